"""Scores with an upper bound for each key, and hidden keys whose logit is only slightly below all capped scores."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto
from small_graphs import Graph, run
from softmax_graphs import HIDDEN, Mix, attention, seen

from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model


def number(g: Graph, value: float) -> str:
    return g.constant(value, np.float32)


def least(high: float, low: float, *, hidden_first: bool = False, reverse: bool = False, expanded: bool = False) -> Mix:
    """softmax(min(x, where(seen, high, low)))."""

    def mix(g: Graph, scores: str, values: str) -> str:
        truth, bounds = seen(g, scores), [number(g, high), number(g, low)]
        if hidden_first:
            truth, bounds = g.op("Not", truth), bounds[::-1]
        mask = g.op("Where", truth, *bounds)
        mask = g.op("Expand", mask, g.op("Shape", scores)) if expanded else mask
        scores = g.op("Min", *([mask, scores] if reverse else [scores, mask]))
        return g.op("MatMul", g.op("Softmax", scores, axis=-1), values)

    return mix


def bounded(bound: float) -> Mix:
    return lambda g, scores, values: g.op(
        "MatMul", g.op("Softmax", g.op("Min", scores, number(g, bound)), axis=-1), values
    )


def by_input(g: Graph, scores: str, values: str) -> str:
    """A bound that is an input and may be any number."""
    mask = g.op("Unsqueeze", g.op("Cast", "attention_mask", to=TensorProto.FLOAT), g.constant([1, 2]))
    return g.op("MatMul", g.op("Softmax", g.op("Min", scores, mask), axis=-1), values)


def negated(g: Graph, scores: str, values: str) -> str:
    """A mask of negated scores, which are negated again after it."""
    mask = g.op("Where", seen(g, scores), number(g, 1e30), number(g, -1e30))
    less = g.op("Neg", g.op("Min", g.op("Neg", scores), mask))
    return g.op("MatMul", g.op("Softmax", less, axis=-1), values)


def filled(fill: float, cap: float | None = None, *, added: str = "") -> Mix:
    """Scores with an optional cap and `fill` at hidden keys; positions are `added` before or after the fill."""

    def mix(g: Graph, scores: str, values: str) -> str:
        if cap is not None:
            scores = g.op("Mul", g.op("Tanh", g.op("Div", scores, number(g, cap))), number(g, cap))
        length = g.op("Squeeze", g.length(scores, 3), g.constant([0]))
        places = g.op("Cast", g.op("Range", g.constant(0), length, g.constant(1)), to=TensorProto.FLOAT)
        scores = g.op("Add", scores, places) if added == "before" else scores
        scores = g.op("Where", seen(g, scores), scores, number(g, fill))
        scores = g.op("Add", scores, places) if added == "behind" else scores
        return g.op("MatMul", g.op("Softmax", scores, axis=-1), values)

    return mix


def hidden(cap: float | None = None) -> Mix:
    """The attention that the others should be equal to."""
    return filled(-1e9, cap)


SAME: dict[str, tuple[Mix, Mix]] = {
    "Min": (least(1e30, -1e30), hidden()),
    "Min with infinity": (least(np.inf, -np.inf), hidden()),
    "Min, hidden first": (least(1e38, -1e4, hidden_first=True), hidden()),
    "Min, mask first": (least(1e38, -1e9, reverse=True), hidden()),
    "Min, expanded": (least(1e30, -1e30, expanded=True), hidden()),
    "a bound that no score reaches": (bounded(3e38), bounded(np.inf)),
    "capped": (filled(-1000.0, 50.0), hidden(50.0)),
}

OTHERS: dict[str, tuple[str, Mix]] = {
    "a bound that scores reach": ("score-bound", bounded(1.0)),
    "a mask that bounds seen keys": ("score-bound", least(1e3, -1e30)),
    "a mask that hides too little": ("score-bound", least(1e30, -1e3)),
    "a mask of a caller": ("score-bound", by_input),
    "negated scores": ("score-bound", negated),
    "without a cap": ("score-fill", filled(-1000.0)),
    "a wide cap": ("score-fill", filled(-1000.0, 250.0)),
    "added behind a cap": ("score-fill", filled(-1000.0, 50.0, added="before")),
    "added behind the fill": ("score-fill", filled(-1000.0, 50.0, added="behind")),
}


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("name", SAME)
def test_bounds_that_hide_keys_are_masks(name: str, form: str) -> None:
    one, other = (attention(mix) for mix in SAME[name])
    done, proto = helpers.rewritten_model(one, form=form, target="ort")
    assert [(site.state, site.reason) for site in done.sites] == [(REWRITTEN, None)]
    for tokens in (1, 6):
        given = {"features": np.random.default_rng(tokens).standard_normal((2, tokens, HIDDEN)).astype(np.float32)}
        want, found = (run(model, given)["output"] for model in (other, proto))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_bounds_stay(name: str) -> None:
    code, mix = OTHERS[name]
    (site,) = rewrite_model(ir.from_proto(attention(mix)), form="native", target="ort").sites
    assert site.reason is not None
    assert (site.state, site.reason.code) == (KEPT, code)
