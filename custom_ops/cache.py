"""Caches of keys and values, and the positions of cached keys. Keys are cached after rotation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import NUM_KV_HEADS
from posexport.custom_ops.heads import heads_onnx, to_heads
from posexport.custom_ops.operator import ORT_FORMS, Ops, operator
from posexport.custom_ops.visibility import Lengths, lengths_onnx

Write = Callable[[Ops, "ir.Value", "ir.Value", "ir.Value", Lengths, int], "ir.Value"]
"""Writes new keys or values into a buffer. The arguments are those of `written_onnx`."""


def total_keys(past: Tensor, new: Tensor, write_indices: Tensor | None) -> int:
    """Return the number of keys in a cache, including the new tokens of `new` [B, S, ...]."""
    return past.shape[2] + (new.shape[1] if write_indices is None else 0)


def _cached_fake(call: Any) -> Tensor:
    past: Tensor = call.past
    batch, heads, _, width = past.shape
    return past.new_empty((batch, heads, total_keys(past, call.k, call.write_indices), width))


@operator("CachedKeys", "keys", fake=_cached_fake)
def cached_keys(
    past: Tensor, k: Tensor, write_indices: Tensor | None = None, num_kv_heads: int = NUM_KV_HEADS
) -> Tensor:
    """A cache with new keys or values, which are appended or written into a buffer (ONNX TensorScatter-24).

    Args:
        past: [B, num_kv_heads, past, head_dim].
        k: [B, S, num_kv_heads*head_dim], in past's dtype: the new keys.
        write_indices: int64 [B], the first index of the new keys in each row of a buffer; None for a growing cache.
        num_kv_heads: number of key heads, by default that of `past`.

    Returns:
        [B, num_kv_heads, T, head_dim], T = past + S, or past for a buffer.

    Example:
        >>> cached_keys(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2))
        tensor([[[[0., 0.],
                  [0., 0.],
                  [1., 1.]]]])
    """
    new = to_heads(k, num_kv_heads)
    if write_indices is None:
        return torch.cat((past, new), 2)
    steps = torch.arange(new.shape[2], device=new.device)
    at = (write_indices.unsqueeze(1) + steps)[:, None, :, None].expand_as(new)
    return past.scatter(2, at, new)


def joined(past: Tensor | None, k: Tensor, write_indices: Tensor | None, num_kv_heads: int) -> Tensor:
    """Return a cache with new keys, or only the new keys, [B, K, T, head_dim]."""
    return to_heads(k, num_kv_heads) if past is None else cached_keys.eager(past, k, write_indices, num_kv_heads)


def grown_onnx(op: Ops, past: ir.Value, new: ir.Value, num_kv_heads: int) -> ir.Value:
    """Append new [B, S, K*head_dim] to the cache [B, K, P, head_dim]."""
    return op.Concat(past, heads_onnx(op, new, num_kv_heads), axis=2)


def written_onnx(
    op: Ops, buffer: ir.Value, new: ir.Value, write_indices: ir.Value, lengths: Lengths, num_kv_heads: int
) -> ir.Value:
    """Write new [B, S, K*head_dim] into the buffer [B, K, M, head_dim] at write_indices[b] ... + S - 1.

    `lengths` are S and M, as `lengths_onnx` reads them from the new keys and their buffer. Each slot selects its new or
    its old row. This is one kernel in TensorRT; a scatter takes ten.
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
    """Do the same as `written_onnx` with a scatter. On ONNX Runtime, this takes a tenth of a decode step's time.

    The indices don't depend on `new` or `buffer`, so keys and values share them.
    """
    (seq, _), batch = lengths, op.Shape(write_indices)
    rows = op.Add(op.Unsqueeze(write_indices, [1]), op.Range(0, seq, 1))
    places = op.Concat(batch, [num_kv_heads], op.Unsqueeze(seq, [0]), [1], axis=0)
    at = [
        op.Unsqueeze(op.Range(0, op.Squeeze(batch), 1), [1, 2, 3]),
        op.Unsqueeze(op.Range(0, num_kv_heads, 1), [0, 2, 3]),
        op.Unsqueeze(rows, [1, 3]),
    ]
    indices = op.Concat(*(op.Expand(axis, places) for axis in at), axis=3)
    return op.ScatterND(buffer, indices, heads_onnx(op, new, num_kv_heads))


def tensor_scattered_onnx(
    op: Ops, buffer: ir.Value, new: ir.Value, write_indices: ir.Value, lengths: Lengths, num_kv_heads: int
) -> ir.Value:
    """Do the same as `written_onnx` with TensorScatter-24."""
    return op.TensorScatter(buffer, heads_onnx(op, new, num_kv_heads), write_indices, axis=2)


def write_of(ort: bool) -> Write:
    """Return how keys and values are written with operators of every opset."""
    return scattered_onnx if ort else written_onnx


def joined_onnx(
    op: Ops,
    past: ir.Value | None,
    k: ir.Value,
    write_indices: ir.Value | None,
    num_kv_heads: int,
    write: Write = written_onnx,
) -> ir.Value:
    """Do the same as `joined` with the nodes of attention, so that both become one if functions are inlined."""
    if past is None:
        return heads_onnx(op, k, num_kv_heads)
    if write_indices is None:
        return grown_onnx(op, past, k, num_kv_heads)
    return write(op, past, k, write_indices, lengths_onnx(op, k, past), num_kv_heads)


cached_keys.onnx(joined_onnx)
cached_keys.form(*ORT_FORMS)(partial(joined_onnx, write=scattered_onnx))
cached_keys.form("native:ort")(partial(joined_onnx, write=tensor_scattered_onnx))


def _key_positions_fake(call: Any) -> Tensor:
    positions: Tensor = call.positions
    return positions.new_empty((positions.shape[0], total_keys(call.past, positions, call.write_indices)))


@operator("KeyPositions", "k_positions", fake=_key_positions_fake)
def key_positions(
    positions: Tensor, past: Tensor, write_indices: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The positions of all keys. New keys have the queries' positions. Cached keys have the consecutive positions
    before the first of them. Padding takes up no position.

    Args:
        positions: int64 [B, S], positions of the queries.
        past: [B, num_kv_heads, past, head_dim], the cache before the new keys.
        write_indices: int64 [B], as in `cached_keys`.
        mask: int64 [B, T], 0 for padding.

    Returns:
        int64 [B, T], T = past + S, or past for a buffer.

    Example:
        >>> key_positions(torch.tensor([[7, 8]]), torch.zeros(1, 1, 3, 2))
        tensor([[4, 5, 6, 7, 8]])
    """
    batch, seq = positions.shape
    total = total_keys(past, positions, write_indices)
    keys = torch.arange(total, device=positions.device).expand(batch, total)
    first = (total - seq if write_indices is None else write_indices.unsqueeze(1)) + torch.zeros_like(keys[:, :1])
    before, at_first, anchor = keys, first, positions[:, :1]
    if mask is not None:
        attended = (mask != 0).long()
        before = attended.cumsum(1) - attended  # the number of attended tokens before each key
        at_first = before.gather(1, first)
        # the first new token that is not padding, because the position of padding means nothing
        new = (before + attended).gather(1, first + torch.arange(seq, device=positions.device))
        anchor = positions.gather(1, (new == at_first).sum(1, keepdim=True).clamp(max=seq - 1))
    cached = anchor - at_first + before
    return torch.where(keys < first, cached, positions.gather(1, (keys - first).clamp(0, seq - 1)))


@key_positions.onnx
def _key_positions_onnx(
    op: Ops, positions: ir.Value, past: ir.Value, write_indices: ir.Value | None, mask: ir.Value | None
) -> ir.Value:
    seq, length = op.Shape(positions, start=1, end=2), op.Shape(past, start=2, end=3)
    grown = write_indices is None
    take = op.Gather if grown else op.GatherElements
    total, first = (op.Add(length, seq), length) if grown else (length, op.Unsqueeze(write_indices, [1]))
    keys = op.Range(0, op.Squeeze(total), 1)
    before, at_first, anchor = keys, first, op.Slice(positions, [0], [1], [1])
    if mask is not None:
        attended = op.Cast(op.Cast(mask, to=ir.DataType.BOOL), to=ir.DataType.INT64)
        before = op.CumSum(attended, 1, exclusive=1)
        at_first = take(before, first, axis=1)
        new = take(op.Add(before, attended), op.Add(first, op.Range(0, op.Squeeze(seq), 1)), axis=1)
        leading = op.ReduceSum(op.Cast(op.Equal(new, at_first), to=ir.DataType.INT64), [1])
        anchor = op.GatherElements(positions, op.Min(leading, op.Sub(seq, 1)), axis=1)
    cached = op.Add(op.Sub(anchor, at_first), before)
    # Where, not Concat of cached and new: after CumSum, a Concat keeps TensorRT from fusing attention
    steps = op.Min(op.Max(op.Sub(keys, first), 0), op.Sub(seq, 1))
    new = take(positions, steps, axis=1)
    return op.Where(op.Less(keys, first), cached, new)
