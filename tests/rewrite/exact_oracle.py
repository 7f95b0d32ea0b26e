"""A numpy reference for a decoder of `small_graphs`, with angles of 60 digits. This file does not import posexport."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from small_graphs import HEADS, KV_HEADS, SIZE

Array = np.ndarray[Any, Any]

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def turn(position: int, pair: int, theta: float = 10_000.0, width: int = SIZE) -> tuple[float, float]:
    """Cosine and sine of position * theta^(-2 pair / width)."""
    with localcontext() as context:
        context.prec = 60
        angle = Decimal(position) * Decimal(theta) ** (Decimal(-2 * pair) / Decimal(width))
        angle %= 2 * PI
        return math.cos(angle), math.sin(angle)


def angles(positions: Array) -> tuple[Array, Array]:
    """Cosines and sines [B, 1, S, P]."""
    turns = np.array([[[turn(int(p), i) for i in range(SIZE // 2)] for p in row] for row in positions])
    return turns[:, None, ..., 0], turns[:, None, ..., 1]


def computed(model: onnx.ModelProto, feeds: dict[str, Array]) -> tuple[Array, Array]:
    """The logits of a decoder of one layer, and its rotated keys."""
    weights = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer}
    x = weights["embed.weight"][feeds["input_ids"]]
    batch, seq, _ = x.shape
    cos, sin = angles(feeds["position_ids"])

    def heads(name: str, count: int) -> Array:
        return (x @ weights[f"layers.0.{name}.weight"]).reshape(batch, seq, count, SIZE).swapaxes(1, 2)

    def turned(one: Array) -> Array:
        a, b = one[..., : SIZE // 2], one[..., SIZE // 2 :]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    past = [feeds[f"past_key_values.0.{kind}"].astype(np.float64) for kind in ("key", "value")]
    q, k = turned(heads("q_proj", HEADS)), np.concatenate((past[0], turned(heads("k_proj", KV_HEADS))), 2)
    v = np.concatenate((past[1], heads("v_proj", KV_HEADS)), 2)
    keys = k
    k, v = (one.repeat(HEADS // KV_HEADS, 1) for one in (k, v))
    total = k.shape[2]
    seen = np.arange(total) <= np.arange(seq)[:, None] + total - seq
    seen = seen & (feeds["attention_mask"][:, None, None] == 1)
    scores = np.where(seen, q @ k.swapaxes(2, 3) * SIZE**-0.5, -1e30)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    mixed = mixed.swapaxes(1, 2).reshape(batch, seq, -1) @ weights["layers.0.o_proj.weight"]
    return (x + mixed) @ weights["head.weight"], keys
