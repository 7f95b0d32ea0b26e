"""Sums at indices in half precision, in a form that ONNX Runtime computes on CPUs.

Its kernels of ScatterND and ScatterElements for fp16 take no reduction. Such nodes reduce in float32, and their result
is rounded once.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from posexport.graphs.nodes import Nodes

_SCATTERS = ("ScatterND", "ScatterElements")
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_DATA, _UPDATES = 0, 2
"""The inputs of a scatter that have its dtype; the other contains indices."""


def reduce_in_fp32(model: ir.Model) -> None:
    """Give each scatter with a reduction in half precision inputs in float32, in place. Values have names."""
    found = [node for node in model.graph.all_nodes() if _reduces(node)]
    if not found:
        return
    dtypes = _dtypes(model)
    taken = {
        name for node in model.graph.all_nodes() for name in (node.name, *(one.name for one in node.outputs)) if name
    }
    for node in found:
        made, graph = node.outputs[0], node.graph
        dtype = dtypes.get(made.name)
        if dtype not in _HALF or graph is None:
            continue
        before, after = Nodes(taken), Nodes(taken)
        for place in (_DATA, _UPDATES):
            value = before.op("Cast", [node.inputs[place]], {"to": ir.DataType.FLOAT}, dtype=ir.DataType.FLOAT)[0]
            node.replace_input_with(place, value)
        graph.insert_before(node, before.nodes)
        rounded = after.op("Cast", [made], {"to": dtype}, dtype=dtype)[0]
        made.replace_all_uses_with(rounded, replace_graph_outputs=True)
        after.nodes[0].replace_input_with(0, made)
        graph.insert_after(node, after.nodes)
        made.name, rounded.name, rounded.shape = rounded.name, made.name, made.shape
        made.dtype = ir.DataType.FLOAT


def _reduces(node: ir.Node) -> bool:
    reduction = node.attributes.get("reduction") if node.op_type in _SCATTERS else None
    return reduction is not None and reduction.as_string() != "none"


def _dtypes(model: ir.Model) -> dict[str | None, ir.DataType | None]:
    """The dtypes of values by name. torch's exporter leaves some of them out."""
    copy = model.clone()
    ShapeInferencePass()(copy)
    return {value.name: value.dtype for node in copy.graph.all_nodes() for value in node.outputs}
