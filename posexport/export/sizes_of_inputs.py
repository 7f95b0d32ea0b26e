"""Sizes that a graph computes from values inside it are those of its inputs, where their dimensions have one name.

What follows from sizes alone, such as a causal mask, is then the same for all layers of a stack, and computed once.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def read_from_inputs(model: ir.Model) -> None:
    """Make each Shape of one dimension, which an input has too, read that input; equal nodes then become one."""
    known: dict[str, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                known.setdefault(size.value, (value, axis))
    for node in model.graph.all_nodes():
        value = node.inputs[0] if node.op_type == "Shape" else None
        if value is None or value.shape is None or not {"start", "end"} <= {*node.attributes}:
            continue
        start, end = (node.attributes[name].as_int() for name in ("start", "end"))
        size = value.shape[start] if end == start + 1 and start < len(value.shape) else None
        source = known.get(size.value or "") if isinstance(size, ir.SymbolicDim) else None
        if source is not None:
            given, axis = source
            node.replace_input_with(0, given)
            node.attributes.add(ir.AttrInt64("start", axis))
            node.attributes.add(ir.AttrInt64("end", axis + 1))
    for apply in (common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass()):
        apply(model)
