"""Factors of zero and one whose zeros are only where a mask hides the key anyway.

Some graphs multiply scores by a mask that they also add, or set the weights of hidden keys to zero once more. Attention
may leave this out only if each zero implies a hidden key on all inputs. The operators between a truth value and the
mask show that the truth value of a zero hides a key. Random truth values show that the zero and the hidden key are in
the same place. Zeros for a whole query must depend on all of its keys: on the largest of their truth values, or on
whether all of its logits are minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.attention.absorbed import lays_out
from posexport.graphs.attention.computations import above
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.scores import HIDDEN, Term
from posexport.graphs.attention.truths import FALSE, HIDES, LARGE, TRUE, Given, meaning_of
from posexport.graphs.attention.uniform import number_of

_DRAWS = 16
"""How often truth values are drawn. A mask may be a single value, which may be the same in a few draws."""

_TRUTHS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"}
"""Operators that compute truth values from other numbers."""


def zeros_hide(
    flow: Dataflow,
    probe: Probe,
    value: ir.Value,
    terms: Sequence[Term],
    *,
    zero_if: bool = False,
    logits: ir.Value | None = None,
) -> float | None:
    """The largest logit that keys have where a value is zero; None if keys that are seen have zeros too.

    The value consists of zeros and ones, or of truth values that are `zero_if` for zeros. The result is HIDDEN if the
    terms hide the keys, and minus infinity if the value tests whether `logits` are minus infinity.
    """
    leaves = _leaves(probe, value, zero_if)
    below = [-math.inf]
    asked = [one for one in leaves if one.zero_if and logits and asked_for_infinity(probe, one.value, below) is logits]
    known = {(probe.computations.key(one.value), TRUE if one.zero_if else FALSE) for one in leaves if one not in asked}
    hiding = [term for term in terms if any(_hides(probe, term, given) for given in known)]
    if not leaves or not all(any(_hides(probe, term, given) for term in hiding) for given in known):
        return None
    cone = list(above(flow, [value, *(term.value for term in hiding)]))
    nodes = {node for one in cone if (node := one.producer()) is not None}
    keys = {probe.computations.key(leaf.value) for leaf in leaves}
    drawn_anew = [one for one in cone if probe.computations.key(one) in keys]
    for _ in range(_DRAWS):
        drawn: dict[int, torch.Tensor] = {}
        for one in drawn_anew:
            drawn.setdefault(probe.computations.key(one), probe.random_truths(one))
        replaced = {one: drawn[probe.computations.key(one)] for one in drawn_anew}
        factor, *added = probe.replaced(replaced, [value, *(term.value for term in hiding)], nodes)
        zero = factor.bool() == zero_if if factor.dtype == torch.bool else factor == 0
        if factor.dtype != torch.bool and not bool((zero | (factor == 1)).all()):
            return None
        if not _are_hidden(zero, hiding, added, [drawn[probe.computations.key(leaf.value)].bool() for leaf in asked]):
            return None
    return -math.inf if asked else HIDDEN


def _hides(probe: Probe, term: Term, given: Given) -> bool:
    """Whether a term hides keys wherever the truth values of a computation are as `given`."""
    meaning = meaning_of(probe, term.value, given)
    if term.seen_if is not None:
        return meaning == (FALSE if term.seen_if else TRUE)
    return meaning == (HIDES if term.factor > 0 else LARGE)


@attrs.frozen(kw_only=True)
class _Leaf:
    """Truth values, and what they are where the factor is zero."""

    value: ir.Value
    zero_if: bool


def _leaves(probe: Probe, value: ir.Value, zero_if: bool) -> list[_Leaf]:
    """The truth values that a value is computed from by layouts, And, Or, Not, and reductions over axes.

    Truth values that are computed in another way, such as a part of a mask, are taken as they are. There are none if
    the value is computed in another way and has no truth values.
    """
    leaves, pending, seen = list[_Leaf](), [(value, zero_if)], {value}
    while pending:
        one, truth = pending.pop()
        of_all = _of_all(probe, one, truth)
        node, truth = of_all or (one.producer(), truth)
        if of_all is None and _is_truth(probe, one):
            leaves.append(_Leaf(value=one, zero_if=truth))
            continue
        if node is not None and node.op_type in ("And", "Or"):
            sources = [source for source in node.inputs if source is not None]
        elif node is not None and node.inputs[0] is not None and _keeps_truths(probe, node, truth):
            sources = [node.inputs[0]]
        elif _are_zeros_and_ones(probe, one) or (one not in probe.fixed and probe.dtype(one) == torch.bool):
            leaves.append(_Leaf(value=one, zero_if=truth))
            continue
        else:
            return []
        new = [source for source in dict.fromkeys(sources) if source not in seen]
        seen.update(new)
        pending += [(source, truth != (node.op_type == "Not")) for source in new]
    return leaves


def _keeps_truths(probe: Probe, node: ir.Node, truth: bool) -> bool:
    """Whether a result with this `truth` decides the truth of everything that the node reads.

    If the largest number of a row is false, all are false. If the least is true, all are true.
    """
    return node.op_type in (*_SAME, *_OVER_ROWS[truth]) or lays_out(probe, node)


def _of_all(probe: Probe, value: ir.Value, truth: bool) -> tuple[ir.Node, bool] | None:
    """The reduction of zeros and ones that a value is computed from, and the truth that all of its elements have.

    `truth` is that of the value, which is Cast(ReduceMax(x)), ReduceSum(x) > 0, ReduceMax(x) == 0 or the like.
    """
    node = value.producer()
    if node is None or node.inputs[0] is None or node.op_type not in ("Cast", "Greater", "Equal"):
        return None
    if node.op_type != "Cast" and number_of(probe, node.inputs[1]) != 0.0:
        return None
    found, truth = node.inputs[0].producer(), truth != (node.op_type == "Equal")
    return (found, truth) if found is not None and found.op_type in _OVER_ROWS[truth] else None


def asked_for_infinity(
    probe: Probe, value: ir.Value | None, numbers: Sequence[float] = (math.inf, -math.inf)
) -> ir.Value | None:
    """The value that truth values test for infinity; None for other truth values.

    The test is an IsInf, or a comparison with one of `numbers`.
    """
    node = None if value is None else value.producer()
    if node is None or node.op_type not in ("Equal", "IsInf"):
        return None
    if node.op_type == "Equal" and number_of(probe, node.inputs[1]) not in numbers:
        return None
    return node.inputs[0]


_SAME = {"Not", "Cast"}

_OVER_ROWS = {True: ("ReduceMin",), False: ("ReduceMax", "ReduceSum")}
"""Reductions of zeros and ones that have this truth value only if all of their elements have it."""

_PARTS = {"Trilu", "Slice", "Gather", "Expand", "Tile", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity"}
"""Operators that give elements of their first input, or zeros."""


def _are_zeros_and_ones(probe: Probe, value: ir.Value) -> bool:
    """Whether a value contains only zeros and ones on all inputs, and differs between inputs."""
    node = value.producer()
    if node is None or value in probe.fixed or node.op_type not in _PARTS:
        return False
    while node is not None and value not in probe.fixed and node.op_type in {*_PARTS, "Cast"}:
        if node.inputs[0] is None:
            return False
        value, node = node.inputs[0], node.inputs[0].producer()
    array = probe.get(value)
    of_one_number = node is not None and node.op_type == "ConstantOfShape"
    return (value in probe.fixed or of_one_number) and bool(((array == 0) | (array == 1)).all())


def _is_truth(probe: Probe, value: ir.Value) -> bool:
    """Whether a value has truth values that are computed from other numbers, or are an input."""
    node = value.producer()
    if value in probe.fixed or probe.dtype(value) != torch.bool:
        return False
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        return probe.dtype(node.inputs[0]) != torch.bool
    return node is None or node.op_type in _TRUTHS


def _are_hidden(
    zero: torch.Tensor, terms: Sequence[Term], added: Sequence[torch.Tensor], infinite: Sequence[torch.Tensor]
) -> bool:
    """Whether keys are hidden wherever `zero` is true, by the terms or because their logits are `infinite`."""
    try:
        seen = zero.clone()
        for one in infinite:
            seen = seen & ~one
        for term, value in zip(terms, added, strict=True):
            hides = value.bool() != term.seen_if if term.seen_if is not None else value * term.factor <= HIDDEN
            seen = seen & ~hides
    except RuntimeError:  # their axes don't match
        return False
    return not bool(seen.any())
