"""What the nodes of a graph do with an input: they continue a cache, or add a mask to a product."""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.node_arguments import is_copy


def is_joined(value: ir.Value) -> bool:
    """Whether an input is the first value of a Concat, like cached keys before new keys."""
    nodes = [use.node for use in value.uses()]
    return any(
        is_joined(node.outputs[0])
        if is_copy(node) or node.op_type == "Cast"
        else node.op_type == "Concat" and node.inputs[0] is value
        for node in nodes
    )


def is_continued(value: ir.Value) -> bool:
    """Whether a Concat puts computed values after an input, or after parts of it: the new keys after cached ones."""
    pending, seen = [value], {value}
    while pending:
        for node, place in pending.pop().uses():
            if node.op_type == "Concat" and place == 0 and len(node.inputs) == 2:
                new = node.inputs[1]
                return new is not None and new.producer() is not None
            if place == 0 and (is_copy(node) or node.op_type in _PARTS):
                pending += [one for one in node.outputs if one not in seen]
                seen.update(node.outputs)
    return False


_PARTS = {"Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather"}
"""Operators that lay out an input, or give parts of it."""


_BY_ELEMENTS = {"Add", "Sub", "Mul", "Div", "Neg", "Not", "And", "Or", "Where", "Cast", "Equal", "Greater", "Less"}
_BY_ELEMENTS |= {"GreaterOrEqual", "LessOrEqual", "Identity", "Clip", "Tanh"}


def meets_a_product(mask: ir.Value) -> bool:
    """Whether an input goes through only elementwise operators and is then combined with a product of matrices."""
    pending, seen = [mask], {mask}
    while pending:
        value = pending.pop()
        for node, _ in value.uses():
            if node.op_type not in _BY_ELEMENTS:
                continue
            if any(other is not None and other not in seen and _is_product(other) for other in node.inputs):
                return True
            new = [output for output in node.outputs if output not in seen]
            seen.update(new)
            pending += new
    return False


def _is_product(value: ir.Value) -> bool:
    """Whether a value is a product of matrices, possibly after elementwise operators."""
    pending, seen = [value], {value}
    while pending:
        node = pending.pop().producer()
        if node is None:
            continue
        if node.op_type in ("MatMul", "Gemm", "Einsum"):
            return True
        if node.op_type in _BY_ELEMENTS:
            new = [one for one in node.inputs if one is not None and one not in seen]
            seen.update(new)
            pending += new
    return False
