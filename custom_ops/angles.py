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
from collections.abc import Sequence

import onnx_ir as ir
import torch

from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of, rank_of

HALF_TURN, SPLIT = 1 << 49, 4096
"""Half a turn in the units of exact_sinusoids, and the number of positions that its first turns stand for."""


def _check(frequencies: torch.Tensor) -> None:
    if frequencies.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"frequencies are {frequencies.dtype}: angles need float32 or float64, so cast the block's weights only, "
            "not its constants."
        )


def _scaled(cos: torch.Tensor, sin: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def _scaled_onnx(op: Ops, cos: ir.Value, sin: ir.Value, scale: float) -> tuple[ir.Value, ir.Value]:
    if scale == 1.0:
        return cos, sin
    factor = constant(op, scale, ir.DataType.FLOAT)
    return op.Mul(cos, factor), op.Mul(sin, factor)


def _sinusoids(positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    _check(frequencies)
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    if frequencies.dim() == 2:
        angles = angles.sum(-2)
    return _scaled(angles.cos(), angles.sin(), scale)


def _angles_fake(positions: torch.Tensor, frequencies: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = frequencies.dtype if frequencies.is_floating_point() else torch.float32
    cos = frequencies.new_empty((*positions.shape[:2], frequencies.shape[-1]), dtype=dtype)
    return cos, torch.empty_like(cos)


def _sinusoids_onnx(op: Ops, positions: ir.Value, frequencies: ir.Value, *, scale: float) -> tuple[ir.Value, ir.Value]:
    # products and a sum, not MatMul: TF32 would round the positions to 11 bits
    angles = op.Mul(op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1]), frequencies)
    if rank_of(frequencies) == 2:
        angles = op.ReduceSum(angles, [-2], keepdims=0)
    return _scaled_onnx(op, op.Cos(angles), op.Sin(angles), scale)


sinusoids = Operator(
    name="sinusoids",
    function="Sinusoids",
    inputs=("positions", "frequencies"),
    outputs=("cos", "sin"),
    eager=_sinusoids,
    fake=_angles_fake,
    body=_sinusoids_onnx,
)


# With p = hi * 4096 + lo, both below 4096 for p < 2^24, and turns below 2^50, hi * turns[0] + lo * turns[1] is the
# angle of p up to whole turns, and below 2^63. Its distance to the nearest half turn is at most a quarter turn, which
# fp32 holds within 5e-8 rad; cosine and sine change sign with every half turn.


def _exact(positions: torch.Tensor, turns: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    places = positions.unsqueeze(-1)
    high = places.div(SPLIT, rounding_mode="trunc")
    angles = high * turns[0] + (places - high * SPLIT) * turns[1]
    if turns.dim() == 3:
        angles = angles.sum(-2)
    halves = (angles + HALF_TURN // 2).div(HALF_TURN, rounding_mode="trunc")
    angle = (angles - halves * HALF_TURN).float() * (math.pi / HALF_TURN)
    signs = 1.0 - 2.0 * halves.remainder(2).float()
    return _scaled(angle.cos() * signs, angle.sin() * signs, scale)


def _exact_onnx(op: Ops, positions: ir.Value, turns: ir.Value, *, scale: float) -> tuple[ir.Value, ir.Value]:
    fp32 = ir.DataType.FLOAT
    places = op.Unsqueeze(positions, [-1])
    high = op.Div(places, SPLIT)
    of_high, of_low = (op.Squeeze(part, [0]) for part in op.Split(turns, num_outputs=2, axis=0, _outputs=2))
    angles = op.Add(op.Mul(high, of_high), op.Mul(op.Sub(places, op.Mul(high, SPLIT)), of_low))
    if rank_of(turns) == 3:
        angles = op.ReduceSum(angles, [-2], keepdims=0)
    halves = op.Div(op.Add(angles, HALF_TURN // 2), HALF_TURN)
    angle = op.Cast(op.Sub(angles, op.Mul(halves, HALF_TURN)), to=fp32)
    angle = op.Mul(angle, constant(op, math.pi / HALF_TURN, fp32))
    odd = op.Equal(op.Mod(halves, 2), 1)
    signs = op.Where(odd, constant(op, -1.0, fp32), constant(op, 1.0, fp32))
    return _scaled_onnx(op, op.Mul(op.Cos(angle), signs), op.Mul(op.Sin(angle), signs), scale)


exact_sinusoids = Operator(
    name="exact_sinusoids",
    function="ExactSinusoids",
    inputs=("positions", "turns"),
    outputs=("cos", "sin"),
    eager=_exact,
    fake=_angles_fake,
    body=_exact_onnx,
)


def _by_length(positions: torch.Tensor, short: torch.Tensor, long: torch.Tensor, limit: int) -> torch.Tensor:
    return torch.where(positions.max() + 1 > limit, long, short)


def _like_second(positions: torch.Tensor, frequencies: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(frequencies)


def _by_length_onnx(op: Ops, positions: ir.Value, short: ir.Value, long: ir.Value, *, limit: int) -> ir.Value:
    return op.Where(op.GreaterOrEqual(op.ReduceMax(positions, keepdims=0), limit), long, short)


length_frequencies = Operator(
    name="length_frequencies",
    function="LengthFrequencies",
    inputs=("positions", "short", "long"),
    outputs=("frequencies",),
    eager=_by_length,
    fake=_like_second,
    body=_by_length_onnx,
)
"""`long` where any position is `limit` or more, otherwise `short`; frequencies or turns (LongRoPE: Ding et al. 2024,
arXiv:2402.13753, section 3.3, with the switch of transformers)."""


def _ntk(
    positions: torch.Tensor, frequencies: torch.Tensor, theta: float, factor: float, limit: int, dim: int
) -> torch.Tensor:
    _check(frequencies)
    length = (positions.max() + 1).clamp(min=limit)
    grown = (factor * length.to(frequencies.dtype) / limit) - (factor - 1)
    base = theta * grown ** (dim / (dim - 2))
    steps = torch.arange(0, dim, 2, device=positions.device).to(frequencies.dtype)
    return torch.where(length > limit, 1.0 / base ** (steps / dim), frequencies)


def _ntk_onnx(
    op: Ops, positions: ir.Value, frequencies: ir.Value, *, theta: float, factor: float, limit: int, dim: int
) -> ir.Value:
    fp32 = ir.DataType.FLOAT
    length = op.Max(op.Add(op.ReduceMax(positions, keepdims=0), 1), limit)
    grown = op.Mul(op.Cast(length, to=fp32), constant(op, factor, fp32))
    grown = op.Sub(op.Div(grown, constant(op, float(limit), fp32)), constant(op, factor - 1, fp32))
    base = op.Mul(op.Pow(grown, constant(op, dim / (dim - 2), fp32)), constant(op, theta, fp32))
    steps = op.Constant(value=ir.tensor([step / dim for step in range(0, dim, 2)], dtype=fp32))
    return op.Where(op.Greater(length, limit), op.Reciprocal(op.Pow(base, steps)), frequencies)


ntk_frequencies = Operator(
    name="ntk_frequencies",
    function="NtkFrequencies",
    inputs=("positions", "frequencies"),
    outputs=("scaled",),
    eager=_ntk,
    fake=_like_second,
    body=_ntk_onnx,
)
"""`frequencies` up to the length `limit`; beyond, those of theta (factor length / limit - factor + 1)^(dim / (dim - 2))
(dynamic NTK, as transformers computes it)."""


def _pair_features(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def _pair_features_fake(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return first.new_empty((*first.shape[:-1], 2 * first.shape[-1]))


def _pair_features_onnx(op: Ops, first: ir.Value, second: ir.Value, *, interleaved: bool) -> ir.Value:
    if interleaved:
        return op.Reshape(op.Concat(op.Unsqueeze(first, [-1]), op.Unsqueeze(second, [-1]), axis=-1), [0, 0, -1])
    return op.Concat(first, second, axis=-1)


pair_features = Operator(
    name="pair_features",
    function="PairFeatures",
    inputs=("first", "second"),
    outputs=("features",),
    eager=_pair_features,
    fake=_pair_features_fake,
    body=_pair_features_onnx,
)


def _keep_prefix(cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (torch.arange(cos.shape[1], device=cos.device) < tokens).view(-1, *(1,) * (cos.dim() - 2))
    return cos.masked_fill(kept, 1.0), sin.masked_fill(kept, 0.0)


def _keep_prefix_fake(cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(cos), torch.empty_like(sin)


def _keep_prefix_onnx(op: Ops, cos: ir.Value, sin: ir.Value, *, tokens: int) -> tuple[ir.Value, ir.Value]:
    places = op.Range(0, op.Squeeze(op.Shape(cos, start=1, end=2)), 1)
    kept = op.Unsqueeze(op.Less(places, tokens), list(range(1, rank_of(cos) - 1)))
    one, zero = (constant(op, value, ir.DataType.FLOAT) for value in (1.0, 0.0))
    return op.Where(kept, one, cos), op.Where(kept, zero, sin)


keep_prefix = Operator(
    name="keep_prefix",
    function="KeepPrefix",
    inputs=("cos", "sin"),
    outputs=("kept_cos", "kept_sin"),
    eager=_keep_prefix,
    fake=_keep_prefix_fake,
    body=_keep_prefix_onnx,
)


def _powers(positions: torch.Tensor, rates: torch.Tensor, centred: bool) -> torch.Tensor:
    places = positions
    if centred:
        places = positions - (positions.amin(1, keepdim=True) + positions.amax(1, keepdim=True)) // 2
    return torch.exp(places.to(rates.dtype).unsqueeze(-1) * rates)


def _powers_fake(positions: torch.Tensor, rates: torch.Tensor, centred: bool) -> torch.Tensor:
    return rates.new_empty((*positions.shape, rates.shape[-1]))


def _powers_onnx(op: Ops, positions: ir.Value, rates: ir.Value, *, centred: bool) -> ir.Value:
    places = positions
    if centred:
        ends = op.Add(op.ReduceMin(positions, [1]), op.ReduceMax(positions, [1]))
        places = op.Sub(positions, op.Div(ends, 2))
    return op.Exp(op.Mul(op.Unsqueeze(op.Cast(places, to=ir.DataType.FLOAT), [-1]), rates))


position_powers = Operator(
    name="position_powers",
    function="PositionPowers",
    inputs=("positions", "rates"),
    outputs=("powers",),
    eager=_powers,
    fake=_powers_fake,
    body=_powers_onnx,
)


def _temperature(q: torch.Tensor, positions: torch.Tensor, floor_scale: int, attn_scale: float) -> torch.Tensor:
    steps = (positions + 1).div(floor_scale, rounding_mode="trunc")
    steps = steps.to(torch.promote_types(q.dtype, torch.float32))
    return q * (torch.log1p(steps) * attn_scale + 1.0).to(q.dtype).unsqueeze(-1)


def _temperature_onnx(op: Ops, q: ir.Value, positions: ir.Value, *, floor_scale: int, attn_scale: float) -> ir.Value:
    fp32 = ir.DataType.FLOAT
    one, weight = constant(op, 1.0, fp32), constant(op, attn_scale, fp32)
    steps = op.Cast(op.Div(op.Add(positions, 1), floor_scale), to=fp32)
    factor = op.Add(op.Mul(op.Log(op.Add(steps, one)), weight), one)
    return op.Mul(q, op.Unsqueeze(cast(op, factor, dtype_of(q)), [2]))


position_temperature = Operator(
    name="position_temperature",
    function="PositionTemperature",
    inputs=("q", "positions"),
    outputs=("scaled",),
    eager=_temperature,
    body=_temperature_onnx,
)
"""q [B, S, N*head_dim] times 1 + attn_scale log(1 + (p + 1) // floor_scale)."""


def _grid(
    positions: torch.Tensor, frequencies: torch.Tensor, grid: Sequence[int], prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(frequencies)
    places = positions
    if prefix:
        kept = torch.arange(positions.shape[1], device=positions.device) < prefix
        places = positions.masked_fill(kept[:, None], 0)
    sizes = torch.tensor(grid, device=positions.device) if grid else places.amax(1, keepdim=True) + 1
    centres = (places.to(frequencies.dtype) + 0.5) / sizes.to(frequencies.dtype)
    angles = ((2.0 * centres - 1.0) * (2 * math.pi)).unsqueeze(-1) * frequencies
    angles = angles.sum(-2)
    return angles.cos(), angles.sin()


def _grid_onnx(
    op: Ops, positions: ir.Value, frequencies: ir.Value, *, grid: Sequence[int], prefix: int
) -> tuple[ir.Value, ir.Value]:
    fp32 = ir.DataType.FLOAT
    places = positions
    if prefix:
        index = op.Range(0, op.Squeeze(op.Shape(positions, start=1, end=2)), 1)
        places = op.Where(op.Unsqueeze(op.Less(index, prefix), [1]), 0, positions)
    sizes = op.Constant(value=ir.tensor([*grid], dtype=ir.DataType.INT64)) if grid else None
    sizes = op.Add(op.ReduceMax(places, [1]), 1) if sizes is None else sizes
    half, one, two, turn = (constant(op, value, fp32) for value in (0.5, 1.0, 2.0, 2 * math.pi))
    centres = op.Div(op.Add(op.Cast(places, to=fp32), half), op.Cast(sizes, to=fp32))
    angles = op.Mul(op.Sub(op.Mul(centres, two), one), turn)
    angles = op.ReduceSum(op.Mul(op.Unsqueeze(angles, [-1]), frequencies), [-2], keepdims=0)
    return op.Cos(angles), op.Sin(angles)


grid_sinusoids = Operator(
    name="grid_sinusoids",
    function="GridSinusoids",
    inputs=("positions", "frequencies"),
    outputs=("cos", "sin"),
    eager=_grid,
    fake=_angles_fake,
    body=_grid_onnx,
)
