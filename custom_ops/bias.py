"""Biases on the logits that depend only on the positions p_i of the query and p_j of the key. fp32 for every dtype of
the graph.

Distances are computed in integers, so they are exact at any position. Buckets are looked up, because runtimes round
logarithms differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.by_head import ByHead, add_by_head, by_head
from posexport.custom_ops.near_keys import Frequencies, Turns, by_distance_onnx
from posexport.custom_ops.operator import Ops, cast, constant, operator, shape_of, size_of, wide


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Return p_i - p_j, [B, S, T] (or [B, S, T, axes])."""
    return q_positions.unsqueeze(2) - k_positions.unsqueeze(1)


def distances_onnx(op: Ops, positions: Positions[ir.Value]) -> ir.Value:
    """Do the same as `distances`, in ONNX."""
    return op.Sub(op.Unsqueeze(positions.q_positions, [2]), op.Unsqueeze(positions.k_positions, [1]))


def ahead_onnx(op: Ops, positions: Positions[ir.Value]) -> ir.Value:
    """Return p_j - p_i, [B, S, T]."""
    return op.Sub(op.Unsqueeze(positions.k_positions, [1]), op.Unsqueeze(positions.q_positions, [2]))


def clipped(offset: Tensor, reach: int, limit: int | None = None) -> Tensor:
    """Return clip(offset, -reach, limit or reach) + reach: the row in a table of distances."""
    return offset.clamp(-reach, reach if limit is None else limit) + reach


def clipped_onnx(op: Ops, offset: ir.Value, reach: int, limit: int | None = None) -> ir.Value:
    """Do the same as `clipped`, in ONNX."""
    return op.Add(op.Min(op.Max(offset, -reach), reach if limit is None else limit), reach)


def fake_logits(queries: Tensor, keys: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor [B, N, S, T] for `queries` [B, S, ...], in the wide dtype of `dtype`."""
    return queries.new_empty((queries.shape[0], num_heads, queries.shape[1], keys), dtype=wide(dtype))


def fake_bias(call: Any, per_head: Tensor) -> Tensor:
    """Return the fake of a bias that depends on positions. The last axis of `per_head` are the heads."""
    return fake_logits(call.q_positions, call.k_positions.shape[1], per_head.shape[-1], per_head.dtype)


@operator("AlibiBias", "bias", fake=lambda call: fake_bias(call, call.slopes))
def alibi_bias(q_positions: Tensor, k_positions: Tensor, slopes: Tensor, ahead: Tensor | None = None) -> Tensor:
    """-slope |p_i - p_j|, with a slope for each head (ALiBi: Press et al. 2022, arXiv:2108.12409, section 3).

    Args:
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        slopes: float32 [num_heads].
        ahead: float32 [num_heads], slopes for keys ahead of the query, by default slopes.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> alibi_bias(torch.tensor([[2]]), torch.tensor([[0, 1, 2]]), torch.tensor([0.5]))
        tensor([[[[-1.0000, -0.5000, -0.0000]]]])
    """
    distance = distances(q_positions, k_positions).unsqueeze(1)
    if ahead is None:
        return distance.abs().to(slopes.dtype) * -slopes.view(-1, 1, 1)
    past, future = (part.clamp(min=0).to(slopes.dtype) for part in (distance, -distance))
    return past * -slopes.view(-1, 1, 1) + future * -ahead.view(-1, 1, 1)


def rated(op: Ops, queries: ir.Value, rates: Sequence[ir.Value], shared: Callable[[Ops], Sequence[ir.Value]]) -> ByHead:
    """Return the sum of numbers that all heads share, each [B, 1, S, T], times a rate of each head, [N].

    `queries` are [B, S, ...].
    """
    factors = [op.Unsqueeze(rate, [0, 2, 3]) for rate in rates]

    def summed(op: Ops, count: int, *parts: ir.Value) -> ir.Value:
        half = len(parts) // 2
        terms = [op.Mul(numbers, factor) for numbers, factor in zip(parts[:half], parts[half:], strict=True)]
        return terms[0] if half == 1 else op.Add(*terms)

    def parts(op: Ops) -> list[ir.Value]:
        return [*shared(op), *factors]

    return by_head(op, factors[0], parts, summed, queries=op.Shape(queries, start=1, end=2))


def _alibi(
    op: Ops, positions: Positions[ir.Value], slopes: ir.Value, ahead: ir.Value | None, ort: bool = False
) -> ByHead:
    def apart(op: Ops) -> list[ir.Value]:
        distance = op.Unsqueeze(distances_onnx(op, positions), [1])
        parts = [op.Abs(distance)] if ahead is None else [op.Max(distance, 0), op.Max(op.Neg(distance), 0)]
        return [op.Cast(part, to=ir.DataType.FLOAT) for part in parts]

    rates = [op.Neg(rate) for rate in (slopes, ahead) if rate is not None]
    return rated(op, positions.q_positions, rates, apart)


add_by_head(alibi_bias, _alibi, scans=False)


@operator("GridBias", "bias", fake=lambda call: fake_bias(call, call.slopes))
def grid_bias(q_positions: Tensor, k_positions: Tensor, slopes: Tensor, euclidean: bool = True) -> Tensor:
    """-slope d(p_i, p_j), where d is the distance on a grid: Euclidean (CROMA: Fuller et al. 2023, arXiv:2311.00566) or
    manhattan (data2vec 2.0: Baevski et al. 2022, arXiv:2212.07525).

    Args:
        q_positions: int64 [B, S, 2], positions of the queries.
        k_positions: int64 [B, T, 2], positions of the keys.
        slopes: float32 [num_heads].
        euclidean: whether the distance is Euclidean, not manhattan.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> grid_bias(torch.tensor([[[0, 0]]]), torch.tensor([[[3, 4]]]), torch.tensor([0.5]))
        tensor([[[[-2.5000]]]])
    """
    offset = distances(q_positions, k_positions)
    apart = (offset.square() if euclidean else offset.abs()).sum(-1).to(slopes.dtype)
    distance = apart.sqrt() if euclidean else apart
    return distance.unsqueeze(1) * -slopes.view(-1, 1, 1)


STRIDE = 4096
"""A position is split into a multiple of this number and a rest. fp32 represents both exactly."""


def _offsets_onnx(op: Ops, queries: ir.Value, keys: ir.Value) -> ir.Value:
    """Return p_i - p_j in fp32, [B, S, T], rounded once. ONNX Runtime's Cast of integers has one thread."""

    def parts(side: ir.Value, axis: int) -> list[ir.Value]:
        rest = op.Mod(side, STRIDE)
        both = (op.Div(op.Sub(side, rest), STRIDE), rest)
        return [op.Unsqueeze(op.Cast(part, to=ir.DataType.FLOAT), [axis]) for part in both]

    strides, rests = map(op.Sub, parts(queries, 2), parts(keys, 1))
    return op.Add(op.Mul(strides, constant(op, float(STRIDE))), rests)


def _grid(op: Ops, positions: Positions[ir.Value], slopes: ir.Value, euclidean: bool, ort: bool = False) -> ByHead:
    def apart(op: Ops) -> list[ir.Value]:
        def along(axis: int) -> ir.Value:
            sides = (op.Gather(side, axis, axis=2) for side in (positions.q_positions, positions.k_positions))
            offset = _offsets_onnx(op, *sides)
            return op.Mul(offset, offset) if euclidean else op.Abs(offset)

        distance = op.Add(along(0), along(1))
        return [op.Unsqueeze(op.Sqrt(distance) if euclidean else distance, [1])]

    return rated(op, positions.q_positions, [op.Neg(slopes)], apart)


add_by_head(grid_bias, _grid, scans=False)


@operator("RelativeBias", "bias", fake=lambda call: fake_bias(call, call.table))
def relative_bias(
    q_positions: Tensor, k_positions: Tensor, table: Tensor, buckets: Tensor, max_distance: int
) -> Tensor:
    """table[buckets[clip(p_j - p_i, -max_distance, max_distance) + max_distance]] (T5: Raffel et al. 2020,
    arXiv:1910.10683, section 2.1).

    Args:
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        table: [rows, num_heads], the trained bias of each bucket.
        buckets: int64 [2*max_distance + 1], the table row for each distance.
        max_distance: longer distances have the bucket of this distance.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> table, buckets = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 2])
        >>> relative_bias(torch.tensor([[5]]), torch.tensor([[2, 5, 6]]), table, buckets, max_distance=1)
        tensor([[[[1., 2., 3.]]]])
    """
    offset = clipped(-distances(q_positions, k_positions), max_distance)
    return table[buckets][offset].permute(0, 3, 1, 2).to(wide(table.dtype))


ROWS = 64
"""Rows of an index of single numbers. ONNX Runtime's GatherElements divides them among its threads. Its Gather takes
three times as long."""


def looked_up(op: Ops, queries: ir.Value, table: ir.Value, index: Callable[[Ops], ir.Value]) -> ByHead:
    """Return rows of a table [R, N] in fp32 at an index [B, S, T] that all heads share. `queries` are [B, S, ...]."""
    by_heads = op.Unsqueeze(op.Transpose(table, perm=[1, 0]), [0, 2])

    def parts(op: Ops) -> list[ir.Value]:
        at = index(op)
        shape = op.Shape(at, start=1)
        numbers = op.ReduceProd(shape)
        power = op.BitwiseAnd(numbers, op.Neg(numbers))  # the largest power of two that divides the count
        rows = op.Where(op.Less(power, 8), op.Slice(shape, [0], [1], [0]), op.Min(power, ROWS))
        in_rows = op.Reshape(at, op.Concat([0, 1], rows, [-1], axis=0))
        in_rows.shape = ir.Shape([shape_of(at)[0], 1, None, None])
        sizes = (op.Concat([1, 1], size, axis=0) for size in (shape, op.Concat(rows, [1], axis=0)))
        return [in_rows, by_heads, *(op.Unsqueeze(size, [0, 1]) for size in sizes)]

    def one(op: Ops, _: int, in_rows: ir.Value, table: ir.Value, shape: ir.Value, rows: ir.Value) -> ir.Value:
        alike = op.Expand(table, op.Squeeze(rows, [0, 1]))
        return op.Reshape(op.GatherElements(alike, in_rows, axis=-1), op.Squeeze(shape, [0, 1]))

    def all_heads(op: Ops) -> ir.Value:
        return op.Transpose(op.Gather(table, index(op), axis=0), perm=[0, 3, 1, 2])

    return by_head(op, by_heads, parts, one, all_heads, op.Shape(queries, start=1, end=2))


def _relative(
    op: Ops, positions: Positions[ir.Value], table: ir.Value, buckets: ir.Value, max_distance: int, ort: bool = False
) -> ByHead:
    def index(op: Ops) -> ir.Value:
        return clipped_onnx(op, ahead_onnx(op, positions), max_distance)

    by_offset = op.Gather(cast(op, table, ir.DataType.FLOAT), buckets, axis=0)
    return looked_up(op, positions.q_positions, by_offset, index)


add_by_head(relative_bias, _relative, scans=False)


MIN_PARAMETER, MAX_POWER = 0.01, 2.0
"""KERPLE's smallest parameter and largest exponent. Beyond them it is not a kernel."""


@operator("KerpleBias", "bias", fake=lambda call: fake_bias(call, call.r1))
def kerple_bias(q_positions: Tensor, k_positions: Tensor, r1: Tensor, r2: Tensor, power: bool = False) -> Tensor:
    """-r1 log(1 + r2 |p_i - p_j|), or -r1 |p_i - p_j|^r2 (KERPLE: Chi et al. 2022, arXiv:2205.09921).

    Args:
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        r1, r2: [num_heads], trained parameters.
        power: whether to use the second formula.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> kerple_bias(torch.tensor([[3]]), torch.tensor([[0, 3]]), torch.tensor([2.0]), torch.tensor([1.0]))
        tensor([[[[-2.7726, -0.0000]]]])
    """
    distance = distances(q_positions, k_positions).abs().unsqueeze(1).to(wide(r1.dtype))
    r1, r2 = (t.to(distance.dtype).clamp(min=MIN_PARAMETER).view(-1, 1, 1) for t in (r1, r2))
    grown = distance ** r2.clamp(max=MAX_POWER) if power else torch.log(1 + r2 * distance)
    return -r1 * grown


def _kerple(
    op: Ops, positions: Positions[ir.Value], r1: ir.Value, r2: ir.Value, power: bool, ort: bool = False
) -> ByHead:
    lowest = constant(op, MIN_PARAMETER)
    r1, r2 = (op.Unsqueeze(op.Max(cast(op, t, ir.DataType.FLOAT), lowest), [0, 2, 3]) for t in (r1, r2))
    rates = [op.Neg(r1), op.Min(r2, constant(op, MAX_POWER)) if power else r2]

    def parts(op: Ops) -> list[ir.Value]:
        return [op.Cast(op.Unsqueeze(op.Abs(distances_onnx(op, positions)), [1]), to=ir.DataType.FLOAT), *rates]

    def made(op: Ops, count: int, distance: ir.Value, rate: ir.Value, inner: ir.Value) -> ir.Value:
        if power:
            return op.Mul(rate, op.Pow(distance, inner))
        return op.Mul(rate, op.Log(op.Add(op.Mul(inner, distance), constant(op, 1.0))))

    return by_head(op, rates[0], parts, made, queries=op.Shape(positions.q_positions, start=1, end=2))


add_by_head(kerple_bias, _kerple, scans=False)


@operator("CosineBias", "bias", fake=lambda call: fake_bias(call, call.rates))
def cosine_bias(
    q_positions: Tensor,
    k_positions: Tensor,
    rates: Tensor,
    frequencies: Tensor | None = None,
    turns: Tensor | None = None,
    below_zero: bool = False,
) -> Tensor:
    """rate * sum over f of cos(w_f (p_i - p_j)) (Sandwich: Chi et al. 2023, arXiv:2212.10356, section 5).

    Args:
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        rates: float32 [num_heads].
        frequencies: float32 [P], w_f in radians per position; None if turns are given.
        turns: int64 [2, P], exact frequencies, as in `exact_sinusoids`.
        below_zero: whether the bias at distance 0 is subtracted, which does not change softmax.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> cosine_bias(torch.tensor([[3]]), torch.tensor([[0, 3]]), torch.tensor([2.0]), torch.tensor([1.0]))
        tensor([[[[-1.9800,  2.0000]]]])
    """
    angles, first = Frequencies(frequencies, turns), k_positions.amin(1, keepdim=True)
    left, right = (torch.cat(angles.sides(side - first), -1) for side in (q_positions, k_positions))
    product = left @ right.transpose(1, 2)
    product = product - left.shape[-1] // 2 if below_zero else product
    return product.unsqueeze(1) * rates.view(-1, 1, 1)


def _cosine(
    op: Ops,
    positions: Positions[ir.Value],
    rates: ir.Value,
    angles: Frequencies[ir.Value],
    below_zero: bool,
    ort: bool = False,
) -> ByHead:
    # cos(w (p_i - p_j)) = cos cos + sin sin: one product for any positions
    def summed(op: Ops, left: Sequence[ir.Value], right: Sequence[ir.Value]) -> ir.Value:
        turned = op.Transpose(op.Concat(*right, axis=-1), perm=[0, 2, 1])
        sums: ir.Value = op.MatMul(op.Concat(*left, axis=-1), turned)
        constants = angles.frequencies or angles.turns
        assert constants is not None  # one of them is given
        return op.Sub(sums, constant(op, float(size_of(constants, -1)))) if below_zero else sums

    def product(op: Ops) -> ir.Value:
        first = op.ReduceMin(positions.k_positions, [1])  # positions relative to it give small, more exact angles
        sides = (op.Sub(side, first) for side in (positions.q_positions, positions.k_positions))
        return op.Unsqueeze(summed(op, *(angles.sides_onnx(op, side) for side in sides)), [1])

    def near(op: Ops, turns: Turns[ir.Value], columns: ir.Value) -> ir.Value:
        sums = summed(op, (turns.coarse_cos, turns.coarse_sin), (turns.fine_cos, turns.fine_sin))
        return op.Gather(op.Reshape(sums, [-1]), op.Unsqueeze(columns, [1, 2]), axis=0)

    def few(op: Ops) -> ir.Value:
        return op.Mul(by_distance_onnx(op, positions, angles, near, product), op.Unsqueeze(rates, [0, 2, 3]))

    made = rated(op, positions.q_positions, [rates], lambda op: [product(op)])
    few_keys = isinstance(shape_of(positions.k_positions)[1], int)  # then there is nothing to save
    return attrs.evolve(made, few=few) if ort and not few_keys else made


add_by_head(cosine_bias, _cosine, scans=False)
