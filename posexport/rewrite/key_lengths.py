"""The number of keys including cached ones, as masks ask for it.

It is read from the shape of the keys [B, K, P + S, D], of those keys repeated or laid out differently, or of the
scores. An operator with the cache inside outputs these keys, but needs the mask before. So the shape is computed from
the shapes of the cache and of the graph's inputs instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.dataflow import bodies, values_read
from posexport.graphs.nodes import Nodes
from posexport.graphs.symbolic_sizes import ONE, Size
from posexport.graphs.view import View
from posexport.rewrite.broadcasts import Broadcasts
from posexport.rewrite.site import Site


def move_lengths(
    view: View, attention: Attention, site: Site, values: Mapping[str, ir.Value], nodes: Nodes, total: ir.Value | None
) -> bool:
    """Replace the shapes of keys, values and scores that a site's features, mask, bias or angles are computed from.

    `values` are those of the graph that is written to, before anything was put there. `total` [1] is the number of keys
    if caches are buffers: then no shape of a former cache may be read, wherever it is used. False if these inputs are
    computed from the site's own result in another way, or from a shape of it whose lengths aren't known.
    """
    scores = values.get(attention.scores.result.name or "")
    inner = _replaced(attention, values, site) | ({scores} if scores is not None else set())
    before = {value.name: value for node in view.model.graph for value in node.outputs}
    known = _known_lengths(view, attention, site, values, nodes, total)
    shapes = dict(_shapes_between(_read(attention, values), inner))
    if total is not None:
        caches = [side.cache.present for side in (attention.k, attention.v) if side.cache is not None]
        shapes |= _shapes_of_layouts(values[cache.name or ""] for cache in caches)
    for node, value in shapes.items():
        if value.name not in before or node.outputs[0].is_graph_output():
            continue  # of a branch or a body: its own lengths aren't known, and its outputs are its own
        sizes = view.probe.shapes.of(before[value.name])[_part(node)]
        lengths = [_length(site.sizes, nodes, size, known) for size in sizes]
        parts = [part for part in lengths if part is not None]
        if len(parts) < len(lengths) or not parts:
            continue
        shape = nodes.one("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
        ir.convenience.replace_all_uses_with(node.outputs[0], shape)
        node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return not _is_its_own_source(attention, values, site)


def _known_lengths(
    view: View, attention: Attention, site: Site, values: Mapping[str, ir.Value], nodes: Nodes, total: ir.Value | None
) -> dict[Size, ir.Value]:
    """The lengths [1] of caches with their new keys and of the graph's inputs, by size."""
    shapes, found = view.probe.shapes, dict[Size, ir.Value]()
    for side in (attention.k, attention.v):
        if side.cache is not None:
            past = values[side.cache.past.name or ""]
            rows, _, keys, _ = shapes.of(side.cache.present)
            joined = nodes.one("Add", nodes.length(past, 2), nodes.length(site.keys, 1)) if total is None else total
            found[site.sizes.find(keys)] = joined
            found |= dict.fromkeys(map(site.sizes.find, (rows, shapes.of(side.cache.past)[0])), nodes.length(past, 0))
    for value in view.model.graph.inputs:
        role = view.roles.get(value.name or "")
        if role is not None and role.kind != "past":  # it may be a buffer
            for axis, size in enumerate(map(site.sizes.find, shapes.of(value))):
                if not size.is_fixed and size not in found:
                    found[size] = nodes.length(values[value.name or ""], axis)
    return found


def circular(sites: Iterable[Site], values: Mapping[str, ir.Value]) -> list[bool]:
    """For each site, whether it would need its own outputs after it is put into the graph of these values.

    It would also be circular if the number of its keys needs them.
    """
    found = [*sites]
    instead = {values[name]: new for site in found for name, new in site.replaced.items()}
    return [any(_needs_itself(new, instead) for new in (*site.replaced.values(), site.keys)) for site in found]


def _needs_itself(result: ir.Value, instead: Mapping[ir.Value, ir.Value]) -> bool:
    """Whether a node above a result needs the node that computes the result."""
    first = result.producer()
    pending, seen = [first], {first}
    for node in pending:
        above = [instead.get(one, one).producer() for one in _sources(node)]
        if first is not None and first in above:
            return True
        new = [one for one in dict.fromkeys(above) if one not in seen]
        seen.update(new)
        pending += new
    return False


def _length(sizes: Broadcasts, nodes: Nodes, size: Size, lengths: Mapping[Size, ir.Value]) -> ir.Value | None:
    """A length [1]: a number, one of `lengths`, or a multiple of one; None for others."""
    symbols = sizes.shapes.symbols
    size = sizes.joint(*(symbols.broadcast_of(size) or (size,)))
    if size.is_fixed:
        return nodes.constant([size.number])
    for one, value in lengths.items():
        times = symbols.quotient(size, one)
        if times is not None and times.is_fixed:
            return value if times == ONE else nodes.one("Mul", value, nodes.constant([times.number]))
    return None


def _shapes_between(read: Iterable[ir.Value], inner: Collection[ir.Value]) -> list[tuple[ir.Node, ir.Value]]:
    """Every Shape of one of the values `inner`, or of what is computed from one, that `read` is computed from.

    Each comes with the value that it is the shape of.
    """
    above = _above(read)
    pending = [value for value in inner if value in above]
    seen, found = {*pending}, dict[ir.Node, ir.Value]()
    for value in pending:
        for node in (use.node for use in value.uses()):
            if not any(output in above for output in node.outputs):
                continue
            if node.op_type == "Shape":
                found[node] = value
                continue
            pending += [output for output in node.outputs if output not in seen]
            seen.update(node.outputs)
    return [*found.items()]


_LAYOUTS = {"Unsqueeze", "Expand", "Reshape", "Transpose", "Identity"}


def _shapes_of_layouts(caches: Iterable[ir.Value]) -> dict[ir.Node, ir.Value]:
    """Every Shape of these values laid out differently, for example repeated for all heads, with its input."""
    pending, found = [*caches], dict[ir.Node, ir.Value]()
    for value in pending:
        for use in value.uses():
            if use.node.op_type == "Shape" and not use.node.outputs[0].is_graph_output():
                found[use.node] = value
            elif use.node.op_type in _LAYOUTS and use.idx == 0 and use.node.outputs[0] not in pending:
                pending.append(use.node.outputs[0])
    return found


def _part(node: ir.Node) -> slice:
    """The axes that a Shape gives."""
    ends = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
    return slice(*ends)


def _read(attention: Attention, values: Mapping[str, ir.Value]) -> list[ir.Value]:
    """What a site reads, without the angles of `turns`, in the graph that is written to."""
    read = [term.value for term in attention.terms] + [scale for scale, _ in attention.head_scales]
    read += [side.source.value for side in (attention.q, attention.k, attention.v)]
    read += [attention.sinks] if isinstance(attention.sinks, ir.Value) else []
    read += [angles for side in (attention.q, attention.k) if side.rotary for angles in side.rotary.angle_values]
    return [values[value.name or ""] for value in read]


def _replaced(attention: Attention, values: Mapping[str, ir.Value], site: Site) -> set[ir.Value]:
    """What a site outputs, without values that it only rotates: a mask may be computed from these, for example their
    shape."""
    turned = {values[turn.rotary.target.name or ""] for turn in attention.turns}
    return {values[name] for name in site.replaced} - turned


def _is_its_own_source(attention: Attention, values: Mapping[str, ir.Value], site: Site) -> bool:
    """Whether features, a mask, a bias or angles depend on values that the site replaces."""
    turns = [values[angles.name or ""] for turn in attention.turns for angles in turn.rotary.angle_values]
    if not _above(_read(attention, values)).isdisjoint(_replaced(attention, values, site)):
        return True
    return not _above(turns).isdisjoint(values[name] for name in site.replaced)


def _above(read: Iterable[ir.Value]) -> set[ir.Value]:
    """Values and everything that they are computed from."""
    pending = [*read]
    seen = {*pending}
    for value in pending:
        new = [source for source in dict.fromkeys(_sources(value.producer())) if source not in seen]
        seen.update(new)
        pending += new
    return seen


def _sources(node: ir.Node | None) -> list[ir.Value]:
    """What a node is computed from, including its branches and bodies: their results, and the outer values that they
    read."""
    if node is None:
        return []
    return [*values_read(node), *(value for graph in bodies(node) for value in graph.outputs)]
