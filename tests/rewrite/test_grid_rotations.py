"""Rotations of queries and keys whose tokens are two axes, the rows and columns of a picture, [B, N, H, W, D].

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

HEADS, SIZE = 2, 8
HIDDEN = HEADS * SIZE
SIDES = (3, 4)
TOKENS = SIDES[0] * SIDES[1]
QUARTER = 10.0 ** -np.arange(SIZE // 4)
"""Frequencies of each axis."""


def table(fault: float = 0.0) -> np.ndarray:
    """Angles [H, W, D]; both features of a pair have the same angle, but for `fault` in the last one."""
    rows, columns = np.meshgrid(*map(np.arange, SIDES), indexing="ij")
    angles = np.concatenate([axis[..., None] * QUARTER for axis in (rows, columns)], -1).repeat(2, -1)
    angles[-1, -1, -1] += fault
    return angles


def model_of(fault: float = 0.0, *, turned: bool = False) -> onnx.ModelProto:
    """With `turned`, the axes of the grid are columns and rows, [B, N, W, H, D], and the table is transposed."""
    g = Graph()
    angles = table(fault).swapaxes(0, 1) if turned else table(fault)
    cos, sin = (g.constant(function(angles), np.float32) for function in (np.cos, np.sin))
    matrix = np.zeros((SIZE, SIZE))
    for pair in range(0, SIZE, 2):
        matrix[pair + 1, pair], matrix[pair, pair + 1] = -1, 1
    turn = g.constant(matrix, np.float32)
    sides = SIDES[::-1] if turned else SIDES

    def rotated(name: str) -> str:
        """[B, N, H*W, D]."""
        projected = g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN))
        split = g.op("Reshape", projected, g.constant([0, *sides, HEADS, SIZE]))
        heads = g.op("Transpose", split, perm=[0, 3, 1, 2, 4])
        if name != "v":
            heads = g.op("Add", g.op("Mul", heads, cos), g.op("Mul", g.op("MatMul", heads, turn), sin))
        return g.op("Reshape", heads, g.constant([0, HEADS, TOKENS, SIZE]))

    q, k, v = map(rotated, "qkv")
    scores = g.op("MatMul", g.op("Mul", q, g.constant(SIZE**-0.5, np.float32)), g.op("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    g.op("MatMul", g.op("Reshape", mixed, g.constant([0, -1, HIDDEN])), g.random("o", HIDDEN, HIDDEN), name="output")
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", TOKENS, HIDDEN])
        for name in ("features", "output")
    ]
    graph = helper.make_graph(g.nodes, "main_graph", infos[:1], infos[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def check_equal(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    for batch in (1, 3, TOKENS):
        features = np.random.default_rng(batch).standard_normal((batch, TOKENS, HIDDEN)).astype(np.float32)
        expected, actual = (run(one, {"features": features})["output"] for one in (model, other))
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_rotation_on_a_grid_is_one_operator(turned: bool, form: str) -> None:
    model = model_of(turned=turned)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("RotaryEmbedding") == 2
    check_equal(model, proto)


def test_a_pair_with_two_angles_stays() -> None:
    model = model_of(fault=0.3)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert "RotaryEmbedding" not in {node.op_type for node in proto.graph.node}
    check_equal(model, proto)
