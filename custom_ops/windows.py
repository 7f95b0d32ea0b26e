"""Biases within a window of a grid, looked up by the offset of two cells on both axes, in fp32 for every graph dtype.

window_bias      table[(dy + M - 1) (2M - 1) + dx + M - 1, n], offsets clipped to the window of M x M cells
                 (Swin: Liu et al. 2021, arXiv:2103.14030, eq. 4)
window_table     that table [(2M - 1)^2, N], as 16 sigmoid of an MLP of log-spaced offsets
                 (Swin V2: Liu et al. 2022, arXiv:2111.09883, eq. 3 and 4)
cosine_heads     x / |x| of each head, times a trained factor per head where there is one, at most 100 (ibid., eq. 2)

positions [B, S, 2] and [B, T, 2] -> [B, N, S, T]
"""

import math

import onnx_ir as ir
import torch

from posexport.custom_ops.bias import FP32, behind, offsets_onnx, per_table, wide
from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of


def _bias(q_positions: torch.Tensor, k_positions: torch.Tensor, table: torch.Tensor, size: int) -> torch.Tensor:
    offset = behind(q_positions, k_positions).clamp(1 - size, size - 1) + size - 1
    index = offset[..., 1] * (2 * size - 1) + offset[..., 0]
    return table[index].permute(0, 3, 1, 2).to(wide(table.dtype))


def _bias_onnx(op: Ops, q_positions: ir.Value, k_positions: ir.Value, table: ir.Value, *, size: int) -> ir.Value:

    def offset(axis: int) -> ir.Value:  # one axis at a time: both at once take ONNX Runtime three times as long
        queries, keys = (op.Slice(positions, [axis], [axis + 1], [2]) for positions in (q_positions, k_positions))
        return offsets_onnx(op, queries, op.Transpose(keys, perm=[0, 2, 1]), size - 1)

    index = op.Add(op.Mul(offset(1), 2 * size - 1), offset(0))
    rows = op.Gather(cast(op, table, FP32), index, axis=0)
    return op.Transpose(rows, perm=[0, 3, 1, 2])


window_bias = Operator(
    name="window_bias",
    function="WindowBias",
    inputs=("q_positions", "k_positions", "table"),
    outputs=("bias",),
    eager=_bias,
    fake=per_table,
    body=_bias_onnx,
)

MAX_BIAS = 16.0
"""The upper bound of Swin V2's bias."""


def _table(coordinates: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    w1, b1, w2 = (t.to(coordinates.dtype) for t in (w1, b1, w2))
    return MAX_BIAS * torch.sigmoid(torch.relu(coordinates @ w1.T + b1) @ w2.T)


def _table_fake(coordinates: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return coordinates.new_empty((coordinates.shape[0], w2.shape[0]))


def _table_onnx(op: Ops, coordinates: ir.Value, w1: ir.Value, b1: ir.Value, w2: ir.Value) -> ir.Value:
    w1, b1, w2 = (cast(op, t, FP32) for t in (w1, b1, w2))
    hidden = op.Relu(op.Add(op.MatMul(coordinates, op.Transpose(w1, perm=[1, 0])), b1))
    return op.Mul(op.Sigmoid(op.MatMul(hidden, op.Transpose(w2, perm=[1, 0]))), constant(op, MAX_BIAS, FP32))


window_table = Operator(
    name="window_table",
    function="WindowTable",
    inputs=("coordinates", "w1", "b1", "w2"),
    outputs=("table",),
    eager=_table,
    fake=_table_fake,
    body=_table_onnx,
)

MAX_LOG_FACTOR = math.log(100.0)
"""The largest logarithm of the factor on the cosines."""

NORM_EPS = 1e-12


def _cosine(x: torch.Tensor, logit_scale: torch.Tensor | None, head_dim: int) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, head_dim)).to(wide(x.dtype))
    heads = heads / heads.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS)
    if logit_scale is not None:
        heads = heads * logit_scale.to(heads.dtype).clamp(max=MAX_LOG_FACTOR).exp().view(-1, 1)
    normed: torch.Tensor = heads.to(x.dtype).flatten(2)
    return normed


def _cosine_onnx(op: Ops, x: ir.Value, logit_scale: ir.Value | None, *, head_dim: int) -> ir.Value:
    heads = cast(op, op.Reshape(x, [0, 0, -1, head_dim]), FP32)
    norm = op.Sqrt(op.ReduceSum(op.Mul(heads, heads), [-1]))
    heads = op.Div(heads, op.Max(norm, constant(op, NORM_EPS, FP32)))
    if logit_scale is not None:
        factor = op.Exp(op.Min(cast(op, logit_scale, FP32), constant(op, MAX_LOG_FACTOR, FP32)))
        heads = op.Mul(heads, op.Reshape(factor, [-1, 1]))
    return op.Reshape(cast(op, heads, dtype_of(x)), [0, 0, -1])


cosine_heads = Operator(
    name="cosine_heads",
    function="CosineHeads",
    inputs=("x", "logit_scale"),
    outputs=("normed",),
    eager=_cosine,
    body=_cosine_onnx,
)
