"""bench with a user's torch module next to the file that was exported from it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from graph_files import one_layer
from helpers import cli, exported, refused
from small_graphs import no_attention

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.benchmark import bench
from posexport.bench.options import BenchOptions

MODULE = """
import torch

class Plain(torch.nn.Module):
    def forward(self, x):
        return {"y": x.softmax(-1)[..., :5]}

class Other(torch.nn.Module):
    def forward(self, hidden, mask):
        return hidden
"""


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graph from x to y in the working folder, with a file of modules next to it."""
    monkeypatch.chdir(tmp_path)
    Path("module.py").write_text(MODULE)
    onnx.save(no_attention(), "plain.onnx")
    return tmp_path / "plain.onnx"


@pytest.mark.slow
def test_a_file_is_timed_beside_its_module(plain: Path) -> None:
    options = ("--runtime", "ort-cpu", "--rounds", 3, "--processes", 1)
    shown = cli("bench", "plain.onnx", "--module", "module.py:Plain", *options)
    assert shown.exit_code == 0, shown.stderr
    assert "x torch eager" in shown.stdout and "x lower bound" in shown.stdout
    assert "not known" not in shown.stdout


def test_the_module_is_what_torch_runs(plain: Path) -> None:
    result = bench(plain, BenchOptions(runtimes=("ort-cpu",), rounds=3, module="module.py:Plain"))
    _, torch, ort = result.timings
    assert [torch.runtime, torch.state, torch.engine["engine"]] == ["torch", "timed", "torch, module.py:Plain"]
    assert torch.ratios["torch"].median == 1 and ort.ratios["torch"].median > 0


def test_a_module_of_other_inputs_is_no_success(plain: Path) -> None:
    options = ("--runtime", "ort-cpu", "--rounds", 3, "--processes", 1)
    shown = cli("bench", "plain.onnx", "--module", "module.py:Other", "--json", *options)
    assert shown.exit_code == 3
    assert "required runtime torch was not run: " in shown.stderr and "takes 'hidden', 'mask'" in shown.stderr
    assert [one["state"] for one in json.loads(shown.stdout)["shapes"][0]["results"]] == ["timed", "not run", "timed"]


def test_a_module_that_isn_t_there_is_refused_before_anything_is_timed(plain: Path) -> None:
    refused(cli("bench", "plain.onnx", "--module", "missing.py:Plain"), "--module 'missing.py:Plain' can't be read")


def test_a_block_of_posexport_has_its_torch_already(plain: Path) -> None:
    write_onnx(exported(one_layer()), Path("own.onnx"))
    refused(cli("bench", "own.onnx", "--module", "module.py:Plain"), "its torch block is made of its spec, so drop it")


def test_a_project_has_no_module(plain: Path) -> None:
    refused(cli("bench", "--module", "module.py:Plain"), "--module was given without a file")
