"""Factors of zero and one whose zeros stand where a mask hides the key anyway.

Graphs multiply scores by a mask that they add as well, and put zeros in place of the weights of hidden keys once more.
Attention may leave that out only if each zero implies a hidden key, whatever the inputs are. That the truth value of a
zero hides the key is read off the operators between them; that both stand in the same place is seen when these truth
values are drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from posexport.graphs.attention.absorbed import lays_out
from posexport.graphs.attention.computations import above
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.scores import HIDDEN, Term
from posexport.graphs.attention.truths import FALSE, HIDES, LARGE, TRUE, meaning_of

_DRAWS = 16
"""How often truth values are drawn: a mask may be one value, of which few draws are all the same."""

_TRUTHS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"}
"""Operators that give truth values of other numbers."""


def zeros_hide(flow: Dataflow, probe: Probe, value: ir.Value, terms: Sequence[Term], *, zero_if: bool = False) -> bool:
    """Whether a value has zeros, or `zero_if` where it has truth values, only where the terms hide the key, and else
    ones."""
    known = {probe.computations.key(one) for one in _leaves(probe, value)}
    hiding = [term for term in terms if any(_hides(probe, term, key) for key in known)]
    if not known or not all(any(_hides(probe, term, key) for term in hiding) for key in known):
        return False
    cone = list(above(flow, [value, *(term.value for term in hiding)]))
    nodes = {node for one in cone if (node := one.producer()) is not None}
    leaves = [one for one in cone if probe.computations.key(one) in known]
    for _ in range(_DRAWS):
        drawn: dict[int, torch.Tensor] = {}
        for one in leaves:
            drawn.setdefault(probe.computations.key(one), probe.random_truths(one))
        replaced = {one: drawn[probe.computations.key(one)] for one in leaves}
        factor, *added = probe.replaced(replaced, [value, *(term.value for term in hiding)], nodes)
        zero = factor.bool() == zero_if if factor.dtype == torch.bool else factor == 0
        if factor.dtype != torch.bool and not bool((zero | (factor == 1)).all()):
            return False
        if not _are_hidden(zero, hiding, added):
            return False
    return True


def _hides(probe: Probe, term: Term, key: int) -> bool:
    """Whether a term hides keys wherever the truth values of this computation are false."""
    meaning = meaning_of(probe, term.value, key)
    if term.seen_if is not None:
        return meaning == (FALSE if term.seen_if else TRUE)
    return meaning == (HIDES if term.factor > 0 else LARGE)


def _leaves(probe: Probe, value: ir.Value) -> list[ir.Value]:
    """The truth values that a value is laid out from, joined by And, Or and Not; none where it is something else."""
    leaves, pending, seen = list[ir.Value](), [value], {value}
    while pending:
        one = pending.pop()
        node = one.producer()
        if _is_truth(probe, one):
            leaves.append(one)
            continue
        if node is not None and node.op_type in ("And", "Or"):
            sources = [source for source in node.inputs if source is not None]
        elif node is not None and node.inputs[0] is not None and (node.op_type in _SAME or lays_out(probe, node)):
            sources = [node.inputs[0]]
        elif _are_zeros_and_ones(probe, one):
            leaves.append(one)
            continue
        else:
            return []
        new = [source for source in dict.fromkeys(sources) if source not in seen]
        seen.update(new)
        pending += new
    return leaves


_SAME = {"Not", "Cast"}

_PARTS = {"Trilu", "Slice", "Gather", "Expand", "Tile", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity"}
"""Operators that give elements of their first input, or zeros."""


def _are_zeros_and_ones(probe: Probe, value: ir.Value) -> bool:
    """Whether a value has nothing but zeros and ones on all inputs, and not the same on all."""
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
    """Whether a value has truth values that are computed from others, or given."""
    node = value.producer()
    if value in probe.fixed or probe.dtype(value) != torch.bool:
        return False
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        return probe.dtype(node.inputs[0]) != torch.bool
    return node is None or node.op_type in _TRUTHS


def _are_hidden(zero: torch.Tensor, terms: Sequence[Term], added: Sequence[torch.Tensor]) -> bool:
    """Whether keys are hidden wherever `zero` is true."""
    try:
        seen = zero.clone()
        for term, value in zip(terms, added, strict=True):
            hides = value.bool() != term.seen_if if term.seen_if is not None else value * term.factor <= HIDDEN
            seen = seen & ~hides
    except RuntimeError:  # the axes of one don't stand for the axes of the other
        return False
    return not bool(seen.any())
