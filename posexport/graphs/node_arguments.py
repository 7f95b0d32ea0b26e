"""Facts about a node: its optional inputs, the maker of an input, whether it only copies, and whether it rounds."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

ROUNDING = {"QuantizeLinear", "DynamicQuantizeLinear"}
"""Operators that round features to integers."""


def input_of(node: ir.Node, at: int) -> ir.Value | None:
    """What a node reads at a place; None if it reads nothing there."""
    return node.inputs[at] if at < len(node.inputs) else None


def maker_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it has this operator of the standard domain; None otherwise."""
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def numbers_of(value: ir.Value | None) -> Sequence[int] | None:
    """The integers of a constant, or of a constant that is only reshaped."""
    shaped = maker_of(value, "Reshape")
    value = value if shaped is None else shaped.inputs[0]
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 16 or not tensor.dtype.is_integer():
        return None
    return [int(number) for number in tensor.numpy().reshape(-1)]


def keeps_order(node: ir.Node) -> bool:
    """Whether a node is a Transpose that leaves all axes in place."""
    order = list(node.attributes.get_ints("perm", [])) if node.op_type == "Transpose" else []
    return bool(order) and order == sorted(order)


def is_copy(node: ir.Node) -> bool:
    """Whether a node outputs its input unchanged: Identity, or a Concat of one value, which TorchScript writes."""
    return node.op_type == "Identity" or (node.op_type == "Concat" and len(node.inputs) == 1)
