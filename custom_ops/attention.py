"""Attention with a bias: softmax(scale * q k^T + bias, masked) v, softmax in fp32 (Vaswani et al. 2017, eq. 1).

q [B, S, N*head_dim], k and v [B, T, K*head_dim], bias [B, N, S, T] in fp32 or absent -> [B, S, N*head_dim].
Query head n reads key head n // (N/K). The last query stands at the last key: query i has index i + T - S.
`causal`: index_i >= j. `window` w > 0: |index_i - j| < w. Both go by index, not by position.
"""

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.operator import Operator, cast, constant

MASKED = -3.0e38
"""The logit of a key out of sight: finite, so that no row becomes NaN, and 0 after softmax beside any other."""


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    q = q.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    k, v = (t.unflatten(-1, (num_kv_heads, -1)).transpose(1, 2) for t in (k, v))
    mask: torch.Tensor | None = bias
    seq, total = q.shape[-2], k.shape[-2]
    if window or (causal and (bias is not None or seq != total)):  # torch's own is_causal counts from the first key
        ahead = torch.arange(seq, device=q.device).unsqueeze(1) + (total - seq) - torch.arange(total, device=q.device)
        visible = ahead >= 0 if causal else ahead > -window
        if window:
            visible = visible & (ahead < window)
        mask = visible if bias is None else bias.masked_fill(~visible, MASKED)
    if mask is None or mask.dtype in (torch.bool, q.dtype):
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(
            q, k, v, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
    else:  # a bias in fp32 over half-precision queries: the logits are summed in fp32, as in the graph
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, 1) for t in (k, v))
        logits = ((q * scale) @ k.transpose(-1, -2)).to(mask.dtype) + mask
        out = logits.softmax(-1).to(q.dtype) @ v
    return out.transpose(1, 2).flatten(2)


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    return torch.empty_like(q)


def _visible(op: Any, seq: ir.Value, total: ir.Value, causal: bool, window: int) -> ir.Value:
    """Which keys a query sees, [S, T] bool, from the lengths as they are at run time."""
    queries = op.Range(op.Sub(total, seq), total, 1)
    ahead = op.Sub(op.Unsqueeze(queries, [1]), op.Range(0, total, 1))
    visible = op.GreaterOrEqual(ahead, 0) if causal else op.Greater(ahead, -window)
    made: ir.Value = op.And(visible, op.Less(ahead, window)) if window else visible
    return made


def _attention_onnx(
    op: Any,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    bias: ir.Value | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    causal: bool,
    window: int,
) -> ir.Value:
    dtype, fp32 = q.dtype, ir.DataType.FLOAT
    assert dtype is not None
    group = num_heads // num_kv_heads
    mask = None
    if causal or window:
        seq, total = (op.Squeeze(op.Shape(t, start=1, end=2)) for t in (q, k))
        mask = _visible(op, seq, total, causal, window)
    k, v = (op.Reshape(t, [0, 0, num_kv_heads, -1]) for t in (k, v))
    if group > 1:
        # constant shapes only: a reshape to computed ones costs TensorRT host-side shape kernels
        k, v = (op.Reshape(op.Expand(op.Unsqueeze(t, [3]), [1, 1, 1, group, 1]), [0, 0, num_heads, -1]) for t in (k, v))
    q = op.Mul(q, constant(op, scale, dtype))
    q = op.Transpose(op.Reshape(q, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3])
    k, v = op.Transpose(k, perm=[0, 2, 3, 1]), op.Transpose(v, perm=[0, 2, 1, 3])
    logits = cast(op, op.MatMul(q, k), dtype, fp32)
    if bias is not None:
        logits = op.Add(logits, bias)
    if mask is not None:
        logits = op.Where(mask, logits, constant(op, MASKED, fp32))
    weights = cast(op, op.Softmax(logits, axis=-1), fp32, dtype)
    made: ir.Value = op.Reshape(op.Transpose(op.MatMul(weights, v), perm=[0, 2, 1, 3]), [0, 0, -1])
    return made


attend = Operator(
    name="attend",
    function="PositionalAttention",
    inputs=("q", "k", "v", "bias"),
    outputs=("attended",),
    eager=_attention,
    fake=_attention_fake,
    body=_attention_onnx,
)
