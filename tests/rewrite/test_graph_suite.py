"""The suite of graphs: transformers has all models of its table, and ONNX Runtime agrees with the references of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

SUITE = Path(__file__).parents[2] / "scripts" / "suite"


@pytest.fixture(autouse=True)
def suite_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUITE))


def test_the_table_names_models_that_transformers_has() -> None:
    import transformers
    from decoders import DECODERS
    from encoders import ENCODERS
    from generate import CORE, FEW
    from table import ARCHITECTURES
    from vision import VISION

    assert len(ARCHITECTURES) == len(DECODERS) + len(ENCODERS) + len(VISION)  # No name occurs twice.
    assert set(CORE) <= set(ARCHITECTURES)
    assert set(FEW) < set(_exporters())
    for row in ARCHITECTURES.values():
        getattr(transformers, row.config)
        getattr(transformers, row.model)


def _exporters() -> Any:
    from exporters import EXPORTERS

    return EXPORTERS


def test_weights_are_the_same_in_every_process_and_none_is_left_as_it_was() -> None:
    from building import build
    from table import ARCHITECTURES

    first, second = build(ARCHITECTURES["t5_encoder"]), build(ARCHITECTURES["t5_encoder"])
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.std() > 0


@pytest.mark.slow
def test_one_file_is_made(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE / "make_one.py"), str(tmp_path), "t5_encoder", "torchscript17"]
    subprocess.run([*command, str(tmp_path / "record.json")], check=True, capture_output=True, timeout=200)
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["sites"] == 2
    assert max(record["onnxruntime"].values()) < 1e-4
    model = onnx.load(tmp_path / record["file"])
    assert sum(node.op_type == "Softmax" for node in model.graph.node) == 2
    data = np.load(tmp_path / record["references"][0])
    assert {f"in/{name}" for name in record["feeds"].values()} < set(data)
    gap = np.abs(data["torch/output"] - data["out64/output"]).max()
    assert 0 < gap < 1e-4  # The references are float64, wider than the dtype of the file.


@pytest.mark.slow
def test_a_failure_is_recorded_with_its_reason(tmp_path: Path) -> None:
    from generate import attempt

    (tmp_path / "records").mkdir()
    record = attempt(tmp_path, "no_such_model", "dynamo18")
    assert "no_such_model" in record["error"]
    assert json.loads((tmp_path / "records" / "no_such_model-dynamo18.json").read_text()) == record
