"""Operators of transformers as TensorRT imports them: attention, rotary embedding, caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trt_helpers import needs_rtx
from trt_import_helpers import Array, graph, imported, inputs_for, kinds, on_ort

pytestmark = needs_rtx

QKV = "(float[b,4,s,8] q, float[b,{h},t,8] k, float[b,{h},t,8] v{m}) => (float[i,j,l,m] y)"
FLAT = "(float[b,s,32] q, float[b,t,{w}] k, float[b,t,{w}] v{m}) => (float[i,j,l] y)"
HEADS = "q_num_heads = 4, kv_num_heads = {n}"
SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 1, "t": 3})


def seen(shape: Any) -> Array:
    """A random boolean mask in which every query sees the first key."""
    mask: Array = np.random.default_rng(3).integers(0, 2, shape).astype(bool)
    mask[..., 0] = True
    return mask


def four(call: str, mask: str = "", kv: int = 4) -> str:
    """Attention of 4-D tensors."""
    return QKV.format(h=kv, m=f", {mask}" if mask else "") + f" {{ y = {call} }}"


def flat(call: str, mask: str = "", kv: int = 4) -> str:
    """Attention of 3-D tensors, with the numbers of heads in attributes."""
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
        flat("com.microsoft.MultiHeadAttention<num_heads = 4, unidirectional = 1, scale = 0.5>(q, k, v)"),
        {},
        23,
    ),
    "MultiHeadAttention with a bias": (
        flat("com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v, , , m)", "float[b,4,s,t] m"),
        {},
        23,
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    text, given, opset = ATTENTION[name]
    model = graph(text, opset)
    runner = imported(model, tmp_path)
    assert {"ATTENTION_INPUT", "ATTENTION_OUTPUT"} <= kinds(runner)
    for seed, sizes in enumerate(SIZES):
        if "unidirectional" in text:  # with more keys than queries, ONNX Runtime's last query sees every key
            sizes = {**sizes, "t": sizes["s"]}
        inputs = inputs_for(model, sizes, given, seed)
        np.testing.assert_allclose(runner.run(inputs)["y"], on_ort(model, inputs)["y"], rtol=1e-5, atol=1e-6)


def table(shape: Any) -> Array:
    """A table of cosines or sines. Any numbers will do."""
    return np.random.default_rng(5).standard_normal(shape)


def rows(shape: Any) -> Array:
    """Positions within a table of 50 rows."""
    return np.random.default_rng(6).integers(0, 50, shape)


POSITIONS = {"p": rows}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"4-D, interleaved {turned}": (
            "(float[b,4,s,8] x, float[50,4] c, float[50,4] n, int64[b,s] p) => (float[i,j,k,l] y) "
            f"{{ y = RotaryEmbedding<interleaved = {turned}>(x, c, n, p) }}",
            POSITIONS,
        )
        for turned in (0, 1)
    },
    **{
        f"3-D, partial, interleaved {turned}": (
            "(float[b,s,32] x, float[50,2] c, float[50,2] n, int64[b,s] p) => (float[i,j,k] y) "
            f"{{ y = RotaryEmbedding<interleaved = {turned}, num_heads = 4, rotary_embedding_dim = 4>(x, c, n, p) }}",
            POSITIONS,
        )
        for turned in (0, 1)
    },
    "4-D, angles of each token": (
        "(float[b,4,s,8] x, float[b,s,4] c, float[b,s,4] n) => (float[i,j,k,l] y) { y = RotaryEmbedding(x, c, n) }",
        {},
    ),
    "3-D, partial, angles of each token": (
        "(float[b,s,32] x, float[b,s,3] c, float[b,s,3] n) => (float[i,j,k] y) "
        "{ y = RotaryEmbedding<num_heads = 4, rotary_embedding_dim = 6>(x, c, n) }",
        {},
    ),
    **{
        f"contrib, 3-D, interleaved {turned}": (
            "(float[b,s,32] x, int64[b,s] p, float[50,4] c, float[50,4] n) => (float[i,j,k] y) "
            f"{{ y = com.microsoft.RotaryEmbedding<interleaved = {turned}, num_heads = 4>(x, p, c, n) }}",
            POSITIONS,
        )
        for turned in (0, 1)
    },
    "contrib, 4-D": (
        "(float[b,4,s,8] x, int64[b,s] p, float[50,4] c, float[50,4] n) => (float[i,j,k,l] y) "
        "{ y = com.microsoft.RotaryEmbedding<num_heads = 4>(x, p, c, n) }",
        POSITIONS,
    ),
}


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
        "(float[b,4,9,8] c, float[b,4,s,8] u, int64[b] w) => (float[i,j,k,l] y) "
        "{ y = TensorScatter<axis = 2>(c, u, w) }",
        {"w": lambda shape: np.resize([4, 1], shape)},
        24,
    ),
    "TensorScatter from the start": (
        "(float[b,4,9,8] c, float[b,4,s,8] u) => (float[i,j,k,l] y) { y = TensorScatter<axis = 2>(c, u) }",
        {},
        24,
    ),
    "SkipSimplifiedLayerNormalization": (
        "(float[b,s,8] x, float[b,s,8] r, float[8] w) => (float[i,j,k] y) "
        "{ y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.01>(x, r, w) }",
        {},
        23,
    ),
    "Gelu": ("(float[b,s] x) => (float[i,j] y) { y = com.microsoft.Gelu(x) }", {}, 23),
}


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
        "(float[b,4,s,8] q, float[b,4,s,8] k, float[b,4,s,8] v, float[b,4,p,8] x, float[b,4,p,8] z) "
        "=> (float[i,j,l,m] y) { a = Concat<axis = 2>(x, k) c = Concat<axis = 2>(z, v) y = Attention(q, a, c) }"
    )
    model = graph(text)
    runner = imported(model, tmp_path)
    for past in (0, 6):
        inputs = inputs_for(model, {"b": 2, "s": 3, "p": past}, {})
        np.testing.assert_allclose(runner.run(inputs)["y"], on_ort(model, inputs)["y"], rtol=1e-5, atol=1e-6)
