"""Biases on the logits that follow from the positions of query and key alone, in fp32 whatever the graph's dtype.

alibi_bias     -slope_n |p_i - p_j|                       (Press et al. 2022, arXiv:2108.12409, section 3)
relative_bias  W[bucket[clip(p_j - p_i, -M, M) + M], n]   (Raffel et al. 2020, arXiv:1910.10683, section 2.1)

q_positions [B, S], k_positions [B, T] int64 -> [B, N, S, T]. Distances are taken in integers, so they are exact at
any position; buckets are looked up, not computed with a logarithm that each runtime rounds its own way.
"""

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.operator import Operator, cast


def _alibi(q_positions: torch.Tensor, k_positions: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    distance = (q_positions.unsqueeze(2) - k_positions.unsqueeze(1)).abs()
    return distance.unsqueeze(1).to(slopes.dtype) * -slopes.view(-1, 1, 1)


def _alibi_fake(q_positions: torch.Tensor, k_positions: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    return slopes.new_empty((q_positions.shape[0], slopes.shape[0], q_positions.shape[1], k_positions.shape[1]))


def _alibi_onnx(op: Any, q_positions: ir.Value, k_positions: ir.Value, slopes: ir.Value) -> ir.Value:
    distance = op.Abs(op.Sub(op.Unsqueeze(q_positions, [2]), op.Unsqueeze(k_positions, [1])))
    distance = op.Cast(op.Unsqueeze(distance, [1]), to=ir.DataType.FLOAT)
    made: ir.Value = op.Mul(distance, op.Neg(op.Unsqueeze(slopes, [1, 2])))
    return made


alibi_bias = Operator(
    name="alibi_bias",
    function="AlibiBias",
    inputs=("q_positions", "k_positions", "slopes"),
    outputs=("bias",),
    eager=_alibi,
    fake=_alibi_fake,
    body=_alibi_onnx,
)


def offsets_onnx(op: Any, ahead: ir.Value, behind: ir.Value, reach: int) -> ir.Value:
    """clip(ahead - behind, -reach, reach) + reach, int64: the row of a table of distances."""
    made: ir.Value = op.Add(op.Min(op.Max(op.Sub(ahead, behind), -reach), reach), reach)
    return made


def _relative(
    q_positions: torch.Tensor, k_positions: torch.Tensor, table: torch.Tensor, buckets: torch.Tensor, max_distance: int
) -> torch.Tensor:
    offset = (k_positions.unsqueeze(1) - q_positions.unsqueeze(2)).clamp(-max_distance, max_distance) + max_distance
    bias = table[buckets][offset].permute(0, 3, 1, 2)
    return bias if bias.dtype == torch.float64 else bias.float()


def _relative_fake(
    q_positions: torch.Tensor, k_positions: torch.Tensor, table: torch.Tensor, buckets: torch.Tensor, max_distance: int
) -> torch.Tensor:
    shape = (q_positions.shape[0], table.shape[1], q_positions.shape[1], k_positions.shape[1])
    return table.new_empty(shape, dtype=torch.float64 if table.dtype == torch.float64 else torch.float32)


def _relative_onnx(
    op: Any, q_positions: ir.Value, k_positions: ir.Value, table: ir.Value, buckets: ir.Value, *, max_distance: int
) -> ir.Value:
    assert table.dtype is not None
    by_offset = op.Gather(cast(op, table, table.dtype, ir.DataType.FLOAT), buckets, axis=0)
    offset = offsets_onnx(op, op.Unsqueeze(k_positions, [1]), op.Unsqueeze(q_positions, [2]), max_distance)
    made: ir.Value = op.Transpose(op.Gather(by_offset, offset, axis=0), perm=[0, 3, 1, 2])
    return made


relative_bias = Operator(
    name="relative_bias",
    function="RelativeBias",
    inputs=("q_positions", "k_positions", "table", "buckets"),
    outputs=("bias",),
    eager=_relative,
    fake=_relative_fake,
    body=_relative_onnx,
)
