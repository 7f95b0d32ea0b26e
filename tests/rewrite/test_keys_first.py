"""Scores with the key axis before the query axis and a softmax over the keys. The oracle is attention in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Array, Graph, run

from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model

HEADS, SIZE, HIDDEN = 4, 8, 32


def heads(g: Graph, name: str, *perm: int) -> str:
    """A projection [B, S, N, D], transposed by `perm`."""
    projected = g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN))
    split = g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE]))
    return split if not perm else g.op("Transpose", split, perm=list(perm))


def hidden(g: Graph, scores: str, kind: str) -> str:
    """Scores [B, N, T, S] with padding keys or later keys hidden."""
    never = g.constant(-np.inf, np.float32)
    if kind == "padding":
        seen = g.op("Cast", g.op("Unsqueeze", "attention_mask", g.constant([1, 3])), to=TensorProto.BOOL)
        return g.op("Where", seen, scores, g.constant(-1e9, np.float32))
    if kind == "causal":
        places = g.op("Range", g.constant(0), g.op("Squeeze", g.length("features", 1)), g.constant(1))
        return g.op("Where", g.op("LessOrEqual", g.op("Unsqueeze", places, g.constant([1])), places), scores, never)
    return scores


def by_product(g: Graph, kind: str, axis: int = -2) -> None:
    """V^T softmax(K Q^T)."""
    scores = g.op("MatMul", heads(g, "k", 0, 2, 1, 3), heads(g, "q", 0, 2, 3, 1))
    scores = hidden(g, g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32)), kind)
    mixed = g.op("MatMul", heads(g, "v", 0, 2, 3, 1), g.op("Softmax", scores, axis=axis))
    g.op("Reshape", g.op("Transpose", mixed, perm=[0, 3, 1, 2]), g.constant([0, 0, HIDDEN]), name="output")


def transposed(g: Graph, kind: str, axis: int = -1) -> None:
    """softmax((K Q^T)^T) V, with the mask before the transpose."""
    scores = g.op("MatMul", heads(g, "k", 0, 2, 1, 3), heads(g, "q", 0, 2, 3, 1))
    scores = hidden(g, g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32)), kind)
    weights = g.op("Softmax", g.op("Transpose", scores, perm=[0, 1, 3, 2]), axis=axis)
    mixed = g.op("Transpose", g.op("MatMul", weights, heads(g, "v", 0, 2, 1, 3)), perm=[0, 2, 1, 3])
    g.op("Reshape", mixed, g.constant([0, 0, HIDDEN]), name="output")


def by_einsum(g: Graph, kind: str, axis: int = 1) -> None:
    """Channels first, with the head axis after the key axis: scores [B, T, N, S], as in Apple's ane_transformers."""
    q, v = heads(g, "q", 0, 3, 2, 1), heads(g, "v", 0, 3, 2, 1)
    scores = g.op("Einsum", q, heads(g, "k"), equation="bchq,bkhc->bkhq")
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    if kind == "padding":
        seen = g.op("Unsqueeze", g.op("Cast", "attention_mask", to=TensorProto.FLOAT), g.constant([2, 3]))
        less = g.op("Mul", g.op("Sub", g.constant(1.0, np.float32), seen), g.constant(-1e9, np.float32))
        scores = g.op("Add", scores, less)
    weights = g.op("Softmax", scores, axis=axis)
    mixed = g.op("Einsum", weights, v, equation="bkhq,bchk->bchq")
    g.op("Reshape", g.op("Transpose", mixed, perm=[0, 3, 2, 1]), g.constant([0, 0, HIDDEN]), name="output")


def model_of(g: Graph) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "seq", HIDDEN]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "seq"]),
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", "seq", HIDDEN])
    graph = helper.make_graph(g.nodes, "main_graph", infos, [output], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def attended(g: Graph, x: Array, mask: Array, kind: str) -> Array:
    """softmax(q k^T) v in numpy."""
    weights = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in g.weights}
    q, k, v = ((x @ weights[name]).reshape(*x.shape[:2], HEADS, SIZE).transpose(0, 2, 1, 3) for name in "qkv")
    scores = q @ k.transpose(0, 1, 3, 2) * SIZE**-0.5
    seen = np.ones(scores.shape, bool)
    seen &= (mask[:, None, None, :] != 0) | (kind != "padding")
    seen &= np.tril(np.ones(scores.shape[2:], bool)) | (kind != "causal")
    powers = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return (powers / powers.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize(
    ("write", "kind"),
    [
        *((write, kind) for write in (by_product, transposed) for kind in ("none", "padding", "causal")),
        *((by_einsum, kind) for kind in ("none", "padding")),
    ],
)
def test_keys_may_stand_before_queries(write: Callable[..., None], kind: str, form: str) -> None:
    g = Graph()
    write(g, kind)
    model = model_of(g)
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for batch, seq in ((1, 1), (2, 6), (3, 4)):
        mask = np.ones((batch, seq), np.int64)
        mask[-1, : seq // 2] = 0
        x = np.random.default_rng(seq).standard_normal((batch, seq, HIDDEN)).astype(np.float32)
        arrays = {"features": x, "attention_mask": mask}
        actual = run(ir.to_proto(done.model), arrays)["output"]
        np.testing.assert_allclose(actual, attended(g, x, mask, kind), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("write", "axis"), [(by_product, -1), (by_product, 1), (transposed, -2), (by_einsum, 3), (by_einsum, 2)]
)
def test_a_softmax_over_another_axis_is_left_alone(write: Callable[..., None], axis: int) -> None:
    g = Graph()
    write(g, "none", axis=axis)
    done = rewrite_model(ir.from_proto(model_of(g)), form="native", target="ort")
    assert [one.state for one in done.sites] == [KEPT]


def test_weights_of_queries_that_meet_values_are_no_attention() -> None:
    """softmax(q k^T) over the queries, times the values."""
    g = Graph()
    scores = g.op("MatMul", heads(g, "q", 0, 2, 1, 3), heads(g, "k", 0, 2, 3, 1))
    mixed = g.op("MatMul", g.op("Softmax", scores, axis=-2), heads(g, "v", 0, 2, 1, 3))
    g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]), name="output")
    (site,) = rewrite_model(ir.from_proto(model_of(g)), form="native", target="ort").sites
    assert site.reason is not None
    assert (site.state, site.reason.code) == (KEPT, "softmax-axis")
