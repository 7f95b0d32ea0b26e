"""Transformer-XL's logits of query i at p_i and key j at p_j. fp32 for every dtype of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.arguments import SCALE
from posexport.custom_ops.bias import clipped, clipped_onnx, distances, distances_onnx, fake_logits
from posexport.custom_ops.by_head import ByHead, add_by_head, by_head
from posexport.custom_ops.near_keys import Frequencies, Turns, by_distance_onnx
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, shape_of, size_of, wide
from posexport.custom_ops.tables import index_onnx, picked, picked_onnx


def biased(q: Tensor, position_bias: Tensor, scale: float) -> Tensor:
    """Return scale * (q + v), [B, N, S, head_dim]."""
    heads: Tensor = q.unflatten(-1, (position_bias.shape[0], -1)) + position_bias
    return heads.transpose(1, 2) * scale


def biased_onnx(op: Ops, q: ir.Value, position_bias: ir.Value, scale: float) -> ir.Value:
    heads = op.Add(op.Reshape(q, [0, 0, size_of(position_bias, 0), -1]), position_bias)
    heads = op.Transpose(heads, perm=[0, 2, 1, 3])
    return op.Mul(heads, constant(op, scale, dtype_of(q)))


def fake_score(call: Any, keys: Tensor, num_heads: int) -> Tensor:
    """Return the fake of a score for keys [B, T, ...], or for a cache [B, K, T, head_dim]."""
    return fake_logits(call.q, keys.shape[2 if keys.dim() == 4 else 1], num_heads, call.q.dtype)


def turned_onnx(op: Ops, heads: ir.Value, turns: Turns[ir.Value], r_proj: ir.Value, shape: list[int]) -> ir.Value:
    """Return queries [B, N, S, head_dim] . W_r R of every coarse minus every fine position, float32 [B, N, S, R*FINE].

    Queries times W_r are rotated by the coarse angles c, and then multiplied with the fine angles f:

    s sin(c - f) + o cos(c - f) = (s sin c + o cos c) cos f + (o sin c - s cos c) sin f.
    """
    products = cast(op, op.MatMul(heads, op.Reshape(r_proj, shape)), ir.DataType.FLOAT)
    s, o = op.Split(op.Unsqueeze(products, [3]), num_outputs=2, axis=-1, _outputs=2)  # [B, N, S, 1, P]
    cos_c, sin_c = (op.Unsqueeze(side, [1, 2]) for side in (turns.coarse_cos, turns.coarse_sin))
    by_cos = op.Add(op.Mul(s, sin_c), op.Mul(o, cos_c))
    by_sin = op.Sub(op.Mul(o, sin_c), op.Mul(s, cos_c))
    fine = (op.Transpose(op.Squeeze(side, [0]), perm=[1, 0]) for side in (turns.fine_cos, turns.fine_sin))
    scores = op.Add(*(op.MatMul(one, other) for one, other in zip((by_cos, by_sin), fine, strict=True)))
    return op.Reshape(scores, [0, 0, 0, -1])


@operator("RelativeScore", "score", fake=lambda call: fake_score(call, call.k_positions, call.position_bias.shape[0]))
def relative_score(
    q: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    position_bias: Tensor,
    r_proj: Tensor,
    frequencies: Tensor | None = None,
    turns: Tensor | None = None,
    scale: float = SCALE,
) -> Tensor:
    """scale * (q_i + v) . W_r R(p_i - p_j), with R sinusoidal and v = position_bias. These are terms (b) + (d) of
    Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section 3.3).

    Let w = W_r^T (q_i + v), split into a sine half s and a cosine half c. The result is the sum over f of s_f sin(w_f
    (p_i - p_j)) + c_f cos(w_f (p_i - p_j)) = [s sin_i + c cos_i, c sin_i - s cos_i] . [cos_j, sin_j]. One product gives
    the term for any positions, without the paper's shift trick for consecutive positions. For ONNX Runtime, one query
    whose keys are less than T behind it uses sums of coarse and fine angles, not one angle for each key. Angles of
    frequencies are computed for positions relative to the first key, so they are small if the keys are near.

    Args:
        q: [B, S, num_heads*head_dim].
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        position_bias: [num_heads, head_dim], in q's dtype.
        r_proj: [num_heads*head_dim, 2*P], in q's dtype: W_r.
        frequencies: float32 [P], radians per position; None if turns are given.
        turns: int64 [2, P], exact frequencies, as in `exact_sinusoids`.
        scale: factor on the score, by default head_dim**-0.5.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> at, w = torch.tensor([[0, 1]]), torch.tensor([[0.0, 1.0]])
        >>> q, v = torch.ones(1, 2, 1), torch.zeros(1, 1)
        >>> relative_score(q, at, at, v, w, frequencies=torch.tensor([1.0]))
        tensor([[[[1.0000, 0.5403],
                  [0.5403, 1.0000]]]])
    """
    angles = Frequencies(frequencies, turns)
    if turns is None:  # positions relative to the first key give small, more exact angles
        first = k_positions[:, :1]
        q_positions, k_positions = q_positions - first, k_positions - first
    (q_cos, q_sin), (k_cos, k_sin) = (angles.sides(side) for side in (q_positions, k_positions))
    s, c = (biased(q, position_bias, scale) @ r_proj.unflatten(0, position_bias.shape)).chunk(2, -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (q_cos, q_sin))
    left = torch.cat((s * sin + c * cos, c * sin - s * cos), -1)
    right = torch.cat((k_cos, k_sin), -1).to(q.dtype).unsqueeze(1)
    return (left @ right.transpose(2, 3)).to(wide(q.dtype))


def _relative(
    op: Ops,
    q: ir.Value,
    positions: Positions[ir.Value],
    position_bias: ir.Value,
    r_proj: ir.Value,
    angles: Frequencies[ir.Value],
    scale: float,
    ort: bool,
) -> ByHead:
    heads, shape = biased_onnx(op, q, position_bias, scale), [*shape_of(position_bias), -1]

    def sides(op: Ops) -> list[ir.Value]:
        """Return the two sides of the product, [B, N, S, 2P] and [B, 1, T, 2P]."""
        at_queries, at_keys = positions.q_positions, positions.k_positions
        if angles.turns is None:
            origin = op.Slice(at_keys, [0], [1], [1])
            at_queries, at_keys = op.Sub(at_queries, origin), op.Sub(at_keys, origin)
        s, c = op.Split(op.MatMul(heads, op.Reshape(r_proj, shape)), num_outputs=2, axis=-1, _outputs=2)
        cos, sin = (op.Unsqueeze(cast(op, t, dtype_of(q)), [1]) for t in angles.sides_onnx(op, at_queries))
        first = op.Add(op.Mul(s, sin), op.Mul(c, cos))
        second = op.Sub(op.Mul(c, sin), op.Mul(s, cos))
        of_keys = op.Concat(*angles.sides_onnx(op, at_keys), axis=-1)
        return [op.Concat(first, second, axis=-1), op.Unsqueeze(cast(op, of_keys, dtype_of(q)), [1])]

    def product(op: Ops, count: int, left: ir.Value, right: ir.Value) -> ir.Value:
        return cast(op, op.MatMul(left, op.Transpose(right, perm=[0, 1, 3, 2])), ir.DataType.FLOAT)

    def few(op: Ops) -> ir.Value:
        def near(op: Ops, turns: Turns[ir.Value], columns: ir.Value) -> ir.Value:
            scores = turned_onnx(op, heads, turns, r_proj, shape)
            return picked_onnx(op, scores, op.Unsqueeze(columns, [1, 2]), shape[0])

        return by_distance_onnx(op, positions, angles, near, lambda op: product(op, shape[0], *sides(op)))

    queries = op.Shape(q, start=1, end=2)
    # no If for other targets, because it divides TensorRT's kernels
    return by_head(op, heads, sides, product, few if ort else None, queries)


add_by_head(relative_score, _relative, scans=False)


@operator(
    "RelativeTableScore", "score", fake=lambda call: fake_score(call, call.k_positions, call.position_bias.shape[0])
)
def relative_table_score(
    q: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    position_bias: Tensor,
    r_proj: Tensor,
    table: Tensor,
    scale: float = SCALE,
) -> Tensor:
    """The same as `relative_score`, with a trained table R: R(p) = table[clip(p, -M, M) + M].

    Args:
        q: [B, S, num_heads*head_dim].
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        position_bias: [num_heads, head_dim], in q's dtype.
        r_proj: [num_heads*head_dim, D], in q's dtype.
        table: [rows, D], in q's dtype, with 2M + 1 rows.
        scale: factor on the score, by default head_dim**-0.5.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> q, v, w, at = torch.ones(1, 1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[4]])
        >>> relative_table_score(q, at, torch.tensor([[3, 4, 9]]), v, w, torch.tensor([[1.0], [2.0], [3.0]]))
        tensor([[[[3., 2., 1.]]]])
    """
    rows = (table @ r_proj.T).unflatten(-1, position_bias.shape)
    scores = biased(q, position_bias, scale) @ rows.permute(1, 2, 0)
    index = clipped(distances(q_positions, k_positions), table.shape[0] // 2)
    return picked(scores, index).to(wide(q.dtype))


def _relative_table(
    op: Ops,
    q: ir.Value,
    positions: Positions[ir.Value],
    position_bias: ir.Value,
    r_proj: ir.Value,
    table: ir.Value,
    scale: float,
    ort: bool,
) -> ByHead:
    # no transposed rows of rank 3: ONNX Runtime 1.31 crashes on them in fp16 next to a second MatMul
    rows = op.MatMul(op.Reshape(r_proj, [*shape_of(position_bias), -1]), op.Transpose(table, perm=[1, 0]))
    index = index_onnx(op, clipped_onnx(op, distances_onnx(op, positions), size_of(table, 0) // 2))
    heads = biased_onnx(op, q, position_bias, scale)

    def make(op: Ops, count: int, heads: ir.Value, rows: ir.Value, index: ir.Value) -> ir.Value:
        return cast(op, picked_onnx(op, op.MatMul(heads, rows), index, count), ir.DataType.FLOAT)

    return by_head(op, heads, (heads, op.Unsqueeze(rows, [0]), index), make)


add_by_head(relative_table_score, _relative_table)


@operator("HeadBias", "biased", fake=lambda call: torch.empty_like(call.q))
def add_head_bias(q: Tensor, bias: Tensor) -> Tensor:
    """q + u for each head, the content bias of term (c) of Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section
    3.3).

    Args:
        q: [B, S, num_heads*head_dim].
        bias: [num_heads, head_dim], in q's dtype.

    Returns:
        A tensor like q.

    Example:
        >>> add_head_bias(torch.ones(1, 1, 4), torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        tensor([[[1., 2., 3., 4.]]])
    """
    return q + bias.reshape(-1)


@add_head_bias.onnx
def _head_bias_onnx(op: Ops, q: ir.Value, bias: ir.Value) -> ir.Value:
    # by heads: TensorRT would fuse a bias on the flat queries into the projection, and then not merge q, k and v
    return op.Reshape(op.Add(op.Reshape(q, [0, 0, *shape_of(bias)]), bias), [0, 0, -1])
