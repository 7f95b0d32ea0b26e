"""ONNX files like those that posexport did not write: exports without their metadata, and small graphs made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
from helpers import case, exported
from onnx import TensorProto, helper, numpy_helper

from posexport.artifact.onnx_artifact import write_onnx
from posexport.spec.spec import Spec

INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT
_ROWS: list[str | int] = ["b", "s"]


def one_layer(**changes: Any) -> Spec:
    """A causal layer with rotary positions and a padding mask."""
    return attrs.evolve(case("rope-half", causal=True), padding_mask=True, **changes)


def foreign(
    folder: Path, name: str, spec: Spec, form: str = "decomposed", change: Callable[[Any], None] | None = None
) -> Path:
    """Export a spec as `<name>.onnx` without a manifest and without posexport's metadata, then apply `change` to it."""
    path = folder / f"{name}.onnx"
    write_onnx(exported(spec, form), path)
    path.with_name(path.name + ".json").unlink()
    model = onnx.load(path)
    del model.metadata_props[:]
    if change is not None:
        change(model)
    onnx.save(model, path)
    return path


def _table() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """x + positions[:length] with a table of 16 positions. Exports by torch contain such tables as constants."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, [*_ROWS, 4])]
    outputs = [helper.make_tensor_value_info("y", FLOAT, [*_ROWS, 4])]
    table = np.random.default_rng(0).standard_normal((1, 16, 4)).astype(np.float32)
    weights = [numpy_helper.from_array(table, "positions"), *_numbers(zero=[0], one=[1])]
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"]),
        helper.make_node("Slice", ["positions", "zero", "length", "one"], ["cut"]),
        helper.make_node("Add", ["x", "cut"], ["y"], name="add positions"),
    ]
    return inputs, outputs, nodes, weights


def _kinds() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """A graph with outputs of every kind: probabilities, the index of the largest, booleans, and scores with
    -infinity."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, [*_ROWS, 4])]
    outputs = [
        helper.make_tensor_value_info("p", FLOAT, [*_ROWS, 4]),
        helper.make_tensor_value_info("best", INT, _ROWS),
        helper.make_tensor_value_info("positive", TensorProto.BOOL, [*_ROWS, 4]),
        helper.make_tensor_value_info("masked", FLOAT, [*_ROWS, 4]),
    ]
    weights = [
        numpy_helper.from_array(np.array(0, np.float32), "nothing"),
        numpy_helper.from_array(np.array(-np.inf, np.float32), "least"),
    ]
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], axis=-1),
        helper.make_node("ArgMax", ["x"], ["best"], axis=-1, keepdims=0),
        helper.make_node("Greater", ["x", "nothing"], ["positive"]),
        helper.make_node("Where", ["positive", "x", "least"], ["masked"]),
    ]
    return inputs, outputs, nodes, weights


def _unknown() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """x * foo. The name of the integer input `foo` does not say what its numbers mean."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, [*_ROWS, 4]), helper.make_tensor_value_info("foo", INT, _ROWS)]
    outputs = [helper.make_tensor_value_info("y", FLOAT, [*_ROWS, 4])]
    nodes = [
        helper.make_node("Cast", ["foo"], ["float"], to=FLOAT),
        helper.make_node("Unsqueeze", ["float", "two"], ["column"]),
        helper.make_node("Mul", ["x", "column"], ["y"]),
    ]
    return inputs, outputs, nodes, _numbers(two=[2])


def _pictures() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The graph declares pictures of any size, but it adds them to a constant of 224 by 224."""
    inputs = [helper.make_tensor_value_info("pixel_values", FLOAT, ["b", 3, "h", "w"])]
    outputs = [helper.make_tensor_value_info("y", FLOAT, ["b", 3, "h", "w"])]
    picture = np.random.default_rng(0).standard_normal((3, 224, 224)).astype(np.float32)
    nodes = [helper.make_node("Add", ["pixel_values", "picture"], ["y"])]
    return inputs, outputs, nodes, [numpy_helper.from_array(picture, "picture")]


def _constant() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """A graph without inputs."""
    outputs = [helper.make_tensor_value_info("y", FLOAT, [3])]
    nodes = [helper.make_node("Exp", ["x"], ["y"])]
    return [], outputs, nodes, [numpy_helper.from_array(np.arange(3, dtype=np.float32), "x")]


def _numbers(**values: list[int]) -> list[Any]:
    return [numpy_helper.from_array(np.array(value), name) for name, value in values.items()]


_MAKERS = {"table": _table, "kinds": _kinds, "unknown": _unknown, "pictures": _pictures, "constant": _constant}


def small_graph(folder: Path, name: str) -> Path:
    """One of the graphs above as `<name>.onnx`."""
    inputs, outputs, nodes, weights = _MAKERS[name]()
    graph = helper.make_graph(nodes, name, inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path
