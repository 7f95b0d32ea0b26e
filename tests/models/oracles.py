"""Blocks in numpy float64 by the formulas of the papers, element by element where that is clearer.

`outputs` computes the whole block of a spec, and `block` its first output; the other functions are parts of it.
Shapes: B batch, S sequence, T keys, N query heads, K key heads. This file does not share code with posexport.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from oracle_rotations import sinusoid_table, turned
from oracle_scores import BIASES, SCORES, shaw_rows

Array = np.ndarray[Any, Any]


def visible(
    seq: int,
    causal: bool,
    window: int | None,
    first: int = 0,
    keys: int | None = None,
    chunk: int | None = None,
    padding: int = 0,
) -> Array:
    """Which of `keys` keys each of `seq` queries sees by index, [S, T].

    The first query has the index `first`. The first chunk starts after `padding` tokens.
    """
    seen = np.ones((seq, seq if keys is None else keys), bool)
    for i, j in np.ndindex(*seen.shape):
        if causal and j > first + i:
            seen[i, j] = False
        if window is not None and abs(first + i - j) >= window:
            seen[i, j] = False
        if chunk is not None and (first + i - padding) // chunk != (j - padding) // chunk:
            seen[i, j] = False
    return seen


def weigh(logits: Array, sink: float | None) -> Array:
    """Softmax of one row of logits with an optional sink. -inf hides a key; a row without visible keys gives zeros."""
    seen = np.isfinite(logits)
    weights = np.zeros_like(logits)
    if seen.any():
        top = max(logits.max(), -np.inf if sink is None else sink)
        grown = np.exp(logits[seen] - top)
        weights[seen] = grown / (grown.sum() + (0.0 if sink is None else np.exp(sink - top)))
    return weights


def linear(x: Array, weights: dict[str, Array], name: str) -> Array:
    """x W^T + b; without a bias, b is 0."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.zeros(1))


def key_places(positions: Array, mask: Array, first: Array) -> Array:
    """Positions [B, T] of keys: new keys have their own, and those of cached keys are counted backwards.

    The count starts at the first new token that is not padding, or at the last new token if all are padding. Each
    cached key that is not padding is one position before the next.
    """
    batch, seq = positions.shape
    made = np.zeros(mask.shape, np.int64)
    for b in range(batch):
        start = int(first[b])
        new = [i for i in range(seq) if mask[b, start + i]]
        at = positions[b, new[0] if new else seq - 1]
        for j in range(start - 1, -1, -1):
            at = at - int(mask[b, j])
            made[b, j] = at
        made[b, start : start + seq] = positions[b]
    return made


def promised_places(spec: Any, inputs: dict[str, Array], batch: int, seq: int, first: Array, keys: int) -> Any:
    """Positions [B, S] of tokens and [B, T] of keys for `positions` = "consecutive".

    Token i has the position start + i, and each earlier key is one position before the next. start is the first of
    position_ids, or without that input the index of the first new token. In a window, the positions are [..., 2]:
    column and row of its cells, row by row.
    """
    made, of_keys = np.zeros((batch, seq), np.int64), np.zeros((batch, keys), np.int64)
    for b in range(batch):
        start = int(inputs["position_ids"][b, 0]) if "position_ids" in inputs else int(first[b])
        for i in range(seq):
            made[b, i] = start + i
        for j in range(keys):
            of_keys[b, j] = start - (int(first[b]) - j)
    if size := getattr(spec.encoding, "window_size", 0):
        return tuple(np.stack((cells % size, cells // size), -1) for cells in (made, of_keys))
    return made, of_keys


def head_norm(heads: Array, weight: Array, eps: float) -> Array:
    """RMSNorm (Zhang and Sennrich 2019) over the features of each head."""
    made: Array = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + eps) * weight
    return made


def written(past: Array | None, new: Array, first: Array) -> Array:
    """Keys or values [B, T, K, H]: those of a cache [B, K, P, H], and new ones [B, S, K, H] from `first` on."""
    batch, seq, heads, width = new.shape
    if past is None:
        return new
    total = max(past.shape[2], int(first.max()) + seq)
    made = np.zeros((batch, total, heads, width))
    for b in range(batch):
        for j in range(past.shape[2]):
            made[b, j] = past[b, :, j]
        for i in range(seq):
            made[b, int(first[b]) + i] = new[b, i]
    return made


def attention(
    spec: Any, weights: dict[str, Array], x: Array, inputs: dict[str, Array], past: tuple[Array, Array] | None
) -> tuple[Array, tuple[Array, Array]]:
    """The attention of one layer, [B, S, D] to [B, S, D], and the keys and values [B, K, T, H] for the cache."""
    batch, seq, _ = x.shape
    encoding, width = spec.encoding, spec.head_dim
    source = inputs["encoder_hidden_states"].astype(np.float64) if spec.cross else x
    grown = 0 if past is None or spec.kv_cache == "shared" else past[0].shape[2]
    first = inputs.get("write_indices", np.full(batch, grown))
    positions = inputs.get("position_ids", np.zeros((batch, seq), np.int64))  # The encoding `none` has no position_ids.
    if spec.positions == "consecutive":
        positions, _ = promised_places(spec, inputs, batch, seq, first, 0)
    q = linear(x, weights, "q_proj").reshape(batch, seq, spec.num_heads, width)
    k = linear(source, weights, "k_proj").reshape(batch, -1, spec.num_kv_heads, width)
    v = linear(source, weights, "v_proj").reshape(batch, -1, spec.num_kv_heads, width)
    own = {name.removeprefix("encoding."): value for name, value in weights.items() if name.startswith("encoding.")}
    if spec.qk_norm_type == "rms":
        q, k = (head_norm(t, weights[f"{name}.weight"], spec.norm_eps) for t, name in ((q, "q_norm"), (k, "k_norm")))
    if not spec.cross:
        q, k = (turned(spec, t, positions, own, sign) for t, sign in ((q, 1), (k, -1)))
    if spec.qk_norm_type == "l2":
        q, k = (head_norm(t, np.ones(width), spec.norm_eps) for t in (q, k))
    k, v = (written(None if past is None else past[each], t, first) for each, t in enumerate((k, v)))
    present = (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    mask = inputs.get("attention_mask", np.ones(k.shape[:2], np.int64))
    k_positions = positions if past is None or positions.ndim > 2 else key_places(positions, mask, first)
    if spec.positions == "consecutive":
        _, k_positions = promised_places(spec, inputs, batch, seq, first, k.shape[1])
    k, v = (
        np.stack([t[:, :, n * spec.num_kv_heads // spec.num_heads] for n in range(spec.num_heads)], 2) for t in (k, v)
    )
    seen = np.zeros((batch, seq, k.shape[1]), bool)
    for b in range(batch):
        padding = next((j for j in range(k.shape[1]) if mask[b, j]), 0)
        near = visible(seq, spec.causal, spec.window, int(first[b]), k.shape[1], spec.attention_chunk_size, padding)
        seen[b] = near & (mask[b] != 0)
        if not spec.cross:
            seen[b, :, int(first[b]) + seq :] = False  # In a shared cache, slots after the new keys are empty.
    content = q + own["content_bias"] if encoding.name == "relative" else q  # terms (a) and (c) of Transformer-XL
    logits = np.einsum("bihd,bjhd->bhij", content, k) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    if encoding.name in SCORES:
        logits = logits + SCORES[encoding.name](spec, q, k, (positions, k_positions), own, seen)
    if encoding.name in BIASES and not spec.cross:
        logits = logits + BIASES[encoding.name](spec, positions, k_positions, own)
    out = np.zeros((batch, seq, spec.num_heads, width))
    for b in range(batch):
        for n, i in np.ndindex(spec.num_heads, seq):
            row = np.where(seen[b, i], logits[b, n, i], -np.inf)
            shares = weigh(row, weights["sinks"][n] if spec.sinks else None)
            out[b, i, n] = shares @ v[b, :, n]
            if "values.weight" in own:  # Shaw et al. 2018, eq. 3
                out[b, i, n] += shares @ own["values.weight"][shaw_rows(spec, (positions, k_positions))[b, i]]
    return linear(out.reshape(batch, seq, -1), weights, "o_proj"), present


def norm(spec: Any, weights: dict[str, Array], x: Array, name: str) -> Array:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)."""
    if spec.norm_type == "layernorm":
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + spec.norm_eps)
        made: Array = scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    else:
        made = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * weights[f"{name}.weight"]
    return made


def mlp(spec: Any, weights: dict[str, Array], x: Array) -> Array:
    """W2 gelu(W1 x) with gelu(x) = x Phi(x), or W_down (silu(W_gate x) * W_up x)."""
    if spec.mlp == "gelu":
        h = linear(x, weights, "mlp.fc1")
        return linear(h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2))), weights, "mlp.fc2")
    gate = linear(x, weights, "mlp.gate_proj")
    return linear(gate / (1 + np.exp(-gate)) * linear(x, weights, "mlp.up_proj"), weights, "mlp.down_proj")


def layer(
    spec: Any, weights: dict[str, Array], x: Array, inputs: dict[str, Array], past: tuple[Array, Array] | None
) -> tuple[Array, tuple[Array, Array]]:
    """One layer of a spec, and its keys and values."""
    if spec.block == "attention":
        return attention(spec, weights, x, inputs, past)
    if spec.norm == "pre":
        attended, present = attention(spec, weights, norm(spec, weights, x, "input_layernorm"), inputs, past)
        x = x + attended
        return x + mlp(spec, weights, norm(spec, weights, x, "post_attention_layernorm")), present
    attended, present = attention(spec, weights, x, inputs, past)
    x = norm(spec, weights, x + attended, "post_attention_layernorm")
    return norm(spec, weights, x + mlp(spec, weights, x), "post_feedforward_layernorm"), present


def block(spec: Any, weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """The output of the whole block for the graph's inputs by name, in float64."""
    return outputs(spec, weights, inputs)["output"]


def outputs(spec: Any, weights: dict[str, Array], inputs: dict[str, Array]) -> dict[str, Array]:
    """All outputs of the whole block for the graph's inputs by name, in float64."""
    positions = inputs.get("position_ids")
    if spec.vocab_size is not None:
        x = weights["embed_tokens.weight"][inputs["input_ids"]]
        if spec.scale_embedding:
            x = x * math.sqrt(spec.hidden_size)
    else:
        x = inputs["hidden_states"].astype(np.float64)
    encoding = spec.encoding
    if spec.positions == "consecutive" and positions is not None:
        positions, _ = promised_places(spec, inputs, *x.shape[:2], np.zeros(len(x)), 0)
    if encoding.name == "learned":
        x = x + weights["encoding.weight"][positions]
    if encoding.name == "sinusoidal":
        assert positions is not None
        x = x + sinusoid_table(positions, spec.hidden_size, encoding.theta, encoding.order, encoding.layout)
    found = {}
    for index in range(spec.layers):
        prefix, number = (f"layers.{index}.", f".{index}") if spec.layers > 1 else ("", "")
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        past = None
        if spec.kv_cache is not None:
            key, value = (inputs[f"past_{kind}{number}"].astype(np.float64) for kind in ("key", "value"))
            past = (key, value)
        x, present = layer(spec.layer(index), own, x, inputs, past)
        if spec.kv_cache is not None:
            found |= {f"present_key{number}": present[0], f"present_value{number}": present[1]}
    return {"output": x, **found}
