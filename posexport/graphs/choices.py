"""An If with attention in its bodies, among other nodes of a graph: each body as its own graph.

    z = If(condition) { then: attention of x and y | else: x }        x, y: features of the graph around it

`lifted` puts the nodes of one body in place of the If, so that they are read, tried and changed like other nodes.
`put_back` puts the changed nodes back into the body: all nodes that its outputs are computed from, up to values that
the graph around it has. posexport.graphs.branches reads graphs that are one choice and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import onnx_ir as ir

from posexport.graphs.attention.dataflow import outer_values
from posexport.graphs.branches import BRANCHES, body_of, detach, emptied


@attrs.frozen
class Body:
    """The body `branch` of the If that gives `output`, with the names of its nodes (or of their first outputs)."""

    output: str
    branch: str
    names: frozenset[str]


def bodies_with(model: ir.Model, holds: Callable[[ir.Node], bool]) -> Iterator[Body]:
    """The bodies of each If of the main graph that have a node for which `holds` is true.

    The outputs of such a body are outputs of its own nodes, all different.
    """
    for node in model.graph:
        if (node.domain, node.op_type) != ("", "If") or not node.outputs[0].name:
            continue
        for branch in BRANCHES:
            body = body_of(node, branch)
            outputs = body.outputs
            own = all((one := value.producer()) is not None and one.graph is body for value in outputs)
            if own and len({*outputs}) == len(outputs) and any(map(holds, body)):
                yield Body(node.outputs[0].name, branch, frozenset(map(_name, body)))


def lifted(model: ir.Model, body: Body) -> ir.Model:
    """A copy of the model with the nodes of a body in place of its If.

    The outputs of the body become outputs of the model too, after the existing ones.
    """
    copy = model.clone()
    graph, node = copy.graph, _choice(copy, body)
    for each in BRANCHES:
        if each != body.branch:
            detach(body_of(node, each))
    outputs, nodes, weights = emptied(body_of(node, body.branch))
    taken = {value.name for value in node.outputs}
    for value in (value for one in nodes for value in one.outputs if value.name in taken):
        value.name = f"{value.name}/{body.branch}"
    for weight in weights:
        graph.register_initializer(weight)
    graph.insert_before(node, nodes)
    for old, value in zip(node.outputs, outputs, strict=True):
        given = ir.node("Identity", [value])
        graph.insert_before(node, given)
        new, name = given.outputs[0], old.name
        new.shape, new.type = old.shape or value.shape, old.type or value.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = None, name
        graph.outputs.append(value)
    graph.remove(node, safe=True)
    return copy


def put_back(model: ir.Model, body: Body, changed: ir.Model) -> ir.Model:
    """A copy of the model whose body has the nodes of `changed`, which was made from the result of `lifted`."""
    copy, part = model.clone(), changed.clone()
    node = _choice(copy, body)
    around = {value.name: value for value in copy.graph.initializers.values()}
    around |= {value.name: value for value in copy.graph.inputs}
    around |= {value.name: value for one in copy.graph for value in one.outputs if one is not node}
    outputs = [*part.graph.outputs][-len(node.outputs) :]
    inner, own = set[ir.Node](), dict[str, ir.Value]()
    pending = [*outputs]
    while pending:
        value = pending.pop()
        one = value.producer()
        if one is None:
            if not _is_outer(value, around):
                own[str(value.name)] = value
        elif one not in inner and not _is_outer(value, around):
            inner.add(one)
            pending += [each for each in one.inputs if each is not None] + outer_values(one)
    nodes = [one for one in part.graph if one in inner]
    old = body_of(node, body.branch)
    names = [value.name for value in old.outputs]
    read = {value for one in nodes for value in (*one.inputs, *outer_values(one)) if value is not None}
    for value in read:
        if value.producer() not in inner and str(value.name) not in own:
            value.replace_all_uses_with(around[value.name])
    for weight in own.values():
        part.graph.initializers.pop(str(weight.name), None)
        if weight.name in around:
            weight.name = f"{body.output}/{body.branch}/{weight.name}"
    part.graph.outputs.clear()
    for one in reversed([*part.graph]):
        if one not in inner:
            part.graph.remove(one)
    part.graph.remove(nodes)
    for value, name in zip(outputs, names, strict=True):
        if name not in {each.name for one in nodes for each in one.outputs}:
            value.name = name
    for value in (value for one in nodes for value in one.outputs if value.name in around):
        value.name = f"{value.name}/{body.branch}"  # a name of the graph around must not have another meaning
    detach(old)
    graph = ir.Graph([], outputs, nodes=nodes, initializers=list(own.values()), name=old.name)
    node.attributes[body.branch] = ir.AttrGraph(body.branch, graph)
    copy.functions.update(part.functions)
    copy.graph.opset_imports.update(part.graph.opset_imports)
    return copy


def _is_outer(value: ir.Value, around: dict[str | None, ir.Value]) -> bool:
    """Whether the graph around a body has this value."""
    other = around.get(value.name)
    if other is None:
        return False
    one, same = value.producer(), other.producer()
    if one is None or same is None:
        return one is same and other.const_value is value.const_value
    return one.op_identifier() == same.op_identifier() and [each and each.name for each in one.inputs] == [
        each and each.name for each in same.inputs
    ]


def _choice(model: ir.Model, body: Body) -> ir.Node:
    return next(node for node in model.graph if node.outputs and node.outputs[0].name == body.output)


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or ""
