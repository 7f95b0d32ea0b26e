"""Puts sites into a graph: new nodes replace old values, and what is not read any more is removed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.heads import Cache
from posexport.graphs.attention.rotary import Rotary
from posexport.graphs.function_bodies import DOMAIN, Functions
from posexport.graphs.nodes import PREFIX, Nodes
from posexport.graphs.view import View
from posexport.rewrite.key_lengths import circular, move_lengths
from posexport.rewrite.number_types import operands, turned_values
from posexport.rewrite.shared_cache import append, lengths_of, redirect, shared_cache
from posexport.rewrite.site import Site, SiteWriter
from posexport.rewrite.writing import Writing

_CIRCULAR = "its inputs depend on its own output."
"""The reason why a site can't be written."""


def values_of(model: ir.Model) -> dict[str, ir.Value]:
    """Every value of the main graph by name."""
    graph = model.graph
    values = {value.name or "": value for value in (*graph.inputs, *graph.initializers.values())}
    return values | {value.name or "": value for node in graph for value in node.outputs}


def put(model: ir.Model, replaced: Iterable[Mapping[str, ir.Value]], nodes: Nodes) -> list[ir.Value]:
    """Add the new nodes to the graph, and put new values in the places of old ones, which are given by name and
    returned."""
    values = values_of(model)
    model.graph.extend(nodes.nodes)
    before: dict[str, ir.Value] = {}  # several attentions may read the same keys
    for name, new in ((name, new) for site in replaced for name, new in site.items()):
        if name not in before:
            old = before[name] = values[name]
            new.shape, new.type = old.shape, old.type or new.type
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name = f"{PREFIX}/old/{name}"
            new.name = name
    return [*before.values()]


def remove_unused(model: ir.Model, values: Sequence[ir.Value]) -> None:
    """Remove the nodes and initializers that were only needed to compute these values."""
    pending = list(values)
    while pending:
        value = pending.pop()
        node = value.producer()
        if value.uses() or value.is_graph_output() or (node is not None and node.graph is None):
            continue
        if node is None:
            if value.is_initializer() and not value.is_graph_input():
                model.graph.initializers.pop(value.name or "")
            continue
        if node.graph is not model.graph or any(out.uses() or out.is_graph_output() for out in node.outputs):
            continue
        pending += [source for source in node.inputs if source is not None]
        model.graph.remove(node, safe=True)


def lower(model: ir.Model, functions: Functions, form: str) -> None:
    """Give posexport's operators their bodies; inline the calls in all forms except `function`."""
    before = {node for node in model.graph if node.domain != DOMAIN}
    names = set(values_of(model))
    functions.attach(model)
    if form != "function":
        common.InlinePass(criteria=lambda function: function.domain == DOMAIN)(model)
        model.opset_imports.pop(DOMAIN, None)
    inner = [node for node in model.graph if node not in before]
    if any(node.domain == "com.microsoft" for node in model.graph.all_nodes()):
        model.opset_imports.setdefault("com.microsoft", 1)
    _share(model, inner, names)
    for node in inner:
        if node.graph is model.graph:  # duplicates are removed already
            _read_before_repeating(model, node)


def _share(model: ir.Model, nodes: Collection[ir.Node], names: Collection[str]) -> None:
    """Merge equal new nodes: what all sites compute in the same way, such as lengths, is computed once."""
    known: dict[tuple[object, ...], ir.Node] = {}
    for node in nodes:
        key = (node.domain, node.op_type, tuple(node.inputs), len(node.outputs), _attributes_key(node.attributes))
        first = known.setdefault(key, node)
        if first is node or any(value.name in names for value in node.outputs):
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            old.replace_all_uses_with(new)
        model.graph.remove(node, safe=True)


def _read_before_repeating(model: ir.Model, node: ir.Node) -> None:
    """Replace the maximum of equal numbers by the number: ONNX Runtime on a GPU then knows it without waiting for
    it."""
    source = node.inputs[0].producer() if node.op_type == "ReduceMax" and node.inputs[0] is not None else None
    if source is not None and source.op_type == "Expand":
        value = source.inputs[0]
        if value is not None and value.shape is not None and value.shape.dims == (1,):
            node.outputs[0].replace_all_uses_with(value)
            model.graph.remove(node, safe=True)


def _attributes_key(attributes: Mapping[str, ir.Attr]) -> object:
    def of(attribute: ir.Attr) -> object:
        if attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            return (tensor.dtype, tuple(tensor.shape), tensor.tobytes())
        return repr(attribute.value)

    return tuple(sorted((name, of(attribute)) for name, attribute in attributes.items()))


def write_sites(
    view: View, model: ir.Model, attentions: Sequence[Attention], functions: Functions, *, buffers: Sequence[str] = ()
) -> dict[str, RequestError]:
    """Write these attentions of `view` in `model`, a copy of its model; the caches `buffers` become buffers.

    Returns the errors of those that the form can't express, by name; the model is then unusable.
    """
    values = values_of(model)
    taken = set(values) | {node.name or "" for node in model.graph}
    read = values_read(attentions)
    nodes = Nodes(taken)
    computed = [value for one in attentions for rotary in rotations(one) for value in turned_values(view.flow, rotary)]
    products = [value for one in attentions for value in (*operands(one), one.logits)]
    dtypes = view.dtypes([*read, *_replaced(attentions), *computed, *products])
    writing = Writing(nodes=nodes, functions=functions, values=values, dtypes=dtypes)
    writer = SiteWriter(writing, view)
    lengths = lengths_of(model, view.roles, nodes) if buffers else None
    sites: list[Site] = []
    refused: dict[str, RequestError] = {}
    for attention in attentions:
        cache = attention.k.cache
        buffer = None if lengths is None or cache is None else shared_cache(nodes, lengths, values[cache.name])
        try:
            sites.append(writer.write(attention, buffer))
        except RequestError as error:
            refused[attention.name] = error
    if refused:
        return refused
    _move_shapes(view, values, attentions)
    total = None if lengths is None else lengths.total
    moved = [
        move_lengths(view, attention, site, values, nodes, total)
        for attention, site in zip(attentions, sites, strict=True)
    ]
    for attention, is_moved, needs_itself in zip(attentions, moved, circular(sites, values), strict=True):
        if needs_itself or not is_moved:
            refused[attention.name] = RequestError(_CIRCULAR)
    if refused:
        return refused
    replaced = [site.replaced for site in sites]
    caches = {cache.name: cache.present.name or "" for cache in _caches(attentions)}
    if lengths is not None:
        left = [name for name in buffers if name not in caches]  # no site writes into these
        shapes = view.shapes(value for value in view.model.graph.inputs if value.name in left)
        for name in left:
            _, heads, _, dim = shapes[name]
            caches[name], full = append(writing, lengths, values[name], heads, dim)
            replaced.append({caches[name]: full})
    before = put(model, replaced, nodes)
    if lengths is not None:
        redirect(model, caches.items(), nodes, lengths)
    remove_unused(model, [*before, *(value for node in nodes.nodes for value in node.outputs)])
    try:
        model.graph.sort()
    except ValueError:  # a circle
        return {attention.name: RequestError(_CIRCULAR) for attention in attentions}
    return {}


def _move_shapes(view: View, values: Mapping[str, ir.Value], attentions: Sequence[Attention]) -> None:
    """Make nodes that read the shape of a rotated value read that of the value before its rotation.

    Otherwise they would keep the rotation that is replaced.
    """
    for one in attentions:
        for rotary in rotations(one):
            source = values[rotary.source.name or ""]
            for node in view.flow.between(rotary.source, rotary.target):
                for inner in node.outputs:
                    if view.probe.shapes.of(inner) != view.probe.shapes.of(rotary.source):
                        continue
                    for use in [*values[inner.name or ""].uses()]:
                        if use.node.op_type == "Shape":
                            use.node.replace_input_with(use.idx, source)


def rotations(one: Attention) -> list[Rotary]:
    """All rotations of queries and keys."""
    return [*one.q.rotations, *one.k.rotations]


def _replaced(attentions: Sequence[Attention]) -> list[ir.Value]:
    """Every value that is replaced."""
    values: list[ir.Value] = []
    for one in attentions:
        values += [one.output.value, *(turn.rotary.target for turn in one.turns)]
    return [*values, *(cache.present for cache in _caches(attentions))]


def _caches(attentions: Iterable[Attention]) -> list[Cache]:
    """The caches that these attentions write into."""
    return [side.cache for one in attentions for side in (one.k, one.v) if side.cache is not None]


def values_read(attentions: Iterable[Attention]) -> list[ir.Value]:
    """Every value that the sites read."""
    values: list[ir.Value] = []
    for one in attentions:
        for side in (one.q, one.k, one.v):
            values.append(side.source.value)
            if side.cache is not None:
                values.append(side.cache.past)
        values += [value for rotary in rotations(one) for value in rotary.angle_values]
        values += [turn.rotary.source for turn in one.turns]
        values += [term.value for term in one.terms] + [scale for scale, _ in one.head_scales]
        values += [one.sinks] if isinstance(one.sinks, ir.Value) else []
    return list(dict.fromkeys(values))
