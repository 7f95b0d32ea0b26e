"""The number of keys behind a cache, as masks ask for it: by the shape of the keys [B, K, P + S, D], or of those keys
repeated and laid out otherwise. An operator that has the cache inside gives these keys, and needs the mask before: so
the shape is written anew, from that of the cache and of the new keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx_ir as ir

from posexport.graphs.attention.attention import Attention
from posexport.graphs.nodes import Nodes
from posexport.graphs.symbolic_sizes import ONE, Size
from posexport.graphs.view import View
from posexport.rewrite.site import Site

_LAYOUTS = {"Identity", "Cast", "Unsqueeze", "Squeeze", "Expand", "Tile", "Reshape", "Transpose"}
"""Operators through which keys go on their way to the product."""


def move_lengths(
    view: View, attention: Attention, site: Site, values: Mapping[str, ir.Value], nodes: Nodes, total: ir.Value | None
) -> bool:
    """Write anew the shapes of keys and values that the site's features, mask, bias or angles are computed from.

    `values` are those of the graph that is written to, before anything was put there; `total` [1] is the number of keys
    where caches are buffers. False where something else that they are computed from is the site's own result, or the
    shape of keys laid out in a way whose lengths aren't known.
    """
    if not _is_its_own_source(attention, values, site):
        return True
    before = {value.name: value for node in view.model.graph for value in node.outputs}
    for side in (attention.k, attention.v):
        if side.cache is None:
            continue
        past, present = (values[value.name or ""] for value in (side.cache.past, side.cache.present))
        length = _sum_of_lengths(nodes, past, site.keys) if total is None else total
        rows, _, keys, _ = view.probe.shapes.of(side.cache.present)
        batch = nodes.length(past, 0)
        lengths = {keys: length, rows: batch, view.probe.shapes.of(side.cache.past)[0]: batch}
        for node, value in _shapes_below(present):
            known = [
                _length(view, nodes, size, lengths) for size in view.probe.shapes.of(before[value.name])[_part(node)]
            ]
            parts = [part for part in known if part is not None]
            if len(parts) < len(known) or not parts:
                return False
            shape = nodes.one("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
            ir.convenience.replace_all_uses_with(node.outputs[0], shape)
            node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return not _is_its_own_source(attention, values, site)


def circular(sites: Iterable[Site], values: Mapping[str, ir.Value]) -> list[bool]:
    """For each site, whether nodes above it would need what they give once it stands in the graph of these values."""
    found = [*sites]
    instead = {values[name]: new for site in found for name, new in site.replaced.items()}
    return [_has_a_circle(site.replaced.values(), instead) for site in found]


def _has_a_circle(results: Iterable[ir.Value], instead: Mapping[ir.Value, ir.Value]) -> bool:
    """Whether a node above the results needs what it gives."""
    finished: dict[ir.Node, bool] = {}
    stack = [(node, False) for value in results if (node := value.producer()) is not None]
    while stack:
        node, done = stack.pop()
        if done or node not in finished:
            finished[node] = done
            above = () if done else [instead.get(one, one).producer() for one in node.inputs if one is not None]
            stack += [] if done else [(node, True)]
            stack += [(one, False) for one in above if one is not None]
        elif not finished[node]:
            return True
    return False


def _length(view: View, nodes: Nodes, size: Size, lengths: Mapping[Size, ir.Value]) -> ir.Value | None:
    """A length [1]: a number, one of `lengths`, or a multiple of one; None for another."""
    if size.is_fixed:
        return nodes.constant([size.number])
    for one, value in lengths.items():
        times = view.probe.shapes.symbols.quotient(size, one)
        if times is not None and times.is_fixed:
            return value if times == ONE else nodes.one("Mul", value, nodes.constant([times.number]))
    return None


def _shapes_below(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Every Shape of a value, or of what layouts make of it, with that value."""
    pending = [value]
    for one in pending:
        for node, index in [(use.node, use.idx) for use in one.uses()]:
            if node.op_type == "Shape":
                yield node, one
            elif node.op_type in _LAYOUTS and index == 0:
                pending.append(node.outputs[0])


def _part(node: ir.Node) -> slice:
    """The axes that a Shape gives."""
    ends = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
    return slice(*ends)


def _sum_of_lengths(nodes: Nodes, past: ir.Value, keys: ir.Value) -> ir.Value:
    """The number [1] of cached keys [B, K, P, D] and of new ones [B, S, K*D]."""
    return nodes.one("Add", nodes.length(past, 2), nodes.length(keys, 1))


def _is_its_own_source(attention: Attention, values: Mapping[str, ir.Value], site: Site) -> bool:
    """Whether features, a mask, a bias or angles depend on values that the site replaces."""
    turned = {values[turn.rotary.target.name or ""] for turn in attention.turns}
    replaced = {values[name] for name in site.replaced}
    read = [term.value for term in attention.terms] + [scale for scale, _ in attention.head_scales]
    read += [side.source.value for side in (attention.q, attention.k, attention.v)]
    read += [] if attention.sinks is None else [attention.sinks]
    read += [angles for side in (attention.q, attention.k) if side.rotary for angles in side.rotary.angle_values]
    turns = [angles for turn in attention.turns for angles in turn.rotary.angle_values]
    # a mask may be computed from what is turned in its place, such as its shape
    return _depend(read, values, replaced - turned) or _depend(turns, values, replaced)


def _depend(read: Iterable[ir.Value], values: Mapping[str, ir.Value], replaced: Collection[ir.Value]) -> bool:
    """Whether any of the values that are read, by name in the graph, is computed from a replaced one."""
    pending = list(dict.fromkeys(values[value.name or ""] for value in read))
    seen = set(pending)
    for value in pending:
        if value in replaced:
            return True
        node = value.producer()
        for source in node.inputs if node is not None else ():
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
    return False
