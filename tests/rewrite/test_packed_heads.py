"""Attention whose heads share an axis with rows or with tokens.

With rows, features are [seq, batch, width], as in torch's MultiheadAttention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, causal, run

from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.evaluate import Evaluator
from posexport.rewrite import evidence
from posexport.rewrite.rewriter import KEPT, REWRITTEN

WIDTH, HEADS, SIZE = 32, 4, 8


def packed(tokens: str, rows: str, mask: bool) -> onnx.ModelProto:
    """Attention over heads [rows * HEADS, tokens, SIZE], with an optional padding mask [rows, tokens]."""
    g, dims = Graph(), [None if name == "?" else name for name in (tokens, rows)] + [WIDTH]
    count = g.op("Mul", g.length("x", 1), g.constant([HEADS]))
    shape = g.op("Concat", g.constant([-1]), count, g.constant([SIZE]), axis=0)
    q, k, v = (
        g.op("Transpose", g.op("Reshape", g.op("MatMul", "x", g.random(name, WIDTH, WIDTH)), shape), perm=[1, 0, 2])
        for name in "qkv"
    )
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.constant(SIZE**-0.5, np.float32))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
    if mask:
        inputs.append(helper.make_tensor_value_info("key_padding_mask", TensorProto.BOOL, [rows, tokens]))
        wide = g.op("Unsqueeze", "key_padding_mask", g.constant([1]))
        wide = g.op("Expand", wide, g.op("Concat", g.length("x", 1), g.constant([HEADS]), g.length("x", 0), axis=0))
        wide = g.op("Reshape", wide, g.op("Concat", count, g.constant([1, -1]), axis=0))
        scores = g.op("Where", wide, g.constant(-1e30, np.float32), scores)
    out = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[1, 0, 2])
    back = g.op("Concat", g.op("Shape", "x", start=0, end=2), g.constant([WIDTH]), axis=0)
    g.op("Reshape", out, back, name="y")
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)]
    graph = helper.make_graph(g.nodes, "main_graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(
    ("names", "mask"),
    [
        (("seq", "batch"), True),
        (("seq", "batch"), False),
        (("s0", "s1"), True),
        (("s0", "s1"), False),
        (("?", "?"), False),
    ],
    ids=str,
)
def test_heads_are_told_from_rows(names: tuple[str, str], mask: bool) -> None:
    model = packed(*names, mask)
    done, after = rewritten_model(model, form="native", target="ort")
    (site,) = done.sites
    assert (site.state, site.attention.num_heads) == (REWRITTEN, HEADS), site.reason  # type: ignore[union-attr]
    rng = np.random.default_rng(0)
    for seq, batch in ((1, 1), (9, 2), (3, 5), (40, 3)):
        arrays = {"x": rng.standard_normal((seq, batch, WIDTH)).astype(np.float32)}
        if mask:
            arrays["key_padding_mask"] = np.arange(seq) >= rng.integers(1, seq + 1, (batch, 1))
        for before, now in zip(run(model, arrays).values(), run(after, arrays).values(), strict=True):
            np.testing.assert_allclose(now, before, atol=2e-5)


def folded() -> onnx.ModelProto:
    """Attention with queries [rows, HEADS * tokens, SIZE] and one key head.

    The scores are reshaped to have an axis of heads before the causal mask.
    """
    g = Graph()
    queries = g.op("Reshape", g.op("MatMul", "x", g.random("q", WIDTH, WIDTH)), g.constant([0, 0, HEADS, SIZE]))
    queries = g.op("Reshape", g.op("Transpose", queries, perm=[0, 2, 1, 3]), g.constant([0, -1, SIZE]))
    k, v = (g.op("MatMul", "x", g.random(name, WIDTH, SIZE)) for name in "kv")
    scores = g.op("MatMul", queries, g.op("Transpose", k, perm=[0, 2, 1]))
    tokens = g.length("x", 1)
    by_heads = g.op("Concat", g.constant([0, HEADS]), tokens, tokens, axis=0)
    seen = g.op("Unsqueeze", g.op("Cast", "attention_mask", to=TensorProto.BOOL), g.constant([1, 2]))
    scores = g.op("Reshape", scores, by_heads)
    scores = g.op("Where", g.op("And", seen, causal(g, scores)), scores, g.constant(-1e30, np.float32))
    weights = g.op("Softmax", scores, axis=-1)
    weights = g.op("Reshape", weights, g.op("Concat", g.constant([0, -1]), tokens, axis=0))
    out = g.op(
        "Reshape",
        g.op("MatMul", weights, v),
        g.op("Concat", g.constant([0, HEADS]), tokens, g.constant([SIZE]), axis=0),
    )
    g.op("Reshape", g.op("Transpose", out, perm=[0, 2, 1, 3]), g.constant([0, 0, WIDTH]), name="y")
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", WIDTH]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "seq"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", WIDTH])]
    graph = helper.make_graph(g.nodes, "main_graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_replacement_that_cannot_be_computed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Evaluator):
        def run(self, *inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
            if "see" not in options:  # only for the rewritten graph
                raise RequestError("'posexport/Reshape_3' gets float64[3, 5].")
            return super().run(*inputs, **options)

    monkeypatch.setattr(evidence, "Evaluator", Broken)
    done, _ = rewritten_model(folded(), form="native", target="ort")
    (site,) = done.sites
    assert site.state == KEPT and site.reason is not None
    assert "can't be computed on inputs such as" in site.reason.text
    assert "posexport/" not in site.reason.text and "float64[" not in site.reason.text, site.reason


def test_folded_heads_are_heads() -> None:
    done, _ = rewritten_model(folded(), form="native", target="ort")
    (site,) = done.sites
    assert site.state == REWRITTEN, site.reason
    assert isinstance(site.attention, Attention) and site.attention.num_heads == HEADS


def cached(fault: bool = False) -> onnx.ModelProto:
    """Caches as in old versions of BLOOM: keys [rows*HEADS, SIZE, past], values [rows*HEADS, past, SIZE].

    With `fault`, all rows have the keys of the first.
    """
    g, info = Graph(), helper.make_tensor_value_info
    split = g.constant([0, 0, HEADS, SIZE])
    rows, seq = g.length("x", 0), g.length("x", 1)
    together = g.op("Concat", g.constant([-1]), seq, g.constant([SIZE]), axis=0)
    q, k, v = (
        g.op("Reshape", g.op("Transpose", g.op("Reshape", made, split), perm=[0, 2, 1, 3]), together)
        for made in (g.op("MatMul", "x", g.random(name, WIDTH, WIDTH)) for name in "qkv")
    )
    k = g.op("Concat", "past_key_values.0.key", g.op("Transpose", k, perm=[0, 2, 1]), axis=2, name="present.0.key")
    v = g.op("Concat", "past_key_values.0.value", v, axis=1, name="present.0.value")
    if fault:
        first = g.op("Slice", k, g.constant([0]), g.constant([HEADS]), g.constant([0]))
        k = g.op("Tile", first, g.op("Concat", rows, g.constant([1, 1]), axis=0))
    scores = g.op("Mul", g.op("MatMul", q, k), g.constant(SIZE**-0.5, np.float32))
    wide = g.op("Unsqueeze", scores, g.constant([0]))
    weights = g.op("Softmax", g.op("Where", causal(g, wide), scores, g.constant(-1e9, np.float32)), axis=-1)
    mixed = g.op("Reshape", g.op("MatMul", weights, v), g.op("Concat", rows, g.constant([HEADS, -1, SIZE]), axis=0))
    g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, WIDTH]), name="y")
    inputs = [
        info("x", TensorProto.FLOAT, ["rows", "seq", WIDTH]),
        info("past_key_values.0.key", TensorProto.FLOAT, [f"{HEADS}*rows", SIZE, "past"]),
        info("past_key_values.0.value", TensorProto.FLOAT, [f"{HEADS}*rows", "past", SIZE]),
    ]
    outputs = [
        info("y", TensorProto.FLOAT, ["rows", "seq", WIDTH]),
        info("present.0.key", TensorProto.FLOAT, [f"{HEADS}*rows", SIZE, "total"]),
        info("present.0.value", TensorProto.FLOAT, [f"{HEADS}*rows", "total", SIZE]),
    ]
    graph = helper.make_graph(g.nodes, "main_graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("fault", [False, True])
def test_caches_with_rows_and_heads_on_one_axis(fault: bool) -> None:
    model = cached(fault)
    done, proto = rewritten_model(model, form="native")
    (site,) = done.sites
    assert fault or site.state == REWRITTEN  # The fault is kept in the rewritten attention, or the attention stays.
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, WIDTH), "past_key_values.0.key": (2 * HEADS, SIZE, 5)}
    shapes["past_key_values.0.value"] = (2 * HEADS, 5, SIZE)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    expected, actual = run(model, arrays), run(proto, arrays)
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=2e-5)
