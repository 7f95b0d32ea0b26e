"""Caches of one head that lose the axis of heads before new tokens are appended, such as the keys of an indexer.

    Unsqueeze(Concat(Squeeze(past), new))  becomes  Concat(past, Unsqueeze(new))

`past` is [B, 1, P, D] and `new` [B, S, D]. The Concat then appends to a cache [B, heads, tokens, D] as all others do
(posexport.rewrite.shared_cache). What else reads the result without heads reads a Squeeze of the new one.
"""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.node_arguments import input_of, numbers_of
from posexport.graphs.nodes import Nodes

_HEADS, _TOKENS = 1, 2
"""Axes of a cache [B, heads, tokens, D]."""


def append_with_heads(model: ir.Model) -> None:
    """Append to all such caches of a graph with the axis of heads."""
    for past in model.graph.inputs:
        if past.shape is None or len(past.shape) != 4:
            continue
        for node in [use.node for use in past.uses() if _changes_heads(use.node, "Squeeze")]:
            joint = next((use.node for use in node.outputs[0].uses() if _appends(use.node, use.idx)), None)
            if joint is not None:
                _move(model, past, joint)


def _changes_heads(node: ir.Node, op_type: str) -> bool:
    """Whether a node removes or adds only the axis of heads."""
    axes = numbers_of(input_of(node, 1)) if (node.domain, node.op_type) == ("", op_type) else None
    return axes is not None and list(axes) in ([_HEADS], [_HEADS - 4])


def _appends(node: ir.Node, at: int) -> bool:
    """Whether a Concat appends to tokens [B, P, D], its input `at`."""
    joins = (node.domain, node.op_type, len(node.inputs), at) == ("", "Concat", 2, 0)
    return joins and node.attributes["axis"].as_int() in (_TOKENS - 1, _TOKENS - 1 - 3)


def _move(model: ir.Model, past: ir.Value, joint: ir.Node) -> None:
    """Let the results of `joint` that have the axis of heads come from a Concat with heads."""
    old = joint.outputs[0]
    wide = [use.node for use in old.uses() if _changes_heads(use.node, "Unsqueeze")]
    present = next((node.outputs[0] for node in wide if node.outputs[0].is_graph_output()), None)
    if present is None or old.is_graph_output():
        return
    taken = {value.name or "" for node in model.graph.all_nodes() for value in node.outputs}
    nodes = Nodes(taken | {node.name or "" for node in model.graph.all_nodes()})
    heads = nodes.constant([_HEADS])
    new = nodes.one("Concat", past, nodes.one("Unsqueeze", joint.inputs[1], heads), axis=_TOKENS)
    new.shape, new.type = present.shape, present.type
    narrow = nodes.one("Squeeze", new, heads)
    narrow.shape, narrow.type = old.shape, old.type
    model.graph.insert_before(joint, nodes.nodes)
    name = present.name
    for node in wide:
        ir.convenience.replace_all_uses_with(node.outputs[0], new, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    old.replace_all_uses_with(narrow)
    model.graph.remove(joint, safe=True)
    new.name = name
