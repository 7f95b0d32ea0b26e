"""Biases within a window of a grid, looked up by the offset of two cells on both axes, and the cosine attention of the
models that use them. Biases are fp32 for every dtype of the graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.arguments import REQUIRED
from posexport.custom_ops.bias import clipped, clipped_onnx, distances, fake_bias, looked_up
from posexport.custom_ops.by_head import ByHead, add_by_head, by_head
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, either_onnx, operator, size_of, wide


@operator("WindowBias", "bias", fake=lambda call: fake_bias(call, call.table))
def window_bias(q_positions: Tensor, k_positions: Tensor, table: Tensor, size: int) -> Tensor:
    """table[(dy + M - 1) (2M - 1) + dx + M - 1], with offsets clipped to a window of M x M cells (Swin: Liu et al.
    2021, arXiv:2103.14030, eq. 4).

    Args:
        q_positions: int64 [B, S, 2], x before y.
        k_positions: int64 [B, T, 2].
        table: [rows, num_heads], with (2M - 1)^2 rows.
        size: M.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> table = torch.arange(9.0)[:, None]
        >>> window_bias(torch.tensor([[[1, 0]]]), torch.tensor([[[0, 0], [1, 1]]]), table, size=2)
        tensor([[[[5., 1.]]]])
    """
    offset = clipped(distances(q_positions, k_positions), size - 1)
    index = offset[..., 1] * (2 * size - 1) + offset[..., 0]
    return table[index].permute(0, 3, 1, 2).to(wide(table.dtype))


def _bias(op: Ops, positions: Positions[ir.Value], table: ir.Value, size: int, ort: bool = False) -> ByHead:
    sides = (positions.q_positions, positions.k_positions)

    def index(op: Ops) -> ir.Value:
        def offset(axis: int) -> ir.Value:  # one axis at a time; both take ONNX Runtime three times as long
            queries, keys = (op.Slice(side, [axis], [axis + 1], [2]) for side in sides)
            return clipped_onnx(op, op.Sub(queries, op.Transpose(keys, perm=[0, 2, 1])), size - 1)

        return op.Add(op.Mul(offset(1), 2 * size - 1), offset(0))

    return looked_up(op, positions.q_positions, cast(op, table, ir.DataType.FLOAT), index)


add_by_head(window_bias, _bias, scans=False)


def cells_in_order(tokens: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Return (x, y) of the first cells of a grid in reading order, row by row: int64 [1, tokens, 2]."""
    cells = torch.arange(tokens, device=device)
    return torch.stack((cells % columns, cells // columns), -1).unsqueeze(0)


def _order_fake(call: Any) -> Tensor:
    tokens, heads = call.q.shape[1], call.table.shape[1]
    return torch.empty((1, heads, tokens, tokens), dtype=wide(call.table.dtype), device=call.q.device)


@operator("WindowOrderBias", "bias", fake=_order_fake)
def window_order_bias(table: Tensor, q: Tensor, size: int) -> Tensor:
    """`window_bias` of the first S cells of a window of M x M cells in reading order, row by row.

    Args:
        table: [rows, num_heads], with (2M - 1)^2 rows.
        q: [B, S, D], of which only the number of tokens S is used.
        size: M.

    Returns:
        The bias, float32 [1, num_heads, S, S].

    Example:
        >>> table = torch.arange(9.0)[:, None]
        >>> window_order_bias(table, torch.zeros(1, 3, 1), size=2)
        tensor([[[[4., 3., 1.],
                  [5., 4., 2.],
                  [7., 6., 4.]]]])
    """
    positions = cells_in_order(q.shape[1], size, q.device)
    bias: Tensor = window_bias.eager(positions, positions, table, size)
    return bias


def _order(op: Ops, table: ir.Value, q: ir.Value, size: int, ort: bool) -> ByHead:
    # Biases of two rows of cells, [1, N, (2M - 1) M, M]: by the distance of the rows and the query's column, for each
    # key's column.
    num_heads = size_of(table, 1)
    turned = op.Transpose(cast(op, table, ir.DataType.FLOAT), perm=[1, 0])
    columns, width = op.Range(0, size, 1), 2 * size - 1
    across = op.Add(op.Sub(op.Unsqueeze(columns, [1]), columns), size - 1)
    pairs = op.Gather(op.Reshape(turned, [0, width, width]), across, axis=2)
    pairs = op.Reshape(pairs, [1, num_heads, width * size, size])
    # blocks of M numbers, one for each row of keys
    tokens = op.Shape(q, start=1, end=2)
    count = op.Div(op.Add(tokens, size - 1), size)
    rows = op.Range(0, op.Squeeze(count), 1)
    down = op.Add(op.Sub(op.Unsqueeze(rows, [1, 2]), rows), size - 1)
    index, cells = op.Add(op.Mul(down, size), op.Unsqueeze(columns, [1])), op.Mul(count, size)

    def made(op: Ops, heads: int, pairs: ir.Value) -> ir.Value:
        def whole(op: Ops) -> ir.Value:
            return op.Gather(pairs, index, axis=2)  # [1, N, rows, M, rows, M]

        def cut(op: Ops) -> ir.Value:
            square = op.Reshape(whole(op), op.Concat([1, heads], cells, [-1], axis=0))
            return op.Slice(square, [0, 0], op.Concat(tokens, tokens, axis=0), [2, 3])

        square = either_onnx(op, op.Squeeze(op.Equal(tokens, cells)), whole, cut) if ort else cut(op)
        return op.Reshape(square, op.Concat([1, heads], tokens, [-1], axis=0))

    return by_head(op, pairs, [pairs], made, queries=tokens)


add_by_head(window_order_bias, _order, scans=False)


MAX_BIAS = 16.0
"""The upper bound of Swin V2's bias."""


@operator("WindowTable", "table")
def window_table(coordinates: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """16 sigmoid(MLP(offset)), the table of `window_bias`, with one hidden layer of relu (Swin V2: Liu et al. 2022,
    arXiv:2111.09883, eq. 3 and 4).

    Args:
        coordinates: float32 [rows, 2], offsets on a logarithmic scale.
        w1: [H, 2], weights of the hidden layer.
        b1: [H], bias of the hidden layer.
        w2: [num_heads, H], weights of the output layer.

    Returns:
        float32 [rows, num_heads].

    Example:
        >>> window_table(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1), torch.ones(1, 1))
        tensor([[8.]])
    """
    w1, b1, w2 = (t.to(coordinates.dtype) for t in (w1, b1, w2))
    return MAX_BIAS * torch.sigmoid(torch.relu(coordinates @ w1.T + b1) @ w2.T)


@window_table.onnx
def _table_onnx(op: Ops, coordinates: ir.Value, w1: ir.Value, b1: ir.Value, w2: ir.Value) -> ir.Value:
    w1, b1, w2 = (cast(op, t, ir.DataType.FLOAT) for t in (w1, b1, w2))
    hidden = op.Relu(op.Add(op.MatMul(coordinates, op.Transpose(w1, perm=[1, 0])), b1))
    return op.Mul(op.Sigmoid(op.MatMul(hidden, op.Transpose(w2, perm=[1, 0]))), constant(op, MAX_BIAS))


MAX_LOG_FACTOR = math.log(100.0)
"""The largest logarithm of the factor on the cosines."""

NORM_EPS = 1e-12


@operator("CosineHeads", "normed", fake=lambda call: torch.empty_like(call.x))
def cosine_heads(x: Tensor, logit_scale: Tensor | None = None, head_dim: int = REQUIRED) -> Tensor:
    """x / |x| of each head, times exp(logit_scale), at most 100 (Swin V2: Liu et al. 2022, arXiv:2111.09883, eq. 2).

    Args:
        x: [B, S, heads*head_dim], queries or keys.
        logit_scale: [heads, 1, 1], a trained parameter; None for a factor of 1.
        head_dim: width of a head.

    Returns:
        A tensor like x.

    Example:
        >>> cosine_heads(torch.tensor([[[3.0, 4.0]]]), head_dim=2)
        tensor([[[0.6000, 0.8000]]])
    """
    heads = x.unflatten(-1, (-1, head_dim)).to(wide(x.dtype))
    heads = heads / heads.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS)
    if logit_scale is not None:
        heads = heads * logit_scale.to(heads.dtype).clamp(max=MAX_LOG_FACTOR).exp().view(-1, 1)
    normed: Tensor = heads.to(x.dtype).flatten(2)
    return normed


@cosine_heads.onnx
def _cosine_onnx(op: Ops, x: ir.Value, logit_scale: ir.Value | None, head_dim: int) -> ir.Value:
    heads = cast(op, op.Reshape(x, [0, 0, -1, head_dim]), ir.DataType.FLOAT)
    norm = op.Sqrt(op.ReduceSum(op.Mul(heads, heads), [-1]))
    heads = op.Div(heads, op.Max(norm, constant(op, NORM_EPS)))
    if logit_scale is not None:
        factor = op.Exp(op.Min(cast(op, logit_scale, ir.DataType.FLOAT), constant(op, MAX_LOG_FACTOR)))
        heads = op.Mul(heads, op.Reshape(factor, [-1, 1]))
    return op.Reshape(cast(op, heads, dtype_of(x)), [0, 0, -1])
