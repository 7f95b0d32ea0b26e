"""What a node is given: inputs that may be missing."""

from __future__ import annotations

import onnx_ir as ir


def input_of(node: ir.Node, at: int) -> ir.Value | None:
    """What a node reads at a place; None where it reads nothing there."""
    return node.inputs[at] if at < len(node.inputs) else None
