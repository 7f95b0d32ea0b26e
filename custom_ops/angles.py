"""Cosines and sines of positions: cos(a), sin(a) with a = sum over axes of p_axis * frequency[axis], times `scale`.

sinusoids         (positions [B, S] or [B, S, axes] int, frequencies [P] or [axes, P]) -> cos, sin [B, S, P]
exact_sinusoids   the same from turns int64 [2, P] or [2, axes, P], in 2^-50 of a turn, of 4096 positions and of one
length_frequencies, ntk_frequencies   frequencies that depend on the length, which is the largest position + 1
pair_features     (first, second [B, S, P]) -> [B, S, 2P], features alternating or one half each
position_powers   (positions [B, S], rates [P]) -> exp(p * rate) [B, S, P]; with `centred`, p counts from the middle
                  of each row's positions, which keeps the powers small
grid_sinusoids    positions [B, S, 2] are cells of a grid; angles are their centres, from -1 to 1 along each axis, times
                  2 pi; the grid is given, or ends at each row's largest positions (DINOv3: Simeoni et al. 2025,
                  arXiv:2508.10104, as in its code)
keep_prefix       cos 1 and sin 0 for the first tokens, which then don't rotate

Angles, cosines and sines are fp32 for every graph dtype (fp64 in the float64 reference): an angle in half precision is
wrong by radians from position 1000 on. Callers cast the results last.
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
from posexport.custom_ops.operator import Ops, T, cast, constant, dtype_of, operator, rank_of, wide

_FP32_ANGLES = ContextVar("_FP32_ANGLES", default=False)


@contextmanager
def fp32_angles() -> Iterator[None]:
    """Inside the block, a float64 reference takes its frequencies and angles as fp32 rounds them, so that far positions
    have the angles that models in PyTorch have. Cosines, sines and all that follows stay in float64."""
    token = _FP32_ANGLES.set(True)
    try:
        yield
    finally:
        _FP32_ANGLES.reset(token)


def constant_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which constants of a block in `dtype` are computed: never half precision, in which an angle is wrong
    from position 256 on."""
    return torch.float64 if dtype == torch.float64 and not _FP32_ANGLES.get() else torch.float32


def _products(positions: Tensor, frequencies: Tensor) -> Tensor:
    """position * frequency, summed over several axes: [B, S, P] in the dtype of `frequencies`."""
    dtype = constant_dtype(frequencies.dtype)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies.to(dtype)
    return (angles.sum(-2) if frequencies.dim() == 2 else angles).to(frequencies.dtype)


HALF_TURN, SPLIT = 1 << 49, 4096
"""Half a turn in the units of exact_sinusoids, and the number of positions that its first turns stand for."""


@dataclass(frozen=True)
class Positions(Generic[T]):
    """The positions of queries and keys, [B, S or T] or [B, S or T, axes]."""

    q_positions: T
    k_positions: T


@dataclass(frozen=True)
class Angles(Generic[T]):
    """The cosines and sines of queries and keys, [B, S or T, P]."""

    q_cos: T
    q_sin: T
    k_cos: T
    k_sin: T


def _check(frequencies: Tensor) -> None:
    if frequencies.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"frequencies are {frequencies.dtype}: angles need float32 or float64, so cast the block's weights only, "
            "not its constants."
        )


def _scaled(cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def _scaled_onnx(op: Ops, cos: ir.Value, sin: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
    if scale == 1.0:
        return cos, sin
    factor = constant(op, scale)
    return op.Mul(cos, factor), op.Mul(sin, factor)


@operator("Sinusoids", "cos", "sin")
def sinusoids(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _check(frequencies)
    angles = _products(positions, frequencies)
    return _scaled(angles.cos(), angles.sin(), scale)


@sinusoids.onnx
def _sinusoids_onnx(op: Ops, positions: ir.Value, frequencies: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
    # products and a sum, not MatMul: TF32 would round the positions to 11 bits
    angles = op.Mul(op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1]), frequencies)
    if rank_of(frequencies) == 2:
        angles = op.ReduceSum(angles, [-2], keepdims=0)
    return _scaled_onnx(op, op.Cos(angles), op.Sin(angles), scale)


# With p = hi * 4096 + lo, both below 4096 for p < 2^24, and turns below 2^50, hi * turns[0] + lo * turns[1] is the
# angle of p up to whole turns, and below 2^63. Its distance to the nearest half turn is at most a quarter turn, which
# fp32 holds within 5e-8 rad; cosine and sine change sign with every half turn.


@operator("ExactSinusoids", "cos", "sin")
def exact_sinusoids(positions: Tensor, turns: Tensor, scale: float) -> tuple[Tensor, Tensor]:
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
def _exact_onnx(op: Ops, positions: ir.Value, turns: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
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


@operator("LengthFrequencies", "frequencies")
def length_frequencies(positions: Tensor, short: Tensor, long: Tensor, limit: int) -> Tensor:
    """`long` where any position is `limit` or more, otherwise `short`; frequencies or turns (LongRoPE: Ding et al.
    2024, arXiv:2402.13753, section 3.3, with the switch of transformers)."""
    return torch.where(positions.max() + 1 > limit, long, short)


@length_frequencies.onnx
def _by_length_onnx(op: Ops, positions: ir.Value, short: ir.Value, long: ir.Value, limit: int) -> ir.Value:
    return op.Where(op.GreaterOrEqual(op.ReduceMax(positions, keepdims=0), limit), long, short)


@operator("NtkFrequencies", "scaled")
def ntk_frequencies(
    positions: Tensor, frequencies: Tensor, theta: float, factor: float, limit: int, dim: int
) -> Tensor:
    """`frequencies` up to the length `limit`; beyond, those of
    theta (factor length / limit - factor + 1)^(dim / (dim - 2)) (dynamic NTK, as transformers computes it)."""
    _check(frequencies)
    length, dtype = (positions.max() + 1).clamp(min=limit), constant_dtype(frequencies.dtype)
    grown = (factor * length.to(dtype) / limit) - (factor - 1)
    base = theta * grown ** (dim / (dim - 2))
    steps = torch.arange(0, dim, 2, device=positions.device).to(dtype)
    return torch.where(length > limit, (1.0 / base ** (steps / dim)).to(frequencies.dtype), frequencies)


@ntk_frequencies.onnx
def _ntk_onnx(
    op: Ops, positions: ir.Value, frequencies: ir.Value, theta: float, factor: float, limit: int, dim: int
) -> ir.Value:
    length = op.Max(op.Add(op.ReduceMax(positions, keepdims=0), 1), limit)
    grown = op.Mul(op.Cast(length, to=ir.DataType.FLOAT), constant(op, factor))
    grown = op.Sub(op.Div(grown, constant(op, float(limit))), constant(op, factor - 1))
    base = op.Mul(op.Pow(grown, constant(op, dim / (dim - 2))), constant(op, theta))
    steps = op.Constant(value=ir.tensor([step / dim for step in range(0, dim, 2)], dtype=ir.DataType.FLOAT))
    return op.Where(op.Greater(length, limit), op.Reciprocal(op.Pow(base, steps)), frequencies)


def _paired_fake(call: Any) -> Tensor:
    first: Tensor = call.first
    return first.new_empty((*first.shape[:-1], 2 * first.shape[-1]))


@operator("PairFeatures", "features", fake=_paired_fake)
def pair_features(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
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
    kept = (torch.arange(cos.shape[1], device=cos.device) < tokens).view(-1, *(1,) * (cos.dim() - 2))
    return cos.masked_fill(kept, 1.0), sin.masked_fill(kept, 0.0)


@keep_prefix.onnx
def _keep_prefix_onnx(op: Ops, cos: ir.Value, sin: ir.Value, tokens: int) -> tuple[ir.Value, ir.Value]:
    places = op.Range(0, op.Squeeze(op.Shape(cos, start=1, end=2)), 1)
    kept = op.Unsqueeze(op.Less(places, tokens), list(range(1, rank_of(cos) - 1)))
    one, zero = constant(op, 1.0), constant(op, 0.0)
    return op.Where(kept, one, cos), op.Where(kept, zero, sin)


@operator("PositionPowers", "powers")
def position_powers(positions: Tensor, rates: Tensor, centred: bool) -> Tensor:
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


@operator("PositionTemperature", "scaled", fake=lambda call: torch.empty_like(call.q))
def position_temperature(q: Tensor, positions: Tensor, floor_scale: int, attn_scale: float) -> Tensor:
    """q [B, S, N*head_dim] times 1 + attn_scale log(1 + (p + 1) // floor_scale)."""
    steps = (positions + 1).div(floor_scale, rounding_mode="trunc").to(wide(q.dtype))
    return q * (torch.log1p(steps) * attn_scale + 1.0).to(q.dtype).unsqueeze(-1)


@position_temperature.onnx
def _temperature_onnx(op: Ops, q: ir.Value, positions: ir.Value, floor_scale: int, attn_scale: float) -> ir.Value:
    one, weight = constant(op, 1.0), constant(op, attn_scale)
    steps = op.Cast(op.Div(op.Add(positions, 1), floor_scale), to=ir.DataType.FLOAT)
    factor = op.Add(op.Mul(op.Log(op.Add(steps, one)), weight), one)
    return op.Mul(q, op.Unsqueeze(cast(op, factor, dtype_of(q)), [2]))


@operator("GridSinusoids", "cos", "sin")
def grid_sinusoids(positions: Tensor, frequencies: Tensor, grid: Sequence[int], prefix: int) -> tuple[Tensor, Tensor]:
    _check(frequencies)
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
