"""ONNX Runtime's attention operators, as its CPU kernels compute them (domain com.microsoft)."""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.graphs.kernels.attention import heads_apart, heads_together, rotate
from posexport.graphs.kernels.indexing import positive
from posexport.graphs.kernels.quantised import matmul_integer_to_float
from posexport.graphs.kernels.registry import MICROSOFT, Call, kernel
from posexport.graphs.operators import default_scale


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, cap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(softcap(scale Q K^T) + bias) V over [batch, heads, length, size]; also the scores and the weights.

    `sinks` [heads]: one more score for each head, which takes weight but has no value.
    """
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    scores = (cap * torch.tanh(scores / cap) if cap > 0 else scores) + bias
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        column = sinks.reshape(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    return torch.matmul(weights, v), scores, weights


_MANY = 2**22
"""From this number of scores on, rows are computed one after the other: scores are the largest tensors."""


def attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The first result of `attend`."""
    rows = q.shape[0]
    if rows == 1 or q.shape[:3].numel() * k.shape[2] < _MANY:
        return attend(q, k, v, scale, bias, cap, sinks)[0]
    biases = bias.split(1) if bias.dim() == 4 and bias.shape[0] == rows else [bias] * rows
    parts = zip(q.split(1), k.split(1), v.split(1), biases, strict=True)
    return torch.cat([attend(one_q, one_k, one_v, scale, one, cap, sinks)[0] for one_q, one_k, one_v, one in parts])


def _scale(call: Call, size: int) -> float:
    return float(call.get("scale", 0.0)) or default_scale(size)


def padding_bias(call: Call, mask: Tensor, batch: int, keys: int, like: Tensor) -> Tensor:
    """`mask_filter_value` where a mask (lengths [B], ends and starts [2B], 0/1 of [B, T] or [B, S, T]) hides keys."""
    places = torch.arange(keys)
    if mask.dim() == 1 and mask.numel() in (batch, 2 * batch):
        seen = places < mask[:batch, None]
        seen = seen & (places >= mask[batch:, None]) if mask.numel() == 2 * batch else seen
    elif mask.dim() in (2, 3):
        seen = mask > 0
    else:
        raise ValueError(f"a mask of shape {list(mask.shape)} can't be evaluated")
    seen = seen[:, None, None] if seen.dim() == 2 else seen[:, None]
    hidden = torch.tensor(call.get("mask_filter_value", -10000.0), dtype=like.dtype)
    return torch.where(seen, torch.zeros((), dtype=like.dtype), hidden)


def causal_bias(queries: int, keys: int, past: int, like: Tensor) -> Tensor:
    """-inf at keys after each query, whose position is its place plus `past`; zero for a single query."""
    if queries == 1:
        return torch.zeros((), dtype=like.dtype)
    if keys != past + queries:
        raise ValueError(f"unidirectional attention of {queries} queries over {keys} keys is not defined")
    later = torch.arange(keys)[None] > torch.arange(queries)[:, None] + past
    return torch.zeros(queries, keys, dtype=like.dtype).masked_fill(later, float("-inf"))


def _cached(new: Tensor, past: Tensor | None, past_length: Tensor | None) -> tuple[Tensor, Tensor]:
    """All keys or values so far, and the present cache: new ones are appended, or written into the past's buffer."""
    if past is None:
        return new, new
    if past_length is None:
        whole = torch.cat((past, new), 2)
        return whole, whole
    start = int(past_length)
    buffer = past.clone()
    buffer[:, :, start : start + new.shape[2]] = new
    return buffer[:, :, : start + new.shape[2]], buffer


@kernel("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    call: Call,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_length: Tensor | None = None,
    beams: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V separate, K and V packed, all packed, or K and V as caches; outputs Y, present key and value, QK."""
    if beams is not None:
        raise ValueError("a cache indirection of beam search can't be evaluated")
    heads = call.get("num_heads")
    if query.dim() == 5:
        query, key, value = (part.flatten(2) for part in query.unbind(3))
    elif key is not None and key.dim() == 5:
        key, value = (part.flatten(2) for part in key.unbind(3))
    if key is None or value is None:
        raise ValueError("its key or value is missing")
    if bias is not None:
        query = query + bias[: query.shape[-1]]
        if key.dim() == 3:
            width = query.shape[-1]
            key, value = key + bias[width : 2 * width], value + bias[2 * width :]
    q = heads_apart(query, heads)
    k, v = (heads_apart(x, heads) if x.dim() == 3 else x for x in (key, value))
    past = 0 if past_key is None else past_key.shape[2] if past_length is None else int(past_length)
    k, present_key = _cached(k, past_key, past_length)
    v, present_value = _cached(v, past_value, past_length)
    total = torch.zeros((), dtype=q.dtype) if attention_bias is None else attention_bias
    if mask is not None:
        total = total + padding_bias(call, mask, q.shape[0], k.shape[2], q)
    if call.get("unidirectional", 0):
        total = total + causal_bias(q.shape[2], k.shape[2], past, q)
    y, scores, _ = attend(q, k, v, _scale(call, q.shape[3]), total)
    return heads_together(y), present_key, present_value, scores


@kernel("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked(
    call: Call,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_length: Tensor | None = None,
    width: Tensor | None = None,
    beams: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MultiHeadAttention of one query, with its inputs in another order."""
    if width is not None and int(width) > 1:
        raise ValueError("beam search can't be evaluated")
    if key is None:
        query, key, value = query.chunk(3, dim=-1)
    length = past_length if call.get("past_present_share_buffer", 0) else None
    return multi_head_attention(call, query, key, value, bias, mask, attention_bias, past_key, past_value, length)


@kernel("Attention", domain=MICROSOFT)
def packed_attention(
    call: Call,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Projects x [batch, length, width] to Q, K and V and attends. The cache is [2, batch, heads, length, size]."""
    projected = torch.matmul(x, weights)
    projected = projected if bias is None else projected + bias
    return _of_projected(call, projected, mask, past, attention_bias, past_length)


@kernel("QAttention", domain=MICROSOFT)
def quantised_attention(
    call: Call,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    scale: Tensor,
    mask: Tensor | None = None,
    x_zero: Tensor | None = None,
    zero: Tensor | None = None,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention whose x and weights are integers. The weights have one scale, or one for each column."""
    projected = matmul_integer_to_float(call, x, weights, x_scale, scale, x_zero, zero, bias)
    return _of_projected(call, projected, mask, past, None, None)


def _of_projected(
    call: Call,
    projected: Tensor,
    mask: Tensor | None,
    past: Tensor | None,
    attention_bias: Tensor | None,
    past_length: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention with queries, keys and values [batch, length, width] beside each other."""
    if call.get("do_rotary", 0):
        raise ValueError("its rotation can't be evaluated")
    heads, sizes = call.get("num_heads"), call.get("qkv_hidden_sizes")
    parts = torch.split(projected, list(sizes) if sizes else [projected.shape[-1] // 3] * 3, dim=-1)
    q, k, v = (heads_apart(part, heads) for part in parts)
    length = past_length if call.get("past_present_share_buffer", 0) else None
    before = 0 if past is None else past.shape[3] if length is None else int(length)
    k, present_key = _cached(k, None if past is None else past[0], length)
    v, present_value = _cached(v, None if past is None else past[1], length)
    total = torch.zeros((), dtype=q.dtype) if attention_bias is None else attention_bias
    if mask is not None and mask.dim() == 4:
        mask = mask[:, 0, before : before + q.shape[2], : k.shape[2]]
    if mask is not None:
        total = total + padding_bias(call, mask, q.shape[0], k.shape[2], q)
    if call.get("unidirectional", 0):
        total = total + causal_bias(q.shape[2], k.shape[2], before, q)
    y = attended(q, k, v, _scale(call, q.shape[3]), total)
    same = present_key.shape == present_value.shape
    return heads_together(y), torch.stack((present_key, present_value)) if same else present_key


@kernel("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(call: Call, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions are [batch, length], or [1] for the first token. x is [batch, length, heads * size] or 4-D."""
    if call.get("is_packed_batching", 0):
        raise ValueError("packed batches can't be evaluated")
    flat, heads = x.dim() == 3, call.get("num_heads", 0)
    y = heads_apart(x, heads or x.shape[-1] // (2 * cos.shape[-1])) if flat else x
    if positions.numel() == 1 and positions.dim() <= 1:
        positions = positions.reshape(1, 1) + torch.arange(y.shape[2])
    at = positive(positions, cos.shape[0])
    y = rotate(y, cos[at][:, None], sin[at][:, None], bool(call.get("interleaved", 0)))
    return heads_together(y) if flat else y


@kernel("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(
    call: Call,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    lengths_less_one: Tensor,
    total_length: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    attention_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of grouped heads over a cache; outputs Y, present key, present value, QK.

    Row b has `lengths_less_one[b] + 1` tokens in all. A first prompt (as many queries as tokens) starts at position 0,
    with its padding on the right. Otherwise the queries are the last tokens. A buffer is 0 after its tokens.
    """
    if k_scale is not None or v_scale is not None or call.get("sliding_window_cache", 0):
        raise ValueError("quantised caches and caches of the window's size can't be evaluated")
    heads, kv_heads = call.get("num_heads"), call.get("kv_num_heads")
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * kv_heads)
        query, key, value = torch.split(query, [heads * size, kv_heads * size, kv_heads * size], dim=-1)
    q, k, v = heads_apart(query, heads), heads_apart(key, kv_heads), heads_apart(value, kv_heads)
    queries, size = q.shape[2:]
    lengths, total = lengths_less_one.flatten().to(torch.int64) + 1, int(total_length)
    start = torch.zeros_like(lengths) if queries == total else lengths - queries
    at = start[:, None] + torch.arange(queries)
    if q_norm is not None and k_norm is not None:
        epsilon = call.get("qk_norm_epsilon", 1e-6)
        q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * w for x, w in ((q, q_norm), (k, k_norm)))
    if call.get("do_rotary", 0) and cos is not None and sin is not None:
        if positions is not None and queries == total:  # for a first prompt, the kernels read only one position
            positions = positions.flatten()[0] + torch.arange(queries)[None]
        turned = positive(at if positions is None else positions, cos.shape[0])
        tables = cos[turned][:, None], sin[turned][:, None]
        q, k = (rotate(x, *tables, bool(call.get("rotary_interleaved", 0))) for x in (q, k))
    present = [_written(new, old, start, at, total) for new, old in ((k, past_key), (v, past_value))]
    k, v = (cache[:, :, :total].repeat_interleave(heads // kv_heads, 1) for cache in present)
    places = torch.arange(total)
    distance = at[:, None, :, None] - places
    window, causal = call.get("local_window_size", -1), bool(call.get("causal", 1))
    hidden = (distance < 0) if causal else (places >= lengths[:, None, None, None])
    hidden = hidden | (distance >= window) if window > 0 else hidden
    bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))
    bias = bias if attention_bias is None else bias + attention_bias[..., :total]
    if sinks is None and call.get("smooth_softmax", 0):
        sinks = torch.zeros(heads, dtype=q.dtype)
    if not call.wants(3):
        y = attended(q, k, v, _scale(call, size), bias, call.get("softcap", 0.0), sinks)
        return heads_together(y), present[0], present[1], torch.empty(0)
    y, scores, weights = attend(q, k, v, _scale(call, size), bias, call.get("softcap", 0.0), sinks)
    products = weights if call.get("qk_output", 0) == 2 else scores.masked_fill(hidden, 0.0)
    return heads_together(y), present[0], present[1], products


def _written(new: Tensor, past: Tensor | None, start: Tensor, at: Tensor, total: int) -> Tensor:
    """The present cache: the first `start` tokens of each row's past, then the new ones, then zeros."""
    length = max(total, 0 if past is None else past.shape[2])
    cache = torch.zeros(new.shape[0], new.shape[1], max(length, int(at.max()) + 1), new.shape[3], dtype=new.dtype)
    if past is not None:
        kept = torch.arange(past.shape[2]) < start[:, None]
        cache[:, :, : past.shape[2]] = torch.where(kept[:, None, :, None], past, torch.zeros((), dtype=past.dtype))
    cache[torch.arange(new.shape[0])[:, None], :, positive(at, cache.shape[2])] = new.transpose(1, 2)
    return cache[:, :, :length]
