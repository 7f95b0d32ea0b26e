"""Errors for mistakes of new users: each names what was given, what is allowed, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_files import foreign, one_layer
from helpers import cli, refused

HERE = ("--runtime", "ort-cpu")
X = np.ones((2, 4, 32), np.float32)
PLACES = np.tile(np.arange(4), (2, 1))
GOOD = {"hidden_states": X, "position_ids": PLACES, "attention_mask": np.ones((2, 4), np.int64)}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without posexport's metadata."""
    return foreign(tmp_path_factory.mktemp("graph"), "theirs", one_layer())


INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "one is missing": ({"position_ids": None}, "they lack 'position_ids' ['batch', 'seq'] and have hidden_states, att"),
    "one too many": ({"foo": X}, "inputs 'inputs.npz': unknown array 'foo': allowed: hidden_states, "),
    "no rows": (
        {name: array[:0] for name, array in GOOD.items()},
        "'hidden_states' has shape [0, 4, 32], which holds nothing: give one row and one token at least.",
    ),
    "no tokens": ({name: array[:, :0] for name, array in GOOD.items()}, "which holds nothing: give one row and one"),
    "rank": ({"hidden_states": X[0]}, "'hidden_states' has shape [4, 32], the graph takes ['batch', 'seq', 32]."),
    "dtype": (
        {"position_ids": PLACES.astype(np.float32)},
        "is float32, the graph takes int64: convert it with astype.",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_do_not_fit(name: str, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, said = INPUTS[name]
    monkeypatch.chdir(tmp_path)
    np.savez("inputs.npz", **{key: array for key, array in {**GOOD, **changes}.items() if array is not None})
    refused(cli("verify", graph, *HERE, "--inputs", "inputs.npz"), said)


OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "no file": (("inspect",), "FILE is missing: give it, as 'posexport inspect --help' shows."),
    "an empty file": (("inspect", "empty.onnx"), "'empty.onnx' is empty: export it again."),
    "another file": (("inspect", "other.bin"), "give an ONNX file or a plan, whose name ends so."),
    "a report": (("verify", "graph.onnx", "--junit", "a.onnx"), "--junit 'a.onnx' has the name of an artifact"),
    "a limit": (("compile", "graph.onnx", "--memory-limit", "x"), "--memory-limit 'x' is no size: write it like 512M"),
    "a capability": (("compile", "graph.onnx", "--compute-capability", "9"), "--compute-capability '9' is not X.Y"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_named_as_they_are_typed(
    name: str, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, said = OPTIONS[name]
    monkeypatch.chdir(tmp_path)
    Path("empty.onnx").touch()
    Path("other.bin").write_bytes(b"x")
    Path("graph.onnx").write_bytes(graph.read_bytes())
    refused(cli(*arguments), said)


def test_a_role_on_which_nothing_can_be_evaluated_says_to_check_it(graph: Path) -> None:
    result = cli("inspect", graph, "--input", "hidden_states=past")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("attention was not looked for")]
    assert "--input" in line and "broadcast" not in line, line
