"""Tables of a graph: how many rows integer inputs may select, and tables that are sliced by the number of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from posexport.graphs.tables import lengths_of_tables, required_sizes, rows_of

CONSTANTS: dict[str, Any] = {"zero": [0], "one": [1], "last": [-1], "minus": [-2], "first": 0, "step": 1, "two": 2}


def graph_of(*nodes: onnx.NodeProto, rank: int = 2) -> ir.Graph:
    """A graph with x [batch, seq] int64, a table [50, 4] and a three-dimensional table [1, 50, 4]."""
    table = np.zeros((50, 4), np.float32)
    tensors = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in CONSTANTS.items()]
    tensors += [numpy_helper.from_array(table, "table"), numpy_helper.from_array(table[None], "deep")]
    graph = helper.make_graph(
        list(nodes),
        "tables",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", "seq", "more"][:rank])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(model).graph


node = helper.make_node

LOOKUPS: dict[str, tuple[list[onnx.NodeProto], int | None]] = {
    "Gather": ([node("Gather", ["table", "x"], ["y"])], 50),
    "GatherND of one index": ([node("Unsqueeze", ["x", "last"], ["i"]), node("GatherND", ["table", "i"], ["y"])], 50),
    "GatherND of a table that is transposed to itself": (
        [
            node("Transpose", ["table"], ["t"], perm=[0, 1]),
            node("Unsqueeze", ["x", "last"], ["i"]),
            node("GatherND", ["t", "i"], ["y"]),
        ],
        50,
    ),
    "GatherND of a table that is turned": (
        [
            node("Transpose", ["table"], ["t"], perm=[1, 0]),
            node("Unsqueeze", ["x", "last"], ["i"]),
            node("GatherND", ["t", "i"], ["y"]),
        ],
        None,
    ),
    "GatherND of two indices": (
        [
            node("Unsqueeze", ["x", "last"], ["i"]),
            node("Concat", ["i", "i"], ["j"], axis=-1),
            node("GatherND", ["table", "j"], ["y"]),
        ],
        None,
    ),
}
"""Nodes, and the number of values that x may have."""


@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_of_lookups(name: str) -> None:
    nodes, rows = LOOKUPS[name]
    assert rows_of(graph_of(*nodes).inputs[0]) == rows


TOKENS = (node("Shape", ["x"], ["length"], start=1, end=2), node("Squeeze", ["length"], ["tokens"]))

READ: dict[str, tuple[list[onnx.NodeProto], set[int]]] = {
    "cut": ([*TOKENS, node("Slice", ["table", "zero", "length", "zero"], ["y"])], {50}),
    "cut on the second axis": ([*TOKENS, node("Slice", ["deep", "zero", "length", "one"], ["y"])], {50}),
    "cut on the last axis but one": ([*TOKENS, node("Slice", ["deep", "zero", "length", "minus"], ["y"])], {50}),
    "cut by a constant": ([node("Slice", ["table", "zero", "one", "zero"], ["y"])], set()),
    "cut by a number that is given": (
        [
            node("Gather", ["x", "zero"], ["a"], axis=0),
            node("ReduceMax", ["a"], ["b"], keepdims=0),
            node("Reshape", ["b", "one"], ["c"]),
            node("Slice", ["table", "zero", "c", "zero"], ["y"]),
        ],
        set(),
    ),
    "counted": (
        [*TOKENS, node("Range", ["first", "tokens", "step"], ["r"]), node("Gather", ["table", "r"], ["y"])],
        {50},
    ),
    "counted from 2": (
        [
            *TOKENS,
            node("Range", ["first", "tokens", "step"], ["r"]),
            node("Add", ["r", "two"], ["s"]),
            node("Gather", ["table", "s"], ["y"]),
        ],
        {50},
    ),
    "looked up": ([node("Gather", ["table", "x"], ["y"])], set()),
    "not of a table": ([*TOKENS, node("Slice", ["x", "zero", "length", "one"], ["y"])], set()),
}
"""Nodes, and the lengths of tables that are read by the number of tokens."""


@pytest.mark.parametrize("name", READ)
def test_lengths_of_tables(name: str) -> None:
    nodes, lengths = READ[name]
    assert lengths_of_tables(graph_of(*nodes)) == lengths


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (node("MatMul", ["x", "table"], ["y"]), {1: 50}),
        (node("MatMul", ["table", "x"], ["y"]), {}),
        (node("MatMul", ["x", "x"], ["y"]), {}),
        (node("Gemm", ["x", "table"], ["y"]), {1: 50}),
        (node("Gemm", ["x", "table"], ["y"], transB=1), {1: 4}),
        (node("Gemm", ["x", "table"], ["y"], transA=1), {}),
    ],
)
def test_features_that_meet_weights_are_as_many_as_these(reader: onnx.NodeProto, expected: dict[int, int]) -> None:
    (x,) = graph_of(reader).inputs
    assert required_sizes(x, 2) == expected
