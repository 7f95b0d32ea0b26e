"""What a mask is where a truth value is false, or true, derived from the operators that compute the mask from it.

Where(And(seen, causal), scores, -inf)    hides the key where `seen` is false
(1 - seen) * -10000                       hides it too; (1 - seen) * 10000 hides it if it is subtracted
Where(Or(seen, other), scores, -inf)      doesn't: it depends on `other` too
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch

from posexport.graphs.attention.absorbed import lays_out
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.scores import HIDDEN

TRUE, FALSE, MINUS_ONE, HIDES, LARGE = "true", "false", "minus one", "hides", "large"
"""1, 0, -1, a number so low that it hides a key, and a number so large that it does if it is subtracted."""


Given = tuple[int, str]
"""The key of a computation, and what its truth values are, TRUE or FALSE."""


def meaning_of(
    probe: Probe, value: ir.Value | None, given: Given, known: dict[ir.Value, str | None] | None = None
) -> str | None:
    """What a value is wherever the truth values of a computation are as `given`; None if that depends on more.

    `known` are the answers for other values.
    """
    known = {} if known is None else known
    if value is None:
        return None
    if value not in known:
        known[value] = _meaning(probe, value, given, known)
    return known[value]


def _meaning(probe: Probe, value: ir.Value, given: Given, known: dict[ir.Value, str | None]) -> str | None:
    if probe.computations.key(value) == given[0]:
        return given[1]
    if value in probe.fixed:
        return _of_numbers(probe.get(value))
    node = value.producer()
    if node is None or node.op_type not in _MEANINGS:
        return meaning_of(probe, node.inputs[0], given, known) if node is not None and lays_out(probe, node) else None
    return _MEANINGS[node.op_type](probe, node, [meaning_of(probe, one, given, known) for one in node.inputs])


def _of_numbers(array: torch.Tensor) -> str | None:
    """The meaning of fixed numbers; None if they have none."""
    numbers = array.double()
    if numbers.numel() and bool((numbers.abs() >= -HIDDEN).all()):
        return HIDES if bool((numbers < 0).all()) else LARGE if bool((numbers > 0).all()) else None
    alike = {1.0: TRUE, 0.0: FALSE, -1.0: MINUS_ONE}
    return next((name for number, name in alike.items() if bool((numbers == number).all())), None)


Operands = list["str | None"]

_NEGATED = {TRUE: MINUS_ONE, MINUS_ONE: TRUE, FALSE: FALSE, HIDES: LARGE, LARGE: HIDES}
"""What a value is after it is subtracted from zero."""


def _not(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return {TRUE: FALSE, FALSE: TRUE}.get(operands[0] or "")


def _and(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return FALSE if FALSE in operands else TRUE if {*operands} == {TRUE} else None


def _or(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return TRUE if TRUE in operands else FALSE if {*operands} == {FALSE} else None


def _product(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    if FALSE in operands:
        return FALSE
    if TRUE in operands:
        return operands[1 - operands.index(TRUE)]
    return _NEGATED.get(operands[1 - operands.index(MINUS_ONE)] or "") if MINUS_ONE in operands else None


def _difference(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    first, second = operands
    if second == FALSE:
        return first
    return _NEGATED.get(second or "") if first == FALSE else FALSE if first == second == TRUE else None


def _opposite(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return _NEGATED.get(operands[0] or "")


def _minimum(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return HIDES if HIDES in operands else None


def _sum(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return HIDES if HIDES in operands and {*operands} <= {HIDES, FALSE} else None


def _choice(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    condition, chosen, other = operands
    return {TRUE: chosen, FALSE: other}.get(condition or "", chosen if chosen == other else None)


def _cast(probe: Probe, node: ir.Node, operands: Operands) -> str | None:
    return operands[0]


_MEANINGS: dict[str, Callable[[Probe, ir.Node, Operands], str | None]] = {
    "Add": _sum,
    "And": _and,
    "Cast": _cast,
    "CastLike": _cast,
    "Min": _minimum,
    "Mul": _product,
    "Neg": _opposite,
    "Not": _not,
    "Or": _or,
    "Sub": _difference,
    "Where": _choice,
}
