"""Scores that mix position and content in other ways than Transformer-XL; fp32 logits.

disentangled_score    scale * (q_i . K[b_ij] + k_j . Q[b_ij]), K and Q [N*head_dim, rows] or absent, b_ij =
                      bucket[clip(p_i - p_j, -M, M) + M] (DeBERTa: He et al. 2021, arXiv:2006.03654, eq. 4)
contextual_score      q_i . e[c_ij], interpolated between whole numbers, c_ij = sum from t = j to i of
                      sigmoid(scale q_i . k_t), at most the last row (CoPE: Golovneva et al. 2024, arXiv:2405.18719,
                      eq. 3 to 5, and the listing in its appendix)
cached_keys           the keys of a cache with the new ones [B, K, T, head_dim]

q [B, S, N*head_dim]; k [B, T, K*head_dim], or [B, K, T, head_dim] with a cache; results [B, N, S, T].
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.attention import heads_of, keys_onnx, logits_of, logits_onnx, to_heads
from posexport.custom_ops.bias import FP32, behind, fake_logits, offsets_onnx, wide
from posexport.custom_ops.buffers import grown_onnx, heads_onnx, written_onnx
from posexport.custom_ops.cache import written
from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of, rank_of, size_of
from posexport.custom_ops.visibility import Heads, Lengths, lengths_onnx, visible, visible_onnx


def picked_onnx(op: Ops, scores: ir.Value, index: ir.Value, num_heads: int) -> ir.Value:
    """scores [B, N, S, R] at index [B, S, T]."""
    return op.GatherElements(scores, op.Expand(op.Unsqueeze(index, [1]), [1, num_heads, 1, 1]), axis=-1)


def key_lengths_onnx(op: Ops, q: ir.Value, k: ir.Value) -> Lengths:
    """The numbers of queries and of keys, with a cache or without."""
    return lengths_onnx(op, q, k, rank_of(k) - 2)


def _disentangled(
    q: torch.Tensor,
    k: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    buckets: torch.Tensor,
    key_table: torch.Tensor | None,
    query_table: torch.Tensor | None,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    reach = buckets.shape[0] // 2
    rows = buckets[behind(q_positions, k_positions).clamp(-reach, reach) + reach].unsqueeze(1)
    rows = rows.expand(-1, num_heads, -1, -1)
    score = q.new_zeros(())
    if key_table is not None:
        table = key_table.unflatten(0, (num_heads, -1))
        score = (q.unflatten(-1, (num_heads, -1)).transpose(1, 2) * scale @ table).gather(-1, rows)
    if query_table is not None:
        keys = k if k.dim() == 4 else k.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        table = query_table.unflatten(0, (num_heads, -1))
        by_key = (keys * scale @ table).gather(-1, rows.transpose(2, 3))
        score = score + by_key.transpose(2, 3)
    return score.to(wide(q.dtype))


def _disentangled_fake(q: torch.Tensor, *inputs: Any) -> torch.Tensor:
    _, _, k_positions, _, _, _, num_heads, _ = inputs
    return fake_logits(q, k_positions.shape[1], num_heads, q.dtype)


def _disentangled_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    q_positions: ir.Value,
    k_positions: ir.Value,
    buckets: ir.Value,
    key_table: ir.Value | None,
    query_table: ir.Value | None,
    *,
    num_heads: int,
    scale: float,
) -> ir.Value:
    dtype, reach = dtype_of(q), size_of(buckets, 0) // 2
    offset = offsets_onnx(op, op.Unsqueeze(q_positions, [2]), op.Unsqueeze(k_positions, [1]), reach)
    rows = op.Gather(buckets, offset, axis=0)

    def scores(heads: ir.Value, table: ir.Value) -> ir.Value:
        # features before rows: a transpose here crashes ONNX Runtime 1.31 in fp16
        by_head = op.Reshape(table, [num_heads, size_of(table, 0) // num_heads, -1])
        return op.MatMul(op.Mul(heads, constant(op, scale, dtype)), by_head)

    terms = []
    if key_table is not None:
        terms.append(picked_onnx(op, scores(heads_onnx(op, q, num_heads), key_table), rows, num_heads))
    if query_table is not None:
        keys = k if rank_of(k) == 4 else heads_onnx(op, k, num_heads)
        by_key = picked_onnx(op, scores(keys, query_table), op.Transpose(rows, perm=[0, 2, 1]), num_heads)
        terms.append(op.Transpose(by_key, perm=[0, 1, 3, 2]))
    return cast(op, terms[0] if len(terms) == 1 else op.Add(*terms), FP32)


disentangled_score = Operator(
    name="disentangled_score",
    function="DisentangledScore",
    inputs=("q", "k", "q_positions", "k_positions", "buckets", "key_table", "query_table"),
    outputs=("score",),
    eager=_disentangled,
    fake=_disentangled_fake,
    body=_disentangled_onnx,
)


def _contextual(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    write_indices: torch.Tensor | None,
    pos_emb: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
) -> torch.Tensor:
    heads = Heads(num_heads, num_kv_heads, scale, causal, window, chunk, 0.0)
    queries, keys = to_heads(q, num_heads), heads_of(k, heads)
    logits = logits_of(queries, keys, heads)
    seen = visible(heads, q.shape[1], keys.shape[2], mask, write_indices, q.device)
    gates = torch.sigmoid(logits)
    gates = gates if seen is None else gates.masked_fill(~seen, 0.0)
    places = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=pos_emb.shape[1] - 1)
    scores = (queries @ pos_emb).to(logits.dtype)
    low, high = places.floor(), places.ceil()
    part = places - low
    return scores.gather(-1, high.long()) * part + scores.gather(-1, low.long()) * (1 - part)


def _contextual_fake(q: torch.Tensor, k: torch.Tensor, *inputs: Any) -> torch.Tensor:
    _, _, _, num_heads, *_ = inputs
    return fake_logits(q, k.shape[2] if k.dim() == 4 else k.shape[1], num_heads, q.dtype)


def _contextual_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    mask: ir.Value | None,
    write_indices: ir.Value | None,
    pos_emb: ir.Value,
    **attributes: Any,
) -> ir.Value:
    heads = Heads(**attributes, softcap=0.0)
    lengths = key_lengths_onnx(op, q, k)
    logits = logits_onnx(op, q, keys_onnx(op, q, k, heads), heads)
    seen = visible_onnx(op, heads, *lengths, mask, write_indices)
    zero, one = constant(op, 0.0, FP32), constant(op, 1.0, FP32)
    gates = op.Sigmoid(logits)
    gates = gates if seen is None else op.Where(seen, gates, zero)
    last = constant(op, float(size_of(pos_emb, 1) - 1), FP32)
    places = op.Min(op.CumSum(gates, -1, reverse=1), last)
    scores = cast(op, op.MatMul(heads_onnx(op, q, heads.num_heads), pos_emb), FP32)
    low, high = op.Floor(places), op.Ceil(places)
    part = op.Sub(places, low)
    above, below = (op.GatherElements(scores, op.Cast(t, to=ir.DataType.INT64), axis=-1) for t in (high, low))
    return op.Add(op.Mul(above, part), op.Mul(below, op.Sub(one, part)))


contextual_score = Operator(
    name="contextual_score",
    function="ContextualScore",
    inputs=("q", "k", "mask", "write_indices", "pos_emb"),
    outputs=("score",),
    eager=_contextual,
    fake=_contextual_fake,
    body=_contextual_onnx,
)


def _cached_keys(
    past: torch.Tensor, k: torch.Tensor, write_indices: torch.Tensor | None, num_kv_heads: int
) -> torch.Tensor:
    new = k.unflatten(-1, (num_kv_heads, -1)).transpose(1, 2)
    return torch.cat((past, new), 2) if write_indices is None else written(past, new, write_indices)


def _cached_keys_fake(
    past: torch.Tensor, k: torch.Tensor, write_indices: torch.Tensor | None, num_kv_heads: int
) -> torch.Tensor:
    batch, heads, length, width = past.shape
    return past.new_empty((batch, heads, length + (k.shape[1] if write_indices is None else 0), width))


def _cached_keys_onnx(
    op: Ops, past: ir.Value, k: ir.Value, write_indices: ir.Value | None, *, num_kv_heads: int
) -> ir.Value:
    # the nodes that attention writes, so that the two become one where functions are inlined
    if write_indices is None:
        return grown_onnx(op, past, k, num_kv_heads)
    return written_onnx(op, past, k, write_indices, lengths_onnx(op, k, past, 2), num_kv_heads)


cached_keys = Operator(
    name="cached_keys",
    function="CachedKeys",
    inputs=("past", "k", "write_indices"),
    outputs=("keys",),
    eager=_cached_keys,
    fake=_cached_keys_fake,
    body=_cached_keys_onnx,
)
