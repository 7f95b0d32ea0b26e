"""Attention with a number added to the sum of exponentials, or with another base of the exponentials, and near misses.

Each is a function from the scores and the values to the result of the attention (softmax_graphs.Mix). This file does
not import posexport.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto
from small_graphs import Array, Graph
from softmax_graphs import Mix, reduced


def number(g: Graph, value: float) -> str:
    return g.constant(value, np.float32)


def causal(g: Graph, scores: str, fill: float) -> str:
    """Scores with `fill` at the query's own key and all later keys, so that the first query sees no key."""
    length = g.op("Squeeze", g.length(scores, 3), g.constant([0]))
    places = g.op("Range", g.constant(0), length, g.constant(1))
    later = g.op("GreaterOrEqual", places, g.op("Unsqueeze", places, g.constant([1])))
    return g.op("Where", later, number(g, fill), scores)


def padded(
    pads: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0, 1),
    logit: float = 0.0,
    *,
    last: bool = True,
    cut: bool = True,
    mode: str = "constant",
    scaled: bool = False,
    masked: bool = False,
) -> Mix:
    """softmax(pad(x)) without the additional weight. Near misses pad other axes, scale later, or keep the weight."""

    def mix(g: Graph, scores: str, values: str) -> str:
        scores = causal(g, scores, -1e9) if masked else scores
        inputs = [number(g, logit)] if mode == "constant" else []
        wide = g.op("Pad", scores, g.constant(pads), *inputs, mode=mode)
        wide = g.op("Mul", wide, number(g, 0.5)) if scaled else wide
        weights = g.op("Softmax", wide, axis=-1)
        tokens = [g.length(scores, 2), g.length(scores, 3)]
        if cut:
            begin = 0 if last else 1
            ends = [tokens[0], tokens[1] if last else g.op("Add", tokens[1], g.constant([1]))]
            ends = g.op("Concat", *ends, axis=0)
            weights = g.op("Slice", weights, g.constant([0, begin]), ends, g.constant([2, 3]))
        return g.op("MatMul", weights, values)

    return mix


def padded_by_axes(axis: int = -1) -> Mix:
    """Like `padded`, but Pad has the input `axes` of opset 18."""

    def mix(g: Graph, scores: str, values: str) -> str:
        wide = g.op("Pad", scores, g.constant([0, 1]), number(g, 0.0), g.constant([axis]))
        weights = g.op("Slice", g.op("Softmax", wide, axis=-1), g.constant([0]), g.constant([-1]), g.constant([3]))
        return g.op("MatMul", weights, values)

    return mix


def padded_by_lengths(g: Graph, scores: str, values: str) -> str:
    """Like `padded`, but the graph computes the pads from constants, as TorchScript exports do."""
    zeros = g.op("ConstantOfShape", g.constant([6]))
    pairs = g.op("Reshape", g.op("Concat", g.constant([0, 1]), g.op("Cast", zeros, to=7), axis=0), g.constant([-1, 2]))
    turned = g.op("Slice", pairs, g.constant([-1]), g.constant([-(2**60)]), g.constant([0]), g.constant([-1]))
    pads = g.op("Reshape", g.op("Transpose", turned, perm=[1, 0]), g.constant([-1]))
    wide = g.op("Pad", scores, pads, number(g, 0.0))
    weights = g.op("Slice", g.op("Softmax", wide, axis=-1), g.constant([0]), g.constant([-1]), g.constant([3]))
    return g.op("MatMul", weights, values)


def padded_by_tokens(g: Graph, scores: str, values: str) -> str:
    """Adds as many logits as there are tokens."""
    pads = g.op("Concat", g.constant([0] * 7), g.length(scores, 3), axis=0)
    weights = g.op("Softmax", g.op("Pad", scores, pads, number(g, 0.0)), axis=-1)
    kept = g.op("Slice", weights, g.constant([0]), g.length(scores, 3), g.constant([3]))
    return g.op("MatMul", kept, values)


def concatenated(logit: float = 0.0, *, of_length: bool = False) -> Mix:
    """softmax([x, c]) with the same number c for each query. A near miss adds the number of tokens to c."""

    def mix(g: Graph, scores: str, values: str) -> str:
        shape = g.op("Concat", g.op("Shape", scores, end=3), g.constant([1]), axis=0)
        column = g.op("Expand", number(g, logit), shape)
        if of_length:
            column = g.op("Add", column, g.op("Cast", g.length(scores, 3), to=TensorProto.FLOAT))
        wide = g.op("Softmax", g.op("Concat", scores, column, axis=-1), axis=-1)
        weights = g.op("Slice", wide, g.constant([0]), g.constant([-1]), g.constant([3]))
        return g.op("MatMul", weights, values)

    return mix


def added(weight: float = 1.0, *, first: bool = False, late: bool = False, masked: bool = False) -> Mix:
    """exp(x) / (c + sum(exp(x))) with c = `weight`; with `late`, the product with the values is divided."""

    def mix(g: Graph, scores: str, values: str) -> str:
        powers = g.op("Exp", causal(g, scores, -1e9) if masked else scores)
        sums = g.op("ReduceSum", powers, g.constant([-1]))
        total = g.op("Add", *([number(g, weight), sums] if first else [sums, number(g, weight)]))
        if late:
            return g.op("Div", g.op("MatMul", powers, values), total)
        return g.op("MatMul", g.op("Div", powers, total), values)

    return mix


def stable(
    by: str = "Neg", *, least: float | None = None, put: int | None = None, other: int | None = None, late: bool = False
) -> Mix:
    """exp(x - m) / (exp(-m) + sum(exp(x - m))), with m at least `least`.

    Near misses add exp(m), take m of the added term over the axis `other`, or put the axis of exp(-m) at `put`.
    """

    def mix(g: Graph, scores: str, values: str) -> str:
        most = g.op("ReduceMax", scores, g.constant([-1]))
        most = most if least is None else g.op("Max", most, number(g, least))
        powers = g.op("Exp", g.op("Sub", scores, most))
        level = most if other is None else g.op("ReduceMax", scores, g.constant([other]))
        less = {
            "Neg": lambda: g.op("Neg", level),
            "Sub": lambda: g.op("Sub", number(g, 0.0), level),
            "Mul": lambda: g.op("Mul", level, number(g, -1.0)),
            "": lambda: level,
        }[by]()
        more = g.op("Exp", less)
        if put is not None:
            more = g.op("Unsqueeze", g.op("Squeeze", more, g.constant([3])), g.constant([put]))
        total = g.op("Add", more, g.op("ReduceSum", powers, g.constant([-1])))
        if late:
            return g.op("Div", g.op("MatMul", powers, values), total)
        return g.op("MatMul", g.op("Div", powers, total), values)

    return mix


def less_a_maximum(g: Graph, scores: str, values: str) -> str:
    """exp(x - m) / (1 + sum(exp(x - m))): the sink depends on the largest logit m."""
    powers = g.op("Exp", g.op("Sub", scores, g.op("ReduceMax", scores, g.constant([-1]))))
    total = g.op("Add", g.op("ReduceSum", powers, g.constant([-1])), number(g, 1.0))
    return g.op("MatMul", g.op("Div", powers, total), values)


def by_query(g: Graph, scores: str, values: str) -> str:
    """Adds another number to the sum of each query."""
    powers = g.op("Exp", scores)
    length = g.op("Squeeze", g.length(scores, 2), g.constant([0]))
    places = g.op("Unsqueeze", g.op("Range", g.constant(0), length, g.constant(1)), g.constant([1]))
    more = g.op("Add", g.op("Cast", places, to=TensorProto.FLOAT), number(g, 1.0))
    total = g.op("Add", g.op("ReduceSum", powers, g.constant([-1])), more)
    return g.op("MatMul", g.op("Div", powers, total), values)


def to_base(
    base: float = 2.0,
    *,
    back: bool = False,
    maximum: bool = False,
    sink: bool = False,
    summed: float | None = None,
    late: bool = False,
) -> Mix:
    """b^x / sum(b^x); `back` first scales x by log2(e). A near miss has the base `summed` in its sum."""

    def mix(g: Graph, scores: str, values: str) -> str:
        scores = g.op("Mul", scores, number(g, float(np.log2(np.e)))) if back else scores
        if maximum:
            scores = g.op("Sub", scores, reduced(g, "ReduceMax", scores))
        powers = g.op("Pow", number(g, base), scores)
        others = powers if summed is None else g.op("Pow", number(g, summed), scores)
        total = g.op("ReduceSum", others, g.constant([-1]))
        total = g.op("Add", total, number(g, 1.0)) if sink else total
        if late:
            return g.op("Div", g.op("MatMul", powers, values), total)
        return g.op("MatMul", g.op("Div", powers, total), values)

    return mix


def squares(g: Graph, scores: str, values: str) -> str:
    """x^2 / sum(x^2), which is not a softmax."""
    powers = g.op("Pow", scores, number(g, 2.0))
    total = g.op("ReduceSum", powers, g.constant([-1]))
    return g.op("MatMul", g.op("Div", powers, total), values)


def weights_of(scores: Array, *, more: float = 0.0, base: float = np.e, masked: bool = False) -> Array:
    """base^x / (more + sum(base^x)); if `masked`, keys are hidden as `causal` hides them."""
    powers = base**scores
    if masked:
        powers = np.where(np.arange(scores.shape[-1]) >= np.arange(scores.shape[-2])[:, None], 0.0, powers)
    weights: Array = powers / (more + powers.sum(-1, keepdims=True))
    return weights


SPELLINGS: dict[str, tuple[Mix, dict[str, float | bool]]] = {
    "Pad": (padded(), {"more": 1.0}),
    "Pad at the start": (padded((0, 0, 0, 1, 0, 0, 0, 0), last=False), {"more": 1.0}),
    "Pad with another logit": (padded(logit=0.25), {"more": float(np.exp(0.25))}),
    "Pad with axes": (padded_by_axes(), {"more": 1.0}),
    "Pad by computed numbers": (padded_by_lengths, {"more": 1.0}),
    "Pad behind a mask": (padded(masked=True), {"more": 1.0, "masked": True}),
    "Concat": (concatenated(), {"more": 1.0}),
    "Concat with another logit": (concatenated(-1.5), {"more": float(np.exp(-1.5))}),
    "one more": (added(), {"more": 1.0}),
    "one more, first": (added(first=True), {"more": 1.0}),
    "one more, late": (added(late=True), {"more": 1.0}),
    "one more, masked": (added(masked=True), {"more": 1.0, "masked": True}),
    "a tenth more": (added(float(np.float32(0.1))), {"more": float(np.float32(0.1))}),
    "a small number more": (added(1e-9), {}),
    "stable": (stable(), {"more": 1.0}),
    "stable by Sub": (stable("Sub"), {"more": 1.0}),
    "stable by Mul": (stable("Mul"), {"more": 1.0}),
    "stable, at least zero": (stable(least=0.0), {"more": 1.0}),
    "stable, late": (stable(late=True), {"more": 1.0}),
    "base two": (to_base(), {"base": 2.0}),
    "base two, scaled back": (to_base(back=True), {}),
    "base two, stable": (to_base(back=True, maximum=True), {}),
    "base two, late": (to_base(late=True), {"base": 2.0}),
    "base two and one more": (to_base(sink=True), {"base": 2.0, "more": 1.0}),
    "base ten": (to_base(10.0), {"base": 10.0}),
}
"""Each spelling with the arguments of `weights_of`."""

NEAR_MISSES: dict[str, tuple[str | None, Mix]] = {
    "two more logits": ("score-concat", padded((0, 0, 0, 0, 0, 0, 0, 2))),
    "as many as tokens": ("score-concat", padded_by_tokens),
    "repeated logit": ("score-concat", padded(mode="edge")),
    "scaled with its sink": ("score-order", padded(logit=1.0, scaled=True)),
    "a logit that is a mask": ("sinks", padded(logit=-2000.0)),
    "logit of the length": ("sinks", concatenated(of_length=True)),
    "less than the sum": ("sinks", added(-0.5)),
    "one more behind a maximum": ("score-order", less_a_maximum),
    "another number by query": ("sinks", by_query),
    "exponential of the maximum": ("sinks", stable("")),
    "another maximum": ("sinks", stable(other=2)),
    "maximum put at the queries": ("softmax-axis", stable(put=2)),
    "another base in the sum": (None, to_base(summed=3.0)),
    "base one": (None, to_base(1.0)),
    "squares": (None, squares),
}
"""Each near miss with the code of the reason that a rewrite lists, or None if it lists none."""
