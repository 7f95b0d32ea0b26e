"""Keeps the padding before a MaxPool.

ONNX Runtime's optimizer (PadFusion) moves the zeros of a Pad into the pads of the MaxPool behind it. But MaxPool leaves
out its pads, so the maximum of negative numbers and a zero changes. The optimizer doesn't do that if the Pad has the
input `axes`, so such a Pad gets all axes.
"""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.node_arguments import numbers_of
from posexport.graphs.nodes import Nodes

_INPUTS = 3
"""Inputs of a Pad without `axes`: the data, how much, and the value."""


def keep_pads_of_pools(model: ir.Model) -> None:
    """Give each Pad before a MaxPool all of its axes, in place."""
    graph = model.graph
    taken = {value.name or "" for node in graph for value in node.outputs} | {node.name or "" for node in graph}
    for node in list(graph):
        read_by = {use.node.op_type for use in node.outputs[0].uses()} if node.outputs else set()
        if (node.domain, node.op_type) != ("", "Pad") or "MaxPool" not in read_by or len(node.inputs) > _INPUTS:
            continue
        amounts = numbers_of(node.inputs[1])
        if amounts is None:
            continue
        nodes = Nodes(taken)
        axes = nodes.constant(list(range(len(amounts) // 2)))
        graph.insert_before(node, nodes.nodes)
        node.resize_inputs(_INPUTS + 1)
        node.replace_input_with(_INPUTS, axes)
