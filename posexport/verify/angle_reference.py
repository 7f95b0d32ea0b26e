"""Cosines and sines of every encoding with angles, in plain Python numbers: the reference for those of artifacts.

This module shares no formula with `models/`, on purpose: a wrong frequency there is then noticed. Python's floats have
53 bits: at position 2^20 an angle is off by 2e-10, a thousandth of what is measured with it. Positions are the same
along every axis, so pair i has one frequency w_i. Papers and credits are named in `models/`, at each encoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posexport.spec.arrays import Array
from posexport.spec.spec import Spec


def falling(width: int, theta: float) -> list[float]:
    """theta^(-2i/width) for each of width/2 pairs."""
    return [math.exp(-2 * i / width * math.log(theta)) for i in range(width // 2)]


def _rope(rope: Any, spec: Spec, length: int) -> list[float]:
    plain = falling(rope.rotary_dim or spec.head_dim, rope.theta)
    return plain if rope.scaling is None else SCALED[rope.scaling](rope, plain, length)


def _rope2d(rope: Any, spec: Spec, _: int) -> list[float]:
    if rope.spacing == "alternate":
        pairs = falling(spec.head_dim, rope.theta)
        frequencies = pairs[::2] + pairs[1::2]
    else:
        bases = {"x": rope.theta, "y": rope.theta_y or rope.theta}
        frequencies = [w for axis in rope.order for w in falling(spec.head_dim // 2, bases[axis])]
    return [w / rope.factor for w in frequencies]


def _rope3d(rope: Any, spec: Spec, _: int) -> list[float]:
    bases = {"x": rope.theta, "y": rope.theta_y or rope.theta, "t": rope.theta_t or rope.theta}
    third = spec.head_dim // 6 * 2
    widths = rope.split or (spec.head_dim - third - third, third, third)
    return [w for axis, width in zip(rope.order, widths, strict=True) for w in falling(width, bases[axis])]


FREQUENCIES: dict[str, Callable[[Any, Spec, int], list[float]]] = {
    "sinusoidal": lambda encoding, spec, _: falling(spec.hidden_size, encoding.theta),
    "relative": lambda encoding, spec, _: falling(spec.hidden_size, encoding.theta),
    "rope": _rope,
    "mrope": _rope,
    "rope2d": _rope2d,
    "rope3d": _rope3d,
    "rope-vjepa2": lambda rope, spec, _: 6 * falling(spec.head_dim // 6 * 2, rope.theta),
    "rope-dinov3": lambda rope, spec, _: 2 * falling(spec.head_dim // 2, rope.theta),
    "xpos": lambda rope, spec, _: falling(spec.head_dim, rope.theta),
}
"""The frequencies of the pairs by encoding, from its parameters, the block and a length.

Other encodings have no such angles.
"""


def _slowed(rope: Any, plain: list[float], factor: float) -> list[float]:
    """The frequencies for theta * factor^(d/(d-2)): the slowest pair is slower by `factor`, the fastest is
    unchanged."""
    width = 2 * len(plain)
    return falling(width, rope.theta * factor ** (width / (width - 2)))


def _dynamic(rope: Any, plain: list[float], length: int) -> list[float]:
    times = length / rope.original_max_position_embeddings
    return plain if times <= 1 else _slowed(rope, plain, rope.factor * (times - 1) + 1)


def _yarn(rope: Any, plain: list[float], _: int) -> list[float]:
    def pair(turns: float) -> float:
        """The pair, as a real number, that makes so many turns within the trained length."""
        wavelength = rope.original_max_position_embeddings / turns
        return len(plain) * math.log(wavelength / (2 * math.pi), rope.theta)

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    span = last - first or 0.001
    parts = [min(1.0, max(0.0, (i - first) / span)) for i in range(len(plain))]
    return [w * (1 - part + part / rope.factor) for w, part in zip(plain, parts, strict=True)]


def _llama3(rope: Any, plain: list[float], _: int) -> list[float]:
    def one(w: float) -> float:
        turns = w * rope.original_max_position_embeddings / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        slowed = 1 - min(1.0, max(0.0, float(kept)))
        return w * (1 - slowed + slowed / float(rope.factor))

    return [one(w) for w in plain]


def _longrope(rope: Any, plain: list[float], length: int) -> list[float]:
    within = length <= rope.original_max_position_embeddings
    return [w / by for w, by in zip(plain, rope.short_factor if within else rope.long_factor, strict=True)]


def _proportional(rope: Any, plain: list[float], _: int) -> list[float]:
    turning = int(len(plain) * rope.partial_rotary_factor)
    return [w / rope.factor for w in plain[:turning]] + [0.0] * (len(plain) - turning)


SCALED: dict[str, Callable[[Any, list[float], int], list[float]]] = {
    "linear": lambda rope, plain, _: [w / rope.factor for w in plain],
    "ntk": lambda rope, plain, _: _slowed(rope, plain, rope.factor),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def factor(spec: Spec) -> float:
    """The factor of cosines and sines: the attention factor of yarn and longrope, else 1."""
    rope: Any = spec.encoding
    scaling = getattr(rope, "scaling", None)
    if scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor:
        return float(rope.attention_factor)
    if scaling == "longrope":
        return math.sqrt(1 + math.log(rope.factor, rope.original_max_position_embeddings))
    grown = 0.1 * math.log(rope.factor)
    return float((1 + grown * rope.mscale) / (1 + grown * rope.mscale_all_dim)) if rope.mscale else 1 + grown


def cos_sin(spec: Spec, positions: Sequence[int]) -> tuple[Array, Array]:
    """float64 cosines and sines [len(positions), P]; the length is the largest position + 1."""
    encoding: Any = spec.encoding
    places = np.array(positions, np.float64)
    if encoding.name == "rope-dinov3":  # 2 pi times the centre of the cell, in a grid from -1 to 1
        rows_columns = encoding.grid or (places + 1, places + 1)
        centres = [2 * math.pi * (2 * (places + 0.5) / size - 1) for size in rows_columns]
        places = np.stack(centres, -1).repeat(spec.head_dim // 4, -1)  # half of the pairs rotate by y, then half by x
    else:
        places = places[:, None]
    frequencies = FREQUENCIES[encoding.name](encoding, spec, max(positions) + 1)
    angles = places * np.array(frequencies)
    return factor(spec) * np.cos(angles), factor(spec) * np.sin(angles)
