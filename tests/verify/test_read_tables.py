"""Faults in table rows that few inputs read must fail. The tables are read by GatherND, or cut to a length by Slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import cli
from onnx import TensorProto, helper, numpy_helper

ROWS, WIDTH = 512, 8


def looked_up() -> list[onnx.NodeProto]:
    """The nodes of table[position_ids] as torch exports them."""
    return [
        helper.make_node("Unsqueeze", ["position_ids", "last"], ["index"]),
        helper.make_node("GatherND", ["table", "index"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
    ]


def cut() -> list[onnx.NodeProto]:
    """The nodes of table[: x.shape[1]] as torch exports them."""
    return [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "length", "zero"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
    ]


KINDS = {"looked up": looked_up, "cut": cut}


def saved(path: Path, kind: str, fault: int | None = None) -> Path:
    """Write a file. Row `fault` of its table repeats the row before it."""
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    if fault is not None:
        table[fault] = table[fault - 1]
    floats, tokens = TensorProto.FLOAT, ["batch", "seq"]
    inputs = [helper.make_tensor_value_info("x", floats, [*tokens, WIDTH])]
    if kind == "looked up":
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, tokens))
    constants = {"table": table, "zero": np.array([0]), "last": np.array([-1])}
    graph = helper.make_graph(
        KINDS[kind](),
        kind,
        inputs,
        [helper.make_tensor_value_info("y", floats, [*tokens, WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def verdict(path: Path, other: Path) -> dict[str, Any]:
    result = cli("verify", path, "--against", other, "--runtime", "ort-cpu", "--strict", "--json")
    (found,) = json.loads(result.stdout)["verdicts"]
    assert result.exit_code == (0 if found["state"] == "passed" and not found["not_shown"] else 1)
    return dict(found)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [None, 449, ROWS - 2, ROWS - 1])
def test_a_wrong_row_fails(kind: str, row: int | None, tmp_path: Path) -> None:
    other = saved(tmp_path / "right.onnx", kind)
    found = verdict(saved(tmp_path / "file.onnx", kind, row), other)
    assert (found["state"], found["not_shown"]) == ("passed" if row is None else "failed", [])
    assert found["reach"]["keys"] <= ROWS, "more than any input that was evaluated"
    if kind == "looked up":
        assert found["reach"]["position"] == ROWS - 1


def test_an_output_without_a_number_is_not_shown(tmp_path: Path) -> None:
    """One of two outputs is NaN for all inputs."""
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Add", ["x", "nan"], ["z"])],
        "nan",
        [helper.make_tensor_value_info("x", floats, ["batch", "seq", WIDTH])],
        [helper.make_tensor_value_info(name, floats, ["batch", "seq", WIDTH]) for name in ("y", "z")],
        [numpy_helper.from_array(np.float32(np.nan).reshape(()), "nan")],
    )
    path = tmp_path / "nan.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    found = verdict(path, path)
    assert found["state"] == "passed"
    assert "no value of output 'z' is finite in float64" in found["not_shown"]


def test_a_file_of_our_own_with_its_manifest_is_held_against(tmp_path: Path) -> None:
    """The file and its manifest have a spec, which must not be compared with a manifest of another kind."""
    result = cli(
        "export", "--encoding", "alibi", "--hidden-size", "32", "--num-heads", "2", "-o", tmp_path / "own.onnx"
    )
    assert result.exit_code == 0, result.output
    model = onnx.load(tmp_path / "own.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "copy.onnx")
    assert verdict(tmp_path / "copy.onnx", tmp_path / "own.onnx")["state"] == "passed"
