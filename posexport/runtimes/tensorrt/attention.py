"""TensorRT's layers for transformers: attention, rotary embedding, and updates of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posexport.runtimes.tensorrt.values import CannotEvaluate, ints

Tensor = torch.Tensor


def attention(layer: Any, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor) -> Tensor:
    """softmax(Q K^T, masked) V without a scale: the parser scales queries and keys in separate layers.

    Q is [batch, heads, queries, size], K and V are [batch, heads or a divisor of it, keys, size]. A mask is bool (True
    attends) or is added. The first layer of a scope computes the whole attention; the second returns its input.
    """
    scope = layer.attention
    _check(layer, scope, masks)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores: Tensor = query @ key.transpose(-1, -2)
    for mask in masks:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    kind = _causal_kind(scope)
    if kind != "NONE":
        queries, keys = scores.shape[-2:]
        sees = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if kind == "LOWER_RIGHT" else 0)
        scores = scores.masked_fill(~sees, -torch.inf)
    if bool((scores == -torch.inf).all(-1).any()):
        raise CannotEvaluate("a query attends to no key, for which attention is not defined")
    return torch.matmul(torch.softmax(scores, -1), value)


def _check(layer: Any, scope: Any, masks: Sequence[Tensor]) -> None:
    """CannotEvaluate if this attention has more than queries, keys, values, a mask and causality."""
    forms = [getattr(getattr(scope, name, None), "name", "PADDED_BHND") for name in ("query_form", "key_value_form")]
    if set(forms) != {"PADDED_BHND"}:
        raise CannotEvaluate(f"its tensors are {' and '.join(forms)}")
    for name in ("query_lengths", "key_value_lengths", "normalization_quantize_scale"):
        if getattr(scope, name, None) is not None:
            raise CannotEvaluate(f"it has {name}")
    if scope.norm_op.name != "SOFTMAX" or getattr(scope, "num_ranks", 1) != 1:
        raise CannotEvaluate(f"it normalises by {scope.norm_op.name}, on {getattr(scope, 'num_ranks', 1)} devices")
    named = [scope.get_input(0), scope.get_input(1), scope.get_input(2), *([] if scope.mask is None else [scope.mask])]
    if [tensor.name for tensor in named] != [layer.get_input(at).name for at in range(layer.num_inputs)]:
        raise CannotEvaluate("it has inputs beyond queries, keys, values and a mask")
    kind = _causal_kind(scope)
    if kind not in ("NONE", "UPPER_LEFT", "LOWER_RIGHT") or (masks and kind != "NONE"):
        raise CannotEvaluate(f"it has a mask beside the causality {kind}")


def _causal_kind(scope: Any) -> str:
    """NONE, UPPER_LEFT or LOWER_RIGHT; versions without causal kinds have the first two."""
    if hasattr(scope, "causal_kind"):
        return str(scope.causal_kind.name)
    return "UPPER_LEFT" if scope.causal else "NONE"


def rotary_embedding(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """Pairs of features of x [batch, heads, seq, size], rotated by angles whose cosines and sines are inputs.

    Cosines and sines are [batch, seq, n/2], or [positions, n/2] with the rows in a fourth input [batch, seq]. n is the
    layer's `rotary_embedding_dim`, 0 for all features. Pairs are (2i, 2i + 1) if `interleaved`, otherwise (i, i + n/2).
    """
    if positions is not None:
        if bool(((positions < 0) | (positions >= len(cos))).any()):
            raise CannotEvaluate(f"a position is not in [0, {len(cos)})")
        cos, sin = cos[positions], sin[positions]
    rotated = layer.rotary_embedding_dim or x.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if 2 * cos.shape[-1] != rotated:
        raise ValueError(f"{cos.shape[-1]} angles can't rotate {rotated} features")
    part, unrotated = x[..., :rotated], x[..., rotated:]
    first, second = (part[..., ::2], part[..., 1::2]) if layer.interleaved else part.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    part = torch.stack(pair, -1).flatten(-2) if layer.interleaved else torch.cat(pair, -1)
    return torch.cat((part, unrotated), -1)


def kv_cache_update(layer: Any, cache: Tensor, update: Tensor, starts: Tensor, *lengths: Tensor) -> Tensor:
    """The cache [batch, heads, length, size] with entries [batch, heads, seq, size] written from an index on."""
    form = getattr(getattr(layer, "update_form", None), "name", "PADDED_BHND")
    if layer.cache_mode.name != "LINEAR" or form != "PADDED_BHND" or lengths:
        raise CannotEvaluate(f"its mode is {layer.cache_mode.name} and its entries are {form}")
    cache, count = torch.clone(cache), update.shape[2]
    for row, start in enumerate(ints(starts)):
        if start < 0 or start + count > cache.shape[2]:
            raise CannotEvaluate(f"{count} entries from {start} on don't fit into a cache of {cache.shape[2]}")
        cache[row, :, start : start + count] = update[row]
    return cache
