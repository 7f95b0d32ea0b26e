"""Logits of one head after the other, on ONNX Runtime: what lies between its operators stays in the processor's caches,
and takes the memory of one head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posexport.custom_ops import ir
from posexport.custom_ops.operator import Ops, few_onnx, shape_of, size_of

Make = Callable[..., "ir.Value"]
"""`make(op, N, *parts)`: numbers of N heads, [B, N, ...], from parts [B|1, N|1, ...], which may be None."""

Parts = Callable[[Ops], "Sequence[ir.Value | None]"]
"""What makes such parts."""


def by_head_onnx(
    op: Ops,
    like: ir.Value,
    parts: Sequence[ir.Value | None] | Parts,
    make: Make,
    ort: bool,
    few: Callable[[Ops], ir.Value] | None = None,
) -> ir.Value:
    """`make(op, N, *parts)`, [B, N, S, T]; on ONNX Runtime of one head after the other for many queries, and `few(op)`,
    by default the same, for a few. `like` is [B, N, S, ...]; `parts(op)` makes parts where they are needed."""
    num_heads, made = size_of(like, 1), parts if callable(parts) else lambda op: parts
    if not ort:
        return make(op, num_heads, *made(op))
    batch, queries = (op.Shape(like, start=axis, end=axis + 1) for axis in (0, 2))

    def many(op: Ops) -> ir.Value:
        return each_head_onnx(op, batch, num_heads, made(op), make)

    out = few_onnx(op, True, queries, few or (lambda op: make(op, num_heads, *made(op))), many)
    # here, not in a branch, whose result ONNX Runtime would copy
    return op.Reshape(out, op.Concat(batch, [num_heads], queries, [-1], axis=0))


def each_head_onnx(op: Ops, batch: ir.Value, num_heads: int, parts: Sequence[ir.Value | None], make: Make) -> ir.Value:
    """`make(op, 1, *parts)`, [1, 1, ...], of one head after the other by a Scan: [B N, 1, 1, ...]; `batch` is B, int64
    [1]."""
    shared = [part is None or list(shape_of(part)[:2]) == [1, 1] for part in parts]
    # reshaped here: in the body of a Scan, ONNX Runtime would copy all of it
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


def scan_onnx(op: Ops, count: ir.Value, make: Callable[[Ops, ir.Value], ir.Value]) -> ir.Value:
    """`make(op, number)` of the numbers from 0 to below `count`, both int64 [], one after the other: [count, ...]."""
    number = ir.Value(name="number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
    body = op.builder.subgraph(make, [number], [ir.Value(name="made")], name="body")
    return op.Scan(op.Range(0, count, 1), body=body, num_scan_inputs=1)
