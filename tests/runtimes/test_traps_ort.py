"""Traps in ONNX Runtime's operators: graphs that look right but give wrong results without an error.

Each trap is a handmade graph whose result is far from the formula in numpy. For each trap there is one of our blocks
that needs the same operator in its form and is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from form_helpers import BOUNDS, SMALL, check_form
from helpers import Array, small_spec
from onnx.reference import ReferenceEvaluator
from trap_helpers import (
    BUFFER,
    FLAT,
    GROUP,
    HEADS,
    LENGTHS,
    MULTI,
    OUT,
    PAST,
    PRESENT,
    SAME,
    SIZES,
    Given,
    both,
    corner,
    formula,
    softmax,
)
from trt_import_helpers import graph, inputs_for, on_ort

LOW16, LOW32 = -65504.0, float(np.finfo(np.float32).min)


@attrs.frozen(kw_only=True)
class Trap:
    """A graph that ONNX Runtime runs, the formula that it should compute, and its result: `nan`, or wrong numbers
    (`instead`).

    `reference`: the trap shows on onnx's evaluator, because ONNX Runtime's CPU provider widens half precision.
    """

    text: str
    truth: Callable[[Given], Array]
    given: dict[str, Any] = attrs.field(factory=dict)
    sizes: dict[str, int] = attrs.field(factory=dict)
    opset: int = 23
    nan: bool = False
    reference: bool = False
    instead: Callable[[Given], Array] | None = None


def all_seen(i: Given) -> Array:
    return formula(i["q"], i["k"], i["v"], np.ones((1, 1), bool))


def lower_right(i: Given) -> Array:
    return formula(i["q"], i["k"], i["v"], corner(i["q"].shape[1], i["k"].shape[1]))


def top_left(i: Given) -> Array:
    return formula(i["q"], i["k"], i["v"], np.tri(i["q"].shape[1], i["k"].shape[1], dtype=bool))


def over_past(i: Given) -> Array:
    k, v = both(i)
    return formula(i["q"], k, v, corner(i["q"].shape[1], k.shape[2]))


def padded(i: Given) -> Array:
    """The first key of each row is padding. In the first row, all keys are."""
    return formula(i["q"], i["k"], i["v"], i["keep"][:, None, None, :])


def keep(batch: int, total: int) -> Array:
    mask = np.ones((batch, total), bool)
    mask[:, 0] = False
    mask[0] = False
    return mask


def by_hand(low: str, half: bool = False) -> str:
    """Attention in standard operators. Padding [B, 1, 1, T] is a number that is added to the logits."""
    kind = "float16" if half else "float"
    heads = f"{kind}[b,4,s,8] q, {kind}[b,4,t,8] k, {kind}[b,4,t,8] v"
    return (
        f"({heads}, bool[b,t] keep) => ({kind}[i,j,l,m] y) {{ axes = Constant<value_ints = [1, 2]>() "
        f"z = Constant<value_float = 0.0>() low = Constant<value_float = {low}>() zero = CastLike(z, q) "
        "least = CastLike(low, q) c = Constant<value_float = 0.35355339>() cc = CastLike(c, q) qs = Mul(q, cc) "
        "kt = Transpose<perm = [0, 1, 3, 2]>(k) w = MatMul(qs, kt) seen = Unsqueeze(keep, axes) "
        "n = Where(seen, zero, least) a = Add(w, n) p = Softmax(a) y = MatMul(p, v) }"
    )


TRAPS: dict[str, Trap] = {
    "Attention counts causality from the first key": Trap(
        text=f"({FLAT}) {OUT} {{ y = Attention<{HEADS}, is_causal = 1>(q, k, v) }}", truth=lower_right, instead=top_left
    ),
    "Attention-24 does so too": Trap(
        text=f"({FLAT}) {OUT} {{ y = Attention<{HEADS}, is_causal = 1>(q, k, v) }}",
        truth=lower_right,
        instead=top_left,
        opset=24,
    ),
    "MultiHeadAttention counts causality from neither corner": Trap(
        text=f"({FLAT}) {OUT} {{ y = {MULTI}, unidirectional = 1>(q, k, v) }}",
        truth=lower_right,
        instead=lambda i: np.concatenate([top_left(i)[:, :-1], all_seen(i)[:, -1:]], 1),
    ),
    "MultiHeadAttention with a past and without presents": Trap(
        text=f"({SAME}, {PAST}) {OUT} {{ y = {MULTI}, unidirectional = 1>(q, k, v, , , , pk, pv) }}", truth=over_past
    ),
    "GroupQueryAttention with a past and without presents": Trap(
        text=f"({SAME}, {PAST}, {LENGTHS}) {OUT} {{ y = {GROUP}>(q, k, v, pk, pv, n, a) }}",
        truth=over_past,
        given={"n": [4], "a": 5},
        sizes={"b": 1, "s": 1},
    ),
    "GroupQueryAttention told that a chunk is all there is": Trap(
        text=f"({SAME}, {BUFFER}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}>(q, k, v, pk, pv, n, a) }}",
        truth=lambda i: over_past({**i, "pk": i["pk"][:, :, :4], "pv": i["pv"][:, :, :4]}),
        given={"n": [6], "a": 3},
        sizes={"b": 1},
    ),
    "GroupQueryAttention with a window of 0": Trap(
        text=f"({SAME}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}, local_window_size = 0>(q, k, v, , , n, a) }}",
        truth=lower_right,
        given={"n": [2, 2], "a": 3},
        instead=lambda i: np.zeros_like(i["q"]),
    ),
    "GroupQueryAttention is causal": Trap(
        text=f"({SAME}, {LENGTHS}) {PRESENT} {{ y, x, z = {GROUP}>(q, k, v, , , n, a) }}",
        truth=all_seen,
        given={"n": [2, 2], "a": 3},
        instead=lower_right,
    ),
    "MultiHeadAttention's padding is -10000": Trap(
        text=f"({FLAT}, int32[b,t] g) {OUT} {{ y = {MULTI}, scale = 20000.0>(q, k, v, , g) }}",
        truth=lambda i: formula(i["q"], i["k"], i["v"], i["g"][:, None, None, :] > 0, scale=20000.0),
        given={"g": lambda shape: np.arange(shape[1]) % 2 + 0 * np.zeros(shape)},
    ),
    "a row without keys, -inf": Trap(text=by_hand("-inf"), truth=padded, nan=True),
    "a row without keys, the lowest number": Trap(
        text=by_hand(str(LOW32)),
        truth=padded,
        instead=lambda i: np.where(
            i["keep"].any(1)[:, None, None],
            padded(i),
            np.broadcast_to(i["v"].mean(2, dtype=np.float64).reshape(2, 1, 32), (2, 3, 32)),
        ),
    ),
    "a row without keys, the lowest number in fp16": Trap(text=by_hand(str(LOW16), half=True), truth=padded),
    "a row without keys in MultiHeadAttention": Trap(
        text=f"({FLAT}, float[b,1,s,t] g) {OUT} {{ y = {MULTI}>(q, k, v, , , g) }}",
        truth=lambda i: formula(i["q"], i["k"], i["v"], i["g"] == 0),
        given={"g": lambda shape: np.where(np.arange(shape[0])[:, None, None, None] == 0, -np.inf, np.zeros(shape))},
        nan=True,
    ),
    "a row without keys in GroupQueryAttention": Trap(
        text=(
            f"({SAME}, {LENGTHS}, float[b,1,s,s] g) {PRESENT} "
            f"{{ y, x, z = {GROUP}, causal = 0>(q, k, v, , , n, a, , , , g) }}"
        ),
        truth=lambda i: formula(i["q"], i["k"], i["v"], i["g"] == 0),
        given={
            "n": [2, 2],
            "a": 3,
            "g": lambda shape: np.where(np.arange(shape[0])[:, None, None, None] == 0, -np.inf, np.zeros(shape)),
        },
        nan=True,
    ),
    "a row without keys in Attention, not quite the lowest number": Trap(
        text=f"({FLAT}, float[s,t] g) {OUT} {{ y = Attention<{HEADS}>(q, k, v, g) }}",
        truth=lambda i: formula(i["q"], i["k"], i["v"], i["g"] == 0),
        given={"g": lambda shape: np.where(np.arange(shape[0])[:, None] == 0, -3e38, np.zeros(shape))},
    ),
    "two masks in fp16": Trap(
        text=(
            "(float16[b,4,s,t] z, float16[b,1,1,t] g, float16[s,t] h) => (float16[i,j,l,m] y) "
            "{ a = Add(z, g) c = Add(a, h) y = Softmax(c) }"
        ),
        truth=lambda i: np.zeros_like(i["z"]),
        given={"g": lambda shape: np.full(shape, LOW16), "h": lambda shape: np.full(shape, LOW16)},
        nan=True,
        reference=True,
    ),
    "a cap on masked logits": Trap(
        text=("(float[b,4,s,t] z, float[s,t] g) => (float[i,j,l,m] y) { a = Add(z, g) c = Tanh(a) y = Softmax(c) }"),
        truth=lambda i: softmax(np.tanh(i["z"]), i["g"] == 0),
        given={"g": lambda shape: np.where(corner(*shape), 0.0, -1e30)},
    ),
    "angles in fp16": Trap(
        text=(
            "(int64[b,s] p) => (float16[i,j] y) { c = Constant<value_float = 0.1>() "
            "f = Cast<to = 10>(p) d = CastLike(c, f) a = Mul(f, d) y = Cos(a) }"
        ),
        truth=lambda i: np.cos(i["p"] * 0.1),
        given={"p": [[1000, 1003, 20001], [3333, 4444, 30011]]},
        reference=True,
    ),
    "RotaryEmbedding of com.microsoft with one position": Trap(
        text=(
            "(float[b,s,32] x, int64[1] p, float[50,4] c, float[50,4] n) => (float[i,j,l] y) "
            "{ y = com.microsoft.RotaryEmbedding<num_heads = 4>(x, p, c, n) }"
        ),
        truth=lambda i: turned(i, np.array([[3, 9, 1], [3, 4, 40]])),
        given={"p": [3], "c": lambda shape: np.cos(angles(shape)), "n": lambda shape: np.sin(angles(shape))},
        instead=lambda i: turned(i, np.array([[3, 4, 5], [3, 4, 5]])),
    ),
    "GroupQueryAttention that rotates by itself": Trap(
        text=(
            "(float[b,s,64] q, float[b,s,64] k, float[b,s,64] v, "
            f"{LENGTHS}, float[50,8] c, float[50,8] o, int64[b,s] p) {PRESENT} "
            f"{{ y, x, z = {GROUP}, do_rotary = 1>(q, k, v, , , n, a, c, o, p) }}"
        ),
        truth=lambda i: lower_right(
            {"v": i["v"], **{name: turned({**i, "x": i[name], "n": i["o"]}, i["p"]) for name in ("q", "k")}}
        ),
        given={
            "n": [2, 2],
            "a": 3,
            "p": [[3, 9, 1], [20, 4, 40]],
            "c": lambda shape: np.cos(angles(shape)),
            "o": lambda shape: np.sin(angles(shape)),
        },
    ),
}


def angles(shape: Any) -> Array:
    made: Array = np.arange(shape[0])[:, None] / 10.0 ** np.arange(shape[1])
    return made


def turned(i: Given, positions: Array) -> Array:
    """Rotate pairs (i, i + half a head) by the rows of the tables at these positions."""
    x = i["x"].astype(np.float64).reshape(*i["x"].shape[:2], 4, 2, -1)
    cos, sin = (i[name].astype(np.float64)[positions][:, :, None] for name in ("c", "n"))
    a, b = x[..., 0, :], x[..., 1, :]
    return np.stack([a * cos - b * sin, a * sin + b * cos], -2).reshape(i["x"].shape)


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_one(name: str) -> None:
    trap = TRAPS[name]
    model = graph(trap.text, trap.opset)
    given = {"keep": lambda shape: keep(*shape), **trap.given}
    inputs = inputs_for(model, {**SIZES, **trap.sizes}, given)
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, inputs)[0] if trap.reference else on_ort(model, inputs)["y"]
    truth = trap.truth(inputs)
    if found.ndim == 4 and truth.ndim == 3:
        found = found.transpose(0, 2, 1, 3).reshape(truth.shape)
    assert found.shape == truth.shape
    assert np.isfinite(truth).all()
    assert bool(np.isnan(found).any()) == trap.nan
    if not trap.nan:
        assert np.abs(found - truth).max() > 0.05
    if trap.instead is not None:
        np.testing.assert_allclose(found, trap.instead(inputs), atol=1e-5)


CORNER, PAST_ONLY, EMPTY = "causality", "with a past and without presents", "a row without keys"
OURS: list[tuple[tuple[str, ...], str, str, dict[str, Any]]] = [
    ((CORNER,), "native", "portable", {"kv_cache": "concat", "causal": True}),
    ((CORNER, EMPTY), "native", "ort", {"kv_cache": "concat", "causal": True, "padding_mask": True}),
    ((CORNER, PAST_ONLY), "contrib", "portable", {"kv_cache": "concat", "causal": True, "num_kv_heads": 2}),
    ((CORNER, PAST_ONLY, EMPTY), "contrib", "ort", {"kv_cache": "concat", "causal": True, "padding_mask": True}),
    ((CORNER, PAST_ONLY, "a chunk is all there is"), "contrib", "ort", {"kv_cache": "shared", "causal": True}),
    (("is causal", "is -10000", EMPTY), "contrib", "ort", {"kv_cache": "shared", "padding_mask": True}),
    (("a window of 0",), "contrib", "ort", {"causal": True, "window": 1}),
    (("is -10000",), "contrib", "portable", {"padding_mask": True, "scale": 2000.0}),
    ((EMPTY, "two masks"), "decomposed", "portable", {"padding_mask": True, "causal": True, "dtype": "fp16"}),
    ((EMPTY, "two masks"), "native", "portable", {"padding_mask": True, "causal": True, "dtype": "fp16"}),
    ((EMPTY, "two masks"), "contrib", "ort", {"padding_mask": True, "causal": True, "dtype": "fp16"}),
    (("a cap",), "native", "ort", {"softcap": 1.0, "causal": True, "padding_mask": True}),
    (("a cap",), "decomposed", "portable", {"softcap": 1.0, "causal": True, "window": 2}),
    (("angles in fp16",), "native", "portable", {"encoding": "rope", "dtype": "fp16"}),
    (("one position", "angles in fp16"), "contrib", "portable", {"encoding": "rope", "dtype": "fp16"}),
    (("rotates by itself",), "contrib", "ort", {"encoding": "rope", "causal": True, "layout": "half"}),
]
"""Parts of the names of traps, and our blocks that could run into them. With `far out`, positions go up to 100,000."""


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("traps", "form", "target", "over"), OURS)
def test_a_block_of_ours_is_right_there(traps: tuple[str, ...], form: str, target: str, over: dict[str, Any]) -> None:
    spec = small_spec(**{"encoding": "none", **over})
    # A large scale multiplies the rounding of the scores.
    bound = BOUNDS[spec.dtype] * max(1, (spec.scale or 0) / 100)
    check_form(spec, form, target, (*SMALL, "far out") if spec.dtype == "fp16" else SMALL, bound)


def test_every_trap_has_a_block_of_ours() -> None:
    answered = {part for traps, *_ in OURS for part in traps}
    assert [name for name in TRAPS if not any(part in name for part in answered)] == ["Attention-24 does so too"]
    assert [part for part in answered if not any(part in name for name in TRAPS)] == []
