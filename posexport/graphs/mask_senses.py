"""Whether a boolean mask hides keys where it is true, as in torch's MultiheadAttention and BLOOM.

Where(mask, -inf, scores)        Where(mask, -inf, 0)        Where(Not(mask), scores, -inf)
"""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of

_LAYS_OUT = {"Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Identity", "Tile", "Cast"}
"""Operators that keep booleans the same."""

_LOW = -1e3
"""A number of at most this in place of a score hides a key."""


def hides_where_true(mask: ir.Value) -> bool:
    """Whether a number that hides keys replaces scores wherever a boolean is true, and never where it is false."""
    pending, seen = [(mask, True)], {mask}
    found = set[bool]()
    while pending:
        value, is_same = pending.pop()
        for node, place in value.uses():
            if node.op_type == "Where" and place == 0:
                hidden = [_is_low(one) for one in node.inputs[1:3]]
                if hidden[0] != hidden[1]:
                    found.add(hidden[0] == is_same)
            elif node.op_type == "Not" or (node.op_type in _LAYS_OUT and place == 0):
                for output in node.outputs:
                    if output not in seen:
                        seen.add(output)
                        pending.append((output, is_same != (node.op_type == "Not")))
    return found == {True}


def _is_low(value: ir.Value | None) -> bool:
    """Whether a value is one low number, possibly expanded or reshaped."""
    while value is not None and constant_of(value) is None:
        node = value.producer()
        if node is None or node.op_type not in {*_LAYS_OUT, "ConstantOfShape"}:
            return False
        if node.op_type == "ConstantOfShape":
            number = node.attributes.get("value")
            return number is not None and float(number.as_tensor().numpy().max()) <= _LOW
        value = node.inputs[0]
    tensor = constant_of(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().max()) <= _LOW
