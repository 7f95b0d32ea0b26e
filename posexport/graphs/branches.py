"""Graphs that are one choice between two bodies, like optimum's merged decoders: each body as its own graph.

In such a graph, `use_cache_branch` chooses between a body for prompts, without caches, and a body that continues from
caches. Both read the weights of the graph around them.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

BRANCHES = ("then_branch", "else_branch")


def branches_of(model: ir.Model) -> dict[str, ir.Model]:
    """Each body of a graph that is one choice, as a model with the inputs that it reads; empty for other graphs."""
    return {} if _choice(model) is None else {name: branch_of(model, name) for name in BRANCHES}


def has_branches(model: ir.Model) -> bool:
    """Whether a graph is one choice between two bodies."""
    return _choice(model) is not None


def with_few_queries(model: ir.Model) -> None:
    """Replace each choice by its body for few queries, in an artifact that is for ONNX Runtime only.

    Such a choice has attention in both bodies. With many queries, a Scan computes one head or one block after the other
    (posexport.custom_ops.by_head, attention_by_queries).
    """
    if model.metadata_props.get("posexport.target") != "ort":
        return
    for node in _choices_of_queries(model):
        body = body_of(node, BRANCHES[0])
        outputs, nodes, weights = emptied(body)
        for weight in weights:
            model.graph.register_initializer(weight)
        detach(body_of(node, BRANCHES[1]))
        model.graph.insert_before(node, nodes)
        ir.convenience.replace_all_uses_with(node.outputs, outputs, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)


def most_of_few(*models: ir.Model) -> int | None:
    """The most queries that take the body for few queries in any of these choices; None if there is no choice."""
    conditions = [node.inputs[0] for model in models for node in _choices_of_queries(model)]
    producers = [None if value is None else value.producer() for value in conditions]
    bounds = [node.inputs[1] for node in producers if node is not None and node.op_type == "LessOrEqual"]
    arrays = [None if value is None else ir.convenience.get_const_tensor(value) for value in bounds]
    return max((int(array.numpy().max()) for array in arrays if array is not None), default=None)


def _choices_of_queries(model: ir.Model) -> list[ir.Node]:
    choices = [node for node in model.graph if node.op_type == "If"]
    return [node for node in choices if all(_has_softmax(body_of(node, name)) for name in BRANCHES)]


def _has_softmax(graph: ir.Graph) -> bool:
    return any(node.op_type == "Softmax" for node in graph.all_nodes())


def of_branch(given: Mapping[str, str], branch: ir.Model) -> dict[str, str]:
    """The given roles by name, only those of inputs that a body reads."""
    return {name: role for name, role in given.items() if name in {value.name for value in branch.graph.inputs}}


def _choice(model: ir.Model) -> ir.Node | None:
    """The If that is the whole graph; None for other graphs.

    A node of each body computes each of the body's outputs, which are the outputs of the graph.
    """
    nodes: list[ir.Node] = [*model.graph]
    if len(nodes) != 1 or (nodes[0].domain, nodes[0].op_type) != ("", "If"):
        return None
    if [*nodes[0].outputs] != [*model.graph.outputs]:
        return None
    for name in BRANCHES:
        outputs = body_of(nodes[0], name).outputs
        producers = [value.producer() for value in outputs]
        if len({*outputs}) < len(outputs) or any(node is None or node.graph is model.graph for node in producers):
            return None
    return nodes[0]


def body_of(node: ir.Node, name: str) -> ir.Graph:
    return node.attributes[name].as_graph()


def branch_of(model: ir.Model, name: str) -> ir.Model:
    """The body `name` of a graph that is one choice, with the weights around it.

    Its outputs have the names of the graph's outputs, unless another value of the body has that name.
    """
    copy = model.clone()
    graph, node = copy.graph, _choice(copy)
    assert node is not None
    body, outer = body_of(node, name), [*graph.outputs]
    for each in BRANCHES:
        if each != name:
            detach(body_of(node, each))
    outputs, nodes, weights = emptied(body)
    graph.outputs.clear()
    graph.remove(node, safe=True)
    graph.extend(nodes)
    for weight in weights:
        graph.register_initializer(weight)
    taken = {value.name for each in nodes for value in each.outputs}
    for value, like in zip(outputs, outer, strict=True):
        value.shape, value.type = like.shape or value.shape, like.type or value.type
        if like.name not in taken:
            value.name = like.name
        graph.outputs.append(value)
    unread = [value for value in graph.inputs if not value.uses()]
    for value in unread:
        graph.inputs.remove(value)
    return copy


def with_branch(model: ir.Model, name: str, branch: ir.Model) -> ir.Model:
    """A copy of a graph that is one choice, with `branch` as its body `name`: what `branch_of` gave, after changes.

    Weights of the graph stay outside the body. Weights that nothing reads any more are removed.
    """
    copy, part = model.clone(), branch.clone()
    node = _choice(copy)
    assert node is not None
    graph, old = copy.graph, body_of(node, name)
    names = [value.name for value in old.outputs]
    around = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    (outputs, nodes, weights), own = emptied(part.graph), list[ir.Value]()
    for value in (*part.graph.inputs, *weights):
        outer = around.get(value.name)
        if outer is not None and outer.const_value is value.const_value:
            value.replace_all_uses_with(outer)
        elif value.uses():
            own.append(value)
    for value in own:
        if value.name in around:
            value.name = f"{name}/{value.name}"
    read = [value for value in graph.initializers.values() if value.uses()]
    detach(old)
    for value, output in zip(outputs, names, strict=True):
        value.name = output
    body = ir.Graph([], outputs, nodes=nodes, initializers=own, name=old.name)
    node.attributes[name] = ir.AttrGraph(name, body)
    for value in read:
        if not value.uses() and not value.is_graph_input():
            graph.initializers.pop(str(value.name))
    copy.functions.update(part.functions)
    graph.opset_imports.update(part.opset_imports)
    return copy


def emptied(graph: ir.Graph) -> tuple[list[ir.Value], list[ir.Node], list[ir.Value]]:
    """The outputs, nodes and weights of a graph, removed from it so that another graph can take them."""
    outputs, nodes, weights = [*graph.outputs], [*graph], [*graph.initializers.values()]
    graph.outputs.clear()
    graph.remove(nodes)
    graph.initializers.clear()
    return outputs, nodes, weights


def detach(graph: ir.Graph) -> None:
    """Remove all inputs of the nodes of a body that is dropped."""
    for node in [*graph.all_nodes()]:
        for at in range(len(node.inputs)):
            node.replace_input_with(at, None)
