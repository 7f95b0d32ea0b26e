"""The lengths of the operands of an attention, on all inputs, and which of them may be broadcast at run time.

An axis of one element is broadcast to any other. If no name says that two lengths are equal, one of them may be 1. What
operators need with as many rows or tokens as their queries is then expanded (posexport.rewrite.site).
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import onnx_ir as ir

from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.layouts import Layout
from posexport.graphs.attention.rotary import AngleSource, Rotary
from posexport.graphs.symbolic_shapes import SymbolicShapes
from posexport.graphs.symbolic_sizes import ONE, Size, product


class LengthsApart(RequestError):
    """An attention whose operands may have other lengths than the form's operators take."""


@attrs.frozen(kw_only=True)
class Extent:
    """The lengths of rows and tokens of a value [B, S, ...]."""

    rows: Size
    tokens: Size


@attrs.frozen(kw_only=True)
class TermExtent:
    """The lengths of a term [B or 1, N or 1, S or 1, T or 1]."""

    rows: Size = ONE
    heads: Size = ONE
    tokens: Size = ONE
    keys: Size = ONE


class Broadcasts:
    """The lengths of one attention: `q`, `k` and `v` as they enter the products, rotated; `past` of the cached keys.

    What a graph can't run without is assumed: new keys have the rows of the cache that they are joined with, and there
    are as many keys as values.
    """

    def __init__(
        self, shapes: SymbolicShapes, attention: Attention, totals: Iterable[Size] = (), pasts: Iterable[Size] = ()
    ) -> None:
        """`totals` are the lengths of masks of all tokens, `pasts` those of all caches.

        Where they are used with keys they are as long as these: such inputs have that purpose.
        """
        self.shapes = shapes
        self._same: dict[Size, Size] = {}
        q, k, v = (self.of_source(side) for side in (attention.q, attention.k, attention.v))
        key_past, value_past = (self._past(side) for side in (attention.k, attention.v))
        self.past = Size(0) if key_past is None else key_past.tokens
        if value_past is not None:
            self._assume(v.rows, value_past.rows)
        self._assume_lengths(k.tokens, key_past, [*totals], [*pasts])
        turned_k = self.turned(k, attention.k.rotary)
        if key_past is not None:
            self._assume(turned_k.rows, key_past.rows)
        if (key_past is None) == (value_past is None) and self.same(
            k.tokens, v.tokens
        ):  # else one key would weight several values
            self._assume(turned_k.tokens, v.tokens)
        self.q, self.k, self.v = self.turned(q, attention.q.rotary), self._known(turned_k), self._known(v)

    def find(self, size: Size) -> Size:
        """The size that represents all sizes that are equal to this one."""
        while size in self._same:
            size = self._same[size]
        return size

    def same(self, one: Size, other: Size) -> bool:
        """Whether two lengths are equal on all inputs."""
        return self.find(one) == self.find(other)

    def joint(self, *sizes: Size) -> Size:
        """The length of an axis after these are broadcast: the one that isn't 1."""
        found = {self.find(size) for size in sizes} - {ONE}
        if len(found) < 2:
            return next(iter(found), ONE)
        fixed = [size for size in found if size.is_fixed]
        if fixed:
            return fixed[0]
        inner = {part for size in found for part in self._parts(size)}
        found = {size for size in found if size not in inner}
        found = {size for size in found if not any(self._is_below(size, other) for other in found)}
        return self.find(self.shapes.symbols.broadcast(found)) if len(found) > 1 else next(iter(found))

    def of_source(self, side: Side) -> Extent:
        """The lengths of a source, before its rotation."""
        return self._laid_out(side.source.value, side.source.layout, side.source.heads)

    def of_rotated(self, rotary: Rotary, heads: int) -> Extent:
        """The lengths of the input of a rotation."""
        return self._laid_out(rotary.source, rotary.layout, heads)

    def of_angles(self, angles: AngleSource) -> Extent:
        """The lengths of cosines or sines, including the tokens before them that have none."""
        sizes = self.shapes.of(angles.value)
        grid = product(sizes[angles.tokens : angles.tokens + angles.grid])
        tokens = self.shapes.symbols.total([grid, Size(angles.prefix)])
        rows = ONE if angles.batch is None else sizes[angles.batch]
        return Extent(rows=self.find(rows), tokens=self.find(tokens))

    def turned(self, x: Extent, rotary: Rotary | None) -> Extent:
        """The lengths of the result of a rotation of `x`."""
        if rotary is None:
            return self._known(x)
        angles = [self.of_angles(part) for one in (rotary.cos, rotary.sin) for part in one.parts]
        return Extent(
            rows=self.joint(x.rows, *(one.rows for one in angles)),
            tokens=self.joint(x.tokens, *(one.tokens for one in angles)),
        )

    def keys(self) -> Size:
        """The number of all keys."""
        return self.find(self.shapes.symbols.total([self.past, self.k.tokens]))

    def together(self, terms: Iterable[TermExtent]) -> TermExtent:
        """The lengths of a sum."""
        found = [*terms]
        names = [field.name for field in attrs.fields(TermExtent)]
        return TermExtent(**{name: self.joint(*(getattr(one, name) for one in found)) for name in names})

    def _is_below(self, one: Size, other: Size) -> bool:
        """Whether a length is never more than another, and may be less: then the other one is the length after
        broadcasting."""
        symbols = self.shapes.symbols
        names = [other, *(size for size in self._same if self.find(size) == other)]
        return any(symbols.is_at_most(one, name) for name in names) and not symbols.is_at_most(other, one)

    def _parts(self, size: Size) -> set[Size]:
        """The lengths that are broadcast to this one."""
        parts = {self.find(part) for part in self.shapes.symbols.broadcast_of(size)}
        return parts.union(*(self._parts(part) for part in parts))

    def _known(self, extent: Extent) -> Extent:
        return Extent(rows=self.find(extent.rows), tokens=self.find(extent.tokens))

    def _laid_out(self, value: ir.Value, layout: Layout, heads: int) -> Extent:
        sizes = dict(zip(layout.groups, self.shapes.of(value), strict=True))
        rows = sizes.get("b")
        if rows is None:
            rows = self.shapes.symbols.quotient(sizes["bh"], Size(heads))
        if rows is None:
            rows = self.shapes.symbols.other("rows", value.name)
        return Extent(rows=self.find(rows), tokens=self.find(sizes["s"]))

    def _assume_lengths(self, tokens: Size, past: Extent | None, totals: list[Size], pasts: list[Size]) -> None:
        """Assume that masks are as long as `tokens` of the keys and those of their cache, which may have been joined
        before."""
        symbols = self.shapes.symbols
        if past is None:
            joined = [(one, symbols.difference(tokens, one)) for one in pasts]
            found = [(one, new) for one, new in joined if (symbols.least(new) or 0) > 0]
        else:
            found = [(past.tokens, tokens)]
        for own, new in found[:1]:
            keys = symbols.total([own, new])
            for one in pasts:
                self._assume(symbols.total([one, new]), keys)
            for total in totals:
                self._assume(total, keys)
                for one in (own, *pasts):
                    self._assume(symbols.difference(total, one), new)

    def _past(self, side: Side) -> Extent | None:
        if side.cache is None:
            return None
        rows, _, tokens, _ = self.shapes.of(side.cache.past)
        return Extent(rows=rows, tokens=tokens)

    def _assume(self, one: Size, other: Size) -> None:
        one, other = self.find(one), self.find(other)
        if one.is_fixed or one in self._parts(other):
            one, other = other, one
        if one != other and not one.is_fixed:
            self._same[one] = other
