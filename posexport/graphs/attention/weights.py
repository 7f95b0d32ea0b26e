"""The nodes between a softmax and its product with values: they may change weights of queries that see no key, or
multiply the weights of a head by a number."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.errors import shown
from posexport.graphs.attention.absorbed import keeps_numbers, loses_digits
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.hidden_keys import asked_for_infinity, zeros_hide
from posexport.graphs.attention.layouts import factor
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import Product
from posexport.graphs.attention.score_axes import ScoreAxes, by_query
from posexport.graphs.attention.scores import Declined, Scores
from posexport.graphs.attention.uniform import number_of


@attrs.frozen(kw_only=True)
class Weights:
    """What is done with weights before their product with values.

    `guard` is the largest logit of keys that count as not seen: minus infinity if NaN weights become zeros, HIDDEN if
    the weights of hidden keys become zeros, and None if no weights do. `factors` multiply the weights of each head, or
    of all heads if there is only one; none if there is nothing to multiply.
    """

    guard: float | None = None
    factors: tuple[float, ...] = ()


def check_weights(
    flow: Dataflow,
    probe: Probe,
    softmax: ir.Node,
    product: Product,
    passed: Sequence[ir.Node],
    scores: Scores,
    axes: ScoreAxes,
) -> Weights:
    """Raise Declined unless the values are weighted by the probabilities (without the sinks' column), each head's times
    a number, or by zeros if a query sees no key.

    `axes` are those of the scores.
    """
    source, target = softmax.outputs[0], product.left
    if not passed:
        return Weights()
    nodes = flow.between(source, target)
    changed = Declined(
        "weights", f"the weights of {shown(softmax.name or '')} are changed before the product with the values"
    )
    if loses_digits(flow, source, target):
        raise changed
    guard: float | None = None
    logits = softmax.inputs[0] if softmax.op_type == "Softmax" else None
    weights = [source, *(value for node in nodes for value in node.outputs)]
    for node in nodes:
        if keeps_numbers(flow, probe, node) or _never_chooses(probe, node, weights) or _scales(flow, probe, node):
            continue
        hidden_up_to = _zeros(flow, probe, node, scores, logits)
        if hidden_up_to is None:
            raise changed
        guard = max(hidden_up_to, -math.inf if guard is None else guard)
    replaced = torch.softmax(probe.random_like(source), axes.index("t") if axes else -1)
    result = probe.through(source, [target], replaced)[0]
    if len(axes) == replaced.dim():
        replaced = by_query(replaced, axes, result.shape[1]).permute(["bhst".index(one) for one in product.axes[0]])
    elif product.axes[0].endswith("ts"):
        replaced = replaced.transpose(-1, -2)
    without = {0: replaced[..., 1:], -1: replaced[..., :-1]}
    for expected in (replaced,) if scores.column is None else (replaced, without[scores.column]):
        if expected.numel() == result.numel():
            factors = _factors(result, expected.reshape(result.shape), product.axes[0])
            if factors is not None:
                return Weights(guard=guard, factors=factors)
    # the weights of hidden keys, which are zero, may be set to zero once more
    operators = {node.op_type for node in passed}
    kept = result != 0
    hidden = probe.get(source)
    if product.axes[0].endswith("ts"):
        hidden = hidden.transpose(-1, -2)
    same = result.shape == replaced.shape and bool((result[kept] == replaced[kept]).all())
    same = same and axes[-1:] in ((), ("t",))  # the axes of `hidden`
    some = kept.any(product.axes[0].index("t") - len(product.axes[0]), keepdim=True)  # other queries see no key
    only_zeros = operators <= {"Where", "Mul", "Cast", "Identity", "Dropout"}
    if same and only_zeros and not bool((hidden > 0)[some & ~kept].any()):
        return Weights(guard=guard)
    raise changed


def _scales(flow: Dataflow, probe: Probe, node: ir.Node) -> bool:
    """Whether a node multiplies or divides weights by one number, however the graph computes it."""
    content = [value for value in node.inputs if value in flow.content]
    if (
        node.op_type not in ("Mul", "Div")
        or len(content) != 1
        or (node.op_type == "Div" and node.inputs[0] not in content)
    ):
        return False
    return bool(number_of(probe, node.inputs[1 - node.inputs.index(content[0])]))


def _factors(result: torch.Tensor, expected: torch.Tensor, axes: str) -> tuple[float, ...] | None:
    """The numbers that each head of `expected` is multiplied by: none if all are 1, one number if all are the same.

    None if a head is not multiplied by one number.
    """
    whole = factor(result, expected)
    if whole is not None:
        return () if whole == 1.0 else (whole,)
    if result.dim() != 4:
        return None
    heads = [one.unbind(axes.index("h")) for one in (result, expected)]
    found = [factor(*pair) for pair in zip(*heads, strict=True)]
    return tuple(one for one in found if one is not None) if None not in found else None


def _zeros(flow: Dataflow, probe: Probe, node: ir.Node, scores: Scores, logits: ir.Value | None) -> float | None:
    """The largest logit of keys that count as not seen if a node sets weights to zero.

    None if it changes other weights.
    """
    content = [value for value in node.inputs if value in flow.content]
    if node.op_type == "Mul" and len(content) == 1:
        factor = node.inputs[1 - node.inputs.index(content[0])]
        return None if factor is None else zeros_hide(flow, probe, factor, scores.terms, logits=logits)
    if node.op_type != "Where" or node.inputs[0] is None:
        return None
    kept = node.inputs[1] if node.inputs[1] in flow.content else node.inputs[2]
    filled = node.inputs[2] if kept is node.inputs[1] else node.inputs[1]
    if filled is None or kept is None or number_of(probe, filled) != 0.0:
        return None
    is_nan = _no_numbers(node)
    if is_nan is not None:
        return -math.inf if _uncast(is_nan.inputs[0]) is _uncast(kept) else None
    zero_if = filled is node.inputs[1]
    return zeros_hide(flow, probe, node.inputs[0], scores.terms, zero_if=zero_if, logits=logits)


def _never_chooses(probe: Probe, node: ir.Node, weights: Collection[ir.Value | None]) -> bool:
    """Whether a Where keeps all weights because it replaces only infinite ones, as torch's nan_to_num does."""
    if node.op_type != "Where" or node.inputs[0] is None or node.inputs[2] not in weights:
        return False
    chosen = node.inputs[0].producer()
    conditions = chosen.inputs if chosen is not None and chosen.op_type == "And" else node.inputs[:1]
    return any(_uncast(asked_for_infinity(probe, _uncast(one))) in weights for one in conditions)


def _no_numbers(node: ir.Node) -> ir.Node | None:
    """The IsNaN that a Where has as its condition; None for other conditions."""
    condition = None if node.inputs[0] is None else node.inputs[0].producer()
    if condition is not None and condition.op_type == "Not" and condition.inputs[0] is not None:
        condition = condition.inputs[0].producer()
    return condition if condition is not None and condition.op_type == "IsNaN" else None


def _uncast(value: ir.Value | None) -> ir.Value | None:
    """The value that another one is cast from, or the value itself."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Cast":
        value = node.inputs[0]
    return value
