"""Reads sizes from a graph's inputs that it computes from inner values, if their dimensions have one name.

What depends only on sizes, such as a causal mask, is then the same for all layers of a stack, and computed once.
"""

from __future__ import annotations

import onnx_ir as ir

from posexport.export.equal_nodes import merge_equal_nodes


def read_from_inputs(model: ir.Model) -> None:
    """Make each Shape of one dimension that an input also has read that input. Equal nodes then become one."""
    known: dict[str, tuple[ir.Value, int]] = {}
    for given in model.graph.inputs:
        for axis, size in enumerate(given.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                known.setdefault(size.value, (given, axis))
    for node in model.graph.all_nodes():
        name = _name_of_size(node)
        if name not in known:
            continue
        given, axis = known[name]
        node.replace_input_with(0, given)
        node.attributes.add(ir.AttrInt64("start", axis))
        node.attributes.add(ir.AttrInt64("end", axis + 1))
    merge_equal_nodes(model)


def _name_of_size(node: ir.Node) -> str:
    """The name of the dimension that a Shape of one dimension reads; empty for other nodes, and if it has no name."""
    value = node.inputs[0] if node.op_type == "Shape" else None
    if value is None or value.shape is None or not {"start", "end"} <= {*node.attributes}:
        return ""
    start, end = (node.attributes[name].as_int() for name in ("start", "end"))
    if end != start + 1 or not 0 <= start < len(value.shape):
        return ""
    size = value.shape[start]
    return (size.value or "") if isinstance(size, ir.SymbolicDim) else ""
