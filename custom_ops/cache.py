"""Attention over cached keys and values, and the positions of cached keys.

attend_cached  past [B, K, P, head_dim] grows: present is [B, K, P + S, head_dim], with the new keys last
attend_shared  past [B, K, M, head_dim] is a buffer: present is the buffer with the new keys at write_indices[b] ...
               + S - 1 (ONNX TensorScatter-24); slots after them hold no keys
key_positions  positions [B, S] of the queries -> [B, T] of all keys: new keys have the queries' positions, and cached
               keys the consecutive positions before the first of them. With `mask` [B, T], padding takes up no
               position and is not the first.

Otherwise as posexport.custom_ops.attention. Keys are cached as they enter the product, after any rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.attention import attention, attention_onnx, keys_onnx, to_heads
from posexport.custom_ops.attention_forms import bodies
from posexport.custom_ops.buffers import grown_onnx, repeated_onnx, scattered_onnx, written_onnx
from posexport.custom_ops.operator import Body, Operator, Ops, size_of
from posexport.custom_ops.visibility import Heads, Lengths, lengths_onnx

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
) -> Three:
    heads = Heads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    key, value = (torch.cat((past, to_heads(new, num_kv_heads)), 2) for past, new in ((past_key, k), (past_value, v)))
    return attention(q, key, value, bias, mask, sinks, heads), key, value


def _cached_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past_key: torch.Tensor, *_: object) -> Three:
    batch, heads, past, width = past_key.shape
    present = (batch, heads, past + q.shape[1], width)
    return torch.empty_like(q), past_key.new_empty(present), past_key.new_empty(present)


def _attended_onnx(
    op: Ops,
    q: ir.Value,
    caches: tuple[ir.Value, ir.Value],
    added: tuple[ir.Value | None, ...],
    heads: Heads,
    lengths: Lengths,
    write_indices: ir.Value | None = None,
) -> ir.Value:
    key, value = caches
    head_dim = size_of(q, -1) // heads.num_heads
    bias, mask, sinks = added
    keys, values = keys_onnx(op, q, key, heads), repeated_onnx(op, value, heads, head_dim)
    return attention_onnx(op, q, keys, values, (bias, mask, sinks), heads, lengths, write_indices)


def _cached_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    past_key: ir.Value,
    past_value: ir.Value,
    *added: ir.Value | None,
    **attributes: Any,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    heads = Heads(**attributes)
    key, value = grown_onnx(op, past_key, k, heads.num_kv_heads), grown_onnx(op, past_value, v, heads.num_kv_heads)
    seq, past = lengths_onnx(op, q, past_key, 2)
    return _attended_onnx(op, q, (key, value), added, heads, (seq, op.Add(past, seq))), key, value


_INPUTS = ("q", "k", "v", "past_key", "past_value")
_OPTIONAL = ("bias", "mask", "sinks")
_OUTPUTS = ("attended", "present_key", "present_value")

attend_cached = Operator(
    name="attend_cached",
    function="CachedAttention",
    inputs=(*_INPUTS, *_OPTIONAL),
    outputs=_OUTPUTS,
    eager=_cached,
    fake=_cached_fake,
    body=_cached_onnx,
    forms=bodies(2, False),
)


def written(buffer: torch.Tensor, new: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    """The buffer [B, K, M, head_dim] with new [B, K, S, head_dim] written from write_indices [B] on."""
    steps = torch.arange(new.shape[2], device=new.device)
    at = (write_indices.unsqueeze(1) + steps)[:, None, :, None].expand_as(new)
    return buffer.scatter(2, at, new)


def _shared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    write_indices: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
) -> Three:
    heads = Heads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    key, value = (
        written(past, to_heads(new, num_kv_heads), write_indices) for past, new in ((past_key, k), (past_value, v))
    )
    return attention(q, key, value, bias, mask, sinks, heads, write_indices), key, value


def _shared_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: torch.Tensor, *_: object) -> Three:
    return torch.empty_like(q), torch.empty_like(past), torch.empty_like(past)


def _shared_onnx(write: Callable[..., ir.Value]) -> Body:
    def body(
        op: Ops,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        past_key: ir.Value,
        past_value: ir.Value,
        write_indices: ir.Value,
        *added: ir.Value | None,
        **attributes: Any,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        heads, lengths = Heads(**attributes), lengths_onnx(op, q, past_key, 2)
        pairs = ((past_key, k), (past_value, v))
        key, value = (write(op, past, new, write_indices, lengths, heads.num_kv_heads) for past, new in pairs)
        return _attended_onnx(op, q, (key, value), added, heads, lengths, write_indices), key, value

    return body


_SCATTERED = _shared_onnx(scattered_onnx)

attend_shared = Operator(
    name="attend_shared",
    function="SharedCacheAttention",
    inputs=(*_INPUTS, "write_indices", *_OPTIONAL),
    outputs=_OUTPUTS,
    eager=_shared,
    fake=_shared_fake,
    body=_shared_onnx(written_onnx),
    forms=bodies(2, True) | {"decomposed:ort": _SCATTERED, "function:ort": _SCATTERED},
)


def _key_positions(
    positions: torch.Tensor, past: torch.Tensor, write_indices: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    batch, seq = positions.shape
    total = past.shape[2] + (seq if write_indices is None else 0)
    keys = torch.arange(total, device=positions.device).expand(batch, total)
    first = (total - seq if write_indices is None else write_indices.unsqueeze(1)) + torch.zeros_like(keys[:, :1])
    before, at_first, anchor = keys, first, positions[:, :1]
    if mask is not None:
        attended = (mask != 0).long()
        before = attended.cumsum(1) - attended  # the number of attended tokens before each key
        at_first = before.gather(1, first)
        # the first new token that is not padding, whose position would mean nothing
        new = (before + attended).gather(1, first + torch.arange(seq, device=positions.device))
        anchor = positions.gather(1, (new == at_first).sum(1, keepdim=True).clamp(max=seq - 1))
    cached = anchor - at_first + before
    return torch.where(keys < first, cached, positions.gather(1, (keys - first).clamp(0, seq - 1)))


def _key_positions_fake(
    positions: torch.Tensor, past: torch.Tensor, write_indices: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    batch, seq = positions.shape
    return positions.new_empty((batch, past.shape[2] + (seq if write_indices is None else 0)))


def _key_positions_onnx(
    op: Ops, positions: ir.Value, past: ir.Value, write_indices: ir.Value | None, mask: ir.Value | None
) -> ir.Value:
    seq, length = op.Shape(positions, start=1, end=2), op.Shape(past, start=2, end=3)
    total, first = (
        (op.Add(length, seq), length) if write_indices is None else (length, op.Unsqueeze(write_indices, [1]))
    )
    keys = op.Range(0, op.Squeeze(total), 1)
    before, at_first, anchor = keys, first, op.Slice(positions, [0], [1], [1])
    if mask is not None:
        attended = op.Cast(op.Cast(mask, to=ir.DataType.BOOL), to=ir.DataType.INT64)
        before = op.CumSum(attended, 1, exclusive=1)
        take = op.Gather if write_indices is None else op.GatherElements
        at_first = take(before, first, axis=1)
        new = take(op.Add(before, attended), op.Add(first, op.Range(0, op.Squeeze(seq), 1)), axis=1)
        leading = op.ReduceSum(op.Cast(op.Equal(new, at_first), to=ir.DataType.INT64), [1])
        anchor = op.GatherElements(positions, op.Min(leading, op.Sub(seq, 1)), axis=1)
    cached = op.Add(op.Sub(anchor, at_first), before)
    # Where, not Concat of cached and new: a Concat after CumSum keeps TensorRT from fusing attention
    steps = op.Min(op.Max(op.Sub(keys, first), 0), op.Sub(seq, 1))
    new = (op.Gather if write_indices is None else op.GatherElements)(positions, steps, axis=1)
    return op.Where(op.Less(keys, first), cached, new)


key_positions = Operator(
    name="key_positions",
    function="KeyPositions",
    inputs=("positions", "past", "write_indices", "mask"),
    outputs=("k_positions",),
    eager=_key_positions,
    fake=_key_positions_fake,
    body=_key_positions_onnx,
)
