"""Scores of keys, by the difference of consecutive positions (posexport.custom_ops.differences): DeBERTa's second term.

A row of a table meets each key, so that rows of numbers belong to keys, and a slide is transposed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import REQUIRED, SCALE
from posexport.custom_ops.by_head import by_head_onnx
from posexport.custom_ops.difference_scores import products_onnx
from posexport.custom_ops.differences import blocks_onnx
from posexport.custom_ops.heads import heads_onnx, to_heads
from posexport.custom_ops.operator import (
    ORT_FORMS,
    Ops,
    cast,
    constant,
    dtype_of,
    few_onnx,
    operator,
    rank_of,
    size_of,
    wide,
)
from posexport.custom_ops.relative import fake_score
from posexport.custom_ops.tables import dotted_onnx, picked, rows_of_onnx


def behind(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """p_i - p_j of each entry of the `rows` of `difference_key_score`, int64 [S + T]."""
    return torch.arange(keys + queries, device=device) - (queries - 1)


@operator("DifferenceKeyScore", "score", fake=lambda call: fake_score(call, call.k, call.num_heads))
def difference_key_score(
    k: Tensor,
    q: Tensor,
    table: Tensor,
    rows: Tensor,
    write_indices: Tensor | None = None,
    added: Tensor | None = None,
    num_heads: int = REQUIRED,
    scale: float = SCALE,
    causal: bool = False,
    reach: int = REQUIRED,
) -> Tensor:
    """scale * k_j . table[rows[p_i - p_j]] for consecutive positions, plus `added`.

    In ONNX, keys are taken in blocks of as many as there are queries, so that each meets about as many differences.

    Args:
        k: [B, T, num_heads*head_dim] or [B, num_heads, T, head_dim] of a cache.
        q: [B, S, num_heads*head_dim], of as many queries as there are rows.
        table: [num_heads, R, head_dim], in k's dtype.
        rows: int64 [L], the row of the table for each difference, from the key farthest ahead on; L is S + T.
        write_indices: int64 [B], where the new keys begin in each row of a buffer; None for a cache that grows.
        added: float32 [B, num_heads, S, T], another score.
        num_heads: of the keys.
        scale: of the logits, by default head_dim**-0.5.
        causal: whether what stands at keys ahead of their query doesn't matter.
        reach: the distance from which on keys behind their query have the same row.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> k, table, rows = torch.ones(1, 2, 1), torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([0, 1, 2, 2])
        >>> difference_key_score(k, k, table, rows, num_heads=1, reach=1)
        tensor([[[[2., 1.],
                  [3., 2.]]]])
    """
    heads, queries = to_heads(k, num_heads), q.shape[1]
    keys = heads.shape[2]
    steps = torch.arange(queries, device=q.device).unsqueeze(1)
    first = keys - queries if write_indices is None else write_indices[:, None, None]
    places = first + steps - torch.arange(keys, device=q.device) + (queries - 1)
    index = rows[places.clamp(0, rows.shape[0] - 1)].expand(q.shape[0], queries, keys)
    products = heads * scale @ table.transpose(1, 2)  # [B, N, T, R]
    score = picked(products, index.transpose(1, 2)).transpose(2, 3).to(wide(q.dtype))
    return score if added is None else score + added


def counted(op: Ops, count: ir.Value) -> ir.Value:
    """The numbers from 0 to below `count`, int64 [1]."""
    return op.Range(0, op.Squeeze(count), 1)


def _key_score_onnx(
    op: Ops,
    k: ir.Value,
    q: ir.Value,
    table: ir.Value,
    rows: ir.Value,
    write_indices: ir.Value | None,
    added: ir.Value | None,
    num_heads: int,
    scale: float,
    causal: bool,
    reach: int,
    ort: bool = False,
) -> ir.Value:
    queries, factor = op.Shape(q, start=1, end=2), constant(op, scale, dtype_of(k))
    heads = k if rank_of(k) == 4 else heads_onnx(op, k, num_heads)
    if causal and rank_of(k) == 3:
        return _own_keys_onnx(op, op.Mul(heads, factor), table, rows, added, queries, ort)
    keys = op.Shape(heads, start=2, end=3)
    first = op.Sub(keys, queries) if write_indices is None else write_indices
    first = op.Unsqueeze(first, [1])

    def rows_at(op: Ops, distances: ir.Value) -> ir.Value:
        """The rows for distances [B|1, ...], [B|1, N, ..., head_dim]."""
        last = op.Sub(op.Add(keys, queries), 1)
        places = op.Min(op.Max(op.Add(distances, op.Sub(queries, 1)), 0), last)
        return rows_of_onnx(op, table, op.Gather(rows, places))

    def one(op: Ops) -> ir.Value:
        # all keys meet the last row in one product, which is right for those that are far
        last = rows_of_onnx(op, table, op.Unsqueeze(op.Slice(rows, [-1], [2**31 - 1], [0]), [0]))
        scores, count = products_onnx(op, last, heads), op.Min(keys, reach)
        if write_indices is None:
            far = op.Sub(keys, count)
            near, distances = op.Slice(heads, far, [2**31 - 1], [2]), op.Sub(op.Sub(count, 1), counted(op, count))
            own = rows_of_onnx(op, table, op.Unsqueeze(op.Gather(rows, distances), [0]))
            scores = op.Concat(op.Slice(scores, [0], far, [3]), dotted_onnx(op, near, own), axis=3)
        else:
            # as many slots up to each row's new key, or from slot 0 on
            begins = op.Min(op.Max(op.Sub(first, op.Sub(count, 1)), 0), op.Sub(keys, count))
            slots = op.Add(begins, counted(op, count))
            own = rows_of_onnx(op, table, op.Gather(rows, op.Max(op.Sub(first, slots), 0)))
            heads_before = op.Reshape(
                counted(op, op.Mul(op.Shape(heads, start=0, end=1), num_heads)), [-1, num_heads, 1]
            )
            at = op.Add(op.Mul(heads_before, keys), op.Unsqueeze(slots, [1]))
            near = op.Gather(op.Reshape(heads, [-1, size_of(q, -1) // num_heads]), at, axis=0)
            near = dotted_onnx(op, near, own)
            places = op.Expand(op.Unsqueeze(slots, [1, 2]), op.Shape(near))
            scores = op.ScatterElements(scores, places, near, axis=3)
        return op.Mul(scores, factor)

    def many(op: Ops) -> ir.Value:
        blocks = op.Div(op.Sub(op.Add(keys, queries), 1), queries)
        spare = op.Sub(op.Mul(blocks, queries), keys)
        padded = op.Pad(heads, op.Concat([0], spare, axis=0), None, [2])
        padded = op.Reshape(padded, op.Concat([0, 0], blocks, queries, [size_of(q, -1) // num_heads], axis=0))
        # the key at t of the block from b on and query i are f + i - b - t apart: row t of a block moves left by t
        begins = op.Sub(first, op.Mul(op.Range(1, op.Add(op.Squeeze(blocks), 1), 1), queries))
        width = op.Range(1, op.Add(op.Squeeze(op.Mul(queries, 2)), 1), 1)
        taken = rows_at(op, op.Add(op.Unsqueeze(begins, [-1]), width))  # [B|1, N, blocks, 2 S, head_dim]
        products = op.Mul(op.MatMul(padded, op.Transpose(taken, perm=[0, 1, 2, 4, 3])), factor)
        moved = op.Slice(op.Reshape(products, [0, 0, 0, -1]), op.Sub(queries, 1), [-1], [3])
        slid = op.Slice(op.Reshape(moved, op.Concat([0, 0, 0], queries, [-1], axis=0)), [0], queries, [4])
        by_query = op.Transpose(slid, perm=[0, 1, 4, 2, 3])
        return op.Slice(op.Reshape(by_query, op.Concat([0, 0], queries, [-1], axis=0)), [0], keys, [3])

    score = cast(op, few_onnx(op, ort, queries, one, many, 1), ir.DataType.FLOAT)
    return score if added is None else op.Add(score, added)


difference_key_score.onnx(_key_score_onnx)
difference_key_score.form(*ORT_FORMS)(partial(_key_score_onnx, ort=True))


def _own_keys_onnx(
    op: Ops, heads: ir.Value, table: ir.Value, rows: ir.Value, added: ir.Value | None, queries: ir.Value, ort: bool
) -> ir.Value:
    """The score of keys [B, N, S, head_dim] that are those of the queries, for queries behind them only.

    Key j and query i are i - j apart: rows of S + 1 columns, of the differences from 0 on, read as rows of S."""
    ahead = op.Unsqueeze(op.Slice(rows, op.Sub(queries, 1), [2**31 - 1], [0]), [0])

    def make(op: Ops, count: int, heads: ir.Value, taken: ir.Value, added: ir.Value | None) -> ir.Value:
        products = products_onnx(op, heads, taken)
        if ort:
            slid = blocks_onnx(op, products, queries, (0, queries))
        else:
            moved = op.Slice(op.Reshape(products, [0, 0, -1]), [0], op.Mul(queries, queries), [2])
            slid = op.Reshape(moved, op.Concat([0, 0], queries, [-1], axis=0))
        score = cast(op, op.Transpose(slid, perm=[0, 1, 3, 2]), ir.DataType.FLOAT)
        return score if added is None else op.Add(score, added)

    return by_head_onnx(op, heads, (heads, rows_of_onnx(op, table, ahead), added), make, ort)
