"""Factors of zero at keys that a mask hides anyway are left out; others stay.

The oracle is ONNX Runtime with the original graph, on rows and masks on which the zeros have an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from absorbed_graphs import HIDDEN, long, many, model_of
from onnx import TensorProto
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import KEPT, REWRITTEN

FAR, EDGE = 400, 256

Mask = Callable[[Graph], str]


def distances(g: Graph) -> str:
    """Query position minus key position, [T, T]."""
    count = g.op("Squeeze", many(g), g.constant([0]))
    places = g.op("Range", g.constant(0), count, g.constant(1))
    return g.op("Sub", g.op("Unsqueeze", places, g.constant([1])), places)


def causal(g: Graph) -> str:
    return g.op("GreaterOrEqual", distances(g), g.constant(0))


def near(g: Graph) -> str:
    return g.op("Less", distances(g), g.constant(EDGE))


def padding(g: Graph) -> str:
    """Whether the mask is 1, bool [B, 1, 1, T]."""
    return g.op("Unsqueeze", g.op("Equal", "attention_mask", g.constant(1)), g.constant([1, 2]))


def both(one: Mask, other: Mask) -> Mask:
    return lambda g: g.op("And", one(g), other(g))


def either(one: Mask, other: Mask) -> Mask:
    return lambda g: g.op("Or", one(g), other(g))


def everywhere(g: Graph) -> str:
    return g.op("Greater", distances(g), g.constant(-(10**6)))


def above(g: Graph) -> str:
    """Whether the mask is above 1."""
    return g.op("Unsqueeze", g.op("Greater", "attention_mask", g.constant(1)), g.constant([1, 2]))


def masked(mask: Mask) -> Callable[[Graph, str], str]:
    return lambda g, scores: g.op("Where", mask(g), scores, g.constant(-1e9, np.float32))


def zeroed(mask: Mask) -> Callable[[Graph, str], str]:
    return lambda g, weights: g.op("Where", mask(g), weights, g.constant(0.0, np.float32))


def zeroed_if_hidden(mask: Mask) -> Callable[[Graph, str], str]:
    return lambda g, weights: g.op("Where", g.op("Not", mask(g)), g.constant(0.0, np.float32), weights)


def multiplied_and_masked(factor: Mask, mask: Mask) -> Callable[[Graph, str], str]:
    def hook(g: Graph, scores: str) -> str:
        return masked(mask)(g, g.op("Mul", scores, g.op("Cast", factor(g), to=TensorProto.FLOAT)))

    return hook


def by_the_length(g: Graph, scores: str) -> str:
    """(scores + key position) times 1, or times 0 in long rows."""
    short = g.op("Where", long(g), g.constant([0.0], np.float32), g.constant([1.0], np.float32))
    count = g.op("Squeeze", many(g), g.constant([0]))
    places = g.op("Cast", g.op("Range", g.constant(0), count, g.constant(1)), to=TensorProto.FLOAT)
    return g.op("Add", g.op("Mul", scores, short), g.op("Mul", short, places))


def arrays_for(model: onnx.ModelProto, seq: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    arrays = {"features": rng.standard_normal((2, seq, HIDDEN)).astype(np.float32)}
    if len(model.graph.input) > 1:
        arrays["attention_mask"] = rng.integers(0, 3, (2, seq))
        arrays["attention_mask"][:, 0] = 1
    return arrays


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "zeros of a window that hides nothing": (
        {"scores": masked(both(causal, either(near, everywhere))), "weights": zeroed(near)},
        {"scores": masked(causal)},
        FAR,
    ),
    "scores times such a window": (
        {"scores": multiplied_and_masked(near, both(causal, either(near, everywhere)))},
        {"scores": masked(causal)},
        FAR,
    ),
    "zeros of masks that aren't 1": (
        {"scores": masked(either(padding, above)), "weights": zeroed(padding)},
        {"scores": masked(either(padding, above))},
        12,
    ),
    "zeros by the length": ({"scores": by_the_length}, {}, FAR),
}
"""The hooks of each graph, those of the graph without the zeros, and a row length at which the zeros have an effect."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("fault", FAULTS)
def test_zeros_that_hide_keys_stay(fault: str, form: str) -> None:
    hooks, without, seq = FAULTS[fault]
    model, plain = model_of(**hooks), model_of(**without)
    _, proto = rewritten_model(model, form=form, target="ort")
    arrays = arrays_for(model, seq)
    expected, actual = (run(one, arrays)["output"] for one in (model, proto))
    usual = run(plain, {name: arrays[name] for name in arrays if name in {one.name for one in plain.graph.input}})
    assert float(np.abs(expected - usual["output"]).max()) > 1e-3 * float(np.abs(expected).max())
    assert actual.shape == expected.shape and np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize(
    "hooks",
    [
        {"scores": masked(both(causal, padding)), "weights": zeroed(both(causal, padding))},
        {"scores": masked(both(causal, padding)), "weights": zeroed(padding)},
        {"scores": masked(both(causal, padding)), "weights": zeroed_if_hidden(padding)},
        {"scores": multiplied_and_masked(causal, both(causal, padding))},
    ],
)
def test_zeros_of_hidden_keys_are_left_out(hooks: dict[str, Any], form: str) -> None:
    model = model_of(**hooks)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    arrays = arrays_for(model, 12)
    expected, actual = (run(one, arrays)["output"] for one in (model, proto))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def tril(g: Graph) -> str:
    """Zeros and ones [T, T], sliced from a longer table as in GPT-1 and GPT-2."""
    table = g.weight("bias", np.tril(np.ones((64, 64), np.float32)))
    return g.op("Slice", table, g.constant([0, 0]), g.op("Concat", many(g), many(g), axis=0), g.constant([0, 1]))


def triu(g: Graph) -> str:
    """True where a key is hidden, sliced from a longer table."""
    if "hidden" not in {one.name for one in g.weights}:
        g.weight("hidden", np.triu(np.ones((64, 64), bool), 1))
    return g.op("Slice", "hidden", g.constant([0, 0]), g.op("Concat", many(g), many(g), axis=0), g.constant([0, 1]))


def is_padding(g: Graph) -> str:
    """`mask.eq(0)`, bool [B, 1, 1, T]."""
    return g.op("Unsqueeze", g.op("Equal", "attention_mask", g.constant(0)), g.constant([1, 2]))


def filled(mask: Mask, fill: float) -> Callable[[Graph, str], str]:
    """masked_fill: writes a number where the mask is true."""
    return lambda g, values: g.op("Where", mask(g), g.constant(fill, np.float32), values)


@pytest.mark.parametrize(
    ("scores", "weights", "hides"),
    [
        (triu, triu, True),
        (is_padding, is_padding, True),
        (either(triu, is_padding), either(triu, is_padding), True),
        (either(triu, is_padding), is_padding, True),
        (is_padding, triu, False),
        (both(triu, is_padding), is_padding, False),
    ],
)
def test_masks_that_are_true_where_keys_are_hidden(scores: Mask, weights: Mask, hides: bool) -> None:
    model = model_of(scores=filled(scores, -1e9), weights=filled(weights, 0.0))
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN if hides else KEPT]
    arrays = arrays_for(model, 12)
    expected, actual = (run(one, arrays)["output"] for one in (model, proto))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def number(mask: Mask) -> Mask:
    return lambda g: g.op("Cast", mask(g), to=TensorProto.FLOAT)


def by_numbers(mask: Mask, kind: str, large: float, negated: bool = False) -> Callable[[Graph, str], str]:
    """scores * mask plus or minus (1 - mask) * large."""

    def hook(g: Graph, scores: str) -> str:
        seen = mask(g)
        hidden = g.op("Sub", g.constant(1.0, np.float32), seen)
        if negated:
            hidden = g.op("Neg", g.op("Sub", seen, g.constant(1.0, np.float32)))
        return g.op(kind, g.op("Mul", scores, seen), g.op("Mul", hidden, g.constant(large, np.float32)))

    return hook


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("mask", [tril, number(causal), number(both(causal, padding))])
@pytest.mark.parametrize(
    ("kind", "large", "negated", "hides"),
    [
        ("Add", -1e4, False, True),
        ("Sub", 1e4, False, True),
        ("Sub", 1e9, True, True),
        ("Add", 1e4, False, False),
        ("Sub", -1e4, False, False),
        ("Sub", 1.0, False, False),
    ],
)
def test_masks_that_are_multiplied_as_numbers(
    kind: str, large: float, negated: bool, hides: bool, mask: Mask, form: str
) -> None:
    model = model_of(scores=by_numbers(mask, kind, large, negated))
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN if hides else KEPT]
    arrays = arrays_for(model, 12)
    expected, actual = (run(one, arrays)["output"] for one in (model, proto))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def cut(mask: Mask, least: int = 0) -> Mask:
    """The first T keys of a mask [B, 1, 1, T] that is as long as they are, or all but the first `least`, and one more.

    A Slice gives them, as in streaming encoders.
    """

    def part(g: Graph) -> str:
        whole = mask(g)
        if least:
            whole = g.op("Concat", *(g.op("Slice", whole, *ends) for ends in _halves(g, least)), axis=3)
        return g.op("Slice", whole, g.constant([0]), many(g), g.constant([3]))

    return part


def _halves(g: Graph, at: int) -> list[tuple[str, str, str]]:
    """The ends of the keys from `at` on, and of those before."""
    axis, first, last = g.constant([3]), g.constant([0]), g.constant([2**40])
    place = g.constant([at])
    return [(place, last, axis), (first, place, axis)]


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize(("other", "state"), [(cut(padding), REWRITTEN), (cut(padding, 1), KEPT), (cut(above), KEPT)])
def test_parts_of_masks(other: Mask, state: str, form: str) -> None:
    """Zeros by the same part of a mask are left out. Zeros by the mask moved by one key, or by another mask, stay."""
    model = model_of(scores=masked(cut(padding)), weights=zeroed(other))
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [state]
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 0, 1, 1, 0]])
    feeds = {"features": np.random.default_rng(0).standard_normal((3, 5, HIDDEN)).astype(np.float32)}
    before, after = (run(one, feeds | {"attention_mask": mask})["output"] for one in (model, proto))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)
