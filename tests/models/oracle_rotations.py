"""Rotary encodings in float64 by the formulas of their papers, with pairs of features as complex numbers.

`turned` applies a rotary encoding to heads [B, S, n, width] at positions [B, S] or [B, S, axes]. This file does not
share code with posexport. The frequencies are Python floats.
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


def progression(width: int, theta: float) -> list[float]:
    """theta^(-2i/width)."""
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def scaled(encoding: Any, width: int, length: int) -> tuple[list[float], float]:
    """The frequencies of RoPE with a scaling at a length, and the factor on cosines and sines."""
    plain, kind, factor = progression(width, encoding.theta), encoding.scaling, encoding.factor
    trained = encoding.original_max_position_embeddings
    if kind == "linear":  # Chen et al. 2023, eq. 4: positions divided by the factor
        return [w / factor for w in plain], 1.0
    if kind == "ntk":  # theta' = theta s^(d/(d-2)): this divides the lowest frequency by s and keeps the highest
        return progression(width, encoding.theta * factor ** (width / (width - 2))), 1.0
    if kind == "dynamic":
        grown = max(1.0, factor * length / trained - (factor - 1))
        return progression(width, encoding.theta * grown ** (width / (width - 2))), 1.0
    if kind == "yarn":
        return _yarn(encoding, plain, width), _yarn_factor(encoding)
    if kind == "longrope":
        divisors = encoding.long_factor if length > trained else encoding.short_factor
        more = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        return [w / d for w, d in zip(plain, divisors, strict=True)], encoding.attention_factor or more
    if kind == "llama3":
        return [_llama3(encoding, w) for w in plain], 1.0
    if kind == "proportional":
        kept = int(encoding.partial_rotary_factor * width // 2)
        return [w / factor if i < kept else 0.0 for i, w in enumerate(plain)], 1.0
    return plain, 1.0


def _yarn(encoding: Any, plain: list[float], width: int) -> list[float]:
    """Peng et al. 2023 as released: the ramp is linear in the index of the pair.

    It runs between the pairs that turn beta_fast and beta_slow times in the trained length.
    """

    def pair(turns: float) -> float:
        # theta^(-2i/width) * length = 2 pi turns
        length = encoding.original_max_position_embeddings
        return width / 2 * math.log(length / (2 * math.pi * turns)) / math.log(encoding.theta)

    low, high = pair(encoding.beta_fast), pair(encoding.beta_slow)
    if encoding.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramps = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    return [w / encoding.factor * ramp + w * (1 - ramp) for w, ramp in zip(plain, ramps, strict=True)]


def _yarn_factor(encoding: Any) -> float:
    if encoding.attention_factor:
        return float(encoding.attention_factor)
    log = math.log(encoding.factor)
    if encoding.mscale:
        return float((0.1 * encoding.mscale * log + 1) / (0.1 * encoding.mscale_all_dim * log + 1))
    return 0.1 * log + 1


def _llama3(encoding: Any, w: float) -> float:
    turns = encoding.original_max_position_embeddings * w / (2 * math.pi)
    if turns < encoding.low_freq_factor:
        return w / float(encoding.factor)
    if turns > encoding.high_freq_factor:
        return w
    part = (turns - encoding.low_freq_factor) / (encoding.high_freq_factor - encoding.low_freq_factor)
    return (1 - part) * w / float(encoding.factor) + part * w


def turn_pairs(heads: Array, angles: Array, pairs: list[tuple[int, int]], scale: float = 1.0) -> Array:
    """Su et al. 2021, eq. 34: multiplies each pair, as a complex number, by scale exp(i angle).

    The other features stay. angles [B, S, n or 1, P].
    """
    made = heads.copy()
    for i, (real, imaginary) in enumerate(pairs):
        pair = (heads[..., real] + 1j * heads[..., imaginary]) * scale * np.exp(1j * angles[..., i])
        made[..., real], made[..., imaginary] = pair.real, pair.imag
    return made


def pairs_of(layout: str, widths: list[int]) -> list[tuple[int, int]]:
    """The pairs of features in a layout; `widths` are the numbers of features of consecutive runs."""
    whole = sum(widths)
    if layout == "interleaved":
        return [(2 * i, 2 * i + 1) for i in range(whole // 2)]
    if layout == "half-head":
        return [(i, i + whole // 2) for i in range(whole // 2)]
    found, first = [], 0
    for width in widths:
        found += [(first + i, first + i + width // 2) for i in range(width // 2)]
        first += width
    return found


def _rope(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    encoding = spec.encoding
    width = encoding.rotary_dim or spec.head_dim
    frequencies, scale = scaled(encoding, width, int(positions.max()) + 1)
    angles = positions[..., None, None] * np.array(frequencies)
    return turn_pairs(heads, angles, pairs_of(encoding.layout, [width]), scale)


def _mrope(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    """M-RoPE: each pair has its own frequency and takes the position on one axis."""
    encoding = spec.encoding
    width = encoding.rotary_dim or spec.head_dim
    frequencies, scale = scaled(encoding, width, int(positions.max()) + 1)
    t, h, w = encoding.mrope_section or (width // 2 - 2 * (3 * width // 16), 3 * width // 16, 3 * width // 16)
    angles = np.zeros((*positions.shape[:2], 1, width // 2))
    for i, frequency in enumerate(frequencies):
        axis = 2 if i < t else 1 if i < t + h else 0
        if encoding.mrope_interleaved:
            axis = 1 if i % 3 == 1 and i < 3 * h else 0 if i % 3 == 2 and i < 3 * w else 2
        angles[:, :, 0, i] = positions[..., axis] * frequency
    return turn_pairs(heads, angles, pairs_of(encoding.layout, [width]), scale)


def _axial(positions: Array, axes: list[int], lists: list[list[float]]) -> Array:
    """Angles [B, S, 1, P], with a run of pairs for each axis."""
    parts = [positions[..., None, axis, None] * np.array(each) for axis, each in zip(axes, lists, strict=True)]
    return np.concatenate(parts, -1)


def _rope2d(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    encoding, width = spec.encoding, spec.head_dim
    if encoding.spacing == "alternate":
        whole = progression(width, encoding.theta)
        lists = [whole[0::2], whole[1::2]]
    else:
        thetas = {"x": encoding.theta, "y": encoding.theta_y or encoding.theta}
        lists = [progression(width // 2, thetas[letter]) for letter in encoding.order]
    angles = _axial(positions, ["xy".index(letter) for letter in encoding.order], lists) / encoding.factor
    return turn_pairs(heads, angles, pairs_of(encoding.layout, [width // 2] * 2))


def _rope3d(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    encoding, width = spec.encoding, spec.head_dim
    third = width // 6 * 2
    split = list(encoding.split or (width - 2 * third, third, third))
    thetas = {axis: getattr(encoding, f"theta_{axis}", None) or encoding.theta for axis in "xyt"}
    lists = [progression(part, thetas[axis]) for part, axis in zip(split, encoding.order, strict=True)]
    angles = _axial(positions, ["xyt".index(axis) for axis in encoding.order], lists)
    return turn_pairs(heads, angles, pairs_of(encoding.layout, split))


def _mixed(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    """Heo et al. 2024, eq. 14: exp(i (x f_x + y f_y)), with frequencies for each head."""
    freqs = own["freqs"].reshape(2, spec.num_heads, -1)
    angles = sum(positions[..., axis, None, None] * freqs[axis] for axis in (0, 1))
    return turn_pairs(heads, angles, pairs_of(spec.encoding.layout, [spec.head_dim]))


def _dinov3(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    encoding, prefix = spec.encoding, spec.prefix_tokens
    angles = np.zeros((*positions.shape[:2], 1, spec.head_dim // 2))
    for b in range(len(positions)):
        for run, axis in enumerate((1, 0)):
            reach = positions[b, prefix:, axis].max() + 1 if positions.shape[1] > prefix else 1
            size = encoding.grid[1 - axis] if encoding.grid else reach
            centre = (positions[b, :, axis] + 0.5) / size * 2 - 1
            for i, w in enumerate(progression(spec.head_dim // 2, encoding.theta)):
                angles[b, :, 0, run * spec.head_dim // 4 + i] = 2 * np.pi * centre * w
    return turn_pairs(heads, angles, pairs_of("half-head", [spec.head_dim]))


def _vjepa2(spec: Any, heads: Array, positions: Array, own: dict[str, Array]) -> Array:
    """As in V-JEPA 2's code: feature j of an axis has the angle of frequency j mod half, and its neighbour is its
    partner."""
    half = spec.head_dim // 3 // 2
    made = heads.copy()
    for run, axis in enumerate((2, 1, 0)):
        for j in range(2 * half):
            angle = positions[..., axis, None] * spec.encoding.theta ** (-(j % half) / half)
            at = run * 2 * half + j
            partner = -heads[..., at + 1] if j % 2 == 0 else heads[..., at - 1]
            made[..., at] = heads[..., at] * np.cos(angle) + partner * np.sin(angle)
    return made


def _xpos(spec: Any, heads: Array, positions: Array, own: dict[str, Array], sign: int) -> Array:
    """Sun et al. 2022, section 3.2: RoPE times zeta_i^(+-p / scale_base)."""
    encoding, width = spec.encoding, spec.head_dim
    angles = positions[..., None, None] * np.array(progression(width, encoding.theta))
    made = turn_pairs(heads, angles, pairs_of(encoding.layout, [width]))
    centre = (positions.min(1) + positions.max(1)) // 2 if spec.kv_cache is None else np.zeros(len(positions), int)
    for i, (a, b) in enumerate(pairs_of(encoding.layout, [width])):
        zeta = (2 * i / width + encoding.gamma) / (1 + encoding.gamma)
        grown = zeta ** (sign * (positions - centre[:, None]) / encoding.scale_base)
        made[..., a] *= grown[..., None]
        made[..., b] *= grown[..., None]
    return made


def _temperature(spec: Any, heads: Array, positions: Array, own: dict[str, Array], sign: int) -> Array:
    if sign < 0:
        return heads
    steps = np.floor((positions + 1) / spec.encoding.floor_scale)
    made: Array = heads * (np.log(steps + 1) * spec.encoding.attn_scale + 1)[..., None, None]
    return made


def _cosine(spec: Any, heads: Array, positions: Array, own: dict[str, Array], sign: int) -> Array:
    """Liu et al. 2022, eq. 2: unit vectors; queries are multiplied by the trained factor of their head, at most 100.

    Zeros stay zeros: a row without keys passes them to the next layer.
    """
    made: Array = heads / np.maximum(np.sqrt((heads**2).sum(-1, keepdims=True)), 1e-12)
    return made * np.exp(np.minimum(own["logit_scale"], math.log(100)))[:, 0] if sign > 0 else made


_SAME = {
    "rope": _rope,
    "mrope": _mrope,
    "rope2d": _rope2d,
    "rope3d": _rope3d,
    "rope-mixed": _mixed,
    "rope-dinov3": _dinov3,
    "rope-vjepa2": _vjepa2,
}
_OWN = {"xpos": _xpos, "temperature": _temperature, "swinv2": _cosine}


def turned(spec: Any, heads: Array, positions: Array, own: dict[str, Array], sign: int) -> Array:
    """Queries (sign 1) or keys (sign -1) after the encoding. Rotations leave the first prefix_tokens unchanged."""
    name = spec.encoding.name
    if name in _OWN:
        return _OWN[name](spec, heads, positions, own, sign)
    if name not in _SAME:
        return heads
    made = _SAME[name](spec, heads, positions, own)
    made[:, : spec.prefix_tokens] = heads[:, : spec.prefix_tokens]
    return made
