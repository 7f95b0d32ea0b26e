"""Rotations of tokens that are cells of a grid, in rows: the angles from one row or column to the next.

    cos + i sin = exp(i (offset + row * f_y + column * f_x))

rope2d        offset 0 (posexport.graphs.fits.axes)
rope-dinov3   angles 2 pi c v_i, c the centre of the patch along its axis, from -1 to 1, v_i = theta^(-4i/head_dim): so
              f = 4 pi v_i / n over n cells (Simeoni et al. 2025, arXiv:2508.10104). Angles of more than half a turn
              can't be told from smaller ones, so theta is that of slow pairs, or the usual one
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from posexport.graphs.fits.progressions import Parameters, progression

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]
    Turns = np.ndarray[Any, np.dtype[np.complex128]]

EVEN = 1e-5
"""How much rotations may differ from even steps: cosines and sines, and their angles, are computed in float32."""

USUAL_THETA = 100.0


@attrs.frozen(kw_only=True)
class GridTurning:
    """The rotations `turns` [R, C, P] of the cells of a grid, and their `steps` [2, P] along x and y in radians.

    `prefix` is the number of tokens before the cells. They are not rotated.
    """

    rows: int
    columns: int
    steps: Array
    turns: Turns
    prefix: int

    @property
    def starts_at_zero(self) -> bool:
        """Whether the first cell is not rotated."""
        return bool(np.abs(self.turns[0, 0] - 1).max() <= EVEN)


def grid_turning(turns: Turns, most_prefix: int) -> GridTurning | None:
    """The grid whose cells have the rotations [S, P], in rows; None if there is none.

    At most `most_prefix` tokens come before it. The squarest grid is tried first.
    """
    for prefix in range(most_prefix + 1):
        cells = turns[prefix:]
        for rows, columns in _shapes(len(cells)):
            grid = cells.reshape(rows, columns, -1)
            down, right = grid[1:] / grid[:-1], grid[:, 1:] / grid[:, :-1]
            even = np.abs(down - down[:1, :1]).max() <= EVEN and np.abs(right - right[:1, :1]).max() <= EVEN
            if even and np.abs(np.abs(grid) - 1).max() <= EVEN:
                steps = np.angle(np.stack([right[0, 0], down[0, 0]]))
                steps[np.abs(steps) < EVEN / 10] = 0.0
                return GridTurning(rows=rows, columns=columns, steps=steps, turns=grid, prefix=prefix)
    return None


def _shapes(cells: int) -> Iterator[tuple[int, int]]:
    """The possible rows and columns of so many cells, at least two of each, the squarest grid first."""
    sides = [(rows, cells // rows) for rows in range(2, cells // 2 + 1) if cells % rows == 0]
    yield from sorted(sides, key=lambda side: abs(side[0] - side[1]))


def dinov3_parameters(turning: GridTurning, *, by_grid: bool = False) -> Parameters | None:
    """rope-dinov3 with these rotations, over this grid or another; None if it has other rotations.

    `by_grid`: the grid is known to follow the tokens, so it is not a parameter.
    """
    pairs = turning.steps.shape[1]
    if pairs % 2 or pairs < 2:
        return None
    half = pairs // 2
    for theta in _thetas(turning, half):
        frequencies = theta ** (-np.arange(half) / half)
        for rows, columns in _grids(turning, frequencies):
            angles = np.concatenate(
                [
                    np.broadcast_to(
                        _centres(turning.rows, rows)[:, None, None] * frequencies, (*turning.turns.shape[:2], half)
                    ),
                    np.broadcast_to(
                        _centres(turning.columns, columns)[None, :, None] * frequencies,
                        (*turning.turns.shape[:2], half),
                    ),
                ],
                -1,
            )
            if np.abs(np.exp(1j * angles) - turning.turns).max() <= EVEN:
                same = by_grid and (rows, columns) == (turning.rows, turning.columns)
                found: Parameters = {"name": "rope-dinov3", "theta": theta}
                return found if same else {**found, "grid": [rows, columns]}
    return None


def _centres(count: int, cells: int) -> Array:
    """2 pi times the centres of the first `count` of `cells` cells."""
    return np.asarray(2 * math.pi * (2 * (np.arange(count) + 0.5) / cells - 1))


def _thetas(turning: GridTurning, half: int) -> Iterator[float]:
    """The theta of the slow pairs of rows, then the usual one."""
    steps = np.abs(turning.steps[1, :half])
    for first in range(half - 1):
        found = progression(steps[first:], 2 * half, EVEN / 10)
        if found is not None:
            yield found[0]
            break
    yield USUAL_THETA


def _grids(turning: GridTurning, frequencies: Array) -> Iterator[tuple[int, int]]:
    """The grid itself, then the grid whose steps the slowest pair has."""
    yield turning.rows, turning.columns
    half = len(frequencies)
    slowest = turning.steps[1, half - 1], turning.steps[0, 2 * half - 1]
    if min(slowest) > 0:
        rows, columns = (round(4 * math.pi * float(frequencies[-1]) / float(step)) for step in slowest)
        if rows >= 1 and columns >= 1:
            yield rows, columns
