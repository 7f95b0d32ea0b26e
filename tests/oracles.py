"""The formulas of the papers in numpy float64, element by element where that is clearer. Shares no code with posexport.

`block` is the whole block of a spec; the rest are its parts. Shapes: B batch, S sequence, N query heads, K key heads.
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


def alibi(positions: Array, heads: int) -> Array:
    """-m |i - j|, [B, N, S, S]."""
    slopes = np.array(alibi_slopes(heads))
    distance = np.abs(positions[:, :, None] - positions[:, None, :])
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


def t5(positions: Array, table: Array, num_buckets: int, max_distance: int, bidirectional: bool) -> Array:
    """W[bucket(p_j - p_i)], [B, N, S, S]."""
    batch, seq = positions.shape
    bias = np.zeros((batch, table.shape[1], seq, seq))
    for b in range(batch):
        for i in range(seq):
            for j in range(seq):
                offset = int(positions[b, j] - positions[b, i])
                bias[b, :, i, j] = table[t5_bucket(offset, num_buckets, max_distance, bidirectional)]
    return bias


def relative_rows(positions: Array, width: int, theta: float) -> Array:
    """R(p_i - p_j) of Dai et al. 2019, [B, S, S, width]: all sines, then all cosines."""
    return sinusoid_table(positions[:, :, None] - positions[:, None, :], width, theta, "sin-cos", "half")


def relative_table(positions: Array, table: Array, max_distance: int) -> Array:
    """Row clip(p_i - p_j) + max_distance of a trained table, [B, S, S, width]."""
    distance = positions[:, :, None] - positions[:, None, :]
    rows: Array = table[np.clip(distance, -max_distance, max_distance) + max_distance]
    return rows


def relative_logits(q: Array, k: Array, rows: Array, weights: dict[str, Array]) -> Array:
    """Dai et al. 2019, section 3.3: terms (a) to (d), unscaled, from heads [B, S, N, H] and R [B, S, S, D]."""
    u, v = weights["content_bias"], weights["position_bias"]
    r = (rows @ weights["r_proj.weight"].T).reshape(*rows.shape[:-1], *u.shape)
    a = np.einsum("bihd,bjhd->bhij", q, k)
    b = np.einsum("bihd,bijhd->bhij", q, r)
    c = np.einsum("hd,bjhd->bhj", u, k)[:, :, None, :]
    d = np.einsum("hd,bijhd->bhij", v, r)
    made: Array = a + b + c + d
    return made


def visible(seq: int, causal: bool, window: int | None) -> Array:
    """Which keys a query sees, by index, [S, S]."""
    seen = np.ones((seq, seq), bool)
    for i in range(seq):
        for j in range(seq):
            if causal and j > i:
                seen[i, j] = False
            if window is not None and abs(i - j) >= window:
                seen[i, j] = False
    return seen


def softmax(logits: Array) -> Array:
    """Softmax over the last axis; -inf is a key that isn't seen."""
    grown = np.exp(logits - logits.max(-1, keepdims=True))
    made: Array = grown / grown.sum(-1, keepdims=True)
    return made


def linear(x: Array, weights: dict[str, Array], name: str) -> Array:
    """x W^T + b, where there is a b."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.zeros(1))


def attention(spec: Any, weights: dict[str, Array], x: Array, positions: Array | None) -> Array:
    """One layer's attention, [B, S, D] to [B, S, D]."""
    batch, seq, _ = x.shape
    encoding, width = spec.encoding, spec.head_dim
    positions = np.zeros((batch, seq), np.int64) if positions is None else positions  # `none` reads none
    q = linear(x, weights, "q_proj").reshape(batch, seq, spec.num_heads, width)
    k = linear(x, weights, "k_proj").reshape(batch, seq, spec.num_kv_heads, width)
    v = linear(x, weights, "v_proj").reshape(batch, seq, spec.num_kv_heads, width)
    if encoding.name == "rope":
        q = rope(q, positions, encoding.theta, encoding.layout, encoding.rotary_dim)
        k = rope(k, positions, encoding.theta, encoding.layout, encoding.rotary_dim)
    if encoding.name == "rope2d":
        q, k = (rope2d(t, positions, encoding.theta, encoding.layout) for t in (q, k))
    k, v = (
        np.stack([t[:, :, n * spec.num_kv_heads // spec.num_heads] for n in range(spec.num_heads)], 2) for t in (k, v)
    )
    own = {name.removeprefix("encoding."): value for name, value in weights.items() if name.startswith("encoding.")}
    if encoding.name == "relative":
        if encoding.table == "learned":
            rows = relative_table(positions, own["weight"], encoding.max_distance)
        else:
            rows = relative_rows(positions, spec.hidden_size, encoding.theta)
        logits = relative_logits(q, k, rows, own) * spec.scale
    else:
        logits = np.einsum("bihd,bjhd->bhij", q, k) * spec.scale
    if encoding.name == "alibi":
        logits = logits + alibi(positions, spec.num_heads)
    if encoding.name == "t5":
        table = own["relative_attention_bias.weight"]
        logits = logits + t5(positions, table, encoding.num_buckets, encoding.max_distance, not spec.causal)
    logits = np.where(visible(seq, spec.causal, spec.window), logits, -np.inf)
    out = np.einsum("bhij,bjhd->bihd", softmax(logits), v)
    return linear(out.reshape(batch, seq, -1), weights, "o_proj")


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


def layer(spec: Any, weights: dict[str, Array], x: Array, positions: Array | None) -> Array:
    """One layer of a spec."""
    if spec.block == "attention":
        return attention(spec, weights, x, positions)
    if spec.norm == "pre":
        x = x + attention(spec, weights, norm(spec, weights, x, "input_layernorm"), positions)
        return x + mlp(spec, weights, norm(spec, weights, x, "post_attention_layernorm"))
    x = norm(spec, weights, x + attention(spec, weights, x, positions), "post_attention_layernorm")
    return norm(spec, weights, x + mlp(spec, weights, x), "post_feedforward_layernorm")


def block(spec: Any, weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """The whole block on the graph's inputs by name, all in float64."""
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
    for index in range(spec.layers):
        prefix = f"layers.{index}." if spec.layers > 1 else ""
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        x = layer(spec, own, x, positions)
    return x
