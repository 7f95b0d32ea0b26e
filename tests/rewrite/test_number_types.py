"""Attention that is computed in a wider dtype than its features: the rewrite computes in the wider dtype too.

The oracle is ONNX Runtime with the original graph, on features whose scores overflow float16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, causal, run

from posexport.rewrite import site
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model

HEADS, SIZE, HIDDEN = 2, 8, 16
HALF, SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
FREQUENCIES = (100.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))).astype(np.float32)

SINKS = np.array([90.03, -4.0], np.float32)

Hook = Callable[[Graph, str], str]


def cast(kind: int) -> Hook:
    return lambda g, value: g.op("Cast", value, to=kind)


def turned(g: Graph, value: str, kind: int = SINGLE) -> str:
    """Heads [B, N, S, D] rotated by position in float32, or in the dtype `kind`."""
    value = cast(kind)(g, value)
    half, end = g.constant([SIZE // 2]), g.constant([SIZE])
    places = g.op("Range", g.constant(0), g.op("Squeeze", g.length(value, 2)), g.constant(1))
    column = g.op("Cast", g.op("Unsqueeze", places, g.constant([1])), to=kind)
    angles = g.op("Mul", column, cast(kind)(g, g.constant(np.concatenate([FREQUENCIES] * 2), np.float32)))
    second = g.op("Neg", g.op("Slice", value, half, end, g.constant([3])))
    swapped = g.op("Concat", second, g.op("Slice", value, g.constant([0]), half, g.constant([3])), axis=3)
    return g.op("Add", g.op("Mul", value, g.op("Cos", angles)), g.op("Mul", swapped, g.op("Sin", angles)))


def same(g: Graph, value: str) -> str:
    return value


def model_of(
    *,
    wide: Hook = same,
    scores: Hook = same,
    narrow: Hook = same,
    v: Hook = same,
    cached: bool = False,
    product: type = np.float32,
    sinks: Hook | None = None,
) -> onnx.ModelProto:
    """Attention over float16 features, with hooks.

    - `wide` changes queries and keys before their product, and `scores` the product, which then has the dtype
      `product`.
    - `v` changes the values, and `narrow` the weights, before their product.
    - `cached` adds a float16 cache of keys and values.
    - `sinks` adds float32 sinks to the logits and changes them.
    """
    g = Graph()
    sides = []
    for name in "qkv":
        weight = g.constant(np.eye(HIDDEN) + np.roll(np.eye(HIDDEN), "qkv".index(name), 1), np.float16)
        split = g.op("Reshape", g.op("MatMul", "features", weight), g.constant([0, 0, HEADS, SIZE]))
        sides.append(g.op("Transpose", split, perm=[0, 2, 1, 3]))
    q, k, value = sides
    inputs = [helper.make_tensor_value_info("features", HALF, ["batch", "seq", HIDDEN])]
    outputs = [helper.make_tensor_value_info("y", HALF, ["batch", "seq", HIDDEN])]
    if cached:
        k, value = (
            g.op("Concat", f"past_{name}", new, axis=2, name=f"present_{name}")
            for name, new in (("key", k), ("value", value))
        )
        for name in ("key", "value"):
            dims = ["batch", HEADS, "past", SIZE]
            inputs.append(helper.make_tensor_value_info(f"past_{name}", HALF, dims))
            outputs.append(helper.make_tensor_value_info(f"present_{name}", HALF, [*dims[:2], "total", SIZE]))
    q, k = wide(g, q), wide(g, k)
    logits = scores(g, g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])))
    hidden = g.constant(-6e4 if product is np.float16 else -1e9, product)
    logits = g.op("Where", causal(g, logits), logits, hidden)
    if sinks is not None:
        batch = g.op("Concat", g.length(logits, 0), g.constant([HEADS]), g.length(logits, 2), g.constant([1]), axis=0)
        column = sinks(g, g.constant(SINKS.reshape(1, HEADS, 1, 1), np.float32))
        logits = g.op("Concat", logits, g.op("Expand", column, batch), axis=3)
    weights = narrow(g, g.op("Softmax", logits, axis=-1))
    if sinks is not None:
        weights = g.op("Slice", weights, g.constant([0]), g.constant([-1]), g.constant([3]))
    mixed = g.op("Cast", g.op("MatMul", weights, v(g, value)), to=HALF)
    g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]), name="y")
    graph = helper.make_graph(g.nodes, "graph", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


CASES: dict[str, dict[str, Any]] = {
    "queries and keys": {"wide": cast(SINGLE), "narrow": cast(HALF)},
    "all": {"wide": cast(SINGLE), "v": cast(SINGLE)},
    "rotated": {"wide": turned, "v": cast(SINGLE)},
    "caches in float16": {"wide": cast(SINGLE), "v": cast(SINGLE), "cached": True},
}


def inputs(
    model: onnx.ModelProto, batch: int = 2, seq: int = 6, past: int = 4, size: float = 200.0
) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs whose features have the given size. At 200, their products exceed 65504."""
    rng = np.random.default_rng(3)
    shapes = {"features": (batch, seq, HIDDEN)} | dict.fromkeys(("past_key", "past_value"), (batch, HEADS, past, SIZE))
    names = [one.name for one in model.graph.input]
    return {name: (size * rng.standard_normal(shapes[name])).astype(np.float16) for name in names}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "case"), [*itertools.product(["native", "contrib", "function"], CASES)])
def test_scores_that_float16_cannot_hold(case: str, form: str) -> None:
    model = model_of(**CASES[case])
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    arrays = inputs(model)
    expected, actual = run(model, arrays), run(proto, arrays)
    assert {one.dtype for one in actual.values()} == {np.dtype(np.float16)}
    for name, want in expected.items():
        assert actual[name].shape == want.shape and np.isfinite(want).all()
        np.testing.assert_allclose(actual[name], want, rtol=0, atol=5e-3 * float(np.abs(want).max()))


def test_the_dtype_of_products_is_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: attention in the dtype of the features."""

    def sources(attention: Any) -> tuple[ir.Value, ir.Value, ir.Value]:
        return attention.q.source.value, attention.k.source.value, attention.v.source.value

    monkeypatch.setattr(site, "operands", sources)
    model = model_of(**CASES["all"])
    _, proto = rewritten_model(model, form="native", target="ort")
    arrays = inputs(model)
    want, have = (run(one, arrays)["y"].astype(np.float32) for one in (model, proto))
    assert not np.isfinite(have).all() or float(np.abs(have - want).max()) > 0.01 * float(np.abs(want).max())


def by_way_of(kind: int, back: int = HALF) -> Hook:
    return lambda g, value: cast(back)(g, cast(kind)(g, value))


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": by_way_of(TensorProto.BFLOAT16), "product": np.float16},
        {"narrow": by_way_of(TensorProto.BFLOAT16), "product": np.float16},
    ],
    ids=["scores", "weights"],
)
def test_bfloat16_has_fewer_digits_than_float16(changes: dict[str, Any]) -> None:
    """bfloat16 has 8 bits of precision and float16 has 11, so a rewrite never rounds to bfloat16 in between."""
    (site,) = rewrite_model(ir.from_proto(model_of(**changes)), form="native", target="ort").sites
    assert site.state != REWRITTEN and site.reason is not None and site.reason.code == "score-digits"


def test_a_rotation_alone_may_have_more_digits() -> None:
    """The products stay in float16."""
    model = model_of(wide=lambda g, value: cast(HALF)(g, turned(g, value)), product=np.float16)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    types = onnx.shape_inference.infer_shapes(proto).graph.value_info
    kinds = {value.name: value.type.tensor_type.elem_type for value in types}
    read = {node.op_type: [kinds.get(name) for name in node.input[:2]] for node in proto.graph.node}
    assert (read["RotaryEmbedding"], read["Attention"]) == ([SINGLE, SINGLE], [HALF, HALF])


def test_features_of_more_digits_than_the_rotation() -> None:
    """Queries and keys in float64 that are cast to float32 and rotated in it."""
    model = model_of(wide=turned, v=cast(SINGLE))
    for tensor in model.graph.initializer:
        if tensor.data_type == HALF and len(tensor.dims) == 2:
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(float), tensor.name))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    features = np.random.default_rng(0).standard_normal((2, 5, HIDDEN))
    want, have = (run(one, {"features": features})["y"].astype(np.float32) for one in (model, proto))
    np.testing.assert_allclose(have, want, rtol=0, atol=2e-3 * float(np.abs(want).max()))


@pytest.mark.parametrize("form", ["native", "contrib", "function"])
def test_a_rotation_in_float64(form: str) -> None:
    """As in Wan, which uses complex128. No runtime has a float64 RotaryEmbedding, so elementwise operators rotate."""
    model = model_of(wide=lambda g, value: cast(SINGLE)(g, turned(g, value, TensorProto.DOUBLE)), v=cast(SINGLE))
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert "RotaryEmbedding" not in {node.op_type for node in proto.graph.node}
    arrays = inputs(model, 2, 9, 0, size=2.0)
    want, have = (run(one, arrays)["y"].astype(np.float32) for one in (model, proto))
    assert have.shape == want.shape and np.isfinite(want).all()
    np.testing.assert_allclose(have, want, rtol=0, atol=2e-3 * float(np.abs(want).max()))
    again = rewrite_model(done.model, form=form, target="ort")
    assert not again.changed


def test_sinks_in_float64() -> None:
    double = cast(TensorProto.DOUBLE)
    model = model_of(wide=double, v=double, sinks=double, product=np.float64)
    done, proto = rewritten_model(model, form="native", target="portable")
    assert [one.state for one in done.sites] == [REWRITTEN]
    arrays = inputs(model, 2, 9, 0, size=1.0)
    want, have = (run(one, arrays)["y"].astype(np.float32) for one in (model, proto))
    assert have.shape == want.shape and np.isfinite(want).all()
    np.testing.assert_allclose(have, want, rtol=0, atol=2e-3 * float(np.abs(want).max()))


def slope(g: Graph, value: str) -> str:
    """Adds a float32 slope over the keys, as ALiBi by absolute position."""
    places = g.op("Range", g.constant(0), g.op("Squeeze", g.length(value, 3)), g.constant(1))
    added = g.op("Mul", g.op("Cast", places, to=SINGLE), g.constant(0.37, np.float32))
    return g.op("Add", cast(SINGLE)(g, value), added)


@pytest.mark.parametrize("form", ["native", "contrib", "function"])
@pytest.mark.parametrize("cached", [False, True])
def test_biases_that_float16_cannot_hold(form: str, cached: bool) -> None:
    """At 600 tokens, the float16 numbers near the bias are 0.125 apart."""
    model = model_of(scores=slope, narrow=cast(HALF), cached=cached)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    arrays = inputs(model, 1, 600, 300, size=0.5)
    want, have = (run(one, arrays)["y"].astype(np.float32) for one in (model, proto))
    assert have.shape == want.shape and np.isfinite(want).all()
    np.testing.assert_allclose(have, want, rtol=0, atol=5e-3 * float(np.abs(want).max()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("form", "cached", "narrowed"),
    [*itertools.product(["native", "contrib", "function"], [False, True], [False, True])],
)
def test_sinks_in_float32(form: str, cached: bool, narrowed: bool) -> None:
    """Float32 sinks with float16 features.

    With `narrowed`, the graph rounds the sinks to float16, where numbers near 90 are 0.0625 apart, and computes its
    logits in float16.
    """
    styles: dict[str, Any] = {"sinks": cast(HALF), "product": np.float16} if narrowed else {"sinks": same}
    styles |= {} if narrowed else {"scores": cast(SINGLE), "narrow": cast(HALF)}
    model = model_of(cached=cached, **styles)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    onnx.checker.check_model(proto, full_check=True)
    casts = [node for node in proto.graph.node if node.op_type == "Cast" and node.attribute[0].i == SINGLE]
    assert form == "function" or bool(casts) is not narrowed
    arrays = inputs(model, 2, 6, 3, size=4.0)
    want, have = (run(one, arrays)["y"].astype(np.float32) for one in (model, proto))
    assert have.shape == want.shape and np.isfinite(want).all()
    np.testing.assert_allclose(have, want, rtol=0, atol=(2e-2 if narrowed else 5e-3) * float(np.abs(want).max()))


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_biases_in_a_mask_that_is_an_input(form: str) -> None:
    """Masks may have any values. Float16 numbers near 2,000 are 1 apart."""
    model = model_of(scores=lambda g, value: g.op("Add", cast(SINGLE)(g, value), "attention_mask"), narrow=cast(HALF))
    shape = ["batch", 1, "seq", "seq"]
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", SINGLE, shape))
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    rng = np.random.default_rng(4)
    arrays = {"features": rng.standard_normal((2, 9, HIDDEN)).astype(np.float16)}
    arrays["attention_mask"] = (2000 + 4 * rng.random((2, 1, 9, 9))).astype(np.float32)
    want, have = (run(one, arrays)["y"].astype(np.float32) for one in (model, proto))
    rounded = {**arrays, "attention_mask": arrays["attention_mask"].astype(np.float16).astype(np.float32)}
    assert float(np.abs(run(model, rounded)["y"].astype(np.float32) - want).max()) > 0.05
    np.testing.assert_allclose(have, want, rtol=0, atol=5e-3 * float(np.abs(want).max()))
