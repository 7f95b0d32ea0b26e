"""Joins decomposed attention that is only for ONNX Runtime with the logits that are its bias, into one function."""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.function_bodies import DOMAIN, Functions


def join(model: ir.Model, functions: Functions) -> None:
    """Join each attention with its bias, if only attentions without a cache read the bias, or only this one.

    Both are then computed one head after the other, or for some queries at a time
    (posexport.custom_ops.attention_by_head). With a cache, a bias for several layers is computed once, before them:
    steps of a decoder have so few numbers that computing it in each layer takes longer than reading it.
    """
    for node in [*model.graph]:
        attention = functions.call_of(node)
        if attention is None or attention.operator.joined_body is None:
            continue
        inputs = attention.by_name(node)
        bias = inputs.pop("bias")
        source = None if bias is None else bias.producer()
        logits = None if source is None else functions.call_of(source)
        if bias is None or source is None or logits is None or bias.is_graph_output():
            continue
        if len(bias.uses()) > 1 and not all(_uncached(functions, use.node, bias) for use in bias.uses()):
            continue
        function = functions.joined(attention, logits)
        if function is None:
            continue
        given = [*source.inputs, *(value for value in inputs.values() if value is not None)]
        both = ir.Node(DOMAIN, function.name, given, num_outputs=len(node.outputs), name=node.name)
        for new, old in zip(both.outputs, node.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
        model.graph.insert_before(node, both)
        ir.convenience.replace_all_uses_with(node.outputs, both.outputs, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        if not bias.uses():
            model.graph.remove(source, safe=True)
    functions.attach(model)


def _uncached(functions: Functions, node: ir.Node, bias: ir.Value) -> bool:
    """Whether a node is attention that can be joined with this bias, and has no cache."""
    call = functions.call_of(node)
    if call is None or call.operator.joined_body is None:
        return False
    inputs = call.by_name(node)
    return inputs["bias"] is bias and inputs.get("past_key") is None
