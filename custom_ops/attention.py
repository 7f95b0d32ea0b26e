"""Attention with a bias, over all keys at once or with a cache: torch and decomposed ONNX.

posexport.custom_ops.visibility says which keys a query sees. Caches are in posexport.custom_ops.cache. Bodies of the
forms `native` and `contrib` are in posexport.custom_ops.attention_forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import NUM_HEADS, REQUIRED, SCALE
from posexport.custom_ops.attention_forms import Call, Results, add_bodies
from posexport.custom_ops.cache import Write, cached_keys, written_onnx
from posexport.custom_ops.heads import CappedHeads, Heads, heads_onnx, repeated_onnx, split_onnx, to_heads
from posexport.custom_ops.operator import Ops, T, cast, constant, dtype_of, operator, rank_of, size_of
from posexport.custom_ops.visibility import Lengths, hidden_onnx, keyed_onnx, sink_onnx, visible, visible_onnx

Three = tuple[Tensor, Tensor, Tensor]

MASKED = -3.0e38
"""The logit of a hidden key. It is finite, so that no row becomes NaN, and 0 after softmax beside a visible key."""

FUSED_SOFTCAP = 1000.0
"""In half precision, caps up to this value are computed without tanh. The error of the logits is at most 6e-5."""


@dataclass(frozen=True)
class Added(Generic[T]):
    """The optional inputs of attention."""

    bias: T | None
    mask: T | None
    sinks: T | None


def _attention(
    q: Tensor, k: Tensor, v: Tensor, added: Added[Tensor], heads: CappedHeads, write_indices: Tensor | None = None
) -> Tensor:
    """The torch body of all three kinds of attention. q [B, S, N*head_dim], k and v [B, K, T, head_dim]."""
    q, bias, mask = to_heads(q, heads.num_heads), added.bias, added.mask
    seq, total = q.shape[-2], k.shape[-2]
    out: Tensor
    sdpa, grouped = torch.nn.functional.scaled_dot_product_attention, heads.group > 1
    plain = bias is None and added.sinks is None and not heads.softcap
    all_seen = mask is None and write_indices is None and not heads.local
    if plain and all_seen and (seq in (1, total) or not heads.causal):
        causal = heads.causal and bool(seq > 1)  # seq is a symbol in an export of this body
        out = sdpa(q, k, v, is_causal=causal, scale=heads.scale, enable_gqa=grouped)
        return from_heads(out)
    seen = visible(heads, seq, total, mask, write_indices, q.device)
    if plain:
        out = sdpa(q, k, v, seen, scale=heads.scale, enable_gqa=grouped)
    elif bias is not None and bias.dtype == q.dtype and added.sinks is None and not heads.softcap:
        bias = bias if seen is None else torch.where(seen, bias, MASKED)
        out = sdpa(q, k, v, bias, scale=heads.scale, enable_gqa=grouped)
    else:
        weights, _ = weights_of(q, k, added, heads, write_indices)
        out = weights @ v.repeat_interleave(heads.group, 1)
    if mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return from_heads(out)


def logits_of(q: Tensor, k: Tensor, heads: Heads) -> Tensor:
    """Return scale * q k^T [B, N, S, T], q [B, N, S, head_dim], k [B, K, T, head_dim]. fp32 for half precision."""
    logits = (q * heads.scale) @ k.repeat_interleave(heads.group, 1).transpose(-1, -2)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def weights_of(
    q: Tensor, k: Tensor, added: Added[Tensor], heads: CappedHeads, write_indices: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the attention weights [B, N, S, T] in q's dtype, and the visible keys.

    Logits are summed in fp32, as in the graph.
    """
    seq, total = q.shape[-2], k.shape[-2]
    seen = visible(heads, seq, total, added.mask, write_indices, q.device)
    logits = logits_of(q, k, heads)
    if heads.softcap:
        logits = heads.softcap * torch.tanh(logits / heads.softcap)
    logits = logits if added.bias is None else logits + added.bias
    logits = logits if seen is None else torch.where(seen, logits, MASKED)
    if added.sinks is not None:
        column = added.sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, column), -1)
    return logits.softmax(-1)[..., :total].to(q.dtype), seen


def from_heads(t: Tensor) -> Tensor:
    """Reshape [B, heads, S, head_dim] to [B, S, heads*head_dim]."""
    return t.transpose(1, 2).flatten(2)


@operator("PositionalAttention", "attended", fake=lambda call: torch.empty_like(call.q))
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    num_heads: int = REQUIRED,
    num_kv_heads: int = NUM_HEADS,
    scale: float = SCALE,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention: softmax(scale * q k^T + bias, masked) v, softmax in float32 (Vaswani et al. 2017, eq. 1).

    Query head n reads key head n // (num_heads / num_kv_heads). The result for a query that sees no key is zero.

    Args:
        q: [B, S, num_heads*head_dim].
        k, v: [B, T, num_kv_heads*head_dim], in q's dtype.
        bias: float32 [B|1, num_heads|1, S, T], added to the logits.
        mask: int64 [B, T], 0 for hidden keys, such as padding.
        sinks: [num_heads], one more logit per head, without a value (gpt-oss: OpenAI 2025, arXiv:2508.10925).
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, by default num_heads.
        scale: factor on q k^T, by default head_dim**-0.5.
        causal: whether later keys are hidden; the last query has the index of the last key.
        window: keys at this distance or farther are hidden; 0 for no window.
        chunk: keys in other chunks of this length are hidden (Llama 4); 0 for no chunks.
        softcap: a value c replaces the logits with c tanh(logits / c) before bias and mask are added (Gemma 2:
            Riviere et al. 2024, arXiv:2408.00118); 0 for no cap.

    Returns:
        A tensor like q.

    Example:
        >>> q = k = v = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> attend(q, k, v, num_heads=1, causal=True)
        tensor([[[1.0000, 0.0000],
                 [0.3302, 0.6698]]])
    """
    heads = CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    return _attention(q, to_heads(k, num_kv_heads), to_heads(v, num_kv_heads), Added(bias, mask, sinks), heads)


_OUTPUTS = ("attended", "present_key", "present_value")


def _cached_fake(call: Any) -> Three:
    write_indices = getattr(call, "write_indices", None)  # attend_cached has none
    present = cached_keys.fake(call.past_key, call.k, write_indices, call.num_kv_heads)
    return torch.empty_like(call.q), present, torch.empty_like(present)


@operator("CachedAttention", *_OUTPUTS, fake=_cached_fake)
def attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    num_heads: int = REQUIRED,
    num_kv_heads: int = NUM_HEADS,
    scale: float = SCALE,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Three:
    """`attend` over cached keys followed by new keys. T = past + new is the number of both.

    Args:
        q: [B, S, num_heads*head_dim].
        k, v: [B, new, num_kv_heads*head_dim], in q's dtype: the new keys and values.
        past_key, past_value: [B, num_kv_heads, past, head_dim], in q's dtype: the cached keys and values.
        bias: float32 [B|1, num_heads|1, S, T], added to the logits.
        mask: int64 [B, T], 0 for hidden keys, such as padding.
        sinks: [num_heads], one more logit per head, without a value.
        num_heads, num_kv_heads, scale, causal, window, chunk, softcap: as in `attend`.

    Returns:
        The result like q, and the caches with the new keys and values, [B, num_kv_heads, T, head_dim].

    Example:
        >>> q = k = v = torch.tensor([[[0.0, 1.0]]])
        >>> past = torch.tensor([[[[1.0, 0.0]]]])
        >>> out, keys, values = attend_cached(q, k, v, past, past, num_heads=1, causal=True)
        >>> out, keys
        (tensor([[[0.3302, 0.6698]]]), tensor([[[[1., 0.],
                  [0., 1.]]]]))
    """
    heads = CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    key, value = (cached_keys.eager(*pair, None, num_kv_heads) for pair in ((past_key, k), (past_value, v)))
    return _attention(q, key, value, Added(bias, mask, sinks), heads), key, value


@operator("SharedCacheAttention", *_OUTPUTS, fake=_cached_fake)
def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    write_indices: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    num_heads: int = REQUIRED,
    num_kv_heads: int = NUM_HEADS,
    scale: float = SCALE,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Three:
    """`attend` over buffers of T keys and values. New keys and values are written into them. Later slots are not seen.

    Args:
        q: [B, S, num_heads*head_dim].
        k, v: [B, S, num_kv_heads*head_dim], in q's dtype: the new keys and values.
        past_key, past_value: [B, num_kv_heads, T, head_dim], in q's dtype: the buffers.
        write_indices: int64 [B], the index in each row where the new keys and values begin.
        bias: float32 [B|1, num_heads|1, S, T], added to the logits.
        mask: int64 [B, T], 0 for hidden keys, such as padding.
        sinks: [num_heads], one more logit per head, without a value.
        num_heads, num_kv_heads, scale, causal, window, chunk, softcap: as in `attend`.

    Returns:
        The result like q, and the buffers with the new keys and values.

    Example:
        >>> q = k = v = torch.tensor([[[0.0, 1.0]]])
        >>> buffer = torch.tensor([[[[1.0, 0.0], [9.0, 9.0], [9.0, 9.0]]]])
        >>> out, keys, values = attend_shared(q, k, v, buffer, buffer, torch.tensor([1]), num_heads=1, causal=True)
        >>> out, keys
        (tensor([[[0.3302, 0.6698]]]), tensor([[[[1., 0.],
                  [0., 1.],
                  [9., 9.]]]]))
    """
    heads = CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    pairs = ((past_key, k), (past_value, v))
    key, value = (cached_keys.eager(*pair, write_indices, num_kv_heads) for pair in pairs)
    return (_attention(q, key, value, Added(bias, mask, sinks), heads, write_indices), key, value)


def weights_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    added: Added[ir.Value],
    heads: CappedHeads,
    lengths: Lengths,
    write_indices: ir.Value | None,
    first: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value | None]:
    """Return the attention weights [B, N, S, T] in q's dtype, and the visible keys.

    With sinks, the weights have one more column in front. `first` as in `visible_onnx`.
    """
    bias, sinks, dtype = added.bias, added.sinks, dtype_of(q)
    front = [0, 0, 0, 1, 0, 0, 0, 0]
    if sinks is not None:  # a first key of zeros; the sink then replaces its logit
        k = op.Pad(k, front)
    logits = logits_onnx(op, q, k, heads)
    if heads.softcap:
        logits = _capped_onnx(op, logits, heads.softcap, dtype != ir.DataType.FLOAT and heads.softcap <= FUSED_SOFTCAP)
    if bias is not None:
        logits = op.Add(logits, bias if sinks is None else op.Pad(bias, front))
    seen = visible_onnx(op, heads, lengths, added.mask, write_indices, sinks is not None, first)
    if seen is not None:
        logits = hidden_onnx(op, seen, logits, MASKED, dtype)
    if sinks is not None:
        logits = sink_onnx(op, logits, cast(op, sinks, ir.DataType.FLOAT), lengths[1])
    return cast(op, op.Softmax(logits, axis=-1), dtype), seen


def logits_onnx(op: Ops, q: ir.Value, k: ir.Value, heads: Heads) -> ir.Value:
    """Return scale * q k^T in fp32 for q [B, S, N*head_dim] and k [B, N, head_dim, T]."""
    scaled = op.Mul(q, constant(op, heads.scale, dtype_of(q)))
    return cast(op, op.MatMul(heads_onnx(op, scaled, heads.num_heads), k), ir.DataType.FLOAT)


def keys_onnx(op: Ops, q: ir.Value, k: ir.Value, heads: Heads) -> ir.Value:
    """Return keys for `logits_onnx` from [B, T, K*head_dim], or from a cache [B, K, T, head_dim]."""
    head_dim = size_of(q, -1) // heads.num_heads
    if rank_of(k) == 4:
        return op.Transpose(repeated_onnx(op, k, heads, head_dim), perm=[0, 1, 3, 2])
    return op.Transpose(split_onnx(op, k, heads), perm=[0, 2, 3, 1])


def _capped_onnx(op: Ops, logits: ir.Value, softcap: float, fused: bool) -> ir.Value:
    """Return c tanh(z / c), or c - 2c / (exp(2z / c) + 1), which TensorRT fuses, with an error of c * 2^-24."""
    cap = constant(op, softcap)
    if fused:
        grown = op.Exp(op.Div(logits, constant(op, softcap / 2.0)))  # 2 / c would be rounded
        return op.Sub(cap, op.Div(constant(op, 2.0 * softcap), op.Add(grown, constant(op, 1.0))))
    return op.Mul(op.Tanh(op.Div(logits, cap)), cap)


def by_heads_onnx(op: Ops, t: ir.Value, heads: Heads, width: int) -> ir.Value:
    """Return keys or values [B, N, T, width] from [B, T, K*width], or from a cache [B, K, T, width]."""
    if rank_of(t) == 4:
        return repeated_onnx(op, t, heads, width)
    return op.Transpose(split_onnx(op, t, heads), perm=[0, 2, 1, 3])


def laid_out_onnx(call: Call, present: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return all keys [B, N, head_dim, T] and values [B, N, T, value_dim]."""
    k, v = present or (call.k, call.v)
    return keys_onnx(call.op, call.q, k, call.heads), by_heads_onnx(call.op, v, call.heads, call.value_dim)


def attended_onnx(
    call: Call, keys: ir.Value, v: ir.Value, lengths: Lengths, first: ir.Value | None = None
) -> tuple[ir.Value, ir.Value | None]:
    """Return the result [B, N, S, value_dim] and the visible keys. `first` as in `visible_onnx`.

    `keys` and `v` are laid out as by `laid_out_onnx`.
    """
    op, added = call.op, Added(call.bias, call.mask, call.sinks)
    weights, seen = weights_onnx(op, call.q, keys, added, call.heads, lengths, call.write_indices, first)
    if call.sinks is not None:  # the value of their key is zero
        v = op.Pad(v, [0, 0, 1, 0, 0, 0, 0, 0])
    return op.MatMul(weights, v), seen


def finished_onnx(call: Call, out: ir.Value, seen: ir.Value | None) -> ir.Value:
    """Return [B, S, N*value_dim], with zeros for queries that see no key."""
    if call.mask is not None and call.sinks is None:
        assert seen is not None
        out = call.op.Mul(out, cast(call.op, keyed_onnx(call.op, seen, call.dtype), call.dtype))
    return call.flat(out)


def decomposed_onnx(call: Call, write: Write = written_onnx) -> Results:
    """Attention in standard operators. `write` puts new keys into a shared cache.

    TensorRT fuses it into one kernel in half precision. It does not if there is a tanh, or if sinks are concatenated to
    the logits.
    """
    present, lengths = call.present(write), call.lengths()
    return finished_onnx(call, *attended_onnx(call, *laid_out_onnx(call, present), lengths)), *present


KINDS = (attend, attend_cached, attend_shared)
"""All three kinds of attention."""

for _kind in KINDS:
    add_bodies(_kind, decomposed_onnx)
