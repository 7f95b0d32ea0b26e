"""Heads that share one axis with rows and windows: their number is the number of heads of one token.

The oracle is the number with which each graph is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import Writer
from descriptions import described
from onnx import TensorProto, helper

from posexport.graphs.attention.attention import UnknownAttention
from posexport.graphs.attention.head_count import _features
from posexport.graphs.view import view_of
from posexport.report.attentions import heads_text, recognised
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model

SIDE, WINDOW, SIZE = 6, 3, 8


def finished(g: Writer, output: str, shape: list[Any]) -> onnx.ModelProto:
    g.nodes.append(helper.make_node("Identity", [output], ["output"]))
    g.outputs.append(helper.make_tensor_value_info("output", TensorProto.FLOAT, shape))
    graph = helper.make_graph(g.nodes, "heads", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def attended(g: Writer, q: str, k: str, v: str) -> str:
    """Attention with three axes."""
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.floats(SIZE**-0.5))
    return g.op("MatMul", g.op("Softmax", scores, axis=-1), v)


def windows(heads: int, *, windowed: bool = True, norm: bool = False, late: bool = False) -> onnx.ModelProto:
    """Attention over an image [batch, SIDE, SIDE, heads * SIZE] in windows, as in SAM.

    Rows, windows and heads share one axis. With `late`, the image is split into windows after the projection. With
    `norm`, the queries of each head are normalised.
    """
    g, rng, width = Writer(), np.random.default_rng(0), heads * SIZE
    x = g.input("features", TensorProto.FLOAT, "batch", SIDE, SIDE, width)
    size, count = (WINDOW, SIDE // WINDOW) if windowed else (SIDE, 1)

    def cut(value: str, channels: int) -> str:
        split = g.op("Reshape", value, g.const([-1, count, size, count, size, channels]))
        return g.op("Reshape", g.op("Transpose", split, perm=[0, 1, 3, 2, 4, 5]), g.const([-1, size**2, channels]))

    weight = g.floats(rng.standard_normal((width, 3 * width)) / np.sqrt(width))
    x = cut(g.op("MatMul", x, weight), 3 * width) if late else g.op("MatMul", cut(x, width), weight)
    packed = g.op("Reshape", g.op("Add", x, g.floats(rng.standard_normal(3 * width))), g.const([0, 0, 3, heads, SIZE]))
    merged = g.op("Reshape", g.op("Transpose", packed, perm=[2, 0, 3, 1, 4]), g.const([3, -1, size**2, SIZE]))
    q, k, v = (g.op("Gather", merged, g.const(at), axis=0) for at in range(3))
    if norm:
        q = g.op("LayerNormalization", q, g.floats(rng.standard_normal(SIZE)), axis=-1)
    mixed = g.op("Reshape", attended(g, q, k, v), g.const([-1, heads, size**2, SIZE]))
    mixed = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.const([-1, size**2, width]))
    return finished(g, mixed, ["windows", size**2, width])


@pytest.mark.parametrize("options", [{}, {"norm": True}, {"late": True}, {"windowed": False}], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_windows_are_no_heads(heads: int, options: dict[str, bool]) -> None:
    model = windows(heads, **options)
    found = described(model)
    assert (found["num_heads"], found["num_kv_heads"], found["head_dim"]) == (heads, heads, SIZE)
    (site,) = rewrite_model(ir.from_proto(model), form="contrib", target="ort").sites
    assert (site.state, site.reason) == (REWRITTEN, None)


@pytest.mark.parametrize("early", [False, True])
def test_heads_that_share_their_weights_are_counted(early: bool) -> None:
    """Features are split into heads before one weight projects each head.

    With `early`, the axis of heads comes before that of tokens at the projection.
    """
    g, rng, heads, length = Writer(), np.random.default_rng(0), 3, 5
    x = g.input("features", TensorProto.FLOAT, "batch", length, heads * SIZE)
    x = g.op("Reshape", x, g.const([0, 0, heads, SIZE]))
    x = g.op("Transpose", x, perm=[0, 2, 1, 3]) if early else x
    sides = []
    for _ in range(3):
        side = g.op("MatMul", x, g.floats(rng.standard_normal((SIZE, SIZE)) / np.sqrt(SIZE)))
        side = side if early else g.op("Transpose", side, perm=[0, 2, 1, 3])
        sides.append(g.op("Reshape", side, g.const([-1, length, SIZE])))
    q, k, v = sides
    mixed = g.op("Reshape", attended(g, q, k, v), g.const([-1, heads, length, SIZE]))
    mixed = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.const([0, 0, heads * SIZE]))
    found = described(finished(g, mixed, ["batch", length, heads * SIZE]))
    assert (found["num_heads"], found["num_kv_heads"], found["head_dim"]) == (heads, heads, SIZE)


def test_what_tells_no_number_of_heads_is_said_to_be_unknown() -> None:
    """A product of features does not come from a single token."""
    g = Writer()
    x = g.input("features", TensorProto.FLOAT, "batch", 5, SIZE)
    mixed = g.op("MatMul", g.op("MatMul", x, g.op("Transpose", x, perm=[0, 2, 1])), x)
    mixed = g.op("Reshape", g.op("Concat", mixed, mixed, axis=1), g.const([-1, 5, SIZE]))
    found = described(finished(g, attended(g, mixed, mixed, mixed), ["rows", 5, SIZE]))
    assert found["state"] == "recognised" and found["num_heads"] is None and found["num_kv_heads"] is None
    assert found["head_dim"] == SIZE
    assert heads_text(found) == f"number of heads not known, size {SIZE}"
    assert recognised(found).startswith("number of heads not known")


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_before_the_only_row_are_not_called_one(batch: int) -> None:
    """Heads are [N, B, S, D] with one row, so the axis that looks like rows is that of heads."""
    g, rng = Writer(), np.random.default_rng(0)
    x, heads = g.input("features", TensorProto.FLOAT, batch, "seq", 3 * SIZE), 3
    sides = []
    for _ in range(3):
        weight = g.floats(rng.standard_normal((heads * SIZE, heads * SIZE)))
        split = g.op("Reshape", g.op("MatMul", x, weight), g.const([0, 0, heads, SIZE]))
        sides.append(g.op("Transpose", split, perm=[2, 0, 1, 3]))
    q, k, v = sides
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    (found,) = view_of(ir.from_proto(finished(g, mixed, [heads, batch, "seq", SIZE]))).attentions
    if batch == 1:
        assert isinstance(found, UnknownAttention) and found.reason.code == "heads"


PROJECTIONS: dict[str, tuple[str, list[tuple[int, ...]], dict[str, Any], int, int | None]] = {
    "weights in blocks": ("MatMulNBits", [(2, 5, 32), (64, 4, 16)], {}, 0, -1),
    "weights of heads": ("MatMul", [(2, 3, 5, 32), (3, 32, 8)], {}, 0, None),
    "one of all heads": ("Gemm", [(5, 32), (32, 8)], {}, 0, -1),
    "turned": ("Gemm", [(32, 5), (32, 8)], {"transA": 1}, 0, None),
    "with turned weights": ("Gemm", [(5, 32), (8, 32)], {"transB": 1}, 0, -1),
    "turned on the right": ("Gemm", [(8, 32), (5, 32)], {"transB": 1}, 1, None),
    "letters": ("Einsum", [(2, 5, 32), (32, 8)], {"equation": "bsd,dh->bsh"}, 0, -1),
    "dots before": ("Einsum", [(2, 5, 32), (32, 8)], {"equation": "...d,dh->...h"}, 0, -1),
    "dots behind": ("Einsum", [(2, 32, 5), (32, 8)], {"equation": "bd...,dh->bh..."}, 0, None),
    "dots of heads": ("Einsum", [(2, 3, 5, 32), (3, 32, 8)], {"equation": "b...sd,...dh->b...sh"}, 0, None),
    "three operands": ("Einsum", [(2, 5, 32), (32, 8), (8, 8)], {"equation": "bsd,dh,hk->bsk"}, 0, None),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_features_of_a_projection(name: str) -> None:
    class Shapes:
        def shape(self, value: ir.Value) -> tuple[int, ...]:
            return shapes[int(str(value.name))]

    kind, shapes, given, at, wanted = PROJECTIONS[name]
    attributes = [ir.convenience.convert_attribute(key, value) for key, value in given.items()]
    node = ir.Node("", kind, [ir.Value(name=str(index)) for index in range(len(shapes))], attributes)
    assert _features(Shapes(), node, at) == wanted  # type: ignore[arg-type]
