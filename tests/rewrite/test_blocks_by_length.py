"""Attention within blocks of 256 tokens: short rows have one block, but a rewrite must not assume that.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

BLOCK, HEADS, SIZE, HIDDEN = 256, 2, 8, 16


def blocks(g: Graph) -> tuple[str, str, str]:
    """Features [B, S, HIDDEN] padded to whole blocks, the number of rows, and the number of blocks."""
    rows, length = g.length("features", 0), g.length("features", 1)
    more = g.op("Mod", g.op("Neg", length), g.constant([BLOCK]))
    count = g.op("Div", g.op("Add", length, more), g.constant([BLOCK]))
    pads = g.op("Concat", g.constant([0, 0, 0, 0]), more, g.constant([0]), axis=0)
    return g.op("Pad", "features", pads), rows, count


def hidden(g: Graph, scores: str) -> str:
    """Scores [..., BLOCK, BLOCK] with later keys hidden."""
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    return g.op("Where", g.constant(np.tri(BLOCK), bool), scores, g.constant(-1e9, np.float32))


def finished(g: Graph, rows: str, attended: str) -> onnx.ModelProto:
    """The model with the result `attended`, reshaped from [B, blocks, BLOCK, HIDDEN] and cut to the given tokens."""
    whole = g.op("Reshape", attended, g.op("Concat", rows, g.constant([-1, HIDDEN]), axis=0))
    cut = g.op("Slice", whole, g.constant([0]), g.length("features", 1), g.constant([1]))
    g.op("MatMul", cut, g.random("last", HIDDEN, HIDDEN), name="y")
    dims = ["batch", "seq", HIDDEN]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("features", "y")]
    graph = helper.make_graph(g.nodes, "graph", values[:1], values[1:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def five_axes(order: list[int], back: list[int], einsum: bool = False) -> onnx.ModelProto:
    """Queries, keys and values [B, blocks, BLOCK, HEADS, SIZE] in this order of axes."""
    g = Graph()
    x, rows, count = blocks(g)
    shape = g.op("Concat", rows, count, g.constant([BLOCK, HEADS, SIZE]), axis=0)
    q, k, v = (
        g.op("Transpose", g.op("Reshape", g.op("MatMul", x, g.random(name, HIDDEN, HIDDEN)), shape), perm=order)
        for name in "qkv"
    )
    if einsum:
        weights = g.op("Softmax", hidden(g, g.op("Einsum", q, k, equation="xyzsd,xyztd->xyzst")), axis=-1)
        result = g.op("Einsum", weights, v, equation="xyzst,xyztd->xyzsd")
    else:
        scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 2, 4, 3]))
        result = g.op("MatMul", g.op("Softmax", hidden(g, scores), axis=-1), v)
    return finished(g, rows, g.op("Transpose", result, perm=back))


def one_head(g: Graph, x: str, rows: str, count: str) -> list[str]:
    shape = g.op("Concat", rows, count, g.constant([BLOCK, HIDDEN]), axis=0)
    return [g.op("Reshape", g.op("MatMul", x, g.random(name, HIDDEN, HIDDEN)), shape) for name in "qkv"]


def turned() -> onnx.ModelProto:
    """One head, rotated as [B, blocks, BLOCK, HIDDEN] by the position in the block, and reshaped to three axes."""
    g = Graph()
    x, rows, count = blocks(g)
    half, end, last = g.constant([HIDDEN // 2]), g.constant([HIDDEN]), g.constant([-1])
    angles = np.arange(BLOCK)[:, None] * 100.0 ** (-np.arange(HIDDEN // 2) / (HIDDEN // 2))
    cos, sin = (g.constant(np.concatenate([f(angles)] * 2, -1), np.float32) for f in (np.cos, np.sin))

    def turn(value: str) -> str:
        second = g.op("Neg", g.op("Slice", value, half, end, last))
        swapped = g.op("Concat", second, g.op("Slice", value, g.constant([0]), half, last), axis=-1)
        return g.op("Add", g.op("Mul", value, cos), g.op("Mul", swapped, sin))

    q, k, v = one_head(g, x, rows, count)
    q, k, v = (g.op("Reshape", one, g.constant([-1, BLOCK, HIDDEN])) for one in (turn(q), turn(k), v))
    scores = hidden(g, g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])))
    return finished(g, rows, g.op("MatMul", g.op("Softmax", scores, axis=-1), v))


def operators() -> onnx.ModelProto:
    """`Attention` with four axes, the second for the blocks, with two query heads for each key head."""
    g = Graph()
    x, rows, count = blocks(g)
    q, k, v = one_head(g, x, rows, count)
    twice = g.op("Concat", q, q, axis=1)
    both = g.op("Attention", twice, k, v, is_causal=1)
    return finished(g, rows, g.op("Slice", both, g.constant([0]), count, g.constant([1])))


CASES: dict[str, Callable[[], onnx.ModelProto]] = {
    "heads before blocks": lambda: five_axes([0, 3, 1, 2, 4], [0, 2, 3, 1, 4]),
    "blocks before heads": lambda: five_axes([0, 1, 3, 2, 4], [0, 1, 3, 2, 4]),
    "einsum": lambda: five_axes([0, 3, 1, 2, 4], [0, 2, 3, 1, 4], einsum=True),
    "turned": turned,
    "operators": operators,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("case", CASES)
def test_more_blocks_than_the_probe_has(case: str, form: str) -> None:
    model = CASES[case]()
    if case == "operators":
        model.opset_import[0].version, model.ir_version = 23, 10
    _, new = rewritten_model(model, form=form, target="ort")
    for batch, tokens in ((2, 20), (1, 256), (2, 600)):
        features = np.random.default_rng(tokens).standard_normal((batch, tokens, HIDDEN)).astype(np.float32)
        want, have = (run(one, {"features": features})["y"] for one in (model, new))
        assert have.shape == want.shape and np.isfinite(want).all()
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
