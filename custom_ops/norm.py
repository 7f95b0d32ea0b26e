"""RMS norm of each head, x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, arXiv:1910.07467; on queries and
keys: Qwen3, arXiv:2505.09388), the mean in fp32.

head_norm  x [B, S, heads*head_dim], weight [head_dim] or None -> like x
"""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, wide


@operator("HeadNorm", "normed", fake=lambda call: torch.empty_like(call.x))
def head_norm(x: Tensor, weight: Tensor | None, head_dim: int, eps: float) -> Tensor:
    heads = x.unflatten(-1, (-1, head_dim)).to(wide(x.dtype))
    normed = (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return torch.flatten(normed if weight is None else weight * normed, 2)


@head_norm.onnx
def _head_norm_onnx(op: Ops, x: ir.Value, weight: ir.Value | None, head_dim: int, eps: float) -> ir.Value:
    heads = cast(op, op.Reshape(x, [0, 0, -1, head_dim]), ir.DataType.FLOAT)
    mean = op.Add(op.ReduceMean(op.Mul(heads, heads), [-1]), constant(op, eps))
    normed = cast(op, op.Div(heads, op.Sqrt(mean)), dtype_of(x))
    return op.Reshape(normed if weight is None else op.Mul(normed, weight), [0, 0, -1])


@head_norm.form("native")
def _head_norm_native(op: Ops, x: ir.Value, weight: ir.Value | None, head_dim: int, eps: float) -> ir.Value:
    if weight is None:
        return _head_norm_onnx(op, x, weight, head_dim, eps)
    heads = op.Reshape(x, [0, 0, -1, head_dim])
    return op.Reshape(op.RMSNormalization(heads, weight, axis=-1, epsilon=eps), [0, 0, -1])
