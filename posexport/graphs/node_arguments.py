"""What a node is given: inputs that may be missing, and attributes with defaults."""

from __future__ import annotations

import onnx_ir as ir


def input_of(node: ir.Node, at: int) -> ir.Value | None:
    """What a node reads at a place; None where it reads nothing there."""
    return node.inputs[at] if at < len(node.inputs) else None


def integer_of(node: ir.Node, name: str, default: int) -> int:
    """An attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def string_of(node: ir.Node, name: str) -> str:
    """An attribute of a node; an empty text where it isn't there."""
    attribute = node.attributes.get(name)
    return "" if attribute is None else attribute.as_string()
