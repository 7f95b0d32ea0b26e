"""Exponentials of hidden keys that are set to zero before their sum.

Where(seen, exp(x), 0)    Where(hidden, 0, exp(x))    exp(x) * Cast(seen)    exp(x) * zeros and ones of a constant
"""

from __future__ import annotations

import attrs
import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of


@attrs.frozen(kw_only=True)
class Zeroed:
    """`result` has the numbers of `kept` where `condition` is `seen_if`, and zeros elsewhere.

    `condition` has truth values, or zeros and ones.
    """

    kept: ir.Value
    condition: ir.Value
    seen_if: bool
    result: ir.Value


def zeroed_by(node: ir.Node | None) -> Zeroed | None:
    """What a node keeps if it sets the other numbers to zero; None for other nodes."""
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Where":
        condition, first, second = node.inputs[:3]
        if condition is None or first is None or second is None:
            return None
        kept, zero = (first, second) if _is_zero(second) else (second, first)
        if not _is_zero(zero) or _is_zero(kept):
            return None
        return Zeroed(kept=kept, condition=condition, seen_if=kept is first, result=node.outputs[0])
    if node.op_type == "Mul" and len(node.inputs) == 2:
        for at in (0, 1):
            product, other = node.inputs[at], node.inputs[1 - at]
            truths = _truths(other) or _zeros_and_ones(other)
            if truths is not None and product is not None:
                return Zeroed(kept=product, condition=truths, seen_if=True, result=node.outputs[0])
    return None


def _is_zero(value: ir.Value) -> bool:
    tensor = constant_of(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(-1)[0]) == 0.0


def _truths(value: ir.Value | None) -> ir.Value | None:
    """The truth values that a value of zeros and ones is cast from; None for other values."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Cast" or node.inputs[0] is None:
        return None
    return node.inputs[0] if _are_truths(node.inputs[0]) else None


def _zeros_and_ones(value: ir.Value | None) -> ir.Value | None:
    """The value, if its numbers are from a constant of zeros and ones, or are zeros; None otherwise."""
    one = value
    while one is not None and (node := one.producer()) is not None and node.op_type in {*_LAYOUTS, "Trilu"}:
        one = node.inputs[0]
    tensor = constant_of(one)
    if tensor is None or not tensor.dtype.is_floating_point():
        return None
    numbers = tensor.numpy()
    return value if numbers.size and bool(((numbers == 0) | (numbers == 1)).all()) else None


_TRUTHS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"}

_LAYOUTS = {"Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Slice", "Gather", "Tile"}
"""Operators that give the numbers of their first input, or some of them."""


def _are_truths(value: ir.Value | None) -> bool:
    """Whether a value has truth values, even if the file doesn't state its dtype."""
    while value is not None:
        if value.dtype is not None:
            return value.dtype == ir.DataType.BOOL
        node = value.producer()
        if node is None or node.op_type not in _LAYOUTS:
            cast = node is not None and node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.BOOL
            return cast or (node is not None and node.op_type in _TRUTHS)
        value = node.inputs[0]
    return False
