"""RMS norm of each head, for queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import HEAD_DIM
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, wide


@operator("HeadNorm", "normed", fake=lambda call: torch.empty_like(call.x))
def head_norm(x: Tensor, weight: Tensor | None = None, head_dim: int = HEAD_DIM, eps: float = 1e-6) -> Tensor:
    """RMS norm of each head: x / sqrt(mean(x^2) + eps) * weight, with the mean in float32 (Zhang & Sennrich 2019,
    arXiv:1910.07467; on queries and keys: Qwen3, arXiv:2505.09388).

    Args:
        x: [B, S, heads*head_dim].
        weight: [head_dim], in x's dtype; None for no weight.
        head_dim: width of a head, by default that of `weight`.
        eps: number added to the mean.

    Returns:
        A tensor like x.

    Example:
        >>> head_norm(torch.tensor([[[3.0, 4.0, 0.0, 2.0]]]), head_dim=2)
        tensor([[[0.8485, 1.1314, 0.0000, 1.4142]]])
    """
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
