"""Scores of keys for one query on ONNX Runtime, which read a cache as it came: what writes a key into a buffer may copy
all of it, unless that is attention's own operator."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from posexport.custom_ops import ir
from posexport.custom_ops.operator import Ops, few_onnx


@attrs.frozen
class OneKey:
    """A cache [B, N, P, head_dim] of one key at least, and the key [B, 1, N*head_dim] that comes with one query, at
    `write_indices`, int64 [B], of a buffer, or behind a cache that grows."""

    past: ir.Value
    new: ir.Value
    write_indices: ir.Value | None

    def length(self, op: Ops) -> ir.Value:
        """P, int64 [1]."""
        return op.Shape(self.past, start=2, end=3)

    def place(self, op: Ops) -> ir.Value:
        """The column of the new key, int64 [B|1, 1]."""
        return op.Unsqueeze(self.length(op) if self.write_indices is None else self.write_indices, [1])

    def placed(self, op: Ops, slots: ir.Value, scores: ir.Value, mine: ir.Value) -> ir.Value:
        """Scores [B, N, 1, C] of slots [B|1, C], with that of the new key [B, N, 1, 1] where it overwrites one."""
        if self.write_indices is None:
            return scores
        return op.Where(op.Unsqueeze(op.Equal(slots, self.place(op)), [1, 2]), mine, scores)

    def ended(self, op: Ops, scores: ir.Value, mine: ir.Value) -> ir.Value:
        """Scores [B, N, 1, P] with that of the new key behind them, where the cache grows."""
        return op.Concat(scores, mine, axis=3) if self.write_indices is None else scores


def one_query_onnx(
    op: Ops,
    q: ir.Value,
    past: ir.Value | None,
    ort: bool,
    one: Callable[[Ops], ir.Value],
    many: Callable[[Ops], ir.Value],
) -> ir.Value:
    """What `one` gives for one query [B, 1, ...] on ONNX Runtime, where it sees keys of a cache or there is none, else
    `many`: ONNX Runtime's operators differ in what they make of no keys."""
    queries = op.Shape(q, start=1, end=2)
    if past is not None:
        queries = op.Max(queries, op.Sub(2, op.Shape(past, start=2, end=3)))
    return few_onnx(op, ort, queries, one, many, 1)


def counted_onnx(op: Ops, count: ir.Value) -> ir.Value:
    """The numbers from 0 to below `count`, int64 [1]."""
    return op.Range(0, op.Squeeze(count), 1)
