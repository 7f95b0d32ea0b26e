"""Descriptions of rotated keys with learned keys beside them, which are the same for all rows and not rotated."""

from __future__ import annotations

import numpy as np
import pytest
from absorbed_graphs import HEADS, SIZE, many, model_of
from descriptions import described
from onnx import TensorProto
from small_graphs import Graph

HALF = SIZE // 2
FREQUENCIES = 10_000.0 ** (-np.arange(HALF) / HALF)


def turned(g: Graph, value: str, frequencies: np.ndarray = FREQUENCIES) -> str:
    count = g.op("Squeeze", many(g), g.constant([0]))
    places = g.op("Cast", g.op("Range", g.constant(0), count, g.constant(1)), to=TensorProto.FLOAT)
    angles = g.op("Mul", g.op("Unsqueeze", places, g.constant([1])), g.constant(frequencies, np.float32))
    cos, sin = g.op("Cos", angles), g.op("Sin", angles)
    a, b = g.parts("Split", 2, value, g.constant([HALF, HALF]), axis=3)
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    return g.op("Concat", first, g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin)), axis=3)


def remembered(g: Graph, value: str) -> str:
    """Three learned keys for each head, before the others."""
    memory = g.random(f"memory_of_{value}", 1, HEADS, 3, SIZE)
    rows = g.op("Concat", g.length(value, 0), g.constant([HEADS, 3, SIZE]), axis=0)
    return g.op("Concat", g.op("Expand", memory, rows), value, axis=2)


def test_learned_keys_beside_rotated_ones_are_no_angles() -> None:
    model = model_of(q=turned, k=lambda g, value: remembered(g, turned(g, value)), v=remembered)
    found = described(model)
    assert found["encoding"] == {"name": "rope", "layout": "half", "theta": 10_000.0}


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_second_rotation_is_still_found(side: str) -> None:
    def twice(g: Graph, value: str) -> str:
        return turned(g, g.op("Tanh", turned(g, value, FREQUENCIES / 2)))

    hooks = {"q": turned, "k": turned, "v": remembered} | {side: twice}
    keys = hooks["k"]
    hooks["k"] = lambda g, value: remembered(g, keys(g, value))
    found = described(model_of(**hooks))
    assert found["encoding"]["reason"]["code"] == "rotated-again"
