"""Scores of keys for one query on ONNX Runtime. They read the cache without writing the new key into it.

Writing a key into a buffer may copy the whole buffer, unless attention's own operator writes it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from posexport.custom_ops import ir
from posexport.custom_ops.operator import Ops, few_onnx


@attrs.frozen
class OneKey:
    """A cache [B, N, P, head_dim] with at least one key, and the key [B, 1, N*head_dim] of one new query.

    The new key is at `write_indices`, int64 [B], of a buffer, or at the end of a cache that grows.
    """

    past: ir.Value
    new: ir.Value
    write_indices: ir.Value | None

    def length(self, op: Ops) -> ir.Value:
        """Return P, int64 [1]."""
        return op.Shape(self.past, start=2, end=3)

    def place(self, op: Ops) -> ir.Value:
        """Return the column of the new key, int64 [B|1, 1]."""
        return op.Unsqueeze(self.length(op) if self.write_indices is None else self.write_indices, [1])

    def placed(self, op: Ops, slots: ir.Value, scores: ir.Value, mine: ir.Value) -> ir.Value:
        """Return scores [B, N, 1, C] of slots [B|1, C]. In a buffer, the new key's score [B, N, 1, 1] replaces one of
        them."""
        if self.write_indices is None:
            return scores
        return op.Where(op.Unsqueeze(op.Equal(slots, self.place(op)), [1, 2]), mine, scores)

    def ended(self, op: Ops, scores: ir.Value, mine: ir.Value) -> ir.Value:
        """Return scores [B, N, 1, P]. If the cache grows, the new key's score is appended."""
        return op.Concat(scores, mine, axis=3) if self.write_indices is None else scores


def one_query_onnx(
    op: Ops,
    q: ir.Value,
    past: ir.Value | None,
    ort: bool,
    one: Callable[[Ops], ir.Value],
    many: Callable[[Ops], ir.Value],
) -> ir.Value:
    """Return `one` for one query [B, 1, ...] on ONNX Runtime, otherwise `many`.

    `one` is used only if there is no cache or the cache contains keys. ONNX Runtime's operators differ in their results
    without keys.
    """
    queries = op.Shape(q, start=1, end=2)
    if past is not None:
        queries = op.Max(queries, op.Sub(2, op.Shape(past, start=2, end=3)))
    return few_onnx(op, ort, queries, one, many, 1)


def counted_onnx(op: Ops, count: ir.Value) -> ir.Value:
    """Return the numbers from 0 to below `count`, int64 [1]."""
    return op.Range(0, op.Squeeze(count), 1)
