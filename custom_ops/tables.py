"""Rows of tables, and products with them, selected by an index."""

from __future__ import annotations

from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.operator import Ops, rank_of, shape_of, size_of


def picked(scores: Tensor, index: Tensor) -> Tensor:
    """Return scores [B, N, S, R] at index [B, S, T]."""
    return scores.gather(-1, index.unsqueeze(1).expand(-1, scores.shape[1], -1, -1))


def picked_onnx(op: Ops, scores: ir.Value, index: ir.Value, num_heads: int) -> ir.Value:
    """Return scores [B, N, S, R] at index [B, 1, S, T], in ONNX. `num_heads` is N."""
    index = index if num_heads == 1 else op.Expand(index, [1, num_heads, 1, 1])
    return op.GatherElements(scores, index, axis=-1)


def index_onnx(op: Ops, index: ir.Value) -> ir.Value:
    """Reshape an index [B, S, T] to [B, 1, S, T]. It becomes int32: an index of all heads then takes half the bytes."""
    return op.Unsqueeze(op.Cast(index, to=ir.DataType.INT32), [1])


def rows_of_onnx(op: Ops, table: ir.Value, rows: ir.Value) -> ir.Value:
    """Return rows [B|1, ...] of a table [N|1, R, head_dim]: [B|1, N|1, ..., head_dim]."""
    num_heads, count = shape_of(table)[0], op.Shape(table, start=1, end=2)
    if num_heads == 1:
        return op.Unsqueeze(op.Gather(op.Squeeze(table, [0]), rows, axis=0), [1])
    # one gather for all heads, in the order of its result, because a transpose would move all of it
    begins = op.Reshape(op.Mul(op.Range(0, num_heads, 1), count), [1, -1, *[1] * (rank_of(rows) - 1)])
    return op.Gather(op.Reshape(table, [-1, size_of(table, 2)]), op.Add(op.Unsqueeze(rows, [1]), begins), axis=0)


def dotted_onnx(op: Ops, heads: ir.Value, rows: ir.Value) -> ir.Value:
    """Return the products of vectors [B, N, T, head_dim] with one row each [B|1, N|1, T, head_dim]: [B, N, 1, T]."""
    return op.Unsqueeze(op.ReduceSum(op.Mul(heads, rows), [-1], keepdims=0), [2])


def turned_onnx(op: Ops, table: ir.Value) -> ir.Value:
    """Transpose [..., L, head_dim] to [..., head_dim, L] of rank 4. With rank 3, ONNX Runtime 1.31 crashes in fp16."""
    return op.Transpose(table, perm=[0, 1, 3, 2])
