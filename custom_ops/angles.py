"""Cosines and sines of angles, and features made from them.

Angles, cosines and sines are fp32 for every dtype of the graph (fp64 in the float64 reference). In half precision, an
angle is wrong by radians from position 1000 on. Callers cast the results last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.operator import Ops, T, constant, operator, rank_of

_FP32_ANGLES = ContextVar("_FP32_ANGLES", default=False)


@contextmanager
def fp32_angles() -> Iterator[None]:
    """Inside the block, a float64 reference rounds frequencies and angles to fp32.

    Far positions then have the same angles as in PyTorch models. Cosines, sines and everything after them stay in
    float64.
    """
    token = _FP32_ANGLES.set(True)
    try:
        yield
    finally:
        _FP32_ANGLES.reset(token)


def constant_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the constants of a block in `dtype` are computed.

    It is never half precision, in which an angle is wrong from position 256 on.
    """
    return torch.float64 if dtype == torch.float64 and not _FP32_ANGLES.get() else torch.float32


def _products(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return position * frequency, summed over several axes: [B, S, P] in the dtype of `frequencies`."""
    dtype = constant_dtype(frequencies.dtype)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies.to(dtype)
    return (angles.sum(-2) if frequencies.dim() == 2 else angles).to(frequencies.dtype)


HALF_TURN, SPLIT = 1 << 49, 4096
"""Half a turn in the units of exact_sinusoids, and the number of positions that the first row of `turns` stands for."""


@dataclass(frozen=True)
class Positions(Generic[T]):
    """The positions of queries and keys, [B, S or T] or [B, S or T, axes]."""

    q_positions: T
    k_positions: T


def _scaled(cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def _scaled_onnx(op: Ops, cos: ir.Value, sin: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
    if scale == 1.0:
        return cos, sin
    factor = constant(op, scale)
    return op.Mul(cos, factor), op.Mul(sin, factor)


@operator("Sinusoids", "cos", "sin")
def sinusoids(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a = position * frequency, summed over the axes of positions, times `scale`.

    Args:
        positions: int64 [B, S] or [B, S, axes].
        frequencies: float32 [P] or [axes, P], also in half-precision models, where half-precision angles are wrong.
        scale: factor on the results, such as YaRN's attention factor.

    Returns:
        cos and sin, [B, S, P] in the dtype of `frequencies`.

    Example:
        >>> cos, sin = sinusoids(torch.arange(3)[None], torch.tensor([1.0, 0.5]))
        >>> cos
        tensor([[[ 1.0000,  1.0000],
                 [ 0.5403,  0.8776],
                 [-0.4161,  0.5403]]])
    """
    angles = _products(positions, frequencies)
    return _scaled(angles.cos(), angles.sin(), scale)


@sinusoids.onnx
def sinusoids_onnx(op: Ops, positions: ir.Value, frequencies: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
    # products and a sum, not MatMul, because TF32 would round the positions to 11 bits
    angles = op.Mul(op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1]), frequencies)
    if rank_of(frequencies) == 2:
        angles = op.ReduceSum(angles, [-2], keepdims=0)
    return _scaled_onnx(op, op.Cos(angles), op.Sin(angles), scale)


# Let p = hi * 4096 + lo, with both parts below 4096 for p < 2^24. Turns are below 2^50, so hi * turns[0] + lo *
# turns[1] is below 2^63. It is the angle of p up to whole turns. Its distance to the nearest half turn is at most a
# quarter turn, which fp32 holds within 5e-8 rad. Cosine and sine change sign with every half turn. Integer division
# rounds towards zero, so the distance of a negative angle is up to three quarters of a turn, which fp32 holds within
# 3e-7 rad. A division that rounds down would need more operators in ONNX.


@operator("ExactSinusoids", "cos", "sin")
def exact_sinusoids(positions: Tensor, turns: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same as `sinusoids`, but exact from position 0 to 2^24. Angles are whole numbers in units of 2^-50 turns.

    Args:
        positions: int64 [B, S] or [B, S, axes].
        turns: int64 [2, P] or [2, axes, P], the angles of 4096 positions and of 1 position, without full turns.
        scale: factor on the results.

    Returns:
        cos and sin, float32 [B, S, P].

    Example:
        >>> turns = torch.tensor([[0], [2**48]])  # a quarter turn at each position
        >>> cos, sin = exact_sinusoids(torch.arange(4)[None], turns)
        >>> sin
        tensor([[[ 0.],
                 [ 1.],
                 [-0.],
                 [-1.]]])
    """
    places = positions.unsqueeze(-1)
    high = places.div(SPLIT, rounding_mode="trunc")
    angles = high * turns[0] + (places - high * SPLIT) * turns[1]
    if turns.dim() == 3:
        angles = angles.sum(-2)
    halves = (angles + HALF_TURN // 2).div(HALF_TURN, rounding_mode="trunc")
    angle = (angles - halves * HALF_TURN).float() * (math.pi / HALF_TURN)
    signs = 1.0 - 2.0 * halves.remainder(2).float()
    return _scaled(angle.cos() * signs, angle.sin() * signs, scale)


@exact_sinusoids.onnx
def exact_onnx(op: Ops, positions: ir.Value, turns: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
    places = op.Unsqueeze(positions, [-1])
    high = op.Div(places, SPLIT)
    of_high, of_low = (op.Squeeze(part, [0]) for part in op.Split(turns, num_outputs=2, axis=0, _outputs=2))
    angles = op.Add(op.Mul(high, of_high), op.Mul(op.Sub(places, op.Mul(high, SPLIT)), of_low))
    if rank_of(turns) == 3:
        angles = op.ReduceSum(angles, [-2], keepdims=0)
    halves = op.Div(op.Add(angles, HALF_TURN // 2), HALF_TURN)
    angle = op.Cast(op.Sub(angles, op.Mul(halves, HALF_TURN)), to=ir.DataType.FLOAT)
    angle = op.Mul(angle, constant(op, math.pi / HALF_TURN))
    odd = op.Equal(op.Mod(halves, 2), 1)
    signs = op.Where(odd, constant(op, -1.0), constant(op, 1.0))
    return _scaled_onnx(op, op.Mul(op.Cos(angle), signs), op.Mul(op.Sin(angle), signs), scale)


def _paired_fake(call: Any) -> Tensor:
    first: Tensor = call.first
    return first.new_empty((*first.shape[:-1], 2 * first.shape[-1]))


@operator("PairFeatures", "features", fake=_paired_fake)
def pair_features(first: Tensor, second: Tensor, interleaved: bool = False) -> Tensor:
    """The features of both tensors: one half each, or alternating if `interleaved`.

    Args:
        first, second: [B, S, P], such as sines and cosines.
        interleaved: whether features 2i and 2i + 1 are feature i of first and of second.

    Returns:
        [B, S, 2P].

    Example:
        >>> pair_features(torch.zeros(1, 1, 2), torch.ones(1, 1, 2), interleaved=True)
        tensor([[[0., 1., 0., 1.]]])
    """
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


@pair_features.onnx
def _pair_features_onnx(op: Ops, first: ir.Value, second: ir.Value, interleaved: bool) -> ir.Value:
    if interleaved:
        return op.Reshape(op.Concat(op.Unsqueeze(first, [-1]), op.Unsqueeze(second, [-1]), axis=-1), [0, 0, -1])
    return op.Concat(first, second, axis=-1)


@operator("KeepPrefix", "kept_cos", "kept_sin", fake=lambda call: tuple(map(torch.empty_like, (call.cos, call.sin))))
def keep_prefix(cos: Tensor, sin: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Set cos to 1 and sin to 0 for the first tokens, such as a class token, so that they do not rotate.

    Args:
        cos, sin: float32 [B, S, P] or [B, S, heads, P].
        tokens: number of first tokens.

    Returns:
        cos and sin, like the inputs.

    Example:
        >>> cos, sin = keep_prefix(torch.zeros(1, 2, 1), torch.ones(1, 2, 1), tokens=1)
        >>> cos, sin
        (tensor([[[1.],
                 [0.]]]), tensor([[[0.],
                 [1.]]]))
    """
    kept = (torch.arange(cos.shape[1], device=cos.device) < tokens).view(-1, *(1,) * (cos.dim() - 2))
    return cos.masked_fill(kept, 1.0), sin.masked_fill(kept, 0.0)


@keep_prefix.onnx
def _keep_prefix_onnx(op: Ops, cos: ir.Value, sin: ir.Value, tokens: int) -> tuple[ir.Value, ir.Value]:
    places = op.Range(0, op.Squeeze(op.Shape(cos, start=1, end=2)), 1)
    kept = op.Unsqueeze(op.Less(places, tokens), list(range(1, rank_of(cos) - 1)))
    one, zero = constant(op, 1.0), constant(op, 0.0)
    return op.Where(kept, one, cos), op.Where(kept, zero, sin)


@operator("PositionPowers", "powers")
def position_powers(positions: Tensor, rates: Tensor, centred: bool = False) -> Tensor:
    """exp(position * rate), the decay of xPos (Sun et al. 2022, arXiv:2212.10554, section 3.2).

    Args:
        positions: int64 [B, S].
        rates: float32 [P].
        centred: whether positions are relative to the middle of each row, so that the powers stay small.

    Returns:
        [B, S, P] in the dtype of `rates`.

    Example:
        >>> position_powers(torch.arange(3)[None], torch.tensor([-0.5]))
        tensor([[[1.0000],
                 [0.6065],
                 [0.3679]]])
    """
    places = positions
    if centred:
        places = positions - (positions.amin(1, keepdim=True) + positions.amax(1, keepdim=True)) // 2
    return torch.exp(places.to(rates.dtype).unsqueeze(-1) * rates)


@position_powers.onnx
def _powers_onnx(op: Ops, positions: ir.Value, rates: ir.Value, centred: bool) -> ir.Value:
    places = positions
    if centred:
        ends = op.Add(op.ReduceMin(positions, [1]), op.ReduceMax(positions, [1]))
        places = op.Sub(positions, op.Div(ends, 2))
    return op.Exp(op.Mul(op.Unsqueeze(op.Cast(places, to=ir.DataType.FLOAT), [-1]), rates))


@operator("GridSinusoids", "cos", "sin")
def grid_sinusoids(
    positions: Tensor, frequencies: Tensor, grid: Sequence[int] = (), prefix: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of 2 pi x, where x is the centre of a cell, from -1 to 1 along each axis of a grid. Angles are
    multiplied by the frequency of the axis and summed over the axes (DINOv3: Simeoni et al. 2025, arXiv:2508.10104, as
    in its code).

    Args:
        positions: int64 [B, S, axes], cells of the grid.
        frequencies: float32 [axes, P].
        grid: number of cells along each axis; by default, the largest position of each row + 1.
        prefix: number of first tokens that are not cells.

    Returns:
        cos and sin, [B, S, P] in the dtype of `frequencies`.

    Example:
        >>> cells = torch.tensor([[[0, 0], [1, 0]]])
        >>> cos, sin = grid_sinusoids(cells, torch.tensor([[0.25], [0.0]]))
        >>> sin
        tensor([[[-0.7071],
                 [ 0.7071]]])
    """
    places = positions
    if prefix:
        kept = torch.arange(positions.shape[1], device=positions.device) < prefix
        places = positions.masked_fill(kept[:, None], 0)
    sizes = torch.tensor(grid, device=positions.device) if grid else places.amax(1, keepdim=True) + 1
    centres = (places.to(frequencies.dtype) + 0.5) / sizes.to(frequencies.dtype)
    angles = (((2.0 * centres - 1.0) * (2 * math.pi)).unsqueeze(-1) * frequencies).sum(-2)
    return angles.cos(), angles.sin()


@grid_sinusoids.onnx
def _grid_onnx(
    op: Ops, positions: ir.Value, frequencies: ir.Value, grid: Sequence[int], prefix: int
) -> tuple[ir.Value, ir.Value]:
    places = positions
    if prefix:
        index = op.Range(0, op.Squeeze(op.Shape(positions, start=1, end=2)), 1)
        places = op.Where(op.Unsqueeze(op.Less(index, prefix), [1]), 0, positions)
    sizes = (
        op.Constant(value=ir.tensor([*grid], dtype=ir.DataType.INT64)) if grid else op.Add(op.ReduceMax(places, [1]), 1)
    )
    half, one, two, turn = (constant(op, value) for value in (0.5, 1.0, 2.0, 2 * math.pi))
    centres = op.Div(op.Add(op.Cast(places, to=ir.DataType.FLOAT), half), op.Cast(sizes, to=ir.DataType.FLOAT))
    angles = op.Mul(op.Sub(op.Mul(centres, two), one), turn)
    angles = op.ReduceSum(op.Mul(op.Unsqueeze(angles, [-1]), frequencies), [-2], keepdims=0)
    return op.Cos(angles), op.Sin(angles)
