"""Operators of transformers as TensorRT imports them: attention, rotary embedding, caches, and networks made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trt_helpers import needs_rtx
from trt_import_helpers import Array, graph, imported, inputs_for, kinds, network, on_ort

from posexport.errors import RuntimeMissingError
from posexport.runtimes.trt_layers import ACTIVATIONS

pytestmark = needs_rtx

QKV = "(float[b,4,s,8] q, float[b,{h},t,8] k, float[b,{h},t,8] v{m}) => (float[i,j,l,m] y)"
FLAT = "(float[b,s,32] q, float[b,t,{w}] k, float[b,t,{w}] v{m}) => (float[i,j,l] y)"
HEADS = "q_num_heads = 4, kv_num_heads = {n}"
SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 1, "t": 3})


def seen(shape: Any) -> Array:
    """A mask of bools in which every query sees a key."""
    mask: Array = np.random.default_rng(3).integers(0, 2, shape).astype(bool)
    mask[..., 0] = True
    return mask


def four(call: str, mask: str = "", kv: int = 4) -> str:
    """Attention of 4-D tensors."""
    return QKV.format(h=kv, m=f", {mask}" if mask else "") + f" {{ y = {call} }}"


def flat(call: str, mask: str = "", kv: int = 4) -> str:
    """Attention of 3-D tensors, which count their heads in attributes."""
    return FLAT.format(w=8 * kv, m=f", {mask}" if mask else "") + f" {{ y = {call} }}"


def attrs_of(kv: int = 4) -> str:
    return HEADS.format(n=kv)


ATTENTION: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": (four("Attention(q, k, v)"), {}, 23),
    "plain, opset 24": (four("Attention(q, k, v)"), {}, 24),
    "grouped": (four("Attention(q, k, v)", kv=2), {}, 23),
    "one key head": (four("Attention(q, k, v)", kv=1), {}, 23),
    "scaled": (four("Attention<scale = 0.7>(q, k, v)"), {}, 23),
    "causal": (four("Attention<is_causal = 1>(q, k, v)"), {}, 23),
    "bool mask": (four("Attention(q, k, v, m)", "bool[s,t] m"), {"m": seen}, 23),
    "bool mask of heads": (four("Attention(q, k, v, m)", "bool[4,s,t] m"), {"m": seen}, 23),
    "bool mask of sequences": (four("Attention(q, k, v, m)", "bool[b,1,s,t] m", kv=2), {"m": seen}, 23),
    "bias": (four("Attention(q, k, v, m)", "float[s,t] m"), {}, 23),
    "bias of heads": (four("Attention(q, k, v, m)", "float[4,s,t] m"), {}, 23),
    "bias of sequences and heads": (four("Attention(q, k, v, m)", "float[b,4,s,t] m", kv=2), {}, 23),
    "flat": (flat(f"Attention<{attrs_of()}>(q, k, v)"), {}, 23),
    "flat, grouped, causal": (flat(f"Attention<{attrs_of(2)}, is_causal = 1, scale = 0.5>(q, k, v)", kv=2), {}, 23),
    "flat, masked": (flat(f"Attention<{attrs_of()}>(q, k, v, m)", "bool[b,4,s,t] m"), {"m": seen}, 24),
    "MultiHeadAttention": (flat("com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v)"), {}, 23),
    "MultiHeadAttention, scaled, causal": (
        flat("com.microsoft.MultiHeadAttention<num_heads = 4, unidirectional = 1, scale = 0.5>(q, k, v)"), {}, 23,
    ),
    "MultiHeadAttention with a bias": (
        flat("com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v, , , m)", "float[b,4,s,t] m"), {}, 23,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    text, given, opset = ATTENTION[name]
    model = graph(text, opset)
    runner = imported(model, tmp_path)
    assert {"ATTENTION_INPUT", "ATTENTION_OUTPUT"} <= kinds(runner)
    for seed, sizes in enumerate(SIZES):
        if "unidirectional" in text:  # ONNX Runtime aligns the ends where there are more keys than queries
            sizes = {**sizes, "t": sizes["s"]}
        inputs = inputs_for(model, sizes, given, seed)
        np.testing.assert_allclose(runner.run(inputs)["y"], on_ort(model, inputs)["y"], rtol=1e-5, atol=1e-6)


def table(shape: Any) -> Array:
    """Cosines or sines: any numbers will do."""
    return np.random.default_rng(5).standard_normal(shape)


def rows(shape: Any) -> Array:
    """Positions within a table of 50."""
    return np.random.default_rng(6).integers(0, 50, shape)


POSITIONS = {"p": rows}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"4-D, interleaved {turned}": (
            "(float[b,4,s,8] x, float[50,4] c, float[50,4] n, int64[b,s] p) => (float[i,j,k,l] y) "
            f"{{ y = RotaryEmbedding<interleaved = {turned}>(x, c, n, p) }}", POSITIONS,
        )
        for turned in (0, 1)
    },
    **{
        f"3-D, partial, interleaved {turned}": (
            "(float[b,s,32] x, float[50,2] c, float[50,2] n, int64[b,s] p) => (float[i,j,k] y) "
            f"{{ y = RotaryEmbedding<interleaved = {turned}, num_heads = 4, rotary_embedding_dim = 4>(x, c, n, p) }}", POSITIONS,
        )
        for turned in (0, 1)
    },
    "4-D, angles of each token": (
        "(float[b,4,s,8] x, float[b,s,4] c, float[b,s,4] n) => (float[i,j,k,l] y) { y = RotaryEmbedding(x, c, n) }", {},
    ),
    "3-D, partial, angles of each token": (
        "(float[b,s,32] x, float[b,s,3] c, float[b,s,3] n) => (float[i,j,k] y) "
        "{ y = RotaryEmbedding<num_heads = 4, rotary_embedding_dim = 6>(x, c, n) }", {},
    ),
    **{
        f"contrib, 3-D, interleaved {turned}": (
            "(float[b,s,32] x, int64[b,s] p, float[50,4] c, float[50,4] n) => (float[i,j,k] y) "
            f"{{ y = com.microsoft.RotaryEmbedding<interleaved = {turned}, num_heads = 4>(x, p, c, n) }}", POSITIONS,
        )
        for turned in (0, 1)
    },
    "contrib, 4-D": (
        "(float[b,4,s,8] x, int64[b,s] p, float[50,4] c, float[50,4] n) => (float[i,j,k,l] y) "
        "{ y = com.microsoft.RotaryEmbedding<num_heads = 4>(x, p, c, n) }", POSITIONS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embedding_is_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    text, given = ROTARY[name]
    model = graph(text)
    runner = imported(model, tmp_path)
    assert "ROTARY_EMBEDDING" in kinds(runner)
    for seed, sizes in enumerate(SIZES):
        inputs = inputs_for(model, sizes, {"c": table, "n": table, **given}, seed)
        np.testing.assert_allclose(runner.run(inputs)["y"], on_ort(model, inputs)["y"], rtol=1e-5, atol=1e-6)


OTHERS = {
    "TensorScatter": (
        "(float[b,4,9,8] c, float[b,4,s,8] u, int64[b] w) => (float[i,j,k,l] y) { y = TensorScatter<axis = 2>(c, u, w) }",
        {"w": lambda shape: np.resize([4, 1], shape)}, 24,
    ),
    "TensorScatter from the start": (
        "(float[b,4,9,8] c, float[b,4,s,8] u) => (float[i,j,k,l] y) { y = TensorScatter<axis = 2>(c, u) }", {}, 24,
    ),
    "SkipSimplifiedLayerNormalization": (
        "(float[b,s,8] x, float[b,s,8] r, float[8] w) => (float[i,j,k] y) "
        "{ y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.01>(x, r, w) }", {}, 23,
    ),
    "Gelu": ("(float[b,s] x) => (float[i,j] y) { y = com.microsoft.Gelu(x) }", {}, 23),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_are_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    text, given, opset = OTHERS[name]
    model = graph(text, opset)
    runner = imported(model, tmp_path)
    for seed, sizes in enumerate(SIZES):
        inputs = inputs_for(model, sizes, given, seed)
        np.testing.assert_allclose(runner.run(inputs)["y"], on_ort(model, inputs)["y"], rtol=1e-5, atol=1e-6)


def test_a_cache_may_be_empty(tmp_path: Path) -> None:
    text = (
        "(float[b,4,s,8] q, float[b,4,s,8] k, float[b,4,s,8] v, float[b,4,p,8] x, float[b,4,p,8] z) => (float[i,j,l,m] y) "
        "{ a = Concat<axis = 2>(x, k) c = Concat<axis = 2>(z, v) y = Attention(q, a, c) }"
    )
    model = graph(text)
    runner = imported(model, tmp_path)
    for past in (0, 6):
        inputs = inputs_for(model, {"b": 2, "s": 3, "p": past}, {})
        np.testing.assert_allclose(runner.run(inputs)["y"], on_ort(model, inputs)["y"], rtol=1e-5, atol=1e-6)


A = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7.5
"""An input of networks made by hand."""


def causal_truth(q: Array, k: Array, v: Array, offset: int) -> Array:
    """Attention in which query i sees keys up to i + offset, in float64."""
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(float), k.astype(float))
    seen = np.arange(k.shape[2])[None, :] <= np.arange(q.shape[2])[:, None] + offset
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: Array = (weights / weights.sum(-1, keepdims=True)) @ v.astype(float)
    return found


@pytest.mark.parametrize(("kind", "offset"), [("UPPER_LEFT", 0), ("LOWER_RIGHT", 4), ("NONE", 99)])
def test_causality_is_aligned_as_the_network_says(kind: str, offset: int) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 2, size, 4)).astype(np.float32) for size in (3, 7, 7))

    def build(trt: Any, made: Any, x: Any, constant: Any) -> Any:
        soft = trt.AttentionNormalizationOp.SOFTMAX
        return made.add_attention_v2(x["q"], x["k"], x["v"], soft, getattr(trt.CausalMaskKind, kind))

    found = network(build, {"q": q, "k": k, "v": v}).run({"q": q, "k": k, "v": v})["y0"]
    np.testing.assert_allclose(found, causal_truth(q, k, v, offset), rtol=1e-5, atol=1e-6)


def fill_of_two_axes(trt: Any, made: Any, x: Any, constant: Any) -> Any:
    layer = made.add_fill((2, 3), trt.FillOperation.LINSPACE, trt.int64)
    layer.set_input(1, constant(np.array(5)))
    layer.set_input(2, constant(np.array([10, -2])))
    return layer


def fill_of_attributes(trt: Any, made: Any, x: Any, constant: Any) -> Any:
    layer = made.add_fill((4,), trt.FillOperation.LINSPACE, trt.float32)
    layer.alpha, layer.beta = 1.5, 0.25
    return layer


def scale_of(mode: str) -> Any:
    def build(trt: Any, made: Any, x: Any, constant: Any) -> Any:
        size = {"UNIFORM": 1, "CHANNEL": 3}[mode]
        held = [np.linspace(low, low + 1, size, dtype=np.float32) for low in (1.0, 20.0, 2.0)]
        shift, factor, power = held[1], held[0], held[2]
        x4 = made.add_shuffle(x["x"])
        x4.reshape_dims = (2, 3, 4, 1)
        layer = made.add_scale_nd(x4.get_output(0), getattr(trt.ScaleMode, mode), shift, factor, power, 1)
        layer.metadata = "kept"
        KEPT.append(held)
        return layer

    return build


KEPT: list[Any] = []
"""Weights live as long as the networks that read them."""


def sliced(mode: str) -> Any:
    def build(trt: Any, made: Any, x: Any, constant: Any) -> Any:
        layer = made.add_slice(x["x"], (0, -2, 1), (2, 8, 3), (1, 1, 1))
        layer.mode = getattr(trt.SampleMode, mode)
        if mode == "FILL":
            layer.set_input(4, constant(np.array(9, np.float32)))
        return layer

    return build


def tanh(trt: Any, made: Any, x: Any, constant: Any) -> Any:
    layer = made.add_activation(x["x"], trt.ActivationType.SCALED_TANH)
    layer.alpha, layer.beta = 2.0, 0.3
    return layer


def product(first: str, second: str) -> Any:
    def build(trt: Any, made: Any, x: Any, constant: Any) -> Any:
        ops = (getattr(trt.MatrixOperation, first), getattr(trt.MatrixOperation, second))
        return made.add_matrix_multiply(x["x"], ops[0], x["w"], ops[1])

    return build


def shuffled(trt: Any, made: Any, x: Any, constant: Any) -> Any:
    layer = made.add_shuffle(x["x"])
    layer.first_transpose, layer.reshape_dims, layer.second_transpose = (2, 0, 1), (0, -1), (1, 0)
    return layer


PAD = np.pad(A, ((0, 0), (2, 3), (0, 0)), constant_values=9)[:, :, 1:]
NETWORKS: dict[str, tuple[Any, dict[str, Array], Array]] = {
    "fill of two axes": (fill_of_two_axes, {}, 5 + 10 * np.arange(2)[:, None] - 2 * np.arange(3)),
    "fill of attributes": (fill_of_attributes, {}, 1.5 + 0.25 * np.arange(4)),
    "scale": (scale_of("UNIFORM"), {"x": A}, ((A + 20.0) ** 2)[..., None]),
    "scale of channels": (
        scale_of("CHANNEL"), {"x": A},
        ((A * np.linspace(1, 2, 3)[:, None] + np.linspace(20, 21, 3)[:, None]) ** np.linspace(2, 3, 3)[:, None])[..., None],
    ),
    "slice, filled": (sliced("FILL"), {"x": A}, PAD),
    "slice, clamped": (sliced("CLAMP"), {"x": A}, np.pad(A, ((0, 0), (2, 3), (0, 0)), "edge")[:, :, 1:]),
    "slice, mirrored": (sliced("REFLECT"), {"x": A}, np.pad(A, ((0, 0), (2, 3), (0, 0)), "reflect")[:, :, 1:]),
    "slice, wrapped": (sliced("WRAP"), {"x": A}, np.pad(A, ((0, 0), (2, 3), (0, 0)), "wrap")[:, :, 1:]),
    "scaled tanh": (tanh, {"x": A}, 2 * np.tanh(0.3 * A)),
    "matrix by vector": (product("NONE", "VECTOR"), {"x": A, "w": A[:, 0]}, np.einsum("bij,bj->bi", A, A[:, 0])),
    "vector by matrix": (product("VECTOR", "TRANSPOSE"), {"x": A[:, 1], "w": A}, np.einsum("bj,bij->bi", A[:, 1], A)),
    "transposed": (product("TRANSPOSE", "NONE"), {"x": A, "w": A}, np.einsum("bki,bkj->bij", A, A)),
    "shuffle": (shuffled, {"x": A}, A.transpose(2, 0, 1).reshape(4, -1).T),
    "non-zero": (lambda trt, made, x, constant: made.add_non_zero(x["x"]), {"x": np.sign(A)}, np.array(np.nonzero(A))),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_that_the_parser_makes_seldom(name: str) -> None:
    build, inputs, wanted = NETWORKS[name]
    found = network(build, inputs).run(inputs)["y0"]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_scaled_tanh_is_the_one_activation_that_no_operator_becomes() -> None:
    assert "SCALED_TANH" in ACTIVATIONS


def test_an_assertion_holds_or_ends_the_run() -> None:
    x = np.array([True, True])

    def build(trt: Any, made: Any, tensors: Any, constant: Any) -> Any:
        made.add_assertion(tensors["x"], "sizes differ")
        return made.add_identity(tensors["x"])

    runner = network(build, {"x": x})
    assert runner.run({"x": x})["y0"].tolist() == [True, True]
    with pytest.raises(RuntimeError, match=r"\(ASSERTION\).*sizes differ"):
        runner.run({"x": ~x})


def attention_of(**parts: Any) -> Any:
    def build(trt: Any, made: Any, x: Any, constant: Any) -> Any:
        norm = getattr(trt.AttentionNormalizationOp, parts.pop("norm", "SOFTMAX"))
        kind = getattr(trt.CausalMaskKind, parts.pop("kind", "NONE"))
        layer = made.add_attention_v2(x["q"], x["q"], x["q"], norm, kind)
        for name, array in parts.items():
            setattr(layer, name, constant(array))
        return layer

    return build


def with_layer(call: Any) -> Any:
    return lambda trt, made, x, constant: call(trt, made, x, constant)


Q = np.zeros((1, 2, 3, 4), np.float32)
UNSURE: dict[str, tuple[Any, dict[str, Array], str]] = {
    "attention without softmax": (attention_of(norm="NONE"), {"q": Q}, "normalises by NONE"),
    "attention with lengths": (attention_of(key_value_lengths=np.array([2], np.int32)), {"q": Q}, "key_value_lengths"),
    "a query that sees nothing": (attention_of(mask=np.zeros((1, 1, 3, 3), bool)), {"q": Q}, "a query sees no key"),
    "random numbers": (
        lambda trt, made, x, constant: made.add_fill((3,), trt.FillOperation.RANDOM_NORMAL, trt.float32), {}, "is random",
    ),
    "equal elements": (
        lambda trt, made, x, constant: made.add_topk(x["q"], trt.TopKOperation.MAX, 2, 8, trt.int32), {"q": Q}, "equal",
    ),
    "two axes of a softmax in groups": (
        lambda trt, made, x, constant: _grouped(made, x, constant), {"q": Q}, "has 2 groups",
    ),
    "a pooling": (
        lambda trt, made, x, constant: made.add_pooling_nd(x["q"], trt.PoolingType.MAX, (1, 1)), {"q": Q}, "(POOLING): it is of no kind",
    ),
    "quantised numbers": (
        lambda trt, made, x, constant: made.add_cast(x["q"], trt.int8), {"q": Q}, "(CAST): it gives INT8",
    ),
    "a gather from nothing defined": (
        lambda trt, made, x, constant: _twice(trt, made, x, constant), {"q": Q}, "one place twice",
    ),
    "integers of different signs": (
        lambda trt, made, x, constant: made.add_elementwise(constant(np.array([-7])), constant(np.array([2])), trt.ElementWiseOperation.DIV),
        {}, "different signs",
    ),
}  # fmt: skip


def _grouped(made: Any, x: Any, constant: Any) -> Any:
    ones = np.ones((1, 2, 1, 1), np.float32)
    layer = made.add_normalization_v2(x["q"], constant(ones), constant(ones), 12)
    layer.num_groups = 2
    return layer


def _twice(trt: Any, made: Any, x: Any, constant: Any) -> Any:
    indices, updates = constant(np.array([[0], [0]])), constant(np.ones((2, 2, 3, 4), np.float32))
    return made.add_scatter(x["q"], indices, updates, trt.ScatterMode.ND)


@pytest.mark.parametrize("name", UNSURE)
def test_what_is_not_known_for_sure_is_never_guessed(name: str) -> None:
    build, inputs, said = UNSURE[name]
    with pytest.raises(RuntimeMissingError) as caught:
        network(build, inputs).run(inputs)
    assert said in str(caught.value)
    assert str(caught.value).startswith("tensorrt-import can't evaluate layer '")
