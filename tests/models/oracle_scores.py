"""Biases and scores in float64 by the formulas of their papers, for each pair of query and key.

Positions of queries [B, S], of keys [B, T] (with a last axis on a grid); results [B, N, S, T]. This file does not
share code with posexport.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from oracle_rotations import progression, sinusoid_table

Array = np.ndarray[Any, Any]


def apart(positions: Array, k_positions: Array) -> Array:
    """p_i - p_j, [B, S, T] or [B, S, T, axes]."""
    made: Array = positions[:, :, None] - k_positions[:, None, :]
    return made


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2022, as in the authors' attention_with_linear_biases/fairseq/models/transformer.py, get_slopes."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def _alibi(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    """-m |i - j|; if slopes_ahead are given, m is taken from them where j > i."""
    distance = apart(positions, k_positions)[:, None]
    slopes = np.array(spec.encoding.slopes or alibi_slopes(spec.num_heads))[:, None, None]
    ahead = slopes if spec.encoding.slopes_ahead is None else np.array(spec.encoding.slopes_ahead)[:, None, None]
    made: Array = -np.abs(distance) * np.where(distance >= 0, slopes, ahead)
    return made


def _alibi2d(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    offset = np.abs(apart(positions, k_positions).astype(np.float64))
    distance = np.hypot(offset[..., 0], offset[..., 1]) if spec.encoding.distance == "euclidean" else offset.sum(-1)
    slopes = np.array(spec.encoding.slopes or alibi_slopes(spec.num_heads))
    made: Array = -slopes[:, None, None] * distance[:, None]
    return made


def t5_bucket(offset: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Raffel et al. 2020, section 2.1, as in their mesh-tensorflow code. `offset` is key minus query."""
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
    # The first distance of a bucket must be in it, however the logarithms are rounded.
    grown = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact) + 1e-9
    return bucket + min(exact + math.floor(grown), num_buckets - 1)


def _t5(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    """W[bucket(p_j - p_i)]."""
    encoding, table = spec.encoding, own["relative_attention_bias.weight"]
    offsets = -apart(positions, k_positions)
    bias = np.zeros((offsets.shape[0], table.shape[1], *offsets.shape[1:]))
    for b, i, j in np.ndindex(offsets.shape):
        row = t5_bucket(int(offsets[b, i, j]), encoding.num_buckets, encoding.max_distance, not spec.causal)
        bias[b, :, i, j] = table[row]
    return bias


def _kerple(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    distance = np.abs(apart(positions, k_positions))[:, None].astype(np.float64)
    r1, r2 = (np.maximum(own[name], 0.01)[:, None, None] for name in ("r1", "r2"))
    if spec.encoding.kernel == "power":
        made: Array = -r1 * distance ** np.minimum(r2, 2.0)
    else:
        made = -r1 * np.log(1 + r2 * distance)
    return made


def _sandwich(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    distance = apart(positions, k_positions)
    total = sum(np.cos(distance * w) for w in progression(spec.encoding.dim, spec.encoding.theta))
    ratios = np.array([8 * h / spec.num_heads for h in range(1, spec.num_heads + 1)])
    made: Array = total[:, None] / ratios[:, None, None]
    return made


def _fire(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    c, least = own["c"], abs(own["L_multiplier"] * spec.encoding.init_L)
    distance = apart(positions, k_positions)
    bias = np.zeros((distance.shape[0], spec.num_heads, *distance.shape[1:]))
    for b, i, j in np.ndindex(distance.shape):
        whole = math.log(abs(c * max(float(positions[b, i]), least)) + 1) + 1e-6
        x = math.log(abs(c * distance[b, i, j]) + 1) / whole
        hidden = np.maximum(own["mlp.0.weight"][:, 0] * x + own["mlp.0.bias"], 0)
        bias[b, :, i, j] = own["mlp.2.weight"] @ hidden + own["mlp.2.bias"]
    return bias


def _swin(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    return _window(positions, k_positions, own["relative_position_bias_table"], spec.encoding.window_size)


def _swinv2(spec: Any, positions: Array, k_positions: Array, own: dict[str, Array]) -> Array:
    """Liu et al. 2022, eq. 3 and 4, with 8 and log2 as in the authors' code, which maps offsets to -1 ... 1."""
    size, trained = spec.encoding.window_size, spec.encoding.pretrained_window_size or spec.encoding.window_size
    mlp = {name.removeprefix("continuous_position_bias_mlp."): value for name, value in own.items()}
    rows = []
    for dy in range(1 - size, size):
        for dx in range(1 - size, size):
            offset = np.array([dy, dx]) / (trained - 1) * 8
            x = np.sign(offset) * np.log2(1 + np.abs(offset)) / 3
            hidden = np.maximum(mlp["0.weight"] @ x + mlp["0.bias"], 0)
            rows.append(16 / (1 + np.exp(-mlp["2.weight"] @ hidden)))
    return _window(positions, k_positions, np.array(rows), size)


def _window(positions: Array, k_positions: Array, table: Array, size: int) -> Array:
    """Row (dy + size - 1) (2 size - 1) + dx + size - 1 of a table; offsets are query minus key."""
    offset = np.clip(apart(positions, k_positions), 1 - size, size - 1) + size - 1
    return np.moveaxis(table[offset[..., 1] * (2 * size - 1) + offset[..., 0]], -1, 1)


BIASES = {
    "alibi": _alibi,
    "alibi2d": _alibi2d,
    "t5": _t5,
    "kerple": _kerple,
    "sandwich": _sandwich,
    "fire": _fire,
    "swin": _swin,
    "swinv2": _swinv2,
}


def _relative(spec: Any, q: Array, k: Array, places: tuple[Array, Array], own: dict[str, Array], seen: Array) -> Array:
    """Dai et al. 2019, section 3.3: terms (b) and (d), from rows R(p_i - p_j) of sinusoids or of a table."""
    distance = apart(*places)
    if spec.encoding.table == "learned":
        reach = spec.encoding.max_distance
        rows = own["weight"][np.clip(distance, -reach, reach) + reach]
    else:
        rows = sinusoid_table(distance, spec.hidden_size, spec.encoding.theta, "sin-cos", "half")
    v = own["position_bias"]
    r = (rows @ own["r_proj.weight"].T).reshape(*rows.shape[:-1], *v.shape)
    made: Array = (np.einsum("bihd,bijhd->bhij", q, r) + np.einsum("hd,bijhd->bhij", v, r)) * spec.scale
    return made


def shaw_rows(spec: Any, places: tuple[Array, Array]) -> Array:
    """clip(p_j - p_i), as a row of the tables."""
    encoding = spec.encoding
    made: Array = np.clip(-apart(*places), -encoding.max_distance, encoding.max_distance_ahead) + encoding.max_distance
    return made


def _shaw(spec: Any, q: Array, k: Array, places: tuple[Array, Array], own: dict[str, Array], seen: Array) -> Array:
    """Shaw et al. 2018, eq. 4: q_i . a_ij."""
    rows = own["keys.weight"][shaw_rows(spec, places)]
    made: Array = np.einsum("bihd,bijd->bhij", q, rows) * spec.scale
    return made


def deberta_bucket(distance: int, buckets: int, max_position: int) -> int:
    """DeBERTa v2's bucket of a distance d >= 0 (make_log_bucket_position in the authors' code).

    With m = buckets // 2, it is d if d <= m. Otherwise it is the smallest b with
    log(d / m) / log((max_position - 1) / m) (m - 1) <= b - m. This is computed exactly with powers of fractions.
    """
    middle = buckets // 2
    if distance <= middle:
        return distance
    step = 0
    own, whole = Fraction(distance, middle) ** (middle - 1), Fraction(max_position - 1, middle)
    while whole**step < own:
        step += 1
    return middle + step


def deberta_row(encoding: Any, offset: int) -> int:
    """The row of a table for p_i - p_j, by its clipped value or by its bucket."""
    span = encoding.position_buckets or encoding.max_relative_positions
    if encoding.position_buckets:
        size = deberta_bucket(abs(offset), encoding.position_buckets, encoding.max_relative_positions)
        offset = size if offset > 0 else -size
    return min(max(offset + span, 0), 2 * span - 1)


def _deberta(spec: Any, q: Array, k: Array, places: tuple[Array, Array], own: dict[str, Array], seen: Array) -> Array:
    """He et al. 2021, eq. 4. Both terms take the row of p_i - p_j, as in the authors' code."""
    tables = {}
    for name in ("pos_key_proj", "pos_query_proj"):
        if f"{name}.weight" in own:
            rows = own["weight"] @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)
            tables[name] = rows.reshape(len(rows), spec.num_heads, spec.head_dim)
    distance = apart(*places)
    logits = np.zeros((distance.shape[0], spec.num_heads, *distance.shape[1:]))
    for b, i, j in np.ndindex(distance.shape):
        row = deberta_row(spec.encoding, int(distance[b, i, j]))
        if "pos_key_proj" in tables:
            logits[b, :, i, j] += (q[b, i] * tables["pos_key_proj"][row]).sum(-1)
        if "pos_query_proj" in tables:
            logits[b, :, i, j] += (k[b, j] * tables["pos_query_proj"][row]).sum(-1)
    return logits * spec.scale


def _cope(spec: Any, q: Array, k: Array, places: Any, own: dict[str, Array], seen: Array) -> Array:
    """Golovneva et al. 2024, eq. 3 to 5: counts back from the last key of each query. Only visible keys have a gate."""
    table, last = own["pos_emb"], spec.encoding.npos_max - 1
    scores = np.einsum("bihd,bjhd->bhij", q, k)
    made = np.zeros_like(scores)
    for b, n, i in np.ndindex(scores.shape[:3]):
        count = 0.0
        for j in range(scores.shape[3] - 1, -1, -1):
            if seen[b, i, j]:
                count += 1 / (1 + math.exp(-scores[b, n, i, j] * spec.scale))
            place = min(count, last)
            low = math.floor(place)
            high = min(low + 1, last)
            z = q[b, i, n] @ table
            made[b, n, i, j] = z[high] * (place - low) + z[low] * (1 - (place - low))
    return made


SCORES = {"relative": _relative, "shaw": _shaw, "deberta": _deberta, "cope": _cope}
