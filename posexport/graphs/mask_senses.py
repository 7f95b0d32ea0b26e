"""What a mask of truth values does where it is true: it hides keys, as in torch's MultiheadAttention and BLOOM, or it
shows them.

Where(mask, -inf, scores)        Where(mask, -inf, 0)        Where(Not(mask), scores, -inf)        scores + mask * -1e9
Where(mask, scores, -inf)        Where(mask == 0, -inf, 0)        scores + (1 - mask) * -1e9
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of

HIDES, SHOWS = "hides", "shows"

_LAYS_OUT = {"Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Identity", "Tile", "Cast"}
"""Operators that keep truth values the same, if these are their first input."""

_CUTS = {"Gather", "Pad"}
"""Operators that choose some of the truth values, or put others beside them, if these are their first input."""

_JOINS = {"And", "Or", "Concat", "Min", "Max"}
"""Operators that combine truth values with others, or put them beside others."""

_LOW = -1e3
"""A number of at most this in place of a score, or added to it, hides a key."""


@attrs.frozen
class _Truth:
    """A value that is `number` where the mask is `where`, and 0 elsewhere; or true and false, with the number 1."""

    where: bool
    number: float


def sense_of(mask: ir.Value) -> str | None:
    """HIDES or SHOWS: what becomes of keys where a mask of booleans, or of zeros and ones, is true.

    None if the graph uses it in another way, or in both.
    """
    pending, seen = [(mask, _Truth(True, 1.0))], {mask}
    found = set[bool]()
    while pending:
        value, truth = pending.pop()
        for node, place in value.uses():
            if node.op_type == "Where" and place == 0:
                hidden = [_is_low(one) for one in node.inputs[1:3]]
                if hidden[0] != hidden[1]:
                    found.add(hidden[0] == truth.where)
                continue
            for new in _after(node, place, truth):
                if new.number <= _LOW:
                    found.add(new.where)
                elif node.outputs[0] not in seen:
                    seen.add(node.outputs[0])
                    pending.append((node.outputs[0], new))
    return (HIDES if found.pop() else SHOWS) if len(found) == 1 else None


def _after(node: ir.Node, place: int, truth: _Truth) -> Iterator[_Truth]:
    """What the result of a node is; nothing if it isn't of that kind."""
    kind = node.op_type
    if kind in _JOINS or (kind in _LAYS_OUT | _CUTS and place == 0):
        yield truth
    elif kind == "Not":
        yield _Truth(not truth.where, 1.0)
    other = _number(node.inputs[1 - place]) if len(node.inputs) == 2 else None
    if other is None:
        return
    if kind == "Mul":
        yield _Truth(truth.where, truth.number * other)
    elif kind == "Equal" and other in (0.0, truth.number):
        yield _Truth(truth.where == (other != 0.0), 1.0)
    elif kind == "Greater" and place == 0 and 0.0 <= other < truth.number:
        yield _Truth(truth.where, 1.0)
    elif kind == "Sub" and other == truth.number:  # c - (c or 0), or (c or 0) - c
        yield _Truth(not truth.where, other if place else -other)


def _number(value: ir.Value | None) -> float | None:
    """The number that a value is, possibly expanded or reshaped; None if it is another one."""
    while value is not None and constant_of(value) is None:
        node = value.producer()
        if node is None or node.op_type not in {*_LAYS_OUT, "ConstantOfShape"}:
            return None
        if node.op_type == "ConstantOfShape":
            number = node.attributes.get("value")
            return 0.0 if number is None else float(number.as_tensor().numpy().max())
        value = node.inputs[0]
    tensor = constant_of(value)
    return float(tensor.numpy().max()) if tensor is not None and tensor.size == 1 else None


def _is_low(value: ir.Value | None) -> bool:
    number = _number(value)
    return number is not None and number <= _LOW
