"""DeBERTa's score (posexport.custom_ops.disentangled) by the difference of consecutive positions
(posexport.custom_ops.differences).

In the second term, each key is multiplied by rows of a table. The rows of numbers therefore belong to keys, and the
result of the slide is transposed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.arguments import REQUIRED, SCALE
from posexport.custom_ops.bias import fake_logits
from posexport.custom_ops.by_head import ByHead, add_by_head, by_head
from posexport.custom_ops.cache import joined, joined_onnx, total_keys, write_of
from posexport.custom_ops.difference_scores import difference_score_by_head, products_onnx
from posexport.custom_ops.differences import blocks_onnx
from posexport.custom_ops.disentangled import disentangled, disentangled_by_head
from posexport.custom_ops.heads import heads_onnx, to_heads
from posexport.custom_ops.one_query import OneKey, counted_onnx, one_query_onnx
from posexport.custom_ops.operator import TENSORRT_FORMS, Ops, cast, constant, dtype_of, operator, size_of
from posexport.custom_ops.tables import dotted_onnx, rows_of_onnx


def _fake(call: Any) -> Tensor:
    total = call.k.shape[1] if call.past is None else total_keys(call.past, call.k, call.write_indices)
    return fake_logits(call.q, total, call.num_heads, call.q.dtype)


@operator("DifferenceDisentangledScore", "score", fake=_fake)
def difference_disentangled_score(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    query_table: Tensor,
    key_table: Tensor | None = None,
    past: Tensor | None = None,
    write_indices: Tensor | None = None,
    num_heads: int = REQUIRED,
    scale: float = SCALE,
    causal: bool = False,
    whole: bool = False,
) -> Tensor:
    """scale * (q_i . K[r] + k_j . (Q[r] - Q[last])) for consecutive positions. r is the row for p_i - p_j and last =
    rows[-1], as in `disentangled_score`.

    In ONNX, keys are divided into blocks of as many keys as there are queries, so that each block needs about as many
    differences.

    Args:
        q: [B, S, num_heads*head_dim], at the last S positions, or at the S positions from write_indices on.
        k: [B, new, num_heads*head_dim], in q's dtype: the new keys, or all keys without a cache.
        rows: int64 [distances], the table row for each distance, from 0 to M if causal, otherwise from -M to M;
            farther keys have the row of the nearest of these distances.
        query_table, key_table: [num_heads, R, head_dim], in q's dtype: Q and K; without K, only the term with Q.
        past: [B, num_heads, past, head_dim], in q's dtype: a cache before the new keys.
        write_indices: int64 [B], the first index of the new keys in each row of a buffer; None for a growing cache.
        num_heads: number of query and key heads.
        scale: factor on the score, by default head_dim**-0.5.
        causal: whether attention hides keys ahead of their query, so that their scores may have any value.
        whole: whether the second term is k_j . Q[r], as in `disentangled_score`.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> q, table = torch.ones(1, 2, 1), torch.tensor([[[3.0], [2.0], [1.0]]])
        >>> difference_disentangled_score(q, q, torch.tensor([0, 1, 2]), table, num_heads=1)
        tensor([[[[1., 2.],
                  [0., 1.]]]])
    """
    keys = joined(past, k, write_indices, num_heads)
    queries, total, middle = q.shape[1], keys.shape[2], _middle(rows.shape[0], causal)
    steps = torch.arange(queries, device=q.device).unsqueeze(1)
    first = total - queries if write_indices is None else write_indices[:, None, None]
    distances = first + steps - torch.arange(total, device=q.device) + middle
    index = rows[distances.clamp(0, rows.shape[0] - 1)].expand(q.shape[0], queries, total)
    by_query = None if key_table is None else key_table.transpose(1, 2)
    return disentangled(
        to_heads(q, num_heads) * scale,
        keys * scale,
        index,
        by_query,
        query_table.transpose(1, 2),
        None if whole else rows[-1],
    )


def _middle(distances: int, causal: bool) -> int:
    """Return the index of the row for the distance 0."""
    return 0 if causal else distances // 2


def _score(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    rows: ir.Value,
    query_table: ir.Value,
    key_table: ir.Value | None,
    past: ir.Value | None,
    write_indices: ir.Value | None,
    num_heads: int,
    scale: float,
    causal: bool,
    whole: bool,
    ort: bool,
    looked_up: bool = False,
) -> ir.Value | ByHead:
    """The body of the operator.

    With `looked_up`, each distance is looked up from positions, as in `disentangled_score`. TensorRT fuses attention
    then. A slide of keys would be many kernels.
    """
    if looked_up:
        if causal:  # rows for the keys ahead, which are not seen
            rows = op.Concat(op.Expand(op.Slice(rows, [0], [1], [0]), [size_of(rows, 0) - 1]), rows, axis=0)
        of_keys, of_queries = (  # features before rows
            None if table is None else op.Reshape(op.Transpose(table, perm=[0, 2, 1]), [size_of(q, -1), -1])
            for table in (key_table, query_table)
        )
        inputs = q, k, _positions_onnx(op, q, k, past, write_indices), rows, of_keys, of_queries, past, write_indices
        return disentangled_by_head(op, *inputs, num_heads, scale, whole, ort=False).onnx(op, ort=False)
    queries, factor = op.Shape(q, start=1, end=2), constant(op, scale, dtype_of(q))
    distances, width = size_of(rows, 0), size_of(q, -1) // num_heads
    middle, last = _middle(distances, causal), op.Slice(rows, [-1], [2**31 - 1], [0])
    if not whole:
        query_table = op.Sub(query_table, op.Gather(query_table, last, axis=1))

    def rows_at(op: Ops, behind: ir.Value) -> ir.Value:
        """Return the row for p_i - p_j, int64 of any shape."""
        return op.Gather(rows, op.Min(op.Max(op.Add(behind, middle), 0), distances - 1))

    def first_term(op: Ops, keys: ir.Value) -> ByHead | None:
        if key_table is None:
            return None
        count = op.Add(keys, 1) if causal else op.Add(keys, queries)
        ahead_of = (
            op.Unsqueeze(keys, [1]) if write_indices is None else op.Add(op.Unsqueeze(write_indices, [1]), queries)
        )
        taken = rows_at(op, op.Sub(ahead_of, counted_onnx(op, count)))
        return difference_score_by_head(op, q, key_table, taken, num_heads, scale, causal, ort)

    if causal and past is None:
        first = first_term(op, queries)
        taken = rows_of_onnx(op, query_table, op.Unsqueeze(rows_at(op, counted_onnx(op, op.Add(queries, 1))), [0]))
        return _own_keys(op, op.Mul(heads_onnx(op, k, num_heads), factor), taken, first, queries, ort)

    def many(op: Ops) -> ir.Value:
        heads = joined_onnx(op, past, k, write_indices, num_heads, write_of(ort))
        keys = op.Shape(heads, start=2, end=3)
        first = op.Unsqueeze(op.Sub(keys, queries) if write_indices is None else write_indices, [1])
        blocks = op.Div(op.Sub(op.Add(keys, queries), 1), queries)
        spare = op.Sub(op.Mul(blocks, queries), keys)
        padded = op.Pad(heads, op.Concat([0], spare, axis=0), None, [2])
        padded = op.Reshape(padded, op.Concat([0, 0], blocks, queries, [width], axis=0))
        # Key t of the block that begins at b, and query i, have the difference f + i - b - t. Row t of a block moves
        # left by t.
        begins = op.Sub(first, op.Mul(op.Range(1, op.Add(op.Squeeze(blocks), 1), 1), queries))
        steps = op.Range(1, op.Add(op.Squeeze(op.Mul(queries, 2)), 1), 1)
        # [B|1, N, blocks, 2 S, head_dim]
        taken = rows_of_onnx(op, query_table, rows_at(op, op.Add(op.Unsqueeze(begins, [-1]), steps)))
        products = op.Mul(op.MatMul(padded, op.Transpose(taken, perm=[0, 1, 2, 4, 3])), factor)
        moved = op.Slice(op.Reshape(products, [0, 0, 0, -1]), op.Sub(queries, 1), [-1], [3])
        slid = op.Slice(op.Reshape(moved, op.Concat([0, 0, 0], queries, [-1], axis=0)), [0], queries, [4])
        by_query = op.Transpose(slid, perm=[0, 1, 4, 2, 3])
        score = op.Slice(op.Reshape(by_query, op.Concat([0, 0], queries, [-1], axis=0)), [0], keys, [3])
        term = first_term(op, keys)
        score = cast(op, score, ir.DataType.FLOAT)
        return score if term is None else op.Add(score, term.onnx(op, ort))

    if past is None:
        return many(op)
    # reshaped here, because inside a branch ONNX Runtime would copy all of it
    cache, flat = OneKey(past, k, write_indices), op.Reshape(past, [-1, width])

    def one(op: Ops) -> ir.Value:
        length, first = cache.length(op), cache.place(op)
        # as many slots up to the new key, or from slot 0, as there are distances before the last
        count = op.Min(length, distances - 1 - middle)
        begins = op.Min(op.Max(op.Sub(first, op.Sub(count, 1)), 0), op.Sub(length, count))
        slots = op.Add(begins, counted_onnx(op, count))
        near, own = rows_at(op, op.Max(op.Sub(first, slots), 0)), rows_at(op, op.Constant(value_ints=[0]))
        own = op.Unsqueeze(own, [0])
        heads_before = op.Reshape(counted_onnx(op, op.Mul(op.Shape(q, start=0, end=1), num_heads)), [-1, num_heads, 1])
        at = op.Add(op.Mul(heads_before, length), op.Unsqueeze(slots, [1]))
        scores = dotted_onnx(op, op.Gather(flat, at, axis=0), rows_of_onnx(op, query_table, near))
        mine = dotted_onnx(op, heads_onnx(op, k, num_heads), rows_of_onnx(op, query_table, own))
        scores = cache.placed(op, slots, scores, mine)
        places = op.Expand(op.Unsqueeze(slots, [1, 2]), op.Shape(scores))
        if key_table is None:
            far = op.Constant(value=ir.tensor([0.0], dtype=dtype_of(q)))
        else:
            products = products_onnx(op, heads_onnx(op, q, num_heads), op.Unsqueeze(key_table, [0]))
            far = op.Gather(products, last, axis=3)
            index = op.Expand(op.Unsqueeze(near, [1, 2]), op.Shape(scores))
            scores = op.Add(scores, op.GatherElements(products, index, axis=3))
            mine = op.Add(mine, op.Gather(products, op.Squeeze(own, [0]), axis=3))
        every = op.Expand(far, op.Concat(op.Shape(scores, start=0, end=3), length, axis=0))
        every = cache.ended(op, op.ScatterElements(every, places, scores, axis=3), mine)
        return cast(op, op.Mul(every, factor), ir.DataType.FLOAT)

    return one_query_onnx(op, q, past, ort and not whole, one, many)


add_by_head(difference_disentangled_score, _score)
difference_disentangled_score.form(*TENSORRT_FORMS)(partial(_score, ort=False, looked_up=True))


def _positions_onnx(
    op: Ops, q: ir.Value, k: ir.Value, past: ir.Value | None, write_indices: ir.Value | None
) -> Positions[ir.Value]:
    """Return the consecutive positions of queries and keys from 0 on, for each row."""
    batch, queries, total = (op.Shape(t, start=axis, end=axis + 1) for t, axis in ((q, 0), (q, 1), (k, 1)))
    if past is not None:
        cached = op.Shape(past, start=2, end=3)
        total = cached if write_indices is not None else op.Add(cached, total)
    first = op.Sub(total, queries) if write_indices is None else op.Unsqueeze(write_indices, [1])

    def each_row(steps: ir.Value, count: ir.Value) -> ir.Value:
        made: ir.Value = op.Expand(steps, op.Concat(batch, count, axis=0))
        return made

    return Positions(
        each_row(op.Add(first, counted_onnx(op, queries)), queries), each_row(counted_onnx(op, total), total)
    )


def _own_keys(op: Ops, heads: ir.Value, taken: ir.Value, first: ByHead | None, queries: ir.Value, ort: bool) -> ByHead:
    """Return the score of keys [B, N, S, head_dim] that belong to the queries, plus the first term if there is one.

    It is valid only for keys up to the query. Key j and query i have the difference i - j. The products form rows of S
    + 1 columns, from the rows [1, N, S + 1, head_dim] for the differences from 0 on. They are read as rows of S
    columns.
    """

    def own(op: Ops, count: int, heads: ir.Value, taken: ir.Value) -> ir.Value:
        products = products_onnx(op, heads, taken)
        if ort:
            slid = blocks_onnx(op, products, queries, (0, queries))
        else:
            moved = op.Slice(op.Reshape(products, [0, 0, -1]), [0], op.Mul(queries, queries), [2])
            slid = op.Reshape(moved, op.Concat([0, 0], queries, [-1], axis=0))
        return cast(op, op.Transpose(slid, perm=[0, 1, 3, 2]), ir.DataType.FLOAT)

    if first is None:
        return by_head(op, heads, (heads, taken), own)

    def parts(op: Ops) -> list[ir.Value | None]:
        return [heads, taken, *first.parts(op)]

    def make(op: Ops, count: int, heads: ir.Value, taken: ir.Value, *of_first: ir.Value) -> ir.Value:
        return op.Add(own(op, count, heads, taken), first.make(op, count, *of_first))

    def few(op: Ops) -> ir.Value:
        return op.Add(own(op, first.num_heads, heads, taken), first.few(op))

    return by_head(op, heads, parts, make, few)
