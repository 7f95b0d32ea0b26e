"""Sums at indices in half precision, in a form that ONNX Runtime computes on CPUs.

Its kernels of ScatterND and ScatterElements for fp16 take no reduction. Such nodes reduce in float32, and their result
is rounded once.
"""

from __future__ import annotations

import onnx_ir as ir

_SCATTERS = ("ScatterND", "ScatterElements")
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_DATA, _UPDATES = 0, 2
"""The inputs of a scatter that have its dtype; the other contains indices."""


def reduce_in_fp32(model: ir.Model) -> None:
    """Give each scatter with a reduction in half precision inputs in float32, in place."""
    for node in list(model.graph.all_nodes()):
        reduction = node.attributes.get("reduction") if node.op_type in _SCATTERS else None
        data = None if reduction is None or reduction.as_string() == "none" else node.inputs[_DATA]
        if data is None or (dtype := data.dtype) not in _HALF or node.graph is None:
            continue
        for place in (_DATA, _UPDATES):
            widened = ir.node("Cast", [node.inputs[place]], {"to": ir.DataType.FLOAT})
            node.graph.insert_before(node, widened)
            node.replace_input_with(place, widened.outputs[0])
        made = node.outputs[0]
        rounded = ir.node("Cast", [made], {"to": dtype})
        rounded.outputs[0].dtype, rounded.outputs[0].shape = dtype, made.shape
        made.replace_all_uses_with(rounded.outputs[0], replace_graph_outputs=True)
        rounded.replace_input_with(0, made)
        node.graph.insert_after(node, rounded)
        name, made.name = made.name, f"{made.name}_fp32"
        made.dtype, rounded.outputs[0].name = ir.DataType.FLOAT, name
