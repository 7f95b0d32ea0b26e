"""Attention whose softmax is written out in single operators, as people and exporters do, and near misses of each form.

Each is a function from the scores and the values to the result of the attention, [B, N, S, D]. This file does not
import posexport.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from small_graphs import Array, Graph

HEADS, SIZE, HIDDEN = 4, 8, 32

Mix = Callable[[Graph, str, str], str]


def attention(mix: Mix) -> onnx.ModelProto:
    """Attention over features [batch, seq, HIDDEN], with a mask [batch, seq] of zeros and ones if `mix` reads it."""
    g = Graph()

    def heads(name: str) -> str:
        projected = g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN))
        return g.op("Transpose", g.op("Reshape", projected, g.constant([0, 0, HEADS, SIZE])), perm=[0, 2, 1, 3])

    q, k, v = (heads(name) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = mix(g, g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32)), v)
    g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]), name="output")
    wide = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "seq", HIDDEN])
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.FLOAT, ["batch", "seq"])
    read = any("attention_mask" in node.input for node in g.nodes)
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", "seq", HIDDEN])
    graph = helper.make_graph(g.nodes, "main_graph", [wide, mask] if read else [wide], [output], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def expected(model: onnx.ModelProto, features: Array) -> Array:
    """Attention in numpy, in float64."""
    weights = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer}
    rows, tokens, _ = features.shape
    q, k, v = (
        (features.astype(np.float64) @ weights[name]).reshape(rows, tokens, HEADS, SIZE).transpose(0, 2, 1, 3)
        for name in "qkv"
    )
    powers = np.exp(q @ k.swapaxes(-1, -2) * SIZE**-0.5)
    mixed: Array = powers / powers.sum(-1, keepdims=True) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(rows, tokens, HIDDEN)


def reduced(g: Graph, kind: str, value: str, axis: int = 3, put: int = 3, *, by: str = "Unsqueeze") -> str:
    """A sum or a maximum that drops its axis; Unsqueeze or Reshape then inserts an axis at `put`."""
    result = g.op(kind, value, g.constant([axis]), keepdims=0)
    if by == "Unsqueeze":
        return g.op("Unsqueeze", result, g.constant([put]))
    sizes = [g.length(result, place) for place in range(3)]
    return g.op("Reshape", result, g.op("Concat", *sizes[:put], g.constant([1]), *sizes[put:], axis=0))


def jax(
    axis: int = 3,
    put: int = 3,
    maximum: int = 3,
    *,
    by: str = "Unsqueeze",
    wide: bool = False,
    least: float | None = None,
) -> Mix:
    """The softmax of jax.nn.softmax.

    `maximum` is the place of the maximum's inserted axis, and `least` is a lower bound of the maximum. With `wide`, the
    graph expands the sums to all keys.
    """

    def mix(g: Graph, scores: str, values: str) -> str:
        most = reduced(g, "ReduceMax", scores, put=maximum, by=by)
        most = most if least is None else g.op("Max", g.constant(least, np.float32), most)
        powers = g.op("Exp", g.op("Sub", scores, most))
        total = reduced(g, "ReduceSum", powers, axis, put, by=by)
        total = g.op("Expand", total, g.op("Shape", powers)) if wide else total
        return g.op("MatMul", g.op("Div", powers, total), values)

    return mix


def maximum_over(axis: int) -> Mix:
    """A softmax of the scores minus their maximum over an axis."""

    def mix(g: Graph, scores: str, values: str) -> str:
        less = g.op("Sub", scores, g.op("ReduceMax", scores, g.constant([axis])))
        return g.op("MatMul", g.op("Softmax", less, axis=-1), values)

    return mix


def of_log_softmax(axis: int = -1) -> Mix:
    return lambda g, scores, values: g.op("MatMul", g.op("Exp", g.op("LogSoftmax", scores, axis=axis)), values)


def log_sum_exp(axis: int = -1, put: int | None = None) -> Mix:
    """exp(x - ReduceLogSumExp(x)); with `put`, the reduction drops its axis and Unsqueeze inserts one there."""

    def mix(g: Graph, scores: str, values: str) -> str:
        if put is None:
            total = g.op("ReduceLogSumExp", scores, g.constant([axis]))
        else:
            total = reduced(g, "ReduceLogSumExp", scores, axis, put)
        return g.op("MatMul", g.op("Exp", g.op("Sub", scores, total)), values)

    return mix


def log_of_sum(axis: int = -1, factor: float = 1.0) -> Mix:
    """exp(x - log(sum(exp(factor x))))."""

    def mix(g: Graph, scores: str, values: str) -> str:
        summed = scores if factor == 1.0 else g.op("Mul", scores, g.constant(factor, np.float32))
        total = g.op("Log", g.op("ReduceSum", g.op("Exp", summed), g.constant([axis])))
        return g.op("MatMul", g.op("Exp", g.op("Sub", scores, total)), values)

    return mix


def by_one_over(number: float = 1.0) -> Mix:
    """exp(x) * (number / sum(exp(x)))."""

    def mix(g: Graph, scores: str, values: str) -> str:
        powers = g.op("Exp", scores)
        part = g.op("Div", g.constant(number, np.float32), g.op("ReduceSum", powers, g.constant([-1])))
        return g.op("MatMul", g.op("Mul", powers, part), values)

    return mix


def late(axis: int = 3, *, factor: float = 1.0, reciprocal: bool = False, einsum: str | None = None) -> Mix:
    """(exp(x) v) / sum(exp(factor x)), with the axis of the sum inserted as the last."""

    def mix(g: Graph, scores: str, values: str) -> str:
        powers = g.op("Exp", scores)
        summed = powers if factor == 1.0 else g.op("Exp", g.op("Mul", scores, g.constant(factor, np.float32)))
        total = reduced(g, "ReduceSum", summed, axis)
        mixed = g.op("Einsum", powers, values, equation=einsum) if einsum else g.op("MatMul", powers, values)
        return g.op("Mul", mixed, g.op("Reciprocal", total)) if reciprocal else g.op("Div", mixed, total)

    return mix


def late_behind_a_transpose(g: Graph, scores: str, values: str) -> str:
    """The graph divides the product after a Transpose to [B, S, N, D]."""
    powers = g.op("Exp", scores)
    mixed = g.op("Transpose", g.op("MatMul", powers, values), perm=[0, 2, 1, 3])
    total = g.op("Transpose", g.op("ReduceSum", powers, g.constant([-1])), perm=[0, 2, 1, 3])
    return g.op("Transpose", g.op("Div", mixed, total), perm=[0, 2, 1, 3])


def masked(*, at_end: bool = False) -> Mix:
    """exp(x) * mask / sum(exp(x) * mask); with `at_end`, the product with the values is divided."""

    def mix(g: Graph, scores: str, values: str) -> str:
        powers = g.op("Mul", g.op("Exp", scores), g.op("Unsqueeze", "attention_mask", g.constant([1, 2])))
        total = g.op("ReduceSum", powers, g.constant([-1]))
        if at_end:
            return g.op("Div", g.op("MatMul", powers, values), total)
        return g.op("MatMul", g.op("Div", powers, total), values)

    return mix


def seen(g: Graph, scores: str, *, keys_only: bool = False, window: int = 2) -> str:
    """A bool mask [1, 1, S, T] that allows keys up to `window` after the query.

    With `keys_only`, a mask [1, 1, 1, T] that allows all keys except the third.
    """
    length = g.op("Squeeze", g.length(scores, 3), g.constant([0]))
    places = g.op("Range", g.constant(0), length, g.constant(1))
    if keys_only:
        return g.op("Unsqueeze", g.op("Not", g.op("Equal", places, g.constant(2))), g.constant([0, 1, 2]))
    queries = g.op("Add", g.op("Unsqueeze", places, g.constant([1])), g.constant(window))
    return g.op("Unsqueeze", g.op("LessOrEqual", places, queries), g.constant([0, 1]))


def of_table(g: Graph, scores: str, least: float) -> str:
    """A mask of floats [1, 1, S, T], sliced from a constant for 64 tokens: 1 where a key is visible, else `least`."""
    places = np.arange(64)
    table = np.where(places <= places[:, None] + 2, 1.0, least).astype(np.float32)[None, None]
    lengths = g.op("Concat", g.length(scores, 2), g.length(scores, 3), axis=0)
    return g.op("Slice", g.weight("mask", table), g.constant([0, 0]), lengths, g.constant([2, 3]))


def zeroed(
    by: str = "Where",
    *,
    late: bool = False,
    keys_only: bool = False,
    filled: float = 0.0,
    sums: str = "zeroed",
    least: float = 0.0,
) -> Mix:
    """Exponentials that are set to zero at hidden keys and then divided by their sum.

    Near misses fill in another number or divide by another sum.
    """

    def mix(g: Graph, scores: str, values: str) -> str:
        powers = g.op("Exp", g.op("Sub", scores, g.op("ReduceMax", scores, g.constant([-1]))))
        truth, zero = seen(g, scores, keys_only=keys_only), g.constant(filled, np.float32)
        kept = {
            "Where": lambda: g.op("Where", truth, powers, zero),
            "Where Not": lambda: g.op("Where", g.op("Not", truth), zero, powers),
            "constant": lambda: g.op("Mul", powers, of_table(g, scores, least)),
            "Mul": lambda: g.op("Mul", g.op("Cast", truth, to=TensorProto.FLOAT), powers),
            "hidden": lambda: g.op("Mul", powers, g.op("Cast", g.op("Not", truth), to=TensorProto.FLOAT)),
        }[by]()
        other = g.op("Where", seen(g, scores, window=1), powers, zero) if sums == "other" else powers
        total = g.op("ReduceSum", kept if sums not in ("all", "other") else other, g.constant([-1]))
        if sums == "bounded":
            total = g.op("Max", total, g.constant(0.9, np.float32))
        if sums == "added":
            total = g.op("Add", total, g.constant(1e-1, np.float32))
        if late:
            return g.op("Div", g.op("MatMul", kept, values), total)
        return g.op("MatMul", g.op("Div", kept, total), values)

    return mix


def zeroed_by_input(g: Graph, scores: str, values: str) -> str:
    """Exponentials that are set to zero where the input attention_mask hides keys."""
    truth = g.op("Greater", g.op("Unsqueeze", "attention_mask", g.constant([1, 2])), g.constant(0.5, np.float32))
    powers = g.op("Where", truth, g.op("Exp", scores), g.constant(0.0, np.float32))
    return g.op("MatMul", g.op("Div", powers, g.op("ReduceSum", powers, g.constant([-1]))), values)


ZEROED: dict[str, Mix] = {
    "Where": zeroed(),
    "Where Not": zeroed("Where Not"),
    "Mul": zeroed("Mul"),
    "late": zeroed(late=True),
    "late Mul": zeroed("Mul", late=True),
    "by key": zeroed(keys_only=True),
    "constant": zeroed("constant"),
    "late constant": zeroed("constant", late=True),
}

NOT_ZEROED: dict[str, Mix] = {
    "another number": zeroed(filled=0.5),
    "the sum of all": zeroed(sums="all"),
    "the sum of others": zeroed(sums="other"),
    "a bound": zeroed(sums="bounded"),
    "a number beside": zeroed(sums="added"),
    "a table of other numbers": zeroed("constant", least=0.25),
}
"""Mixes that are not a softmax of the visible keys."""


def bounded(kind: str, bound: float = 1e-9, maximum: int | None = None, *, upper: bool = False) -> Mix:
    """A softmax whose sum has a lower bound. If `maximum` is given, the scores are reduced by their maximum over it."""

    def mix(g: Graph, scores: str, values: str) -> str:
        if maximum is not None:
            scores = g.op("Sub", scores, g.op("ReduceMax", scores, g.constant([maximum])))
        powers = g.op("Exp", scores)
        bounds = [g.constant(bound, np.float32), *([g.constant(1.5, np.float32)] if upper else [])]
        total = g.op(kind, g.op("ReduceSum", powers, g.constant([-1])), *bounds)
        return g.op("MatMul", g.op("Div", powers, total), values)

    return mix


def log_with_maximum(g: Graph, scores: str, values: str) -> str:
    """exp(x - (m + log(sum(exp(x - m)))))."""
    most = g.op("ReduceMax", scores, g.constant([-1]))
    total = g.op("ReduceSum", g.op("Exp", g.op("Sub", scores, most)), g.constant([-1]))
    weights = g.op("Exp", g.op("Sub", scores, g.op("Add", most, g.op("Log", total))))
    return g.op("MatMul", weights, values)


def linear(g: Graph, value: str) -> str:
    """A linear layer over heads, as in CaiT."""
    wide = g.op("MatMul", g.op("Transpose", value, perm=[0, 2, 3, 1]), g.random(f"w{len(g.nodes)}", HEADS, HEADS))
    return g.op("Transpose", g.op("Add", wide, g.random(f"b{len(g.nodes)}", HEADS)), perm=[0, 3, 1, 2])


def convolved(g: Graph, value: str) -> str:
    """A convolution and a batch normalisation over heads, as in DeepViT."""
    value = g.op("Conv", value, g.random(f"w{len(g.nodes)}", HEADS, HEADS, 1, 1))
    scale, bias, mean, variance = (g.weight(f"n{len(g.nodes)}{at}", np.full(HEADS, 1, np.float32)) for at in range(4))
    return g.op("BatchNormalization", value, scale, bias, mean, variance)


def summed(g: Graph, value: str) -> str:
    return g.op("Einsum", value, g.random(f"w{len(g.nodes)}", HEADS, HEADS), equation="bhst,hk->bkst")


def talking(layer: Callable[[Graph, str], str], *, before: bool, behind: bool) -> Mix:
    """Heads that are mixed before the softmax, after it, or both."""

    def mix(g: Graph, scores: str, values: str) -> str:
        weights = g.op("Softmax", layer(g, scores) if before else scores, axis=-1)
        return g.op("MatMul", layer(g, weights) if behind else weights, values)

    return mix


def merged(shape: tuple[int, ...]) -> Mix:
    """A softmax over more than the keys of a query: a Reshape merges axes before it."""

    def mix(g: Graph, scores: str, values: str) -> str:
        weights = g.op("Softmax", g.op("Reshape", scores, g.constant(shape)), axis=-1)
        return g.op("MatMul", g.op("Reshape", weights, g.op("Shape", scores)), values)

    return mix


def softmin(g: Graph, scores: str, values: str) -> str:
    """A softmax of negative distances."""
    distances = g.op("Neg", scores)
    return g.op("MatMul", g.op("Softmax", g.op("Neg", distances), axis=-1), values)


def bounded_below_zero(g: Graph, scores: str, values: str) -> str:
    """A lower bound of the distances that is above all of them."""
    distances = g.op("Max", g.op("Neg", scores), g.constant(1e9, np.float32))
    return g.op("MatMul", g.op("Softmax", g.op("Neg", distances), axis=-1), values)


SPELLINGS: dict[str, Mix] = {
    "jax": jax(),
    "jax by Reshape": jax(by="Reshape"),
    "jax, broadcast": jax(wide=True),
    "jax, at least minus infinity": jax(least=-np.inf),
    "jax, negative axes": jax(axis=-1, put=-1, maximum=-1),
    "the largest of all": lambda g, scores, values: g.op(
        "MatMul", g.op("Softmax", g.op("Sub", scores, g.op("ReduceMax", scores)), axis=-1), values
    ),
    "LogSoftmax": of_log_softmax(),
    "ReduceLogSumExp": log_sum_exp(),
    "ReduceLogSumExp that drops its axis": log_sum_exp(3, 3),
    "logarithm of the sum": log_of_sum(),
    "one over the sum": by_one_over(),
    "Max behind a maximum": bounded("Max", 1.0, -1),
    "Clip behind a maximum": bounded("Clip", maximum=-1),
    "late": late(),
    "late, negative axis": late(-1),
    "late by a reciprocal": late(reciprocal=True),
    "late Einsum": late(einsum="bhst,bhtd->bhsd"),
    "softmin": softmin,
}

NEAR_MISSES: dict[str, Mix] = {
    "sum put at the queries": jax(put=2),
    "sum put at the queries by Reshape": jax(put=2, by="Reshape"),
    "sum put at the queries, negative axes": jax(axis=-1, put=-2),
    "sum over queries": jax(axis=2),
    "sum over queries, put there": jax(axis=2, put=2),
    "sum over queries, broadcast": jax(axis=2, put=2, wide=True),
    "maximum put at the queries": jax(maximum=2),
    "maximum over the queries": maximum_over(2),
    "LogSoftmax over queries": of_log_softmax(2),
    "LogSoftmax over heads": of_log_softmax(1),
    "ReduceLogSumExp over queries": log_sum_exp(2),
    "ReduceLogSumExp put at the queries": log_sum_exp(3, 2),
    "logarithm of a sum over queries": log_of_sum(2),
    "logarithm of another sum": log_of_sum(factor=0.5),
    "two over the sum": by_one_over(2.0),
    "a bound above one": bounded("Max", 1.5, -1),
    "an upper bound": bounded("Clip", maximum=-1, upper=True),
    "a bound behind another maximum": bounded("Max", 1.0, 2),
    "late over queries": late(2),
    "late with another sum": late(factor=0.5),
    "late over a turned product": late(einsum="bhts,bhtd->bhsd"),
}

REASONS: dict[str, tuple[str, Mix]] = {
    "masked": ("softmax-form", masked()),
    "over queries and keys": ("softmax-axis", merged((0, 0, -1))),
    "over heads, queries and keys": ("softmax-axis", merged((0, -1))),
    "a bound above all scores": ("score-bound", bounded_below_zero),
    "masked, late": ("softmax-form", masked(at_end=True)),
    "late behind a Transpose": ("softmax-form", late_behind_a_transpose),
    "Max": ("softmax-form", bounded("Max")),
    "Clip": ("softmax-form", bounded("Clip")),
    "maximum in the logarithm": ("softmax-form", log_with_maximum),
    "linear before": ("mixed-heads", talking(linear, before=True, behind=False)),
    "linear behind": ("mixed-heads", talking(linear, before=False, behind=True)),
    "CaiT": ("mixed-heads", talking(linear, before=True, behind=True)),
    "DeepViT": ("mixed-heads", talking(convolved, before=False, behind=True)),
    "Einsum over heads": ("mixed-heads", talking(summed, before=True, behind=True)),
}
