"""Values and nodes that another value comes from, with only operators in between that keep its numbers."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of

PASSED = ("Cast", "Identity")
"""Operators that keep the numbers and the shape of a value."""

IN_ORDER = (*PASSED, "Unsqueeze", "Squeeze", "Reshape")
"""Operators that keep the numbers of a value in order."""

KEEPS_ORDER = (*IN_ORDER, "Expand")
"""Operators that keep the numbers of a sum or a maximum in order."""


def behind(value: ir.Value, through: Collection[str]) -> ir.Value:
    """The value that another one is computed from by operators of `through` only."""
    while (node := value.producer()) is not None and node.op_type in through and node.inputs[0] is not None:
        if node.op_type == "Cast" and not ir.DataType(node.attributes["to"].as_int()).is_floating_point():
            break
        value = node.inputs[0]
    return value


def above(value: ir.Value | None, operator: str, through: Collection[str] = PASSED) -> ir.Node | None:
    """The node of this operator that a value comes from, with only operators of `through` in between; None if none."""
    node = None if value is None else behind(value, through).producer()
    return node if node is not None and node.op_type == operator else None


def unexpanded(value: ir.Value) -> ir.Value:
    """The value that another one is broadcast from."""
    return behind(value, (*PASSED, "Expand"))


def stored_number(value: ir.Value | None) -> float | None:
    """The number of a constant with one element; None for other values."""
    tensor = constant_of(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
