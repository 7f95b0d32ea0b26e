"""Writes rotations of queries and keys: cosines and sines [B, S, P] from the graph, and RotaryPosition."""

from __future__ import annotations

from itertools import pairwise

import attrs
import onnx_ir as ir

from posexport.custom_ops import rotate
from posexport.custom_ops.rotary import Layout, has_operator
from posexport.graphs.attention.pairings import Pairs
from posexport.graphs.attention.rotary import AngleSource, Rotary
from posexport.graphs.symbolic_sizes import ONE
from posexport.rewrite.broadcasts import Broadcasts, Extent, LengthsApart
from posexport.rewrite.writing import Beside, Shaped, Writing


@attrs.frozen(kw_only=True)
class RotationWriter:
    """Writes rotations whose operands have the lengths `sizes`."""

    writing: Writing
    sizes: Broadcasts

    def rotated(self, rotary: Rotary, x: ir.Value, extent: Extent, heads: int, dim: int) -> tuple[ir.Value, Extent]:
        """Queries or keys [B, S, heads*dim] after rotation, and their lengths then.

        They are rotated by one operator, or run by run if there is no operator for all of them.
        """
        pairs = rotary.pairs
        both = [[self._part(part) for part in one.parts] for one in (rotary.cos, rotary.sin)]
        beside = [
            Beside(value=value, extent=self.sizes.of_angles(part))
            for one, values in zip((rotary.cos, rotary.sin), both, strict=True)
            for part, value in zip(one.parts, values, strict=True)
            if not part.prefix
        ]
        x, extent = self.writing.widened(x, extent, beside, self.sizes, heads * dim)
        cos, sin = (
            self._angles(one, values, x, extent, fill)
            for one, values, fill in ((rotary.cos, both[0], 1.0), (rotary.sin, both[1], 0.0))
        )
        whole = Layout(dim, pairs.interleaved, pairs.runs)
        all_sorted = not pairs.sorted or 2 * pairs.count == dim
        if (
            not pairs.start
            and all_sorted
            and (has_operator(3, whole, x.dtype) or self.writing.functions.form in ("decomposed", "function"))
        ):
            return self._turned(x, (cos, sin), heads, dim, pairs), extent
        nodes = self.writing.nodes
        runs = [Pairs(interleaved=pairs.interleaved, runs=(run,), sorted=pairs.sorted) for run in pairs.runs]
        ends = [0, pairs.start, *(pairs.start + 2 * sum(pairs.runs[: at + 1]) for at in range(len(runs))), dim]
        split = nodes.shaped(x, 0, 0, heads, dim)
        parts, angle = list[ir.Value](), 0
        for run, (first, last) in zip((None, *runs, None), pairwise(ends), strict=True):
            if first == last:
                continue
            part = self._slice(split, 3, first, last)
            if run is not None:
                turns = tuple(self._slice(one, 2, angle, angle + run.count) for one in (cos, sin))
                flat = nodes.shaped(part, 0, 0, heads * (last - first))
                turned = self._turned(flat, (turns[0], turns[1]), heads, last - first, run)
                part, angle = nodes.shaped(turned, 0, 0, heads, last - first), angle + run.count
            parts.append(part)
        return nodes.shaped(nodes.one("Concat", *parts, axis=-1), 0, 0, heads * dim), extent

    def _turned(self, x: ir.Value, angles: tuple[ir.Value, ir.Value], heads: int, dim: int, pairs: Pairs) -> ir.Value:
        nodes = self.writing.nodes
        if pairs.sorted:
            split = nodes.shaped(x, 0, 0, heads, pairs.count, 2)
            halves = nodes.one("Transpose", split, perm=[0, 1, 2, 4, 3])
            x = nodes.shaped(halves, 0, 0, heads * dim)
        shape = ("batch", "seq", pairs.count)
        attributes = {"head_dim": dim, "interleaved": pairs.interleaved, "runs": pairs.runs}
        shaped: list[Shaped] = [(x, ("batch", "seq", heads * dim)), *((one, shape) for one in angles)]
        return self.writing.call(rotate, shaped, attributes)[0]

    def _slice(self, value: ir.Value, axis: int, first: int, last: int) -> ir.Value:
        """The elements `first` to `last` of an axis."""
        nodes = self.writing.nodes
        return nodes.one("Slice", value, *(nodes.constant([end]) for end in (first, last, axis)))

    def _angles(
        self, source: AngleSource, values: list[ir.Value], x: ir.Value, extent: Extent, fill: float
    ) -> ir.Value:
        """Cosines or sines [B, S, P] for queries or keys `x`."""
        parts = [self._fitted(part, value, x, extent, fill) for part, value in zip(source.parts, values, strict=True)]
        return parts[0] if len(parts) == 1 else self.writing.nodes.one("Concat", *parts, axis=-1)

    def _fitted(self, part: AngleSource, value: ir.Value, x: ir.Value, extent: Extent, fill: float) -> ir.Value:
        """Cosines or sines [B or 1, S or 1, P] with the rows and tokens of `x`; `fill` for tokens that have none."""
        nodes, own = self.writing.nodes, self.sizes.of_angles(part)
        one = nodes.constant([1])
        longer = not self.sizes.same(own.tokens, extent.tokens)
        tokens = nodes.length(x, 1) if longer else one
        if part.prefix:
            if longer:
                rest = nodes.one("Sub", tokens, nodes.constant([part.prefix]))
                value = nodes.one("Expand", value, nodes.one("Concat", one, rest, one, axis=0))
                longer = False
            pads = nodes.constant([0, part.prefix, 0, 0, 0, 0])
            assert value.dtype is not None
            value = nodes.one("Pad", value, pads, nodes.constant(fill, value.dtype))
        more = part.batch is None or not self.sizes.same(own.rows, extent.rows)
        if more or longer:
            lengths = [nodes.length(x, 0) if more else one]
            lengths += [tokens, one] if longer else [nodes.constant([1, 1])]
            value = nodes.one("Expand", value, nodes.one("Concat", *lengths, axis=0))
        return value

    def _part(self, source: AngleSource) -> ir.Value:
        """The cosines or sines [B or 1, S or 1, P] that one value has."""
        nodes, value = self.writing.nodes, self.writing.read(source.value)
        shape = self.sizes.shapes.actual(source.value)
        rank = len(shape)
        for place in reversed(source.corner):
            rank -= 1
            value = nodes.one("Gather", value, nodes.constant(place), axis=rank)
        kept = source.axes
        dropped = [axis for axis in range(rank) if axis not in kept]
        own = self.sizes.shapes.of(source.value)
        if not own[source.features].is_fixed or any(own[axis] != ONE for axis in dropped):
            raise LengthsApart("the layout of its cosines depends on lengths.")
        if dropped:
            value = nodes.one("Squeeze", value, nodes.constant(dropped))
        order = [sorted(kept).index(axis) for axis in kept]
        if order != sorted(order):
            value = nodes.one("Transpose", value, perm=order)
        first, step = source.indices[0], source.indices[1] - source.indices[0] if len(source.indices) > 1 else 1
        last = len(kept) - source.grid
        if source.grid > 1:
            value = nodes.shaped(value, *([] if source.batch is None else [0]), -1, shape[source.features])
        if source.indices == tuple(range(first, first + step * len(source.indices), step)) and step > 0:
            if (first, step, len(source.indices)) != (0, 1, shape[source.features]):
                ends = (first, source.indices[-1] + 1, last, step)
                value = nodes.one("Slice", value, *(nodes.constant([end]) for end in ends))
        else:
            value = nodes.one("Gather", value, nodes.constant(list(source.indices)), axis=last)
        if source.sign < 0:
            value = nodes.one("Neg", value)
        return nodes.one("Unsqueeze", value, nodes.constant([0])) if source.batch is None else value
