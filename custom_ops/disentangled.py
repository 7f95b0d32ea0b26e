"""Scores between positions and content, of queries and of keys (DeBERTa).

The key's term has the same row Q for all keys that are far behind. Therefore k . Q is left to the product of queries
and keys: queries q + Q are multiplied with all keys. The score contains only the differences of the rows from Q, which
are zero for far keys.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.arguments import REQUIRED, SCALE
from posexport.custom_ops.bias import clipped, clipped_onnx, distances, distances_onnx
from posexport.custom_ops.by_head import ByHead, add_by_head, by_head
from posexport.custom_ops.cache import joined, joined_onnx, write_of
from posexport.custom_ops.heads import heads_onnx, to_heads
from posexport.custom_ops.one_query import OneKey, one_query_onnx
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, size_of, wide
from posexport.custom_ops.relative import fake_score
from posexport.custom_ops.tables import dotted_onnx, index_onnx, picked, picked_onnx, rows_of_onnx


def disentangled(
    q: Tensor, keys: Tensor, rows: Tensor, key_table: Tensor | None, query_table: Tensor | None, last: Tensor | None
) -> Tensor:
    """Return q_i . K[r_ij] + k_j . (Q[r_ij] - Q[last]), [B, N, S, T], in the dtype of logits.

    Queries [B, N, S, head_dim], keys [B, N, T, head_dim], rows r int64 [B, S, T], tables [N, head_dim, R], `last` int64
    []. If `last` is None, Q[last] is not subtracted.
    """
    score = q.new_zeros(())
    if key_table is not None:
        score = picked(q @ key_table, rows)
    if query_table is not None:
        if last is not None:
            query_table = query_table - query_table.index_select(2, last.reshape(1))
        by_key = keys @ query_table
        score = score + picked(by_key, rows.transpose(1, 2)).transpose(2, 3)
    return score.to(wide(q.dtype))


@operator("DisentangledScore", "score", fake=lambda call: fake_score(call, call.k_positions, call.num_heads))
def disentangled_score(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    buckets: Tensor,
    key_table: Tensor | None = None,
    query_table: Tensor | None = None,
    past: Tensor | None = None,
    write_indices: Tensor | None = None,
    num_heads: int = REQUIRED,
    scale: float = SCALE,
    whole: bool = False,
) -> Tensor:
    """scale * (q_i . K[b_ij] + k_j . (Q[b_ij] - Q[b])), with b_ij = buckets[clip(p_i - p_j, -M, M) + M] and b =
    buckets[2M].

    If the queries are q_i + Q[b], attention adds q_i . k_j and the rest of the second term (DeBERTa: He et al. 2021,
    arXiv:2006.03654, eq. 4). With `whole`, the second term is k_j . Q[b_ij], for unchanged queries.

    Args:
        q: [B, S, num_heads*head_dim].
        k: [B, new, num_heads*head_dim], in q's dtype: the new keys, or all keys without a cache.
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of all keys.
        buckets: int64 [distances], the table row for each of 2M + 1 distances.
        key_table, query_table: [num_heads*head_dim, rows], in q's dtype: K and Q; one of them may be None.
        past: [B, num_heads, past, head_dim], in q's dtype: a cache before the new keys.
        write_indices: int64 [B], the first index of the new keys in each row of a buffer; None for a growing cache.
        num_heads: number of query and key heads.
        scale: factor on the score, by default head_dim**-0.5.
        whole: whether Q[b] is not subtracted in the second term, as needed if attention caps its logits.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> q, at = torch.ones(1, 1, 1), torch.tensor([[4]])
        >>> table = torch.tensor([[1.0, 2.0, 3.0]])
        >>> disentangled_score(q, q, at, at, torch.tensor([0, 1, 2]), key_table=table, num_heads=1)
        tensor([[[[2.]]]])
    """
    rows = buckets[clipped(distances(q_positions, k_positions), buckets.shape[0] // 2)]
    keys = joined(past, k, write_indices, num_heads)
    tables = [None if table is None else table.unflatten(0, (num_heads, -1)) for table in (key_table, query_table)]
    last = None if whole else buckets[-1]
    return disentangled(to_heads(q, num_heads) * scale, keys * scale, rows, tables[0], tables[1], last)


def disentangled_by_head(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    positions: Positions[ir.Value],
    buckets: ir.Value,
    key_table: ir.Value | None,
    query_table: ir.Value | None,
    past: ir.Value | None,
    write_indices: ir.Value | None,
    num_heads: int,
    scale: float,
    whole: bool,
    ort: bool,
) -> ByHead:
    """The body of `disentangled_score`."""
    offset = clipped_onnx(op, distances_onnx(op, positions), size_of(buckets, 0) // 2)
    rows, factor = op.Gather(buckets, offset, axis=0), constant(op, scale, dtype_of(q))
    queries, by_query = heads_onnx(op, q, num_heads), index_onnx(op, rows)
    last = op.Slice(buckets, [-1], [2**31 - 1], [0])

    def of_heads(table: ir.Value) -> ir.Value:
        # features before rows, because a transpose here crashes ONNX Runtime 1.31 in fp16
        return op.Reshape(table, [1, num_heads, size_of(table, 0) // num_heads, -1])

    keyed = None if key_table is None else of_heads(key_table)
    if query_table is not None and not whole:
        query_table = op.Sub(query_table, op.Gather(query_table, last, axis=1))
    queried = None if query_table is None else of_heads(query_table)

    def scores(op: Ops, heads: ir.Value, table: ir.Value) -> ir.Value:
        return op.MatMul(op.Mul(heads, factor), table)

    def summed(
        op: Ops, count: int, queries: ir.Value, of_keys: ir.Value | None, index: ir.Value, second: ir.Value | None
    ) -> ir.Value:
        terms = [] if second is None else [second]
        if of_keys is not None:
            terms.append(picked_onnx(op, scores(op, queries, of_keys), index, count))
        return cast(op, terms[0] if len(terms) == 1 else op.Add(*terms), ir.DataType.FLOAT)

    def make(
        op: Ops,
        count: int,
        queries: ir.Value,
        by_query: ir.Value,
        of_keys: ir.Value | None,
        keys: ir.Value | None,
        by_key: ir.Value | None,
        of_queries: ir.Value | None,
    ) -> ir.Value:
        second = None
        if keys is not None and by_key is not None and of_queries is not None:
            second = picked_onnx(op, scores(op, keys, of_queries), by_key, count)
            second = op.Transpose(second, perm=[0, 1, 3, 2])
        return summed(op, count, queries, of_keys, by_query, second)

    def one(op: Ops) -> ir.Value:
        """Compute the logits of one query. Each key is multiplied by one row of the second table."""
        turned = op.Squeeze(op.Transpose(queried, perm=[0, 1, 3, 2]), [0])
        own = op.Squeeze(rows, [1])
        if past is None:
            second = dotted_onnx(op, heads_onnx(op, k, num_heads), rows_of_onnx(op, turned, own))
        else:
            second = _cached_scores_onnx(op, OneKey(past, k, write_indices), turned, own, last)
        return summed(op, num_heads, queries, keyed, by_query, op.Mul(second, factor))

    def parts(op: Ops) -> list[Any]:
        second: tuple[ir.Value | None, ...] = (None, None, None)
        if queried is not None:
            keys = joined_onnx(op, past, k, write_indices, num_heads, write_of(ort))
            second = (keys, index_onnx(op, op.Transpose(rows, perm=[0, 2, 1])), queried)
        return [queries, by_query, keyed, *second]

    def few(op: Ops) -> ir.Value:
        return one_query_onnx(op, q, past, queried is not None and not whole, one, all_heads)

    def all_heads(op: Ops) -> ir.Value:
        return make(op, num_heads, *parts(op))

    return by_head(op, queries, parts, make, few)


def _cached_scores_onnx(op: Ops, cache: OneKey, table: ir.Value, rows: ir.Value, last: ir.Value) -> ir.Value:
    """Return the products of each key with its row, int64 [B, T], of a table [N, R, head_dim]: [B, N, 1, T].

    The row `last` of the table is zero. The first keys have this row.
    """
    num_heads, length, place = size_of(table, 0), cache.length(op), cache.place(op)
    differs = op.ReduceMax(op.Cast(op.Not(op.Equal(rows, last)), to=ir.DataType.INT32), [0], keepdims=0)
    # the new key's column is the end if no row differs; at least one cached key remains
    begin = op.ArgMax(op.Concat(differs, [1], axis=0), axis=0)
    begin = op.Min(begin, op.ReduceMin(place, keepdims=0), op.Sub(length, 1))
    # slots after the new key of a buffer do not matter
    end = length if cache.write_indices is None else op.Add(op.ReduceMax(place, [0], keepdims=0), 1)
    slots = op.Unsqueeze(op.Range(op.Squeeze(begin), op.Squeeze(end), 1), [0])
    near = rows_of_onnx(op, table, op.Slice(rows, begin, end, [1]))
    scores = dotted_onnx(op, op.Slice(cache.past, begin, end, [2]), near)
    batch = op.Shape(rows, start=0, end=1)
    own = op.GatherElements(rows, op.Expand(place, op.Concat(batch, [1], axis=0)), axis=1)
    mine = dotted_onnx(op, heads_onnx(op, cache.new, num_heads), rows_of_onnx(op, table, own))
    scores = cache.placed(op, slots, scores, mine)
    every = op.Pad(scores, op.Concat([0, 0, 0], begin, [0, 0, 0], op.Sub(length, end), axis=0))
    return cache.ended(op, every, mine)


add_by_head(disentangled_score, disentangled_by_head)
