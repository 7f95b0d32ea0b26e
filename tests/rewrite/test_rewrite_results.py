"""The results of rewriting: what the scripts count and judge, and that the page agrees with the committed data."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import small_graphs
from onnx import TensorProto, helper
from result_pages import figures_of
from rewrite_helpers import feeds, saved

SCRIPTS = Path(__file__).parents[2] / "scripts"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A module of scripts/suite."""
    for folder in ("benchmarks", "suite"):
        monkeypatch.syspath_prepend(str(SCRIPTS / folder))
    return importlib.import_module


def test_the_page_is_of_the_committed_data(load: Load) -> None:
    data, results = load("rewrite_data"), load("results")
    assert figures_of(results.RESULTS / "rewrite.md") == "\n".join(load("page").figures(data.read())).strip("\n") + "\n"


def test_the_data_hold_what_the_schema_says_and_nothing_else(load: Load) -> None:
    from posexport.jsondata import unstructure

    data = load("rewrite_data")
    assert unstructure(data.read()) == load("results").read_results("rewrite")


def test_operators_are_counted_in_functions_and_branches_too(load: Load) -> None:
    rotated = helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"])
    grouped = helper.make_node("GroupQueryAttention", ["q"], ["z"], domain="com.microsoft", do_rotary=1)
    branch = helper.make_graph([rotated], "branch", [], [])
    nodes = [
        helper.make_node("If", ["condition"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("Called", ["q"], ["z"], domain="local"),
        helper.make_node("Attention", ["q"], ["other"], domain="somebody.else"),
    ]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Called", ["q"], ["z"], [grouped], opsets)
    model = helper.make_model(helper.make_graph(nodes, "graph", [], []), functions=[function], opset_imports=opsets)
    facts = load("graph_facts").facts_of(model)
    assert (facts.attentions, facts.rotations, facts.nodes) == (1, 4, 5)


def test_differences_see_everything_but_padding(load: Load) -> None:
    outputs, given = load("outputs"), feeds(2, 6, 3)
    logits, cache = np.ones((2, 6, 5), np.float32), np.ones((2, 2, 9, 8), np.float32)
    expected = {"logits": logits, "present": cache}

    def gap(**changed: Any) -> float:
        return float(outputs.difference(expected, {**expected, **changed}, given))

    assert gap() == 0
    padded = cache.copy()
    padded[1, :, 2] = np.nan  # The first third of the second row is padding.
    assert gap(present=padded) == 0
    assert gap(logits=logits[:1]) == math.inf
    assert gap(logits=np.full_like(logits, np.nan)) == math.inf
    moved = cache.copy()
    moved[1, :, 3] *= 1.5
    assert gap(present=moved) == pytest.approx(0.5)
    assert outputs.difference(expected, {"logits": logits}, given) == math.inf


@pytest.mark.parametrize(("change", "verdict"), [("nothing", "exact"), ("weight", "wrong"), ("operator", "broken")])
def test_verdicts_on_files(load: Load, tmp_path: Path, change: str, verdict: str) -> None:
    model = small_graphs.decoder()
    path = saved(tmp_path, model)
    if change == "weight":
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 1.1, weight.name))
    if change == "operator":
        model.graph.node[-1].op_type = "NoSuchOperator"
    reference = load("outputs").Reference(label="prompt", feeds=feeds(2, 6, 3), outputs=())
    result = load("score_one").judged(path, saved(tmp_path, model, "out.onnx"), [reference], 1e-3)
    assert result["verdict"] == verdict


def test_near_misses_that_become_sound_are_told_from_those_that_break(load: Load, tmp_path: Path) -> None:
    judge = load("judge_near_misses")
    sound, wrong, other = (saved(tmp_path, small_graphs.decoder(seed=seed), f"{seed}.onnx") for seed in range(3))
    given = [feeds(2, 6, 3)]
    verdicts = [judge.judged(wrong, sound, made, given, 1e-3)["verdict"] for made in (wrong, sound, other)]
    assert verdicts == [judge.SAME, judge.CORRECTED, judge.BROKEN]


@pytest.mark.slow
def test_a_process_that_dies_is_a_record_and_what_is_there_is_kept(load: Load, tmp_path: Path) -> None:
    limited = load("limited")
    result, done = limited.record_of(tmp_path / "died.json", dies)
    assert (result, done) == ({"ended": "the process ended with status 3"}, True)
    assert limited.record_of(tmp_path / "died.json", dies) == (result, False)


def dies() -> dict[str, Any]:
    """Ends its process at once."""
    os._exit(3)


def test_profiles_have_a_size_for_every_dynamic_dimension(load: Load) -> None:
    shapes = load("fused").profiles_of(small_graphs.decoder())
    assert [*shapes["past_key_values.0.key"].values()] == [[1, 2, 1, 8], [1, 2, 256, 8], [4, 2, 512, 8]]
    assert shapes["attention_mask"] == {"min": [1, 2], "opt": [1, 272], "max": [4, 640]}
    fixed = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    model = helper.make_model(helper.make_graph([], "graph", [fixed], []))
    assert not load("fused").profiles_of(model)


@pytest.mark.slow
def test_two_files_are_scored(load: Load, tmp_path: Path) -> None:
    generate = load("generate")
    (tmp_path / "records").mkdir()
    for name in ("t5_encoder", "llama"):
        assert "error" not in generate.attempt(tmp_path, name, "torchscript17")
    generate.write_index(tmp_path)
    tools = ("as it is", "posexport contrib", "transformers")
    command = [sys.executable, str(SCRIPTS / "suite"), "suite", str(tmp_path), str(tmp_path / "work")]
    command += [part for tool in tools for part in ("--tool", tool)]
    command += [part for name in ("t5_encoder", "llama") for part in ("--only", f"{name}-torchscript17")]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS / "benchmarks")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, env=environment)
    assert "posexport contrib llama-torchscript17: 2 of 2, exact" in done.stdout
    files = load("score").results(tmp_path, tmp_path / "work")
    structured = [load("rewrite_data").structure(one, load("rewrite_data").File) for one in files]
    assert {one.name: load("page").carried(one, "posexport contrib") for one in structured} == {
        "llama-torchscript17": 2,
        "t5_encoder-torchscript17": 2,
    }
    assert all(one.scores["as it is"].verdict == "exact" for one in structured)
