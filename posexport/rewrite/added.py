"""Writes what is added to the scores of an attention as one bias: all masks and biases of the graph together."""

from __future__ import annotations

import math

import attrs
import onnx_ir as ir

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.layouts import has_groups
from posexport.graphs.attention.score_axes import ScoreAxes
from posexport.graphs.attention.scores import Term
from posexport.graphs.symbolic_sizes import ONE, Size
from posexport.rewrite.broadcasts import Broadcasts, Extent, LengthsApart, TermExtent
from posexport.rewrite.writing import Writing, times

LOWEST = -2.9e38
"""The least bias: finite, so that a row whose keys are all hidden doesn't become NaN.

It is above the logit that operators give to free places of a buffer (posexport.custom_ops.attention_forms.LOWEST): a
query that sees no key weighs hidden keys, and nothing that a buffer happens to contain.
"""

Added = tuple["ir.Value", TermExtent]
"""A term or a sum of terms, with its lengths."""


@attrs.frozen(kw_only=True)
class BiasWriter:
    """Writes the terms of an attention whose operands have the lengths `sizes`, in the dtype `wide`."""

    writing: Writing
    sizes: Broadcasts
    wide: ir.DataType

    def total(self, attention: Attention, q: ir.Value) -> Added | None:
        """All terms together [B or 1, N or 1, S or 1, T or 1], none lower than LOWEST.

        `q` [B, S, ...] are the queries as the graph has them.
        """
        found = self._sum(attention, q)
        if found is None:
            return None
        nodes, (value, extent) = self.writing.nodes, found
        return nodes.one("Max", value, nodes.constant(LOWEST, self.wide)), extent

    def sees_key(self, attention: Attention, q: ir.Value) -> tuple[ir.Value, bool] | None:
        """Whether a query sees a key: [B or 1, S or 1, 1]; or [B or 1, S or 1, N, 1] and True if heads differ.

        None if the graph gives no zeros to a query that sees no key. `q` is that of `total`.
        """
        nodes, guard = self.writing.nodes, attention.guard
        found = None if guard is None else self._sum(attention, q)
        if guard is None or found is None:
            return None
        value, extent = found
        largest = nodes.one("ReduceMax", value, nodes.constant([3]), keepdims=1)
        sees = nodes.one("Greater", largest, nodes.constant(guard, self.wide), dtype=ir.DataType.BOOL)
        if extent.heads == ONE:
            return nodes.one("Squeeze", sees, nodes.constant([1])), False
        return nodes.one("Transpose", sees, perm=[0, 2, 1, 3]), True

    def _sum(self, attention: Attention, q: ir.Value) -> Added | None:
        """All terms together.

        Where a mask hides a key, nothing that is added before the mask has an effect: it may be NaN there.
        """
        nodes, found, extents = self.writing.nodes, None, list[TermExtent]()
        deepest = min((term.fill for term in attention.terms if term.seen_if is not None), default=-math.inf)
        for term in reversed(attention.terms):  # from the product to the softmax
            value, extent = self._term(term, attention.num_heads, q)
            extents.append(extent)
            if term.seen_if is not None:
                value = nodes.cast(value, ir.DataType.BOOL)
                seen = nodes.constant(0.0, self.wide) if found is None else found
                is_told_apart = attention.guard is not None and term.fill == -math.inf
                # a query that sees no key attends to the keys with the larger logit
                lowest = LOWEST if term.fill == deepest else LOWEST / 2
                hidden = nodes.constant(-math.inf if is_told_apart else lowest, self.wide)
                choices = [seen, hidden] if term.seen_if else [hidden, seen]
                found = nodes.one("Where", value, *choices, dtype=self.wide)
            else:
                found = value if found is None else nodes.one("Add", found, value)
        return None if found is None else (found, self.sizes.together(extents))

    def fitted(self, added: Added, q: ir.Value, extent: Extent, keys: ir.Value | None) -> ir.Value:
        """The same with as many queries as `q` and, unless None, with `keys` [1], if it may have other numbers of
        them."""
        nodes, (value, own) = self.writing.nodes, added
        one = nodes.constant([1])
        if self.sizes.same(own.tokens, extent.tokens) and keys is None:
            return value
        seq = one if self.sizes.same(own.tokens, extent.tokens) else nodes.length(q, 1)
        return nodes.one("Expand", value, nodes.one("Concat", one, one, seq, keys or one, axis=0))

    def _term(self, term: Term, heads: int, q: ir.Value) -> Added:
        nodes, value = self.writing.nodes, self.writing.read(term.value)
        if term.seen_if is None:
            value = nodes.cast(value, self.wide)
            if term.factor != 1.0:
                value = times(nodes, value, term.factor)
        value, extent = self._four_axes(value, term, heads, q)
        if extent.heads.is_fixed:
            return value, extent
        if heads == 1:
            raise LengthsApart("the number of heads of its mask or bias depends on lengths.")
        # it meets the heads of the scores: it has as many, or one
        value = nodes.one("Expand", value, nodes.constant([1, heads, 1, 1]))
        return value, attrs.evolve(extent, heads=Size(heads))

    def _four_axes(self, value: ir.Value, term: Term, heads: int, q: ir.Value) -> Added:
        """A term with the axes [B or 1, N or 1, S or 1, T or 1]."""
        nodes, shapes = self.writing.nodes, self.sizes.shapes
        own, level = shapes.of(term.value), shapes.actual(term.level)
        if term.axes:
            return self._folded(value, own, term.axes, heads)
        on_grid = self._of_grid(value, own, shapes.of(term.level), heads)
        if on_grid is not None:
            return on_grid
        if len(level) == 3 and len(own) == 3:  # rows and heads are one axis
            value = nodes.one("Unsqueeze", value, nodes.constant([1]))
            if own[0] == ONE:
                return value, _extent(ONE, *own)
            rows = shapes.symbols.quotient(own[0], Size(heads))
            if rows is None:
                raise LengthsApart("the number of rows of its mask or bias depends on lengths.")
            return nodes.shaped(value, -1, heads, 0, 0), _extent(rows, Size(heads), *own[1:])
        grouped = has_groups(level, heads)
        rank = 5 if len(level) == 5 and not (grouped and len(own) < 3) else 4
        missing = rank - len(own)
        if missing:
            value = nodes.one("Unsqueeze", value, nodes.constant(list(range(missing))))
        own = (*[ONE] * missing, *own)
        if rank == 5 and grouped:  # heads are two axes, those of keys and groups
            if own[1:3] == (ONE, ONE):
                return nodes.one("Squeeze", value, nodes.constant([1])), _extent(own[0], *own[2:])
            value = nodes.one("Expand", value, nodes.constant([1, *level[1:3], 1, 1]))
            last = nodes.length(value, 3, 5)
            parts = (nodes.length(value, 0), nodes.constant([heads]), last)
            shape = nodes.one("Concat", *parts, axis=0)
            return nodes.one("Reshape", value, shape), _extent(own[0], Size(heads), *own[3:])
        if rank == 5:
            return self._of_windows(value, own, term, q)
        return value, _extent(*own)

    def _folded(self, value: ir.Value, own: tuple[Size, ...], axes: ScoreAxes, heads: int) -> Added:
        """A term of scores whose heads aren't a separate axis before their queries."""
        nodes, symbols = self.writing.nodes, self.sizes.shapes.symbols
        missing = len(axes) - len(own)
        if missing:
            value = nodes.one("Unsqueeze", value, nodes.constant([*range(missing)]))
        letters, sizes = "", dict[str, Size]()
        for group, size in zip(axes, (*[ONE] * missing, *own), strict=True):
            at = nodes.constant([len(letters)])
            if group == "":
                value = nodes.one("Squeeze", value, at)
            elif len(group) == 1 or size == ONE:
                sizes |= dict.fromkeys(group, size)
                value = value if len(group) == 1 else nodes.one("Unsqueeze", value, at)
            else:
                tokens = symbols.quotient(size, Size(heads))
                if tokens is None:
                    raise LengthsApart("the number of queries of its mask or bias depends on lengths.")
                split = {"h": nodes.constant([heads]), "s": nodes.constant([-1])}
                kept = [nodes.length(value, axis) for axis in range(len(letters))]
                kept += [*(split[letter] for letter in group), nodes.length(value, len(letters) + 1)]
                value = nodes.one("Reshape", value, nodes.one("Concat", *kept, axis=0))
                sizes |= {"h": Size(heads), "s": tokens}
            letters += group
        if letters != "bhst":
            value = nodes.one("Transpose", value, perm=[letters.index(letter) for letter in "bhst"])
        return value, _extent(*(sizes[letter] for letter in "bhst"))

    def _of_grid(self, value: ir.Value, own: tuple[Size, ...], level: tuple[Size, ...], heads: int) -> Added | None:
        """A term of scores whose queries and keys are on grids of fixed sides; None for others.

        These scores are [B*N, height, width, height, width] or [B, N, height, width, height, width], as in SAM and
        MViT.
        """
        nodes, (queries, keys) = self.writing.nodes, (self.sizes.q.tokens, self.sizes.keys())
        if len(level) < 5 or level[-2:] == (queries, keys) or not (queries.is_fixed and keys.is_fixed):
            return None
        for first in (1, 2):
            sides = [size.number for size in level[first:] if size.is_fixed]
            if len(sides) < len(level) - first or (first == 2 and level[1] != Size(heads)):
                continue
            ends = [at for at in range(1, len(sides)) if math.prod(sides[:at]) == queries.number]
            if not any(math.prod(sides[at:]) == keys.number for at in ends):
                continue
            missing = len(level) - len(own)
            if missing:
                value = nodes.one("Unsqueeze", value, nodes.constant([*range(missing)]))
            own = (*[ONE] * missing, *own)
            rows = own[0] if first == 2 or own[0] == ONE else self.sizes.shapes.symbols.quotient(own[0], Size(heads))
            if rows is None:
                raise LengthsApart("the number of rows of its mask or bias depends on lengths.")
            of_heads = own[1] if first == 2 else ONE if own[0] == ONE else Size(heads)
            whole = nodes.one("Expand", value, nodes.constant([*[1] * first, *sides]))
            result = nodes.shaped(whole, -1, of_heads.number, queries.number, keys.number)
            return result, _extent(rows, of_heads, queries, keys)
        return None

    def _of_windows(self, value: ir.Value, own: tuple[Size, ...], term: Term, q: ir.Value) -> Added:
        """A term [images or 1, windows or 1, ...] of scores whose rows are two axes, such as images and windows."""
        nodes, sizes = self.writing.nodes, self.sizes
        windows = sizes.shapes.of(term.level)[1]
        images = sizes.shapes.symbols.quotient(sizes.q.rows, windows)
        whole = images is not None and all(
            one in (ONE, most) for one, most in zip(own[:2], (images, windows), strict=True)
        )
        if not whole:
            raise LengthsApart("the number of rows of its mask or bias depends on lengths.")
        if own[:2] == (ONE, ONE):
            return nodes.one("Squeeze", value, nodes.constant([1])), _extent(ONE, *own[2:])
        # one of the two axes has its whole length here, or a known number
        at = 1 if windows.is_fixed or own[1] == windows else 0
        length = nodes.constant([windows.number]) if windows.is_fixed else nodes.length(value, at)
        other = nodes.one("Div", nodes.length(q, 0), nodes.one("Max", length, nodes.constant([1])))
        target = nodes.one("Concat", *([other, length] if at else [length, other]), nodes.constant([1, 1, 1]), axis=0)
        merged = nodes.one("Concat", nodes.constant([-1]), nodes.length(value, 2, 5), axis=0)
        return nodes.one("Reshape", nodes.one("Expand", value, target), merged), _extent(sizes.q.rows, *own[2:])


def _extent(*sizes: Size) -> TermExtent:
    rows, heads, tokens, keys = sizes
    return TermExtent(rows=rows, heads=heads, tokens=tokens, keys=keys)
