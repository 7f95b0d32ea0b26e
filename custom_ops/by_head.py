"""Logits computed one head after the other on ONNX Runtime.

Intermediate results stay in the processor's caches and take the memory of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any

import attrs

from posexport.custom_ops import ir
from posexport.custom_ops.operator import (
    ORT_FORMS,
    Body,
    Operator,
    Ops,
    constant,
    dtype_of,
    few_onnx,
    shape_of,
    size_of,
)

Make = Callable[..., "ir.Value"]
"""`make(op, N, *parts)` returns numbers of N heads, [B, N, ...], from parts [B|1, N|1, ...]. Parts may be None."""

Parts = Callable[[Ops], "Sequence[ir.Value | None]"]
"""Returns such parts."""


@attrs.frozen(kw_only=True)
class Span:
    """Consecutive queries, and the keys that one of them may see.

    There are `count` queries, beginning with `first`. Keys are those from `start` to below `end`. All are int64 [].
    `first` is negative if padding queries come first.
    """

    first: ir.Value
    count: ir.Value
    start: ir.Value
    end: ir.Value

    def lengths(self, op: Ops) -> tuple[ir.Value, ir.Value]:
        """Return the numbers of queries and of keys."""
        return self.count, op.Sub(self.end, self.start)

    def of_queries(self, op: Ops, value: ir.Value, axis: int) -> ir.Value:
        """Return the part of a value that belongs to these queries. `axis` is the axis of queries."""
        taken: ir.Value = op.Gather(
            value, op.Max(op.Range(self.first, op.Add(self.first, self.count), 1), 0), axis=axis
        )
        taken.shape = _resized(value, axis)  # onnx does not infer it here
        return taken

    def of_keys(self, op: Ops, value: ir.Value, axis: int) -> ir.Value:
        """Return the part of a value that belongs to these keys. `axis` is the axis of keys."""
        return slice_onnx(op, value, self.start, self.end, axis)

    def of(self, op: Ops, name: str, value: Any) -> Any:
        """Return the part of an input that belongs to these queries and keys, by the input's name.

        `q` or `q_...` is [B, S, ...], `k_...` is [B, T, ...]. A dataclass of such inputs is divided field by field. Any
        other input is returned unchanged.
        """
        if is_dataclass(value) and not isinstance(value, type):
            named = {each.name: getattr(value, each.name) for each in fields(value)}
            return replace(value, **{key: self.of(op, key, each) for key, each in named.items()})
        if name == "q" or name.startswith("q_"):
            return self.of_queries(op, value, 1)
        return self.of_keys(op, value, 1) if name.startswith("k_") else value


Spans = Callable[[Ops], Callable[[Ops, Span], "ByHead"]]


@attrs.frozen
class ByHead:
    """Logits [B, N, S, T] as `make(op, N, *parts(op))`.

    On ONNX Runtime, many queries are computed one head after the other, and a few queries by `few(op)`. `like` is [B,
    N, ...]. `queries` is S, int64 [1]. If logits as an output always use `few(op)`, `make` may support only one head.

    In attention, `of_product(op, product, q)` adds the logits to the fp32 product [1, 1, S, T] of queries and keys. In
    this product, hidden keys have the lowest number, and T is a multiple of `block`. q [1, 1, S, head_dim] is not
    scaled.

    `spans(op)` computes what all spans share. It returns `of_span(op, span)`, the logits of one span.
    """

    like: ir.Value
    queries: ir.Value
    parts: Parts
    make: Make
    few: Callable[[Ops], ir.Value]
    hide: Callable[[Ops, ir.Value], ByHead] | None = None
    of_product: Callable[[Ops, ir.Value, ir.Value], ir.Value] | None = None
    block: int = 1
    spans: Spans | None = None

    def under(self, op: Ops, hidden: ir.Value | None) -> ByHead:
        """Return the logits plus a mask [B|1, 1, S, T]. Uses `hide(op, hidden)` if all rows have the same mask."""
        if hidden is None:
            return self
        if self.hide is not None and shape_of(hidden)[0] == 1:
            return self.hide(op, hidden)

        def make(op: Ops, count: int, hidden: ir.Value, *parts: ir.Value) -> ir.Value:
            return op.Add(self.make(op, count, *parts), hidden)

        return attrs.evolve(self, parts=lambda op: [hidden, *self.parts(op)], make=make)

    @property
    def num_heads(self) -> int:
        """N."""
        return size_of(self.like, 1)

    def onnx(self, op: Ops, ort: bool) -> ir.Value:
        """Return the logits."""
        if not ort:
            return self.make(op, self.num_heads, *self.parts(op))
        batch = op.Shape(self.like, start=0, end=1)

        def many(op: Ops) -> ir.Value:
            return each_head_onnx(op, batch, self.num_heads, self.parts(op), self.make)

        out = few_onnx(op, True, self.queries, self.few, many)
        # here and not in a branch, whose result ONNX Runtime would copy
        return op.Reshape(out, op.Concat(batch, [self.num_heads], self.queries, [-1], axis=0))


def by_head(
    op: Ops,
    like: ir.Value,
    parts: Sequence[ir.Value | None] | Parts,
    make: Make,
    few: Callable[[Ops], ir.Value] | None = None,
    queries: ir.Value | None = None,
) -> ByHead:
    """Return logits by head. By default, `few` is `make` for all heads, and `queries` is a size of `like`."""
    made = parts if callable(parts) else lambda op: parts
    queries = op.Shape(like, start=2, end=3) if queries is None else queries
    return ByHead(like, queries, made, make, few or (lambda op: make(op, size_of(like, 1), *made(op))))


def count_of_blocks(op: Ops, count: ir.Value, block: ir.Value | int) -> ir.Value:
    """Return how many blocks of size `block` hold `count`, int64 []."""
    less = block - 1 if isinstance(block, int) else op.Sub(block, 1)
    return op.Div(op.Add(count, less), block)


def blocks_of(op: Ops, count: ir.Value, block: int) -> ir.Value:
    """Return a number, int64 [], rounded up to a multiple of `block`."""
    return op.Mul(count_of_blocks(op, count, block), block)


def padded_onnx(op: Ops, value: ir.Value, total: ir.Value, axis: int, number: float) -> ir.Value:
    """Append `number` to an axis of a value until its size is `total`."""
    spare = op.Sub(op.Unsqueeze(total, [0]), op.Shape(value, start=axis, end=axis + 1))
    padded: ir.Value = op.Pad(value, op.Concat([0], spare, axis=0), constant(op, number, dtype_of(value)), [axis])
    padded.shape = _resized(value, axis)  # onnx does not infer it here
    return padded


def slice_onnx(op: Ops, value: ir.Value, start: ir.Value, end: ir.Value, axis: int) -> ir.Value:
    """Return the part of a value from `start` to below `end`, int64 [], along an axis."""
    taken: ir.Value = op.Slice(value, op.Unsqueeze(start, [0]), op.Unsqueeze(end, [0]), [axis])
    taken.shape = _resized(value, axis)  # onnx does not infer it here
    return taken


def _resized(value: ir.Value, axis: int) -> ir.Shape:
    """Return the shape of a value with an unknown size of one axis."""
    return ir.Shape([None if place == axis else size for place, size in enumerate(shape_of(value))])


def _has_sides(value: Any) -> bool:
    """Whether a value is a dataclass with fields of queries and keys, such as Positions."""
    return is_dataclass(value) and any(each.name.startswith("q_") for each in fields(value))


def add_by_head(operator: Operator[..., Any], body: Callable[..., ByHead | ir.Value], scans: bool = True) -> None:
    """Give an operator of logits its bodies, from `body(..., ort=...)` for ONNX Runtime or for all targets.

    `body` may return the logits of all heads if the logits of one head cannot be computed separately. Logits can be
    computed for a span if they are made from two sides, such as Positions, and not from the keys themselves. Without
    `scans`, logits as an output are `few(op)` of all heads at once, on ONNX Runtime too.
    """

    def written(ort: bool) -> Body:
        @wraps(body)
        def write(*args: Any) -> ir.Value:
            made = body(*args, ort=ort)
            if not isinstance(made, ByHead):
                return made
            return made.onnx(args[0], ort) if scans else made.few(args[0])

        return write

    names = [*signature(body).parameters][1:]

    @wraps(body)
    def joined(op: Ops, *args: Any) -> ByHead | ir.Value:
        made = body(op, *args, ort=True)
        if not isinstance(made, ByHead) or made.spans is not None or "k" in names or not any(map(_has_sides, args)):
            return made

        def of_span(op: Ops, span: Span) -> ByHead:
            own = (span.of(op, name, arg) for name, arg in zip(names, args, strict=False))
            logits = body(op, *own, ort=True)
            assert isinstance(logits, ByHead)  # like the logits of all queries
            return logits

        return attrs.evolve(made, spans=lambda _: of_span)

    operator.onnx(written(False))
    operator.form(*ORT_FORMS)(written(True))
    operator.logits(joined)


def each_head_onnx(op: Ops, batch: ir.Value, num_heads: int, parts: Sequence[ir.Value | None], make: Make) -> ir.Value:
    """Return `make(op, 1, *parts)`, [1, 1, ...], of one head after the other by a Scan: [B N, 1, 1, ...].

    `batch` is B, int64 [1].
    """
    shared = [part is None or list(shape_of(part)[:2]) == [1, 1] for part in parts]
    # reshaped here, because in the body of a Scan ONNX Runtime would copy all of it
    flat = [
        part if part is None or alike else op.Reshape(part, op.Concat([-1], op.Shape(part, start=2), axis=0))
        for part, alike in zip(parts, shared, strict=True)
    ]

    def one(inner: Ops, number: ir.Value) -> ir.Value:
        def taken(part: ir.Value, rows: ir.Value) -> ir.Value:
            count = inner.Squeeze(inner.Shape(rows, start=0, end=1))
            if shape_of(part)[1] == num_heads:  # B N, or N for all rows
                at = inner.Mod(number, count)
            else:  # B, or 1
                at = inner.Min(inner.Div(number, num_heads), inner.Sub(count, 1))
            return inner.Unsqueeze(inner.Gather(rows, at, axis=0), [0, 1])

        own = (
            rows if part is None or rows is None or alike else taken(part, rows)
            for part, rows, alike in zip(parts, flat, shared, strict=True)
        )
        return make(inner, 1, *own)

    return scan_onnx(op, op.Squeeze(op.Mul(batch, num_heads)), one)


def each_row_onnx(
    op: Ops, num_heads: int, values: Sequence[ir.Value], parts: Sequence[ir.Value | None], make: Make
) -> ir.Value:
    """Return `make(op, *values, *parts)` of one row and one head after the other by two Scans, [B, N, ...].

    Values [B, N, ...] are passed without the first two dimensions. In parts, these dimensions are 1.

    A Scan does not copy what it divides, nor what its body reads from outside. A large part that all heads share is
    therefore copied at most once for each row.
    """
    of_rows, of_heads = ([part is not None and shape_of(part)[axis] != 1 for part in parts] for axis in (0, 1))
    # reshaped here, because in the body of a Scan ONNX Runtime would copy all of it
    before = [
        part if part is None or not (rows or heads) else _opened_onnx(op, part, rows, heads)
        for part, rows, heads in zip(parts, of_rows, of_heads, strict=True)
    ]
    last = [
        op.Sub(op.Squeeze(op.Shape(part, start=0, end=1)), 1) if part is not None and rows else None
        for part, rows in zip(before, of_rows, strict=True)
    ]

    def one_row(op: Ops, row: ir.Value, *values: ir.Value) -> ir.Value:
        here = [
            part if part is None or end is None else op.Gather(part, op.Min(row, end), axis=0)
            for part, end in zip(before, last, strict=True)
        ]

        def one(op: Ops, _: ir.Value, *divided: ir.Value) -> ir.Value:
            by_head = iter(divided[len(values) :])
            own = [next(by_head) if heads else part for part, heads in zip(here, of_heads, strict=True)]
            return make(op, *divided[: len(values)], *own)

        sequences = [part for part, heads in zip(here, of_heads, strict=True) if part is not None and heads]
        return scan_onnx(op, op.Constant(value_int=num_heads), one, [*values, *sequences])

    return scan_onnx(op, op.Squeeze(op.Shape(values[0], start=0, end=1)), one_row, values)


def _opened_onnx(op: Ops, part: ir.Value, rows: bool, heads: bool) -> ir.Value:
    """Reshape [B|1, N|1, ...] to [(B,) (N,) 1, 1, ...]."""
    front = [*([0] if rows else []), *([size_of(part, 1)] if heads else []), 1, 1]
    return op.Reshape(part, op.Concat(front, op.Shape(part, start=2), axis=0))


def scan_onnx(op: Ops, count: ir.Value, make: Callable[..., ir.Value], sequences: Sequence[ir.Value] = ()) -> ir.Value:
    """Return `make(op, number, *values)` for the numbers from 0 to below `count`, int64 []: [count, ...].

    `values` are one value of each sequence [count, ...].
    """
    number = ir.Value(name="number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
    values = [
        ir.Value(name=f"value_{index}", type=sequence.type, shape=ir.Shape(shape_of(sequence)[1:]))
        for index, sequence in enumerate(sequences)
    ]
    body = op.builder.subgraph(make, [number, *values], [ir.Value(name="made")], name="body")
    return op.Scan(op.Range(0, count, 1), *sequences, body=body, num_scan_inputs=1 + len(sequences))
