"""The nodes of a graph that may be attention, found without knowledge of its inputs, and operators that are left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain

import onnx_ir as ir

from posexport.errors import Reason, shown
from posexport.graphs.attention.attention import UnknownAttention
from posexport.graphs.attention.named_operators import is_operator, is_other_softmax, is_unread, operator_reason
from posexport.graphs.attention.products import PRODUCTS
from posexport.graphs.attention.softmaxes import softmax_of
from posexport.graphs.attention.unweighted import COMBINING, MIXING, WEIGHT_OPS, leads_to

_QUANTISED = {"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QuantizeLinear"}
_TO_WHOLE = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
"""Operators of quantised graphs: they take or give integers."""

CONTROL_FLOW = "control-flow"
"""The code of the reason for attention inside the body of a node."""

Functions = Collection[tuple[str, str, str]]
"""Domain, name and overload of the functions of a model. Calls of functions are not operators."""


def reason_to_leave(node: ir.Node, refused: Mapping[ir.Node, str], functions: Functions) -> Reason | None:
    """Why an operator that computes attention, or a softmax whose weights are quantised, is left as it is."""
    if _is_left(node, functions):
        return operator_reason(node, refused)
    name = shown(node.name or node.outputs[0].name or "")
    if node.op_type == "Softmax" and leads_to(node.outputs[0], _QUANTISED, {*WEIGHT_OPS, "DynamicQuantizeLinear"}):
        return Reason("quantised", f"the weights of {name} are quantised before the product with the values")
    return None


def may_hold_attention(model: ir.Model) -> bool:
    """Whether any graph of a model contains a softmax before a product, or an operator that computes attention.

    If not, nothing needs to be known about its inputs.
    """
    return next(_candidates(model), None) is not None


def unread(model: ir.Model) -> list[UnknownAttention]:
    """The attentions of a graph if all of them are operators that can't be evaluated; none if there may be others."""
    nodes = []
    for node in _candidates(model):
        if not (_is_left(node, model.functions) and is_unread(node)) or node.graph is not model.graph:
            return []
        nodes.append(node)
    names = [node.name or node.outputs[0].name or "" for node in nodes]
    return [
        UnknownAttention(name=name, layer=layer, reason=operator_reason(node, {}))
        for layer, (name, node) in enumerate(zip(names, nodes, strict=True))
    ]


def may_be_attention(model: ir.Model) -> Callable[[ir.Node], bool]:
    """A function that returns whether a node of a model may be attention."""
    return lambda node: _may_be_attention(node, model.functions)


def nested(model: ir.Model, layer: int, kept: str | None = None) -> list[UnknownAttention]:
    """Attention in the branches and bodies of If, Loop and Scan, and in functions that were not inlined.

    Functions of the domain `kept` are left out. The first attention has this `layer`.
    """
    found: list[UnknownAttention] = []
    for node in model.graph.all_nodes():
        name = node.name or node.outputs[0].name or ""
        if node.graph is not model.graph and _may_be_attention(node, model.functions):
            text = f"{shown(name)} is inside an If, Loop or Scan, where attention is not searched for"
            reason = Reason(CONTROL_FLOW, text)
        elif _calls_attention(model, node, kept):
            text = f"{shown(name)} calls a function of another opset, or passes a graph to a function"
            reason = Reason("function", f"{text}, where attention is not searched for")
        else:
            continue
        found.append(UnknownAttention(name=name, layer=layer + len(found), reason=reason))
    return found


def _calls_attention(model: ir.Model, call: ir.Node, kept: str | None) -> bool:
    """Whether a node calls a function that may contain attention, directly or through other functions."""
    pending, seen = [call.op_identifier()], set[ir.OperatorIdentifier]()
    while pending:
        name = pending.pop()
        function = model.functions.get(name)
        if function is None or function.domain == kept or name in seen:
            continue
        seen.add(name)
        nodes = [*function.all_nodes()]
        if any(_may_be_attention(node, model.functions) for node in nodes):
            return True
        pending += [node.op_identifier() for node in nodes]
    return False


def unevaluated(model: ir.Model, reason: Reason) -> list[UnknownAttention]:
    """The nodes that may be attention in a graph that can't be evaluated, with this reason."""
    names = [node.name or node.outputs[0].name or "" for node in _candidates(model)]
    return [UnknownAttention(name=name, layer=layer, reason=reason) for layer, name in enumerate(names)]


def leads_to_product(value: ir.Value) -> bool:
    """Whether a product reads a value as the weights of a softmax."""
    return leads_to(value, {*PRODUCTS, *_QUANTISED}, {*WEIGHT_OPS, *COMBINING, *MIXING, "Flatten", *_TO_WHOLE})


def _candidates(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes that may be attention, in all graphs and functions of a model."""
    functions = (node for function in model.functions.values() for node in function)
    nodes = chain(model.graph.all_nodes(), functions)
    return (node for node in nodes if _may_be_attention(node, model.functions))


def _may_be_attention(node: ir.Node, functions: Functions) -> bool:
    if _is_left(node, functions):
        return True
    softmax = softmax_of(node)
    return softmax is not None and (softmax.product is not None or leads_to_product(node.outputs[0]))


def _is_left(node: ir.Node, functions: Functions) -> bool:
    """Whether a node is an operator that computes attention, or the softmax of an attention."""
    if node.op_identifier() in functions:
        return False
    return is_operator(node) or (is_other_softmax(node) and leads_to_product(node.outputs[0]))
