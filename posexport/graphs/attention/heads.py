"""The sources of the queries, keys and values of attention: layout, repeated heads, scale, rotation and cache.

The values that an operand passes through are tried from the product upwards. While the operand is only another layout
of a value, times a number, that value may replace it. Then the same is done above a rotation.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.attention.absorbed import keeps_numbers, loses_digits
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.layouts import FLAT, Layout, Sizes, factor, layouts_of, repeated
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.rotary import BARRIERS, MISSES, Rotary, farthest_rotation
from posexport.graphs.attention.turned_parts import Turn
from posexport.graphs.node_arguments import is_copy


@attrs.frozen(kw_only=True)
class Source:
    """A value with `heads` heads in the layout `layout`. An operand is this value times `factor`."""

    value: ir.Value
    layout: Layout
    heads: int
    factor: float = 1.0


@attrs.frozen(kw_only=True)
class Cache:
    """A cache of keys or values that grows.

    `past` [B, K, P, D] is the graph input `name`. `present` is `past` with the new ones appended.
    """

    name: str
    past: ir.Value
    present: ir.Value


@attrs.frozen(kw_only=True)
class Side:
    """One operand of attention: its source, a rotation, and a cache.

    `rotates`: whether a rotation was found, even one with unknown angles. `turns` are rotations above the source that
    are rewritten where they are.
    """

    source: Source
    rotary: Rotary | None = None
    cache: Cache | None = None
    rotates: bool = False
    turns: tuple[Turn, ...] = ()

    @property
    def rotations(self) -> list[Rotary]:
        """All rotations: `rotary` first, then the `turns`."""
        return [*([] if self.rotary is None else [self.rotary]), *(turn.rotary for turn in self.turns)]


def side_of(
    flow: Dataflow,
    probe: Probe,
    operand: ir.Value,
    canonical: Callable[[torch.Tensor], torch.Tensor],
    sizes: Sizes,
    *,
    rotated: bool,
    cached: bool = True,
) -> Side:
    """The source of an operand that `canonical` brings to [B, N, S or T, D] with the sizes `sizes`.

    With `rotated`, rotations are looked for; with `cached`, a cache.
    """
    source = plain_source(flow, probe, operand, canonical, sizes)
    cache = None
    batch, _, tokens, features = sizes
    grown = _grown(flow, probe, source) if cached else None
    if grown is not None:
        cache, new = grown
        layout = source.layout
        tokens = probe.shape(new)[2]
        inner = (batch, source.heads, tokens, features)
        above = plain_source(flow, probe, new, lambda value: layout.to_heads(value, inner), inner)
        source = attrs.evolve(above, factor=above.factor * source.factor)
    if not rotated:
        return Side(source=source, cache=cache)
    inner = (batch, source.heads, tokens, features)
    rotary, rotates = farthest_rotation(flow, probe, source.value, source.layout, inner)
    if rotary is not None:
        layout = rotary.layout
        above = plain_source(flow, probe, rotary.source, lambda value: layout.to_heads(value, inner), inner)
        source = attrs.evolve(above, factor=above.factor * source.factor)  # heads may be repeated before the rotation
    return Side(source=source, rotary=rotary, cache=cache, rotates=rotates)


def plain_source(
    flow: Dataflow, probe: Probe, operand: ir.Value, canonical: Callable[[torch.Tensor], torch.Tensor], sizes: Sizes
) -> Source:
    """The farthest value of which an operand, brought to `sizes` by `canonical`, is another layout times a number.

    Raises LookupError if the operand itself is not such a value.
    """
    best: Source | None = None
    misses = 0
    above = operand
    for value in flow.dominators(operand):
        if not all(keeps_numbers(flow, probe, node) for node in flow.between(value, above)):
            break
        above = value
        found = None
        if not loses_digits(flow, value, operand):
            found = _as_source(probe, value, operand, canonical, sizes)
        if found is not None:
            best, misses = found, 0
        else:
            misses += 1
        node = value.producer()
        if misses > MISSES or node is None or node.op_type in BARRIERS:
            break
    if best is None:
        raise LookupError
    return best


def _as_source(
    probe: Probe, value: ir.Value, operand: ir.Value, canonical: Callable[[torch.Tensor], torch.Tensor], sizes: Sizes
) -> Source | None:
    batch, heads, tokens, features = sizes
    replaced = probe.random_like(value)
    own_heads, left = divmod(replaced.numel(), batch * tokens * features)
    if left or not own_heads or heads % own_heads:
        return None
    own = (batch, own_heads, tokens, features)
    candidates = [layout for layout in layouts_of(tuple(replaced.shape), own) if layout.groups != FLAT]
    if not candidates:
        return None
    result = canonical(probe.through(value, [operand], replaced)[0])
    for layout in candidates:
        number = factor(result, repeated(layout.to_heads(replaced, own), heads))
        if number is not None:
            return Source(value=value, layout=layout, heads=own_heads, factor=number)
    return None


def _grown(flow: Dataflow, probe: Probe, source: Source) -> tuple[Cache, ir.Value] | None:
    """The cache that a source is, and the new keys or values in it; None unless the cache is [B, K, P, D]."""
    node = source.value.producer()
    if node is None or node.op_type != "Concat" or str(source.layout) != "b h s d" or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    axis = node.attributes["axis"].as_int()
    if past is None or new is None or axis not in (2, -2) or len(probe.shape(past)) != 4:
        return None
    start = past
    while (before := start.producer()) is not None and is_copy(before) and before.inputs[0] is not None:
        start = before.inputs[0]
    if not start.is_graph_input():
        return None
    return Cache(name=start.name or "", past=past, present=source.value), new
