"""Which keys a query sees, by index in the sequence. Computed in torch and in ONNX from the lengths at run time.

The last query has the index of the last key: query i has index i + T - S. In shared buffers, query i has index
write_indices[b] + i, and slots after the last query contain no keys.

`causal`: index_i >= j. `window` w > 0: |index_i - j| < w. `mask` [B, T] is 1 if a key may be seen. `chunk` c > 0:
(index_i - f) // c == (j - f) // c (Llama 4's chunked attention). f is the first key of the row that may be seen, or 0
without a mask. Left padding belongs to no chunk. Later holes in the mask do not move the chunks, as in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.heads import Heads
from posexport.custom_ops.operator import Ops, constant, dtype_of, rank_of


def visible(
    heads: Heads,
    seq: int,
    total: int,
    mask: Tensor | None,
    write_indices: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Return the visible keys, bool [S, T] or [B, 1, S, T]. None if every query sees every key."""
    keys = torch.arange(total, device=device)
    attended = None if mask is None else (mask != 0)[:, None, None, :]
    steps = torch.arange(seq, device=device).unsqueeze(1)
    seen: Tensor | None = None
    if write_indices is not None:
        first = write_indices.view(-1, 1, 1, 1)
        queries = first + steps
        ahead = queries - keys
        seen = ahead >= 0 if heads.causal else keys < first + seq
    else:
        queries = steps + (total - seq)
        ahead = queries - keys
        if heads.causal:
            seen = ahead >= 0
    if heads.window:
        near = ahead < heads.window
        if not heads.causal:
            near = near & (ahead > -heads.window)
        seen = near if seen is None else seen & near
    if heads.chunk:
        padding = 0 if attended is None else torch.where(attended, keys, total).amin(-1, keepdim=True)
        same = (queries - padding) // heads.chunk == (keys - padding) // heads.chunk
        seen = same if seen is None else seen & same
    if attended is not None:
        seen = attended if seen is None else seen & attended
    return seen


Lengths = tuple["ir.Value", "ir.Value"]
"""The numbers of queries and of keys, as scalars."""


def lengths_onnx(op: Ops, q: ir.Value, k: ir.Value) -> Lengths:
    """Return the numbers of queries [B, S, ...] and of keys [B, T, ...], or of a cache [B, K, T, head_dim], as
    scalars."""
    axis = rank_of(k) - 2
    return op.Squeeze(op.Shape(q, start=1, end=2)), op.Squeeze(op.Shape(k, start=axis, end=axis + 1))


def visible_onnx(
    op: Ops,
    heads: Heads,
    lengths: Lengths,
    mask: ir.Value | None,
    write_indices: ir.Value | None,
    sink: bool = False,
    first: ir.Value | None = None,
) -> ir.Value | None:
    """Do the same as `visible` in ONNX.

    With `sink`, one more column with any value comes first. `first` is the index of the first query, int64 []. It is
    needed if the last query does not have the index of the last key.
    """
    seq, total = lengths
    seen: ir.Value | None = None
    if write_indices is not None or heads.causal or heads.local:
        keys = op.Range(-1 if sink else 0, total, 1)
        if write_indices is not None:
            steps = op.Unsqueeze(op.Range(0, seq, 1), [1])
            queries = op.Add(op.Unsqueeze(write_indices, [1, 2, 3]), steps)
        else:
            first, end = (op.Sub(total, seq), total) if first is None else (first, op.Add(first, seq))
            queries = op.Unsqueeze(op.Range(first, end, 1), [1])
        ahead = op.Sub(queries, keys)
        if heads.causal:
            seen = op.GreaterOrEqual(ahead, 0)
        elif write_indices is not None:
            seen = op.Less(keys, op.Add(op.Unsqueeze(write_indices, [1, 2, 3]), seq))
        if heads.window:
            near = op.Less(ahead, heads.window)
            if not heads.causal:
                near = op.And(op.Greater(ahead, -heads.window), near)
            seen = near if seen is None else op.And(seen, near)
        if heads.chunk:
            counted = [queries, keys]
            if mask is not None:
                shift = _to_chunks(op, mask, total, heads.chunk)
                counted = [op.Add(places, shift) for places in counted]
            same = op.Equal(*(op.Div(places, heads.chunk) for places in counted))
            seen = same if seen is None else op.And(seen, same)
    if mask is not None:
        mask = op.Pad(mask, [0, 1, 0, 0], 1) if sink else mask
        attended = op.Unsqueeze(op.Cast(mask, to=ir.DataType.BOOL), [1, 2])
        seen = attended if seen is None else op.And(seen, attended)
    return seen


def hidden_onnx(op: Ops, seen: ir.Value, logits: ir.Value, lowest: float, graph: ir.DataType) -> ir.Value:
    """Return logits, or a mask that is added to them, with `lowest` for keys that are not seen.

    In a graph of fp32, `lowest` is added, because a logit is negligible beside it. ONNX Runtime's Where takes twice as
    long as its Add, and needs an array for each side. In half precision a sum could exceed the range, and TensorRT
    fuses a Where.
    """
    if graph != ir.DataType.FLOAT:
        return op.Where(seen, logits, constant(op, lowest, dtype_of(logits)))
    return op.Add(logits, op.Where(seen, constant(op, 0.0), constant(op, lowest)))


def keyed_onnx(op: Ops, seen: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return [..., 1] from `seen`, bool [..., keys]: 1 if a query sees a key, 0 if it sees none.

    The result is in `dtype`, but fp32 for bf16. ONNX Runtime's CUDA provider has neither ReduceMax nor Equal for bf16.
    """
    return op.ReduceMax(op.Cast(seen, to=ir.DataType.FLOAT if dtype == ir.DataType.BFLOAT16 else dtype), [-1])


def _to_chunks(op: Ops, mask: ir.Value, total: ir.Value, chunk: int) -> ir.Value:
    """Return the number, [B, 1, 1, 1], that moves the first attended key of each row to the start of a chunk.

    It is added to an index. It is from 1 to `chunk`, because Div rounds negative numbers towards zero.
    """
    first = op.ReduceMin(op.Where(op.Cast(mask, to=ir.DataType.BOOL), op.Range(0, total, 1), total), [1])
    into = op.Sub(first, op.Mul(op.Div(first, chunk), chunk))
    return op.Unsqueeze(op.Sub(chunk, into), [1, 2])


def sink_onnx(op: Ops, logits: ir.Value, sinks: ir.Value, total: ir.Value) -> ir.Value:
    """Return `logits` [B or 1, N or 1, S or 1, T + 1], or a mask of that shape, with the sinks [N] in the first
    column."""
    first = op.Equal(op.Range(0, op.Add(total, 1), 1), 0)
    return op.Where(first, op.Unsqueeze(sinks, [1, 2]), logits)
