"""Transformer-XL's position terms (b) + (d), scale * (q_i + v) . W_r R(p_i - p_j), Dai et al. 2019, section 3.3.

relative_score        R sinusoidal. With w = W_r^T (q_i + v), split into a sine half s and a cosine half c,
                      sum_f s_f sin(w_f (p_i - p_j)) + c_f cos(w_f (p_i - p_j))
                      = [s sin_i + c cos_i, c sin_i - s cos_i] . [cos_j, sin_j]   (addition theorem)
                      so one product gives the term for any positions, without the paper's shift trick for consecutive
                      ones.
relative_table_score  R a trained table: scores for every row, then a lookup for each query and key.
add_head_bias         q + u, the content bias of term (c), u [N, head_dim]

q [B, S, N*head_dim]; v = position_bias [N, head_dim]; r_proj [N*head_dim, D]; cos, sin [B, S or T, D/2]; result
[B, N, S, T] in fp32.
"""

from typing import Any

import onnx_ir as ir
import torch

from posexport.custom_ops.bias import fake_logits, offsets_onnx, wide
from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of, shape_of, size_of


def _score(
    q: torch.Tensor,
    q_cos: torch.Tensor,
    q_sin: torch.Tensor,
    k_cos: torch.Tensor,
    k_sin: torch.Tensor,
    position_bias: torch.Tensor,
    r_proj: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_heads = position_bias.shape[0]
    heads = (q.unflatten(-1, (num_heads, -1)) + position_bias).transpose(1, 2) * scale
    s, c = (heads @ r_proj.unflatten(0, (num_heads, -1))).chunk(2, -1)
    cos, sin = q_cos.to(q.dtype).unsqueeze(1), q_sin.to(q.dtype).unsqueeze(1)
    left = torch.cat((s * sin + c * cos, c * sin - s * cos), -1)
    right = torch.cat((k_cos, k_sin), -1).to(q.dtype).unsqueeze(1)
    return (left @ right.transpose(2, 3)).to(wide(q.dtype))


def _score_fake(q: torch.Tensor, *inputs: Any) -> torch.Tensor:
    _, _, k_cos, _, position_bias, *_ = inputs
    return fake_logits(q, k_cos.shape[1], position_bias.shape[0], q.dtype)


def _heads_onnx(op: Ops, q: ir.Value, position_bias: ir.Value, scale: float) -> ir.Value:
    heads = op.Add(op.Reshape(q, [0, 0, size_of(position_bias, 0), -1]), position_bias)
    heads = op.Transpose(heads, perm=[0, 2, 1, 3])
    return op.Mul(heads, constant(op, scale, dtype_of(q)))


def _score_onnx(
    op: Ops,
    q: ir.Value,
    q_cos: ir.Value,
    q_sin: ir.Value,
    k_cos: ir.Value,
    k_sin: ir.Value,
    position_bias: ir.Value,
    r_proj: ir.Value,
    *,
    scale: float,
) -> ir.Value:
    fp32 = ir.DataType.FLOAT
    weights = op.Reshape(r_proj, [*shape_of(position_bias), -1])
    products = op.MatMul(_heads_onnx(op, q, position_bias, scale), weights)
    s, c = op.Split(products, num_outputs=2, axis=-1, _outputs=2)
    cos, sin = (op.Unsqueeze(cast(op, t, dtype_of(q)), [1]) for t in (q_cos, q_sin))
    first = op.Add(op.Mul(s, sin), op.Mul(c, cos))
    second = op.Sub(op.Mul(c, sin), op.Mul(s, cos))
    left = op.Concat(first, second, axis=-1)
    right = op.Unsqueeze(cast(op, op.Concat(k_cos, k_sin, axis=-1), dtype_of(q)), [1])
    return cast(op, op.MatMul(left, op.Transpose(right, perm=[0, 1, 3, 2])), fp32)


relative_score = Operator(
    name="relative_score",
    function="RelativeScore",
    inputs=("q", "q_cos", "q_sin", "k_cos", "k_sin", "position_bias", "r_proj"),
    outputs=("score",),
    eager=_score,
    fake=_score_fake,
    body=_score_onnx,
)


def _table_score(
    q: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    position_bias: torch.Tensor,
    r_proj: torch.Tensor,
    table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    reach = table.shape[0] // 2
    num_heads = position_bias.shape[0]
    heads = (q.unflatten(-1, (num_heads, -1)) + position_bias).transpose(1, 2) * scale
    rows = (table @ r_proj.T).unflatten(-1, (num_heads, -1))
    all_scores = heads @ rows.permute(1, 2, 0)
    offset = (q_positions.unsqueeze(2) - k_positions.unsqueeze(1)).clamp(-reach, reach) + reach
    index = offset.unsqueeze(1).expand(-1, num_heads, -1, -1)
    score: torch.Tensor = all_scores.gather(-1, index).to(wide(q.dtype))
    return score


def _table_score_fake(q: torch.Tensor, *inputs: Any) -> torch.Tensor:
    _, k_positions, position_bias, *_ = inputs
    return fake_logits(q, k_positions.shape[1], position_bias.shape[0], q.dtype)


def _table_score_onnx(
    op: Ops,
    q: ir.Value,
    q_positions: ir.Value,
    k_positions: ir.Value,
    position_bias: ir.Value,
    r_proj: ir.Value,
    table: ir.Value,
    *,
    scale: float,
) -> ir.Value:
    num_heads = size_of(position_bias, 0)
    reach = size_of(table, 0) // 2
    # no transposed rows of rank 3: ONNX Runtime 1.31 crashes on them in fp16 next to a second MatMul
    rows = op.MatMul(op.Reshape(r_proj, [*shape_of(position_bias), -1]), op.Transpose(table, perm=[1, 0]))
    all_scores = op.MatMul(_heads_onnx(op, q, position_bias, scale), rows)
    offset = offsets_onnx(op, op.Unsqueeze(q_positions, [2]), op.Unsqueeze(k_positions, [1]), reach)
    index = op.Expand(op.Unsqueeze(offset, [1]), [1, num_heads, 1, 1])
    return cast(op, op.GatherElements(all_scores, index, axis=-1), ir.DataType.FLOAT)


relative_table_score = Operator(
    name="relative_table_score",
    function="RelativeTableScore",
    inputs=("q", "q_positions", "k_positions", "position_bias", "r_proj", "table"),
    outputs=("score",),
    eager=_table_score,
    fake=_table_score_fake,
    body=_table_score_onnx,
)


def _head_bias(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return q + bias.reshape(-1)


def _head_bias_onnx(op: Ops, q: ir.Value, bias: ir.Value) -> ir.Value:
    # by heads: TensorRT would fuse a bias on the flat queries into the projection and then not merge q, k and v
    return op.Reshape(op.Add(op.Reshape(q, [0, 0, *shape_of(bias)]), bias), [0, 0, -1])


add_head_bias = Operator(
    name="add_head_bias",
    function="HeadBias",
    inputs=("q", "bias"),
    outputs=("biased",),
    eager=_head_bias,
    body=_head_bias_onnx,
)
