"""Caches in ONNX: grown, written into a buffer, and repeated for the query heads that share a key head."""

from __future__ import annotations

import onnx_ir as ir

from posexport.custom_ops.operator import Ops
from posexport.custom_ops.visibility import Heads, Lengths


def heads_onnx(op: Ops, t: ir.Value, num_heads: int) -> ir.Value:
    """[B, S, heads*head_dim] to [B, heads, S, head_dim]."""
    return op.Transpose(op.Reshape(t, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3])


def grown_onnx(op: Ops, past: ir.Value, new: ir.Value, num_kv_heads: int) -> ir.Value:
    """The cache [B, K, P, head_dim] with new [B, S, K*head_dim] appended."""
    return op.Concat(past, heads_onnx(op, new, num_kv_heads), axis=2)


def written_onnx(
    op: Ops, buffer: ir.Value, new: ir.Value, write_indices: ir.Value, lengths: Lengths, num_kv_heads: int
) -> ir.Value:
    """The buffer [B, K, M, head_dim] with new [B, S, K*head_dim] at write_indices[b] ... + S - 1.

    `lengths` are S and M. Each slot selects its new or its old row: one kernel in TensorRT, where a scatter takes ten.
    """
    (seq, length), first = lengths, op.Unsqueeze(write_indices, [1])
    steps = op.Sub(op.Range(0, length, 1), first)
    inside = op.And(op.GreaterOrEqual(steps, 0), op.Less(steps, seq))
    rows = op.Min(op.Max(steps, 0), op.Sub(seq, 1))
    split = op.Reshape(new, [0, 0, num_kv_heads, -1])
    placed = op.Transpose(op.GatherND(split, op.Unsqueeze(rows, [2]), batch_dims=1), perm=[0, 2, 1, 3])
    return op.Where(op.Unsqueeze(inside, [1, 3]), placed, buffer)


def scattered_onnx(
    op: Ops, buffer: ir.Value, new: ir.Value, write_indices: ir.Value, lengths: Lengths, num_kv_heads: int
) -> ir.Value:
    """As `written_onnx`, by a scatter of the new rows: on ONNX Runtime, a tenth of a decode step's time."""
    (seq, _), batch = lengths, op.Shape(new, start=0, end=1)
    rows = op.Add(op.Unsqueeze(write_indices, [1]), op.Range(0, seq, 1))
    places = op.Concat(batch, [num_kv_heads], op.Shape(new, start=1, end=2), [1], axis=0)
    at = [
        op.Unsqueeze(op.Range(0, op.Squeeze(batch), 1), [1, 2, 3]),
        op.Unsqueeze(op.Range(0, num_kv_heads, 1), [0, 2, 3]),
        op.Unsqueeze(rows, [1, 3]),
    ]
    indices = op.Concat(*(op.Expand(axis, places) for axis in at), axis=3)
    return op.ScatterND(buffer, indices, heads_onnx(op, new, num_kv_heads))


def repeated_onnx(op: Ops, t: ir.Value, heads: Heads, head_dim: int) -> ir.Value:
    """[B, K, T, head_dim] to [B, N, T, head_dim], each key head for the query heads that read it."""
    if heads.group == 1:
        return t
    return op.Reshape(op.Expand(op.Unsqueeze(t, [2]), [1, 1, heads.group, 1, 1]), [0, heads.num_heads, -1, head_dim])
