"""Attention and RotaryEmbedding of the standard's opsets 23 and up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posexport.graphs.kernels.registry import Call, kernel
from posexport.graphs.operators import default_scale


def heads_apart(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] to [batch, heads, length, size]."""
    batch, length, hidden = x.shape
    return x.reshape(batch, length, heads, hidden // heads).transpose(1, 2)


def heads_together(x: Tensor) -> Tensor:
    """[batch, heads, length, size] to [batch, length, heads * size]."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] features of [..., size]; cos and sin broadcast to [..., width / 2]."""
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((turned, rest), dim=-1)


@kernel("RotaryEmbedding")
def rotary_embedding(call: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """Opset 23: tables [positions, width/2] with position ids [batch, length], or [batch, length, width/2]."""
    flat = x.dim() == 3
    y = heads_apart(x, call.get("num_heads", 0)) if flat else x
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    width = call.get("rotary_embedding_dim", 0) or y.shape[-1]
    if 2 * cos.shape[-1] != width:
        raise ValueError(f"its tables hold {cos.shape[-1]} angles, and {width // 2} are needed")
    y = rotate(y, cos[:, None], sin[:, None], bool(call.get("interleaved", 0)))
    return heads_together(y) if flat else y


@kernel("Attention")
def attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(softcap(scale Q K^T) + mask) V with grouped heads; outputs Y, present key, present value, QK.

    Query i is at position i + offset. The offset is the length of the past, or, with `nonpad_kv_seqlen`, the number of
    valid keys minus that of queries. Queries that see no key give 0. 3-D inputs are [batch, length, heads * size].
    """
    flat = q.dim() == 3
    if flat:
        q = heads_apart(q, call.get("q_num_heads"))
        k, v = (heads_apart(x, call.get("kv_num_heads")) for x in (k, v))
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
    present = k, v
    groups, scale = q.shape[1] // k.shape[1], call.get("scale")
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    scale = default_scale(q.shape[3]) if scale is None else scale
    root = math.sqrt(abs(scale))
    raw = torch.matmul(q * math.copysign(root, scale), (k * root).transpose(2, 3))
    cap = call.get("softcap", 0.0)
    capped = cap * torch.tanh(raw / cap) if cap else raw
    bias = bias_of(call, capped, mask, past, lengths)
    biased, chosen = capped + bias, call.get("softmax_precision")
    weights = torch.softmax(biased if chosen is None else biased.to(call.dtype(chosen)), -1).to(q.dtype)
    dead = torch.isneginf(bias).all(-1, keepdim=True)
    weights = torch.where(dead, torch.zeros((), dtype=weights.dtype), weights)
    y = torch.matmul(weights, v)
    shown_scores = (raw, capped, biased, weights)[call.get("qk_matmul_output_mode", 0)]
    return heads_together(y) if flat else y, *present, shown_scores


def bias_of(call: Call, scores: Tensor, mask: Tensor | None, past: int, lengths: Tensor | None) -> Tensor:
    """What is added to the scores [batch, heads, queries, keys]: the mask, causality, windows and padding."""
    queries, keys = scores.shape[2:]
    never = torch.tensor(float("-inf"), dtype=scores.dtype)
    bias = torch.zeros(1, 1, queries, keys, dtype=scores.dtype)
    if mask is not None:
        mask = torch.where(mask, torch.zeros((), dtype=scores.dtype), never) if mask.dtype == torch.bool else mask
        if mask.shape[-1] < keys:  # shorter masks hide the keys they don't reach
            mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[-1]), value=float("-inf"))
        bias = bias + mask
    offset = torch.tensor([past]) if lengths is None else lengths - queries
    at = torch.arange(queries)[None, :, None] + offset[:, None, None]
    distance = (at - torch.arange(keys)[None, None, :])[:, None]
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    hidden = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    if call.get("is_causal", 0):
        hidden = hidden | (distance < 0)
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (distance < -right)
    if lengths is not None:
        hidden = hidden | (torch.arange(keys)[None, None, None, :] >= lengths[:, None, None, None])
    return torch.where(hidden, never, bias)
