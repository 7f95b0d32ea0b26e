"""The formulas of the papers in numpy float64, element by element where that is clearer. Shares no code with posexport.

`outputs` is the whole block of a spec, `block` its first output; the rest are its parts. Shapes: B batch, S sequence,
T keys, N query heads, K key heads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def sinusoid_table(positions: Array, width: int, theta: float, order: str, layout: str) -> Array:
    """Vaswani et al. 2017, section 3.5: PE(p, 2i) = sin(p / theta^(2i/width)), PE(p, 2i+1) = cos(the same)."""
    table = np.zeros((*positions.shape, width))
    for i in range(width // 2):
        angle = positions / theta ** (2 * i / width)
        first, second = (np.sin(angle), np.cos(angle)) if order == "sin-cos" else (np.cos(angle), np.sin(angle))
        at = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2)
        table[..., at[0]], table[..., at[1]] = first, second
    return table


def rotate(heads: Array, positions: Array, theta: float, layout: str) -> Array:
    """Su et al. 2021, eq. 34, on [B, S, heads, width]: pair i as a complex number times exp(i p theta^(-2i/width))."""
    width = heads.shape[-1]
    turned = np.zeros_like(heads)
    for i in range(width // 2):
        real, imaginary = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2)
        turn = np.exp(1j * positions * theta ** (-2 * i / width))[:, :, None]
        pair = (heads[..., real] + 1j * heads[..., imaginary]) * turn
        turned[..., real], turned[..., imaginary] = pair.real, pair.imag
    return turned


def rope(heads: Array, positions: Array, theta: float, layout: str, rotary_dim: int | None) -> Array:
    """RoPE of the first `rotary_dim` features of each head."""
    rotary_dim = rotary_dim or heads.shape[-1]
    return np.concatenate([rotate(heads[..., :rotary_dim], positions, theta, layout), heads[..., rotary_dim:]], axis=-1)


def rope2d(heads: Array, positions: Array, theta: float, layout: str) -> Array:
    """Heo et al. 2024: the first half of a head turns by x = positions[..., 0], the second by y."""
    half = heads.shape[-1] // 2
    x, y = positions[..., 0], positions[..., 1]
    return np.concatenate(
        [rotate(heads[..., :half], x, theta, layout), rotate(heads[..., half:], y, theta, layout)], -1
    )


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2022, as in the authors' attention_with_linear_biases/fairseq/models/transformer.py, get_slopes."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def alibi(positions: Array, k_positions: Array, heads: int) -> Array:
    """-m |i - j|, [B, N, S, T]."""
    slopes = np.array(alibi_slopes(heads))
    distance = np.abs(positions[:, :, None] - k_positions[:, None, :])
    bias: Array = -slopes[None, :, None, None] * distance[:, None]
    return bias


def t5_bucket(offset: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Raffel et al. 2020, section 2.1, with the rule of their mesh-tensorflow code; offset is key minus query."""
    bucket, distance = 0, -offset
    if bidirectional:
        num_buckets //= 2
        if distance < 0:
            bucket, distance = num_buckets, -distance
    else:
        distance = max(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    # an edge of a bucket must fall into it, whatever way the logarithms round
    grown = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact) + 1e-9
    return bucket + min(exact + math.floor(grown), num_buckets - 1)


def t5(positions: Array, k_positions: Array, table: Array, encoding: Any, bidirectional: bool) -> Array:
    """W[bucket(p_j - p_i)], [B, N, S, T]."""
    bias = np.zeros((len(positions), table.shape[1], positions.shape[1], k_positions.shape[1]))
    for b, i, j in np.ndindex(bias.shape[0], *bias.shape[2:]):
        offset = int(k_positions[b, j] - positions[b, i])
        bias[b, :, i, j] = table[t5_bucket(offset, encoding.num_buckets, encoding.max_distance, bidirectional)]
    return bias


def relative_rows(positions: Array, k_positions: Array, width: int, theta: float) -> Array:
    """R(p_i - p_j) of Dai et al. 2019, [B, S, T, width]: all sines, then all cosines."""
    return sinusoid_table(positions[:, :, None] - k_positions[:, None, :], width, theta, "sin-cos", "half")


def relative_table(positions: Array, k_positions: Array, table: Array, max_distance: int) -> Array:
    """Row clip(p_i - p_j) + max_distance of a trained table, [B, S, T, width]."""
    distance = positions[:, :, None] - k_positions[:, None, :]
    rows: Array = table[np.clip(distance, -max_distance, max_distance) + max_distance]
    return rows


def relative_logits(q: Array, k: Array, rows: Array, weights: dict[str, Array]) -> tuple[Array, Array]:
    """Dai et al. 2019, section 3.3: terms (a) + (c), (b) + (d), unscaled, from heads [B, S, N, H], R [B, S, T, D]."""
    u, v = weights["content_bias"], weights["position_bias"]
    r = (rows @ weights["r_proj.weight"].T).reshape(*rows.shape[:-1], *u.shape)
    a = np.einsum("bihd,bjhd->bhij", q, k)
    b = np.einsum("bihd,bijhd->bhij", q, r)
    c = np.einsum("hd,bjhd->bhj", u, k)[:, :, None, :]
    d = np.einsum("hd,bijhd->bhij", v, r)
    return a + c, b + d


def visible(seq: int, causal: bool, window: int | None, first: int = 0, keys: int | None = None) -> Array:
    """Which of `keys` keys each of `seq` queries sees, by index, [S, T]; the first query has the index `first`."""
    seen = np.ones((seq, seq if keys is None else keys), bool)
    for i, j in np.ndindex(*seen.shape):
        if causal and j > first + i:
            seen[i, j] = False
        if window is not None and abs(first + i - j) >= window:
            seen[i, j] = False
    return seen


def weigh(logits: Array, sink: float | None) -> Array:
    """Softmax of one row of logits, where -inf is a key that isn't seen, beside a sink; zeros where nothing is seen."""
    seen = np.isfinite(logits)
    weights = np.zeros_like(logits)
    if seen.any():
        top = max(logits.max(), -np.inf if sink is None else sink)
        grown = np.exp(logits[seen] - top)
        weights[seen] = grown / (grown.sum() + (0.0 if sink is None else np.exp(sink - top)))
    return weights


def linear(x: Array, weights: dict[str, Array], name: str) -> Array:
    """x W^T + b, where there is a b."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.zeros(1))


def key_places(positions: Array, mask: Array, first: Array) -> Array:
    """Positions [B, T] of keys: new ones have their own; counting back from the first new token that isn't padding (the
    last one, if all are), each cached key that isn't padding stands one before the next."""
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


def head_norm(heads: Array, weight: Array, eps: float) -> Array:
    """RMSNorm (Zhang and Sennrich 2019) over each head's features."""
    made: Array = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + eps) * weight
    return made


def written(past: Array | None, new: Array, first: Array) -> Array:
    """Keys or values [B, T, K, H]: those of a cache [B, K, P, H], and new ones [B, S, K, H] from place `first` on."""
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
    """One layer's attention, [B, S, D] to [B, S, D], and its keys and values [B, K, T, H] as they are cached."""
    batch, seq, _ = x.shape
    encoding, width = spec.encoding, spec.head_dim
    source = inputs["encoder_hidden_states"].astype(np.float64) if spec.cross else x
    positions = inputs.get("position_ids", np.zeros((batch, seq), np.int64))  # `none` reads none
    q = linear(x, weights, "q_proj").reshape(batch, seq, spec.num_heads, width)
    k = linear(source, weights, "k_proj").reshape(batch, -1, spec.num_kv_heads, width)
    v = linear(source, weights, "v_proj").reshape(batch, -1, spec.num_kv_heads, width)
    if spec.qk_norm:
        q, k = (head_norm(t, weights[f"{name}.weight"], spec.norm_eps) for t, name in ((q, "q_norm"), (k, "k_norm")))
    if encoding.name == "rope":
        q = rope(q, positions, encoding.theta, encoding.layout, encoding.rotary_dim)
        k = rope(k, positions, encoding.theta, encoding.layout, encoding.rotary_dim)
    if encoding.name == "rope2d":
        q, k = (rope2d(t, positions, encoding.theta, encoding.layout) for t in (q, k))
    grown = 0 if past is None or spec.kv_cache == "shared" else past[0].shape[2]
    first = inputs.get("write_indices", np.full(batch, grown))
    k, v = (written(None if past is None else past[each], t, first) for each, t in enumerate((k, v)))
    present = (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    mask = inputs.get("attention_mask", np.ones(k.shape[:2], np.int64))
    k_positions = positions if past is None or positions.ndim > 2 else key_places(positions, mask, first)
    k, v = (
        np.stack([t[:, :, n * spec.num_kv_heads // spec.num_heads] for n in range(spec.num_heads)], 2) for t in (k, v)
    )
    own = {name.removeprefix("encoding."): value for name, value in weights.items() if name.startswith("encoding.")}
    logits, more = np.einsum("bihd,bjhd->bhij", q, k), np.zeros(1)
    if encoding.name == "relative":
        if encoding.table == "learned":
            rows = relative_table(positions, k_positions, own["weight"], encoding.max_distance)
        else:
            rows = relative_rows(positions, k_positions, spec.hidden_size, encoding.theta)
        logits, more = relative_logits(q, k, rows, own)
        more = more * spec.scale
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    logits = logits + more
    if encoding.name == "alibi":
        logits = logits + alibi(positions, k_positions, spec.num_heads)
    if encoding.name == "t5" and not spec.cross:
        table = own["relative_attention_bias.weight"]
        logits = logits + t5(positions, k_positions, table, encoding, not spec.causal)
    out = np.zeros((batch, seq, spec.num_heads, width))
    for b in range(batch):
        seen = visible(seq, spec.causal, spec.window, int(first[b]), k.shape[1]) & (mask[b] != 0)
        if not spec.cross:
            seen[:, int(first[b]) + seq :] = False  # what lies behind the new keys of a shared cache is no key
        for n, i in np.ndindex(spec.num_heads, seq):
            row = np.where(seen[i], logits[b, n, i], -np.inf)
            out[b, i, n] = weigh(row, weights["sinks"][n] if spec.sinks else None) @ v[b, :, n]
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
    """W2 gelu(W1 x), gelu(x) = x Phi(x); or W_down (silu(W_gate x) * W_up x)."""
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
    """The output of the whole block on the graph's inputs by name, all in float64."""
    return outputs(spec, weights, inputs)["output"]


def outputs(spec: Any, weights: dict[str, Array], inputs: dict[str, Array]) -> dict[str, Array]:
    """Every output of the whole block on the graph's inputs by name, all in float64."""
    positions = inputs.get("position_ids")
    if spec.vocab_size is not None:
        x = weights["embed_tokens.weight"][inputs["input_ids"]]
        if spec.scale_embedding:
            x = x * math.sqrt(spec.hidden_size)
    else:
        x = inputs["hidden_states"].astype(np.float64)
    encoding = spec.encoding
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
        x, present = layer(spec, own, x, inputs, past)
        if spec.kv_cache is not None:
            found |= {f"present_key{number}": present[0], f"present_value{number}": present[1]}
    return {"output": x, **found}
