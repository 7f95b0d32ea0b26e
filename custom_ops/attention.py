"""Attention with a bias: softmax(scale * q k^T + bias, masked) v, softmax in fp32 (Vaswani et al. 2017, eq. 1).

q [B, S, N*head_dim], k and v [B, T, K*head_dim], bias [B, N, S, T] in fp32, mask [B, T] int64, sinks [N]; the last
three are optional -> [B, S, N*head_dim]. Query head n reads key head n // (N/K). `causal`, `window` and `mask`
say which keys a query sees (posexport.custom_ops.visibility); a query that sees none gets zeros.

softcap  c > 0: logits are c tanh(logits / c), before bias and mask (Gemma 2: Riviere et al. 2024, arXiv:2408.00118)
sinks    one more logit per head in the softmax, without a value (gpt-oss: OpenAI 2025, arXiv:2508.10925)
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.attention_forms import bodies
from posexport.custom_ops.buffers import repeated_onnx
from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of, rank_of, size_of
from posexport.custom_ops.visibility import Heads, Lengths, lengths_onnx, sink_onnx, visible, visible_onnx

MASKED = -3.0e38
"""The logit of a key that is not seen: finite, so that no row becomes NaN, and 0 after softmax with any other key."""

FUSED_SOFTCAP = 1000.0
"""In half precision, caps up to this are computed without tanh; the error of the logits is at most 6e-5."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    heads: Heads,
    write_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, S, N*head_dim], k and v [B, K, T, head_dim]: the torch body of all three kinds of attention."""
    q = q.unflatten(-1, (heads.num_heads, -1)).transpose(1, 2)
    seq, total = q.shape[-2], k.shape[-2]
    out: torch.Tensor
    sdpa, grouped = torch.nn.functional.scaled_dot_product_attention, heads.group > 1
    plain = bias is None and sinks is None and not heads.softcap
    all_seen = mask is None and write_indices is None and not heads.local
    if plain and all_seen and (seq in (1, total) or not heads.causal):
        causal = heads.causal and bool(seq > 1)  # seq is a symbol in an export of this body
        out = sdpa(q, k, v, is_causal=causal, scale=heads.scale, enable_gqa=grouped)
        return from_heads(out)
    seen = visible(heads, seq, total, mask, write_indices, q.device)
    if plain:
        out = sdpa(q, k, v, seen, scale=heads.scale, enable_gqa=grouped)
    elif bias is not None and bias.dtype == q.dtype and sinks is None and not heads.softcap:
        bias = bias if seen is None else bias.masked_fill(~seen, MASKED)
        out = sdpa(q, k, v, bias, scale=heads.scale, enable_gqa=grouped)
    else:
        weights, _ = weights_of(q, k, bias, mask, sinks, heads, write_indices)
        out = weights @ v.repeat_interleave(heads.group, 1)
    if mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return from_heads(out)


def heads_of(k: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Keys [B, K, T, head_dim], from the same shape or from [B, T, K*head_dim]."""
    return k if k.dim() == 4 else to_heads(k, heads.num_kv_heads)


def logits_of(q: torch.Tensor, k: torch.Tensor, heads: Heads) -> torch.Tensor:
    """scale * q k^T, [B, N, S, T], from q [B, N, S, head_dim] and k [B, K, T, head_dim]; fp32 for half precision."""
    logits = (q * heads.scale) @ k.repeat_interleave(heads.group, 1).transpose(-1, -2)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def weights_of(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    heads: Heads,
    write_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights of attention [B, N, S, T] in q's dtype, from logits that are summed in fp32 as in the graph, and the
    visible keys."""
    seq, total = q.shape[-2], k.shape[-2]
    seen = visible(heads, seq, total, mask, write_indices, q.device)
    logits = logits_of(q, k, heads)
    if heads.softcap:
        logits = heads.softcap * torch.tanh(logits / heads.softcap)
    logits = logits if bias is None else logits + bias
    logits = logits if seen is None else logits.masked_fill(~seen, MASKED)
    if sinks is not None:
        column = sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, column), -1)
    return logits.softmax(-1)[..., :total].to(q.dtype), seen


def to_heads(t: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, S, heads*head_dim] to [B, heads, S, head_dim]."""
    heads: torch.Tensor = t.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return heads


def from_heads(t: torch.Tensor) -> torch.Tensor:
    """[B, heads, S, head_dim] to [B, S, heads*head_dim]."""
    return t.transpose(1, 2).flatten(2)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
) -> torch.Tensor:
    heads = Heads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    return attention(q, to_heads(k, num_kv_heads), to_heads(v, num_kv_heads), bias, mask, sinks, heads)


def attention_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    added: tuple[ir.Value | None, ir.Value | None, ir.Value | None],
    heads: Heads,
    lengths: Lengths,
    write_indices: ir.Value | None = None,
) -> ir.Value:
    """q [B, S, N*head_dim], k [B, N, head_dim, T], v [B, N, T, head_dim]; `added` are bias, mask and sinks, `lengths` S
    and T as scalars: the ONNX body of all three kinds of attention.

    TensorRT fuses all of it into one kernel in half precision; it doesn't with tanh, or with the sinks concatenated to
    the logits.
    """
    _, mask, sinks = added
    weights, seen = weights_onnx(op, q, k, added, heads, lengths, write_indices)
    if sinks is not None:  # their key has the value zero
        v = op.Pad(v, [0, 0, 1, 0, 0, 0, 0, 0])
    out = op.MatMul(weights, v)
    if mask is not None and sinks is None:
        out = op.Mul(out, op.ReduceMax(op.Cast(seen, to=q.dtype), [-1]))
    return op.Reshape(op.Transpose(out, perm=[0, 2, 1, 3]), [0, 0, -1])


def weights_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    added: tuple[ir.Value | None, ir.Value | None, ir.Value | None],
    heads: Heads,
    lengths: Lengths,
    write_indices: ir.Value | None,
) -> tuple[ir.Value, ir.Value | None]:
    """The weights of attention [B, N, S, T] in q's dtype, with sinks one more column in front, and the visible keys."""
    (bias, mask, sinks), dtype, fp32 = added, dtype_of(q), ir.DataType.FLOAT
    front = [0, 0, 0, 1, 0, 0, 0, 0]
    if sinks is not None:  # a first key of zeros, whose logit is then replaced by the sink
        k = op.Pad(k, front)
    logits = logits_onnx(op, q, k, heads)
    if heads.softcap:
        logits = _capped_onnx(op, logits, heads.softcap, dtype != fp32 and heads.softcap <= FUSED_SOFTCAP)
    if bias is not None:
        logits = op.Add(logits, bias if sinks is None else op.Pad(bias, front))
    seen = visible_onnx(op, heads, *lengths, mask, write_indices, sinks is not None)
    if seen is not None:
        logits = op.Where(seen, logits, constant(op, MASKED, fp32))
    if sinks is not None:
        logits = sink_onnx(op, logits, cast(op, sinks, fp32), lengths[1])
    return cast(op, op.Softmax(logits, axis=-1), dtype), seen


def logits_onnx(op: Ops, q: ir.Value, k: ir.Value, heads: Heads) -> ir.Value:
    """scale * q k^T in fp32, from q [B, S, N*head_dim] and k [B, N, head_dim, T]."""
    scaled = op.Mul(q, constant(op, heads.scale, dtype_of(q)))
    scaled = op.Transpose(op.Reshape(scaled, [0, 0, heads.num_heads, -1]), perm=[0, 2, 1, 3])
    return cast(op, op.MatMul(scaled, k), ir.DataType.FLOAT)


def keys_onnx(op: Ops, q: ir.Value, k: ir.Value, heads: Heads) -> ir.Value:
    """Keys for `logits_onnx`, from [B, T, K*head_dim], or [B, K, T, head_dim] of a cache."""
    head_dim = size_of(q, -1) // heads.num_heads
    if rank_of(k) == 4:
        return op.Transpose(repeated_onnx(op, k, heads, head_dim), perm=[0, 1, 3, 2])
    return op.Transpose(_split_onnx(op, k, heads), perm=[0, 2, 3, 1])


def _split_onnx(op: Ops, t: ir.Value, heads: Heads) -> ir.Value:
    """[B, T, K*head_dim] to [B, T, N, head_dim], each key head for the query heads that read it."""
    t = op.Reshape(t, [0, 0, heads.num_kv_heads, -1])
    if heads.group > 1:
        # constant shapes only: computed ones cost TensorRT shape kernels on the host
        t = op.Expand(op.Unsqueeze(t, [3]), [1, 1, 1, heads.group, 1])
        t = op.Reshape(t, [0, 0, heads.num_heads, -1])
    return t


def _capped_onnx(op: Ops, logits: ir.Value, softcap: float, fused: bool) -> ir.Value:
    """c tanh(z / c), or c - 2c / (exp(2z / c) + 1), which TensorRT fuses, with an error of c * 2^-24."""
    fp32 = ir.DataType.FLOAT
    cap = constant(op, softcap, fp32)
    if fused:
        grown = op.Exp(op.Mul(logits, constant(op, 2.0 / softcap, fp32)))
        return op.Sub(cap, op.Div(constant(op, 2.0 * softcap, fp32), op.Add(grown, constant(op, 1.0, fp32))))
    return op.Mul(op.Tanh(op.Div(logits, cap)), cap)


def _attend_onnx(
    op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, *added: ir.Value | None, **attributes: Any
) -> ir.Value:
    heads, lengths = Heads(**attributes), lengths_onnx(op, q, k, 1)
    key, value = keys_onnx(op, q, k, heads), op.Transpose(_split_onnx(op, v, heads), perm=[0, 2, 1, 3])
    bias, mask, sinks = added
    return attention_onnx(op, q, key, value, (bias, mask, sinks), heads, lengths)


attend = Operator(
    name="attend",
    function="PositionalAttention",
    inputs=("q", "k", "v", "bias", "mask", "sinks"),
    outputs=("attended",),
    eager=_attend,
    body=_attend_onnx,
    forms=bodies(0, False),
)
