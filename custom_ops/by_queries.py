"""Logits with work that all heads share, computed for some queries at a time on ONNX Runtime.

Intermediate results take the memory of these queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from posexport.custom_ops import ir
from posexport.custom_ops.by_head import Span, blocks_of, padded_onnx, scan_onnx
from posexport.custom_ops.operator import Ops, shape_of

QUERIES = 16
"""The number of queries whose logits are computed at a time."""


@attrs.frozen
class ByQueries:
    """Logits [N, QUERIES, T] as `make(op, part)`, from parts [QUERIES, T] of `numbers(op)` [B, S, T].

    `few(op)` returns all logits, [B, N, S, T], for a few queries. `spans` as in ByHead.
    """

    numbers: Callable[[Ops], ir.Value]
    make: Callable[[Ops, ir.Value], ir.Value]
    few: Callable[[Ops], ir.Value]
    spans: Callable[[Ops], Callable[[Ops, Span], ByQueries]] | None = None


def logits_onnx(op: Ops, logits: ByQueries) -> ir.Value:
    """Return the logits of all queries, [B, N, S, T]."""
    numbers = logits.numbers(op)
    batch, queries, keys = (op.Shape(numbers, start=axis, end=axis + 1) for axis in range(3))
    divided = _divided_onnx(op, numbers, 1)
    blocks = op.Shape(divided, start=1, end=2)
    parts = op.Reshape(divided, op.Concat([-1, QUERIES], keys, axis=0))
    parts.shape = ir.Shape([None, QUERIES, None])
    made = scan_onnx(op, op.Squeeze(op.Mul(batch, blocks)), lambda op, _, part: logits.make(op, part), [parts])
    # [B blocks, N, QUERIES, T]: rows of T numbers, in the order of batch, head and query
    num_heads, steps = op.Shape(made, start=1, end=2), op.Range(0, op.Squeeze(queries), 1)
    block = op.Add(op.Mul(op.Unsqueeze(op.Range(0, op.Squeeze(batch), 1), [1, 2]), blocks), op.Div(steps, QUERIES))
    head = op.Unsqueeze(op.Range(0, op.Squeeze(num_heads), 1), [1])
    index = op.Add(op.Mul(op.Add(op.Mul(block, num_heads), head), QUERIES), op.Mod(steps, QUERIES))
    return op.Gather(op.Reshape(made, op.Concat([-1], keys, axis=0)), index, axis=0)


Some = Callable[..., "ir.Value"]
"""`some(op, q, k, v, *parts)` returns [N, QUERIES, width] for queries [N, QUERIES, head_dim].

k [N, head_dim, T] and v [N, T, width] are all keys and values of the row. Parts are [QUERIES|1, T], or None.
"""


def some_queries_onnx(
    op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, parts: Sequence[ir.Value | None], some: Some
) -> ir.Value:
    """Return `some` of each row, QUERIES queries at a time, by two Scans: [B, N, S, width].

    q [B, N, S, head_dim], k [B, N, T, head_dim], v [B, N, T, width], parts [B|1, S|1, T].
    """
    of_rows, of_queries = ([part is not None and shape_of(part)[axis] != 1 for part in parts] for axis in (0, 1))
    # divided here, because in the body of a Scan ONNX Runtime would copy all of it
    before = [
        _divided_onnx(op, part, 1) if part is not None and queries else part
        for part, queries in zip(parts, of_queries, strict=True)
    ]
    before = [
        part if part is None or rows else op.Squeeze(part, [0]) for part, rows in zip(before, of_rows, strict=True)
    ]

    def one_row(op: Ops, _: ir.Value, q: ir.Value, k: ir.Value, v: ir.Value, *own: ir.Value) -> ir.Value:
        by_row, turned = iter(own), op.Transpose(k, perm=[0, 2, 1])
        here = [next(by_row) if rows else part for part, rows in zip(before, of_rows, strict=True)]

        def one(op: Ops, _: ir.Value, q: ir.Value, *own: ir.Value) -> ir.Value:
            by_block = iter(own)
            taken = (next(by_block) if each else part for part, each in zip(here, of_queries, strict=True))
            return some(op, q, turned, v, *taken)

        blocks = [part for part, each in zip(here, of_queries, strict=True) if part is not None and each]
        return scan_onnx(op, op.Squeeze(op.Shape(q, start=0, end=1)), one, [q, *blocks])

    queries, rows = op.Shape(q, start=2, end=3), op.Squeeze(op.Shape(q, start=0, end=1))
    q = op.Transpose(_divided_onnx(op, q, 2), perm=[0, 2, 1, 3, 4])
    by_rows = [part for part, each in zip(before, of_rows, strict=True) if part is not None and each]
    blocks = scan_onnx(op, rows, one_row, [q, k, v, *by_rows])  # [B, blocks, N, QUERIES, width]
    made = op.Transpose(blocks, perm=[0, 2, 1, 3, 4])
    made = op.Reshape(made, op.Concat([0, 0, -1], op.Shape(v, start=3), axis=0))
    return op.Slice(made, [0], queries, [2])


def _divided_onnx(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    """Divide [..., S, width] into [..., blocks, QUERIES, width], padded with zeros. `axis` is the axis of S."""
    queries, sizes = op.Squeeze(op.Shape(value, start=axis, end=axis + 1)), list(shape_of(value))
    padded = padded_onnx(op, value, blocks_of(op, queries, QUERIES), axis, 0.0)
    before, behind = op.Shape(padded, start=0, end=axis), op.Shape(padded, start=axis + 1)
    made = op.Reshape(padded, op.Concat(before, [-1, QUERIES], behind, axis=0))
    made.shape = ir.Shape([*sizes[:axis], None, QUERIES, *sizes[axis + 1 :]])
    return made
