"""Parts that are read from a split sequence are slices of the split value. The oracle is numpy's split."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from posexport.graphs.evaluate import Evaluator
from posexport.graphs.sequences import without_sequences
from posexport.graphs.view import view_of

X = np.random.default_rng(0).standard_normal((2, 7, 3)).astype(np.float32)


def model_of(split: str, place: str, *, attributes: str = "axis = 1", more: str = "") -> ir.Model:
    """The part of X at `place`; `split` and `place` are constants in the notation of onnx's parser."""
    sizes = f"sizes = Constant<{split}>()" if split else ""
    text = f"""<ir_version: 10, opset_import: ["" : 18]> g (float[a, 7, c] x, int64 which) => (y) {{
        {sizes} at = {place}
        parts = SplitToSequence<{attributes}>(x{", sizes" if split else ""}) part = SequenceAt(parts, at)
        y = Neg(part) {more}
    }}"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return model


def constant(number: int) -> str:
    return f"Constant<value_int = {number}>()"


def evaluated(model: ir.Model) -> np.ndarray[Any, Any]:
    given = {"x": torch.from_numpy(X), "which": torch.tensor(0)}
    return next(iter(Evaluator(model).run(given).values())).numpy()


CASES = {
    "parts of one length": ("value_int = 3", 1, "axis = 1", X[:, 3:6]),
    "a shorter last part": ("value_int = 3", 2, "axis = 1", X[:, 6:]),
    "an axis from the end": ("value_int = 3", 0, "axis = -2", X[:, :3]),
    "stated lengths": ("value_ints = [1, 4, 2]", 1, "axis = 1", X[:, 1:5]),
    "stated lengths from the end": ("value_ints = [1, 4, 2]", -1, "axis = 1", X[:, 5:]),
    "one length of all": ("value_ints = [7]", 0, "axis = 1", X),
    "slices of length 1": ("value_int = 1", -1, "axis = 1", X[:, 6:]),
    "slices": ("", -2, "axis = 1", X[:, 5:6]),
    "slices without their axis": ("", -2, "axis = 1, keepdims = 0", X[:, 5]),
    "the first axis": ("value_int = 1", 1, "axis = 0", X[1:]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_sequence_is_a_part(name: str) -> None:
    split, place, attributes, expected = CASES[name]
    model = model_of(split, constant(place), attributes=attributes)
    np.testing.assert_array_equal(evaluated(model), -expected)
    without_sequences(model.graph)
    assert {node.op_type for node in model.graph} <= {"Constant", "Slice", "Gather", "Neg"}
    assert "part" in {value.name for node in model.graph for value in node.outputs}
    np.testing.assert_array_equal(evaluated(model), -expected)
    model.graph.outputs[0].shape = ir.Shape([None] * expected.ndim)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_parts_of_one_sequence_are_all_replaced() -> None:
    model = model_of("value_int = 3", constant(1), more="two = Constant<value_int = 2>() z = SequenceAt(parts, two)")
    without_sequences(model.graph)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["Slice", "Neg", "Slice"]


UNKNOWN = {
    "a place that is given": ("value_int = 3", "Identity(which)", "axis = 1"),
    "a place from the end of an axis of any length": ("value_int = 2", constant(-1), "axis = 1"),
    "a place beyond stated lengths": ("value_ints = [3, 4]", constant(2), "axis = 1"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_part_that_is_not_known_stays_in_its_sequence(name: str) -> None:
    split, place, attributes = UNKNOWN[name]
    model = model_of(split, place, attributes=attributes)
    without_sequences(model.graph)
    assert {"SplitToSequence", "SequenceAt"} <= {node.op_type for node in model.graph}


def test_a_sequence_that_is_read_otherwise_stays_too() -> None:
    model = model_of("value_int = 3", constant(1), more="n = SequenceLength(parts)")
    without_sequences(model.graph)
    kinds = [node.op_type for node in model.graph]
    assert "SplitToSequence" in kinds
    assert "SequenceAt" not in kinds


def test_a_sequence_of_constants_is_no_bar() -> None:
    """Halves of a table with computed sizes, as TorchScript writes tensor_split in timm's rotations."""
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[a, 7, 4] features) => (float[a, 7, 4] y)
        <float[2, 4] table = {1, 2, 3, 4, 5, 6, 7, 8}> {
        one = Constant<value_ints = [1]>() at = Constant<value_int = 1>() sizes = Concat<axis = 0>(one, one)
        parts = SplitToSequence<axis = 0>(table, sizes) row = SequenceAt(parts, at)
        q = Mul(features, row) k = Transpose<perm = [0, 2, 1]>(features) scores = MatMul(q, k)
        weights = Softmax<axis = -1>(scores) y = MatMul(weights, features)
    }"""
    (found,) = view_of(ir.serde.deserialize_model(onnx.parser.parse_model(text))).attentions
    assert found.state == "recognised"
