"""Logits in which position and content mix, and what positions add to the values; logits are fp32.

relative_score        scale * (q_i + v) . W_r R(p_i - p_j), terms (b) + (d) of Transformer-XL (Dai et al. 2019,
                      section 3.3), R sinusoidal. With w = W_r^T (q_i + v), split into a sine half s and a cosine half
                      c, sum_f s_f sin(w_f (p_i - p_j)) + c_f cos(w_f (p_i - p_j))
                      = [s sin_i + c cos_i, c sin_i - s cos_i] . [cos_j, sin_j]   (addition theorem)
                      so one product gives the term for any positions, without the paper's shift trick for consecutive
                      ones.
relative_table_score  the same with a trained table R: scores for every row, then a lookup for each query and key
add_head_bias         q + u, the content bias of term (c), u [N, head_dim]
offset_score          scale * q_i . table[r_ij], r_ij = clip(p_j - p_i, -behind, ahead) + behind (Shaw et al. 2018,
                      arXiv:1803.02155, eq. 4)
offset_values         sum over j of a_ij table[r_ij], a the weights of attention (ibid., eq. 3)
disentangled_score    scale * (q_i . K[b_ij] + k_j . Q[b_ij]), K and Q [N*head_dim, rows] or absent, b_ij =
                      bucket[clip(p_i - p_j, -M, M) + M] (DeBERTa: He et al. 2021, arXiv:2006.03654, eq. 4)
contextual_score      q_i . e[c_ij], interpolated between whole numbers, c_ij = sum from t = j to i of
                      sigmoid(scale q_i . k_t), at most the last row (CoPE: Golovneva et al. 2024, arXiv:2405.18719,
                      eq. 3 to 5, and the listing in its appendix)

q [B, S, N*head_dim]; k [B, T, K*head_dim], or [B, K, T, head_dim] with a cache; v = position_bias [N, head_dim];
r_proj [N*head_dim, D]; cos, sin [B, S or T, D/2]; table [behind + ahead + 1, head_dim]; results [B, N, S, T].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Angles, Positions
from posexport.custom_ops.attention import Added, keys_onnx, logits_of, logits_onnx, weights_of, weights_onnx
from posexport.custom_ops.bias import ahead_onnx, clipped, clipped_onnx, distances, distances_onnx, fake_logits
from posexport.custom_ops.heads import CappedHeads, Heads, heads_onnx, to_heads
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, shape_of, size_of, wide
from posexport.custom_ops.visibility import lengths_onnx, visible, visible_onnx


def _picked(scores: Tensor, index: Tensor) -> Tensor:
    """scores [B, N, S, R] at index [B, S, T]."""
    return scores.gather(-1, index.unsqueeze(1).expand(-1, scores.shape[1], -1, -1))


def _picked_onnx(op: Ops, scores: ir.Value, index: ir.Value, num_heads: int) -> ir.Value:
    """As `_picked`, in ONNX."""
    return op.GatherElements(scores, op.Expand(op.Unsqueeze(index, [1]), [1, num_heads, 1, 1]), axis=-1)


def _biased(q: Tensor, position_bias: Tensor, scale: float) -> Tensor:
    """scale * (q + v), [B, N, S, head_dim]."""
    heads: Tensor = q.unflatten(-1, (position_bias.shape[0], -1)) + position_bias
    return heads.transpose(1, 2) * scale


def _biased_onnx(op: Ops, q: ir.Value, position_bias: ir.Value, scale: float) -> ir.Value:
    heads = op.Add(op.Reshape(q, [0, 0, size_of(position_bias, 0), -1]), position_bias)
    heads = op.Transpose(heads, perm=[0, 2, 1, 3])
    return op.Mul(heads, constant(op, scale, dtype_of(q)))


def _fake(call: Any, keys: Tensor, num_heads: int) -> Tensor:
    """The fake of a score for keys [B, T, ...], or [B, K, T, head_dim] of a cache."""
    return fake_logits(call.q, keys.shape[2 if keys.dim() == 4 else 1], num_heads, call.q.dtype)


@operator("RelativeScore", "score", fake=lambda call: _fake(call, call.k_cos, call.position_bias.shape[0]))
def relative_score(q: Tensor, angles: Angles[Tensor], position_bias: Tensor, r_proj: Tensor, scale: float) -> Tensor:
    s, c = (_biased(q, position_bias, scale) @ r_proj.unflatten(0, position_bias.shape)).chunk(2, -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.q_cos, angles.q_sin))
    left = torch.cat((s * sin + c * cos, c * sin - s * cos), -1)
    right = torch.cat((angles.k_cos, angles.k_sin), -1).to(q.dtype).unsqueeze(1)
    return (left @ right.transpose(2, 3)).to(wide(q.dtype))


@relative_score.onnx
def _relative_onnx(
    op: Ops, q: ir.Value, angles: Angles[ir.Value], position_bias: ir.Value, r_proj: ir.Value, scale: float
) -> ir.Value:
    weights = op.Reshape(r_proj, [*shape_of(position_bias), -1])
    products = op.MatMul(_biased_onnx(op, q, position_bias, scale), weights)
    s, c = op.Split(products, num_outputs=2, axis=-1, _outputs=2)
    cos, sin = (op.Unsqueeze(cast(op, t, dtype_of(q)), [1]) for t in (angles.q_cos, angles.q_sin))
    first = op.Add(op.Mul(s, sin), op.Mul(c, cos))
    second = op.Sub(op.Mul(c, sin), op.Mul(s, cos))
    left = op.Concat(first, second, axis=-1)
    right = op.Unsqueeze(cast(op, op.Concat(angles.k_cos, angles.k_sin, axis=-1), dtype_of(q)), [1])
    return cast(op, op.MatMul(left, op.Transpose(right, perm=[0, 1, 3, 2])), ir.DataType.FLOAT)


@operator("RelativeTableScore", "score", fake=lambda call: _fake(call, call.k_positions, call.position_bias.shape[0]))
def relative_table_score(
    q: Tensor, positions: Positions[Tensor], position_bias: Tensor, r_proj: Tensor, table: Tensor, scale: float
) -> Tensor:
    rows = (table @ r_proj.T).unflatten(-1, position_bias.shape)
    scores = _biased(q, position_bias, scale) @ rows.permute(1, 2, 0)
    index = clipped(distances(positions), table.shape[0] // 2)
    return _picked(scores, index).to(wide(q.dtype))


@relative_table_score.onnx
def _relative_table_onnx(
    op: Ops,
    q: ir.Value,
    positions: Positions[ir.Value],
    position_bias: ir.Value,
    r_proj: ir.Value,
    table: ir.Value,
    scale: float,
) -> ir.Value:
    # no transposed rows of rank 3: ONNX Runtime 1.31 crashes on them in fp16 next to a second MatMul
    rows = op.MatMul(op.Reshape(r_proj, [*shape_of(position_bias), -1]), op.Transpose(table, perm=[1, 0]))
    scores = op.MatMul(_biased_onnx(op, q, position_bias, scale), rows)
    index = clipped_onnx(op, distances_onnx(op, positions), size_of(table, 0) // 2)
    return cast(op, _picked_onnx(op, scores, index, size_of(position_bias, 0)), ir.DataType.FLOAT)


@operator("HeadBias", "biased", fake=lambda call: torch.empty_like(call.q))
def add_head_bias(q: Tensor, bias: Tensor) -> Tensor:
    return q + bias.reshape(-1)


@add_head_bias.onnx
def _head_bias_onnx(op: Ops, q: ir.Value, bias: ir.Value) -> ir.Value:
    # by heads: TensorRT would fuse a bias on the flat queries into the projection and then not merge q, k and v
    return op.Reshape(op.Add(op.Reshape(q, [0, 0, *shape_of(bias)]), bias), [0, 0, -1])


@operator(
    "OffsetScore", "score", fake=lambda call: _fake(call, call.k_positions, call.q.shape[2] // call.table.shape[1])
)
def offset_score(
    q: Tensor, positions: Positions[Tensor], table: Tensor, behind: int, ahead: int, scale: float
) -> Tensor:
    scores = to_heads(q, q.shape[-1] // table.shape[1]) * scale @ table.T
    index = clipped(-distances(positions), behind, ahead)
    return _picked(scores, index).to(wide(q.dtype))


@offset_score.onnx
def _offset_score_onnx(
    op: Ops, q: ir.Value, positions: Positions[ir.Value], table: ir.Value, behind: int, ahead: int, scale: float
) -> ir.Value:
    num_heads = size_of(q, -1) // size_of(table, 1)
    heads = op.Mul(heads_onnx(op, q, num_heads), constant(op, scale, dtype_of(q)))
    scores = op.MatMul(heads, op.Transpose(table, perm=[1, 0]))
    index = clipped_onnx(op, ahead_onnx(op, positions), behind, ahead)
    return cast(op, _picked_onnx(op, scores, index, num_heads), ir.DataType.FLOAT)


@operator("OffsetValues", "added", fake=lambda call: torch.empty_like(call.q))
def offset_values(
    q: Tensor,
    k: Tensor,
    added: Added[Tensor],
    write_indices: Tensor | None,
    positions: Positions[Tensor],
    table: Tensor,
    heads: CappedHeads,
    behind: int,
    ahead: int,
) -> Tensor:
    queries, keys = to_heads(q, heads.num_heads), to_heads(k, heads.num_kv_heads)
    weights, seen = weights_of(queries, keys, added, heads, write_indices)
    out = weights.transpose(1, 2) @ table[clipped(-distances(positions), behind, ahead)]
    if added.mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1).unsqueeze(-1).transpose(1, 2), 0.0)
    return out.flatten(2)


@offset_values.onnx
def _offset_values_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    added: Added[ir.Value],
    write_indices: ir.Value | None,
    positions: Positions[ir.Value],
    table: ir.Value,
    heads: CappedHeads,
    behind: int,
    ahead: int,
) -> ir.Value:
    lengths = lengths_onnx(op, q, k)
    weights, seen = weights_onnx(op, q, keys_onnx(op, q, k, heads), added, heads, lengths, write_indices)
    if added.sinks is not None:  # they are the first column
        weights = op.Slice(weights, [1], [2**31 - 1], [3])
    rows = op.Gather(table, clipped_onnx(op, ahead_onnx(op, positions), behind, ahead), axis=0)
    out = op.MatMul(op.Transpose(weights, perm=[0, 2, 1, 3]), rows)
    if added.mask is not None and added.sinks is None:
        out = op.Mul(out, op.Transpose(op.ReduceMax(op.Cast(seen, to=q.dtype), [-1]), perm=[0, 2, 1, 3]))
    return op.Reshape(out, [0, 0, -1])


@operator("DisentangledScore", "score", fake=lambda call: _fake(call, call.k_positions, call.num_heads))
def disentangled_score(
    q: Tensor,
    k: Tensor,
    positions: Positions[Tensor],
    buckets: Tensor,
    key_table: Tensor | None,
    query_table: Tensor | None,
    num_heads: int,
    scale: float,
) -> Tensor:
    rows = buckets[clipped(distances(positions), buckets.shape[0] // 2)]
    score = q.new_zeros(())
    if key_table is not None:
        score = _picked(to_heads(q, num_heads) * scale @ key_table.unflatten(0, (num_heads, -1)), rows)
    if query_table is not None:
        by_key = to_heads(k, num_heads) * scale @ query_table.unflatten(0, (num_heads, -1))
        score = score + _picked(by_key, rows.transpose(1, 2)).transpose(2, 3)
    return score.to(wide(q.dtype))


@disentangled_score.onnx
def _disentangled_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    positions: Positions[ir.Value],
    buckets: ir.Value,
    key_table: ir.Value | None,
    query_table: ir.Value | None,
    num_heads: int,
    scale: float,
) -> ir.Value:
    offset = clipped_onnx(op, distances_onnx(op, positions), size_of(buckets, 0) // 2)
    rows = op.Gather(buckets, offset, axis=0)

    def scores(heads: ir.Value, table: ir.Value) -> ir.Value:
        # features before rows: a transpose here crashes ONNX Runtime 1.31 in fp16
        by_head = op.Reshape(table, [num_heads, size_of(table, 0) // num_heads, -1])
        return op.MatMul(op.Mul(heads, constant(op, scale, dtype_of(q))), by_head)

    terms = []
    if key_table is not None:
        terms.append(_picked_onnx(op, scores(heads_onnx(op, q, num_heads), key_table), rows, num_heads))
    if query_table is not None:
        keys = k if len(shape_of(k)) == 4 else heads_onnx(op, k, num_heads)
        by_key = _picked_onnx(op, scores(keys, query_table), op.Transpose(rows, perm=[0, 2, 1]), num_heads)
        terms.append(op.Transpose(by_key, perm=[0, 1, 3, 2]))
    return cast(op, terms[0] if len(terms) == 1 else op.Add(*terms), ir.DataType.FLOAT)


@operator("ContextualScore", "score", fake=lambda call: _fake(call, call.k, call.num_heads))
def contextual_score(
    q: Tensor, k: Tensor, mask: Tensor | None, write_indices: Tensor | None, pos_emb: Tensor, heads: Heads
) -> Tensor:
    queries, keys = to_heads(q, heads.num_heads), to_heads(k, heads.num_kv_heads)
    logits = logits_of(queries, keys, heads)
    seen = visible(heads, q.shape[1], keys.shape[2], mask, write_indices, q.device)
    gates = torch.sigmoid(logits)
    gates = gates if seen is None else gates.masked_fill(~seen, 0.0)
    places = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=pos_emb.shape[1] - 1)
    scores = (queries @ pos_emb).to(logits.dtype)
    low, high = places.floor(), places.ceil()
    part = places - low
    return scores.gather(-1, high.long()) * part + scores.gather(-1, low.long()) * (1 - part)


@contextual_score.onnx
def _contextual_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    mask: ir.Value | None,
    write_indices: ir.Value | None,
    pos_emb: ir.Value,
    heads: Heads,
) -> ir.Value:
    lengths = lengths_onnx(op, q, k)
    logits = logits_onnx(op, q, keys_onnx(op, q, k, heads), heads)
    seen = visible_onnx(op, heads, lengths, mask, write_indices)
    zero, one = constant(op, 0.0), constant(op, 1.0)
    gates = op.Sigmoid(logits)
    gates = gates if seen is None else op.Where(seen, gates, zero)
    last = constant(op, float(size_of(pos_emb, 1) - 1))
    places = op.Min(op.CumSum(gates, -1, reverse=1), last)
    scores = cast(op, op.MatMul(heads_onnx(op, q, heads.num_heads), pos_emb), ir.DataType.FLOAT)
    low, high = op.Floor(places), op.Ceil(places)
    part = op.Sub(places, low)
    above, below = (op.GatherElements(scores, op.Cast(t, to=ir.DataType.INT64), axis=-1) for t in (high, low))
    return op.Add(op.Mul(above, part), op.Mul(below, op.Sub(one, part)))
