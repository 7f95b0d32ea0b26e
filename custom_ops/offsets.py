"""Trained vectors for each distance, added to keys and to values (Shaw et al. 2018, arXiv:1803.02155); fp32 logits.

offset_score   scale * q_i . table[r_ij], r_ij = clip(p_j - p_i, -behind, ahead) + behind   (ibid., eq. 4)
offset_values  sum over j of a_ij table[r_ij], a the weights of attention                   (ibid., eq. 3)

q [B, S, N*head_dim]; k [B, T, K*head_dim], or [B, K, T, head_dim] with a cache; table [behind + ahead + 1, head_dim].
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.attention import heads_of, keys_onnx, to_heads, weights_of, weights_onnx
from posexport.custom_ops.bias import FP32, behind, fake_logits, offsets_onnx, wide
from posexport.custom_ops.buffers import heads_onnx
from posexport.custom_ops.content import key_lengths_onnx, picked_onnx
from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of, size_of
from posexport.custom_ops.visibility import Heads


def _rows(q_positions: torch.Tensor, k_positions: torch.Tensor, reach_behind: int, reach_ahead: int) -> torch.Tensor:
    """int64 [B, S, T]: the row of each query and key in a table of distances."""
    return (-behind(q_positions, k_positions)).clamp(-reach_behind, reach_ahead) + reach_behind


def _rows_onnx(op: Ops, q_positions: ir.Value, k_positions: ir.Value, behind: int, ahead: int) -> ir.Value:
    return offsets_onnx(op, op.Unsqueeze(k_positions, [1]), op.Unsqueeze(q_positions, [2]), behind, ahead)


def _offset_score(
    q: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    table: torch.Tensor,
    behind: int,
    ahead: int,
    scale: float,
) -> torch.Tensor:
    heads = q.unflatten(-1, (-1, table.shape[1])).transpose(1, 2) * scale
    scores = heads @ table.T
    index = _rows(q_positions, k_positions, behind, ahead).unsqueeze(1).expand(-1, heads.shape[1], -1, -1)
    score: torch.Tensor = scores.gather(-1, index).to(wide(q.dtype))
    return score


def _offset_score_fake(
    q: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor, table: torch.Tensor, *_: object
) -> torch.Tensor:
    return fake_logits(q, k_positions.shape[1], q.shape[2] // table.shape[1], q.dtype)


def _offset_score_onnx(
    op: Ops,
    q: ir.Value,
    q_positions: ir.Value,
    k_positions: ir.Value,
    table: ir.Value,
    *,
    behind: int,
    ahead: int,
    scale: float,
) -> ir.Value:
    num_heads = size_of(q, -1) // size_of(table, 1)
    heads = op.Mul(heads_onnx(op, q, num_heads), constant(op, scale, dtype_of(q)))
    scores = op.MatMul(heads, op.Transpose(table, perm=[1, 0]))
    index = _rows_onnx(op, q_positions, k_positions, behind, ahead)
    return cast(op, picked_onnx(op, scores, index, num_heads), FP32)


offset_score = Operator(
    name="offset_score",
    function="OffsetScore",
    inputs=("q", "q_positions", "k_positions", "table"),
    outputs=("score",),
    eager=_offset_score,
    fake=_offset_score_fake,
    body=_offset_score_onnx,
)


def _offset_values(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    write_indices: torch.Tensor | None,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
    behind: int,
    ahead: int,
) -> torch.Tensor:
    heads = Heads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    weights, seen = weights_of(to_heads(q, num_heads), heads_of(k, heads), bias, mask, sinks, heads, write_indices)
    rows = table[_rows(q_positions, k_positions, behind, ahead)]
    out = weights.transpose(1, 2) @ rows
    if mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1).unsqueeze(-1).transpose(1, 2), 0.0)
    return out.flatten(2)


def _offset_values_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    bias: ir.Value | None,
    mask: ir.Value | None,
    sinks: ir.Value | None,
    write_indices: ir.Value | None,
    q_positions: ir.Value,
    k_positions: ir.Value,
    table: ir.Value,
    *,
    behind: int,
    ahead: int,
    **attributes: Any,
) -> ir.Value:
    heads = Heads(**attributes)
    lengths = key_lengths_onnx(op, q, k)
    weights, seen = weights_onnx(op, q, keys_onnx(op, q, k, heads), (bias, mask, sinks), heads, lengths, write_indices)
    if sinks is not None:  # they are the first column
        weights = op.Slice(weights, [1], [2**31 - 1], [3])
    rows = op.Gather(table, _rows_onnx(op, q_positions, k_positions, behind, ahead), axis=0)
    out = op.MatMul(op.Transpose(weights, perm=[0, 2, 1, 3]), rows)
    if mask is not None and sinks is None:
        out = op.Mul(out, op.Transpose(op.ReduceMax(op.Cast(seen, to=q.dtype), [-1]), perm=[0, 2, 1, 3]))
    return op.Reshape(out, [0, 0, -1])


offset_values = Operator(
    name="offset_values",
    function="OffsetValues",
    inputs=("q", "k", "bias", "mask", "sinks", "write_indices", "q_positions", "k_positions", "table"),
    outputs=("added",),
    eager=_offset_values,
    body=_offset_values_onnx,
)
