"""The maximum that a softmax that is written out subtracts from its scores, also with a guard for rows without keys.

    x - max(x)        x - Max(-inf, max(x))        x - Where(IsInf(max(x)), 0, max(x))

Whatever is subtracted, the softmax stays the same if it is the same for all keys. A guard changes only how rows behave
whose keys are all hidden.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from posexport.graphs.attention.behind import KEEPS_ORDER, above, behind
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.uniform import number_of

HIDES_ALL = -5e3
"""A maximum of at most this is that of a row whose keys are all hidden."""

_JOINS = {"Not", "And", "Or", "Abs", "Cast", "Identity"}
"""Operators that combine conditions, or give the size of a number."""

_COMPARES = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}


def maximum_of(probe: Probe, value: ir.Value) -> ir.Node | None:
    """The ReduceMax that a value comes from, possibly through guards; None if there is none."""
    while (node := behind(value, KEEPS_ORDER).producer()) is not None:
        if node.op_type == "Max" and len(node.inputs) == 2:
            others = [one for one in node.inputs if one is not None and number_of(probe, one) != -math.inf]
        elif node.op_type == "Where" and node.inputs[0] is not None and _is_guard(probe, node.inputs[0]):
            others = [one for one in node.inputs[1:3] if one is not None and not _is_finite(probe, one)]
        else:
            break
        if len(others) != 1:
            return None
        value = others[0]
    return above(value, "ReduceMax", KEEPS_ORDER)


def _is_finite(probe: Probe, value: ir.Value) -> bool:
    number = number_of(probe, value)
    return number is not None and math.isfinite(number)


def _is_guard(probe: Probe, condition: ir.Value) -> bool:
    """Whether a condition tells only whether numbers are infinite, or as low as those of hidden keys."""
    pending, seen = [condition], {condition}
    while pending:
        node = pending.pop().producer()
        if node is None:
            return False
        read = [value for value in node.inputs if value is not None]
        if node.op_type in _COMPARES:
            numbers = [number for value in read if (number := number_of(probe, value)) is not None]
            if len(numbers) != 1 or not (math.isinf(numbers[0]) or numbers[0] <= HIDES_ALL):
                return False
        elif node.op_type in _JOINS:
            pending += [value for value in read if value not in seen]
            seen.update(read)
        elif node.op_type not in ("IsInf", "IsNaN"):
            return False
    return True
