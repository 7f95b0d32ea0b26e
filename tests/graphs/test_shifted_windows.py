"""Biases by offset on the grid of a window, together with the mask between regions of a shifted window (Swin)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_graphs import HEADS, Add, attention
from descriptions import described

SIDE, WINDOWS = 4, 2
TOKENS, ROWS = SIDE * SIDE, WINDOWS * WINDOWS

Array = np.ndarray[Any, Any]


def by_offset() -> Array:
    """A bias [HEADS, TOKENS, TOKENS] by offset."""
    table = np.random.default_rng(0).standard_normal((HEADS, 2 * SIDE - 1, 2 * SIDE - 1))
    y, x = np.divmod(np.arange(TOKENS), SIDE)
    found: Array = table[:, y[:, None] - y + SIDE - 1, x[:, None] - x + SIDE - 1]
    return found


def apart(number: float, shift: int = 2) -> Array:
    """Swin's mask, [ROWS, 1, TOKENS, TOKENS]: `number` between tokens of different regions, otherwise 0."""
    size = SIDE * WINDOWS
    bounds = np.digitize(np.arange(size), [size - SIDE, size - shift])
    regions = bounds[:, None] * 3 + bounds
    parts = regions.reshape(WINDOWS, SIDE, WINDOWS, SIDE).transpose(0, 2, 1, 3).reshape(ROWS, TOKENS)
    found: Array = np.where(parts[:, :, None] == parts[:, None], 0.0, number)[:, None]
    return found


def term(value: Array) -> Add:
    return lambda g, scores: g.op("Add", scores, g.floats(value))


def named(*values: Array) -> dict[str, Any]:
    model = attention(add=[term(value) for value in values], fixed=(ROWS, TOKENS))
    found: dict[str, Any] = described(model)["bias"]
    return found


@pytest.mark.parametrize("number", [-100.0, -50.0])
def test_shifted_windows_have_their_bias_and_what_keeps_regions_apart(number: float) -> None:
    expected = {"name": "swin", "window_size": SIDE, "between_regions": number}
    assert named(by_offset()[None], apart(number)) == expected
    assert named(by_offset()[None] + apart(number)) == expected


def test_regions_that_are_hidden_leave_the_bias() -> None:
    assert named(by_offset()[None], apart(-np.inf)) == {"name": "swin", "window_size": SIDE}


def test_windows_with_biases_of_their_own_have_no_name() -> None:
    code = "bias-by-row"
    other = apart(-100.0)
    other[1, 0, 3, 5] -= 1.0  # a second number
    assert named(by_offset()[None], other)["reason"]["code"] == code
    one_way = apart(-100.0)
    one_way[0, 0, 0, 1] = -100.0  # One token sees the other, but not the other way round.
    assert named(by_offset()[None], one_way)["reason"]["code"] == code
    by_head = np.repeat(apart(-100.0), HEADS, 1)
    by_head[:, 1] = 0.0
    assert named(by_offset()[None], by_head)["reason"]["code"] == code
    no_grid = by_offset()
    no_grid[1, 3, 5] += 1e-2
    assert named(no_grid[None], apart(-100.0))["reason"]["code"] == code
