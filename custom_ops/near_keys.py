"""Cosines and sines of distances, for one query whose keys are less than T behind it.

Such a query needs angles of at most T distances, whatever its position. Each is the sum of one of a few coarse angles
and one of a few fine angles, so that few cosines are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions, exact_onnx, exact_sinusoids, sinusoids, sinusoids_onnx
from posexport.custom_ops.operator import Ops, T, either_onnx

FINE = 128
"""The number of differences that share a coarse angle."""


@dataclass(frozen=True)
class Turns(Generic[T]):
    """Cosines and sines of coarse positions [B|1, R], and of fine positions [1, FINE] that are subtracted from them."""

    coarse_cos: T
    coarse_sin: T
    fine_cos: T
    fine_sin: T


@dataclass(frozen=True)
class Frequencies(Generic[T]):
    """The frequencies of the vectors of distances, as numbers or as exact turns."""

    frequencies: T | None
    turns: T | None

    def sides(self: Frequencies[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions."""
        if self.frequencies is not None:
            return sinusoids.eager(positions, self.frequencies, 1.0)
        return exact_sinusoids.eager(positions, self.turns, 1.0)

    def sides_onnx(self: Frequencies[ir.Value], op: Ops, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Do the same as `sides`, in ONNX."""
        if self.frequencies is not None:
            return sinusoids_onnx(op, positions, self.frequencies, 1.0)
        assert self.turns is not None  # one of them is given
        return exact_onnx(op, positions, self.turns, 1.0)


def by_distance_onnx(
    op: Ops,
    positions: Positions[ir.Value],
    angles: Frequencies[ir.Value],
    near: Callable[[Ops, Turns[ir.Value], ir.Value], ir.Value],
    other: Callable[[Ops], ir.Value],
) -> ir.Value:
    """Return `near(op, turns, columns)` for one query whose keys are less than T behind it, otherwise `other(op)`.

    `turns` give the angles of R * FINE columns: coarse position r minus fine position f is the distance of column
    FINE r + f. `columns` int64 [B, T] are those of the keys.
    """
    queries, keys = (op.Shape(side, start=1, end=2) for side in (positions.q_positions, positions.k_positions))
    behind = op.Sub(op.Slice(positions.q_positions, [0], [1], [1]), positions.k_positions)
    is_near = op.And(
        op.GreaterOrEqual(op.ReduceMin(behind, keepdims=0), 0),
        op.Less(op.ReduceMax(behind, keepdims=0), op.Squeeze(keys)),
    )

    def one_query(op: Ops) -> ir.Value:
        blocks = op.Div(op.Add(keys, FINE - 1), FINE)
        last = op.Sub(op.Mul(blocks, FINE), 1)  # the column of distance d is last - d
        coarse = op.Sub(last, op.Mul(op.Range(0, op.Squeeze(blocks), 1), FINE))
        fine = op.Range(0, FINE, 1)
        turned = (side for at in (coarse, fine) for side in angles.sides_onnx(op, op.Unsqueeze(at, [0])))
        return near(op, Turns(*turned), op.Sub(last, behind))

    return either_onnx(op, op.And(op.Equal(op.Squeeze(queries), 1), is_near), one_query, other)
