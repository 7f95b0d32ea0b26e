"""FIRE's bias: an MLP of distances relative to the query's position. fp32 for every dtype of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.bias import distances, distances_onnx, fake_bias
from posexport.custom_ops.by_head import Span
from posexport.custom_ops.by_queries import ByQueries, logits_onnx
from posexport.custom_ops.operator import ORT_FORMS, Ops, T, cast, constant, few_onnx, operator, size_of, wide

FIRE_EPS = 1e-6


@dataclass(frozen=True)
class Mlp(Generic[T]):
    """FIRE's MLP with H hidden features: w1 [H, 1], b1 [H], w2 [N, H], b2 [N]."""

    w1: T
    b1: T
    w2: T
    b2: T


@operator("FireBias", "bias", fake=lambda call: fake_bias(call, call.b2))
def fire_bias(
    q_positions: Tensor,
    k_positions: Tensor,
    c: Tensor,
    multiplier: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    init_l: float = 512.0,
) -> Tensor:
    """MLP(log(1 + |c (p_i - p_j)|) / log(1 + |c max(p_i, L)|)), with L = multiplier * init_l and one hidden layer of
    relu (FIRE: Li et al. 2024, arXiv:2310.04418, section 3).

    Args:
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        c, multiplier: [], trained parameters.
        w1: [H, 1], weights of the hidden layer.
        b1: [H], bias of the hidden layer.
        w2: [num_heads, H], weights of the output layer.
        b2: [num_heads], bias of the output layer.
        init_l: the threshold on positions before it is multiplied by `multiplier`.

    Returns:
        The bias, float32 [B, num_heads, S, T].

    Example:
        >>> one, w1, w2 = torch.tensor(1.0), torch.ones(1, 1), torch.ones(1, 1)
        >>> at = torch.tensor([[0, 4]])
        >>> fire_bias(at, at, one, one, w1, torch.zeros(1), w2, torch.zeros(1), init_l=2.0)
        tensor([[[[0.0000, 1.4650],
                  [1.0000, 0.0000]]]])
    """
    dtype = wide(c.dtype)
    c, multiplier, w1, b1, w2, b2 = (t.to(dtype) for t in (c, multiplier, w1, b1, w2, b2))
    distance = distances(q_positions, k_positions).to(dtype)
    norm = torch.maximum(q_positions.to(dtype), (multiplier * init_l).abs()).unsqueeze(-1)
    x = torch.log((c * distance).abs() + 1) / (torch.log((c * norm).abs() + 1) + FIRE_EPS)
    hidden = torch.relu(x.unsqueeze(-1) * w1[:, 0] + b1)
    return (hidden @ w2.T + b2).permute(0, 3, 1, 2)


def _in_fp32(op: Ops, t: ir.Value) -> ir.Value:
    return cast(op, t, ir.DataType.FLOAT)


def _input_onnx(op: Ops, positions: Positions[ir.Value], c: ir.Value, multiplier: ir.Value, init_l: float) -> ir.Value:
    """Return the MLP's input, [B, S, T]."""
    one, c = constant(op, 1.0), _in_fp32(op, c)
    distance = op.Cast(distances_onnx(op, positions), to=ir.DataType.FLOAT)
    threshold = op.Abs(op.Mul(_in_fp32(op, multiplier), constant(op, init_l)))
    norm = op.Unsqueeze(op.Max(op.Cast(positions.q_positions, to=ir.DataType.FLOAT), threshold), [-1])

    def logs(t: ir.Value) -> ir.Value:
        return op.Log(op.Add(op.Abs(op.Mul(t, c)), one))

    return op.Div(logs(distance), op.Add(logs(norm), constant(op, FIRE_EPS)))


@fire_bias.onnx
def _fire_onnx(
    op: Ops, positions: Positions[ir.Value], c: ir.Value, multiplier: ir.Value, mlp: Mlp[ir.Value], init_l: float
) -> ir.Value:
    x = _input_onnx(op, positions, c, multiplier, init_l)
    w1, b1, w2, b2 = (_in_fp32(op, t) for t in (mlp.w1, mlp.b1, mlp.w2, mlp.b2))
    hidden = op.Relu(op.Add(op.Mul(op.Unsqueeze(x, [-1]), op.Squeeze(w1, [1])), b1))
    return op.Transpose(op.Add(op.MatMul(hidden, op.Transpose(w2, perm=[1, 0])), b2), perm=[0, 3, 1, 2])


def _features_first(
    op: Ops, positions: Positions[ir.Value], c: ir.Value, multiplier: ir.Value, mlp: Mlp[ir.Value], init_l: float
) -> ByQueries:
    """Compute the MLP by two products that include the biases. Only relu needs another pass over [B, S, T, H]."""
    w1, b1, w2, b2 = (_in_fp32(op, t) for t in (mlp.w1, mlp.b1, mlp.w2, mlp.b2))
    zero, one = (op.Unsqueeze(constant(op, value), [0, 1]) for value in (0.0, 1.0))
    hidden = op.Concat(w1, op.Unsqueeze(b1, [1]), axis=1)
    first = op.Concat(hidden, op.Concat(zero, one, axis=1), axis=0)  # and a feature that is always one
    second = op.Concat(w2, op.Unsqueeze(b2, [1]), axis=1)
    num_heads = size_of(mlp.b2, 0)

    def features(op: Ops, flat: ir.Value) -> ir.Value:
        """Map [..., 1, numbers] to [..., N, numbers]."""
        inputs = op.Concat(flat, op.Expand(one, op.Shape(flat)), axis=-2)  # a row of x, a row of ones
        return op.MatMul(second, op.Relu(op.MatMul(first, inputs)))

    def some(op: Ops, part: ir.Value) -> ir.Value:
        return op.Reshape(features(op, op.Reshape(part, [1, -1])), op.Concat([num_heads], op.Shape(part), axis=0))

    def numbers(op: Ops) -> ir.Value:
        return _input_onnx(op, positions, c, multiplier, init_l)

    def few(op: Ops) -> ir.Value:
        x = numbers(op)
        made = features(op, op.Reshape(x, [0, 1, -1]))
        return op.Reshape(made, op.Concat([0, num_heads], op.Shape(x, start=1), axis=0))

    def of_span(op: Ops, span: Span) -> ByQueries:
        return _features_first(op, span.of(op, "", positions), c, multiplier, mlp, init_l)

    return ByQueries(numbers, some, few, lambda _: of_span)


fire_bias.logits(_features_first)


@fire_bias.form(*ORT_FORMS)
def _written_onnx(
    op: Ops, positions: Positions[ir.Value], c: ir.Value, multiplier: ir.Value, mlp: Mlp[ir.Value], init_l: float
) -> ir.Value:
    """Return logits of many queries, some at a time, because features take much memory."""
    logits = _features_first(op, positions, c, multiplier, mlp, init_l)
    queries = op.Shape(positions.q_positions, start=1, end=2)
    return few_onnx(op, True, queries, logits.few, lambda op: logits_onnx(op, logits))
