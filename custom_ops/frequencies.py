"""Frequencies that depend on the length of the sequence, and a temperature that depends on the position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import constant_dtype
from posexport.custom_ops.arguments import Derived
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, wide

TWICE: Any = Derived("2*P", "P", lambda pairs: 2 * pairs)


@operator("LengthFrequencies", "frequencies")
def length_frequencies(positions: Tensor, short: Tensor, long: Tensor, limit: int) -> Tensor:
    """`long` if any position is `limit` or more, otherwise `short` (LongRoPE: Ding et al. 2024, arXiv:2402.13753,
    section 3.3, with the switch of transformers).

    Args:
        positions: int64 [B, S] or [B, S, axes].
        short, long: frequencies of `sinusoids`, or turns of `exact_sinusoids`, both of the same shape.
        limit: the largest length for which `short` is used.

    Returns:
        A tensor like `short`.

    Example:
        >>> length_frequencies(torch.tensor([[3, 4]]), torch.tensor([1.0]), torch.tensor([0.5]), limit=4)
        tensor([0.5000])
    """
    return torch.where(positions.max() + 1 > limit, long, short)


@length_frequencies.onnx
def _by_length_onnx(op: Ops, positions: ir.Value, short: ir.Value, long: ir.Value, limit: int) -> ir.Value:
    return op.Where(op.GreaterOrEqual(op.ReduceMax(positions, keepdims=0), limit), long, short)


@operator("NtkFrequencies", "scaled")
def ntk_frequencies(
    positions: Tensor, frequencies: Tensor, theta: float, factor: float, limit: int, dim: int = TWICE
) -> Tensor:
    """`frequencies` up to the length `limit`. Beyond it, the frequencies of the base theta (factor length / limit -
    factor + 1)^(dim / (dim - 2)) (dynamic NTK, as transformers computes it).

    Args:
        positions: int64 [B, S] or [B, S, axes]; the length is the largest position + 1.
        frequencies: float32 [P].
        theta: the base of `frequencies`.
        factor: factor of the formula above.
        limit: the largest length for which `frequencies` are used.
        dim: number of rotated features, by default 2P.

    Returns:
        A tensor like `frequencies`.

    Example:
        >>> frequencies = 100.0 ** (-torch.arange(2.0) / 2)
        >>> ntk_frequencies(torch.arange(8)[None], frequencies, theta=100.0, factor=2.0, limit=4)
        tensor([1.0000, 0.0333])
    """
    length, dtype = ((positions.max() + 1).clamp(min=limit), constant_dtype(frequencies.dtype))
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


@operator("PositionTemperature", "scaled", fake=lambda call: torch.empty_like(call.q))
def position_temperature(q: Tensor, positions: Tensor, floor_scale: int, attn_scale: float) -> Tensor:
    """q times 1 + attn_scale log(1 + (position + 1) // floor_scale), for sharper attention at far positions (Llama 4,
    after Nakanishi 2025, arXiv:2501.19399, eq. 1).

    Args:
        q: [B, S, D].
        positions: int64 [B, S] or [B, S, axes].
        floor_scale: number of positions in each step; q is unchanged if position + 1 is smaller.
        attn_scale: weight of the logarithm.

    Returns:
        A tensor like q.

    Example:
        >>> position_temperature(torch.ones(1, 2, 1), torch.tensor([[0, 99]]), floor_scale=10, attn_scale=0.1)
        tensor([[[1.0000],
                 [1.2398]]])
    """
    steps = (positions + 1).div(floor_scale, rounding_mode="trunc").to(wide(q.dtype))
    return q * (torch.log1p(steps) * attn_scale + 1.0).to(q.dtype).unsqueeze(-1)


@position_temperature.onnx
def _temperature_onnx(op: Ops, q: ir.Value, positions: ir.Value, floor_scale: int, attn_scale: float) -> ir.Value:
    one, weight = constant(op, 1.0), constant(op, attn_scale)
    steps = op.Cast(op.Div(op.Add(positions, 1), floor_scale), to=ir.DataType.FLOAT)
    factor = op.Add(op.Mul(op.Log(op.Add(steps, one)), weight), one)
    return op.Mul(q, op.Unsqueeze(cast(op, factor, dtype_of(q)), [2]))
