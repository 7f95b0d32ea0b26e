"""Transformer-XL's logits for consecutive positions (posexport.custom_ops.differences)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import SCALE
from posexport.custom_ops.by_head import ByHead, Parts, Span, add_by_head
from posexport.custom_ops.differences import columns_onnx, fake_laid_out, laid_out, slid
from posexport.custom_ops.near_keys import FINE, Turns
from posexport.custom_ops.operator import Ops, cast, dtype_of, operator, shape_of, size_of
from posexport.custom_ops.relative import biased, biased_onnx, turned_onnx


def coarse_and_fine(ahead: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions whose angles `difference_relative_score` combines, int64 [B|1, R] and [1, FINE].

    The first are p_i - p_j of the columns 0, FINE, 2 FINE, ... of `ahead` [B|1, L]. The second are subtracted from them
    for the columns after each.
    """
    blocks = (ahead.shape[1] + FINE - 1) // FINE
    coarse = -ahead[:, :1] - FINE * torch.arange(blocks, device=ahead.device)
    return coarse, torch.arange(FINE, device=ahead.device).unsqueeze(0)


def _fake(call: Any) -> Tensor:
    return fake_laid_out(call, call.ahead.shape[1], call.position_bias.shape[0])


@operator("DifferenceRelativeScore", "score", fake=_fake)
def difference_relative_score(
    q: Tensor,
    ahead: Tensor,
    coarse_cos: Tensor,
    coarse_sin: Tensor,
    fine_cos: Tensor,
    fine_sin: Tensor,
    position_bias: Tensor,
    r_proj: Tensor,
    scale: float = SCALE,
    causal: bool = False,
) -> Tensor:
    """scale * (q_i + v) . W_r R(p_i - p_j) for consecutive positions. R is sinusoidal and v = position_bias. These are
    terms (b) + (d) of Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section 3.3), with the shift of its appendix
    B.

    The angle of column 128 r + f is coarse angle r minus fine angle f, so that few cosines are computed.

    Args:
        q: [B, S, num_heads*head_dim].
        ahead: int64 [B|1, L], p_j - p_i of each column, starting with the farthest key; only the size L is used.
        coarse_cos, coarse_sin: float32 [B|1, R, P], for p_i - p_j of every 128th column; R is L / 128, rounded up.
        fine_cos, fine_sin: float32 [1, F, P], for the positions 0 to F - 1; F is 128.
        position_bias: [num_heads, head_dim], in q's dtype.
        r_proj: [num_heads*head_dim, 2*P], in q's dtype: W_r.
        scale: factor on the score, by default head_dim**-0.5.
        causal: whether differences of keys ahead of their query are left out; L is then T + 1, otherwise S + T.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> one, ahead = torch.tensor([1.0]), torch.tensor([[-2, -1, 0, 1]])
        >>> coarse, fine = sinusoids(torch.tensor([[2]]), one), sinusoids(torch.arange(128)[None], one)
        >>> q, v, w = torch.ones(1, 2, 1), torch.zeros(1, 1), torch.tensor([[0.0, 1.0]])
        >>> difference_relative_score(q, ahead, *coarse, *fine, v, w)
        tensor([[[[1.0000, 0.5403],
                  [0.5403, 1.0000]]]])
    """
    cos_r, sin_r, cos_f, sin_f = coarse_cos.unsqueeze(2), coarse_sin.unsqueeze(2), fine_cos, fine_sin
    sides = (sin_r * cos_f - cos_r * sin_f, cos_r * cos_f + sin_r * sin_f)
    rows = torch.cat(sides, -1).flatten(1, 2)[:, : ahead.shape[1]].to(q.dtype)  # [B|1, L, 2*P]
    table = rows.unsqueeze(1) @ r_proj.unflatten(0, position_bias.shape).transpose(1, 2)
    return laid_out(biased(q, position_bias, scale) @ table.transpose(2, 3), causal)


def _table_onnx(op: Ops, turns: Turns[ir.Value], length: ir.Value, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    """Return sin and cos of all columns, each [B|1, P, L]."""
    cos_r, sin_r = (op.Unsqueeze(side, [2]) for side in (turns.coarse_cos, turns.coarse_sin))

    def side(name: str, first: tuple[ir.Value, ir.Value], second: tuple[ir.Value, ir.Value]) -> ir.Value:
        angles = getattr(op, name)(op.Mul(*first), op.Mul(*second))  # [B|1, R, FINE, P]
        rows = op.Slice(op.Reshape(angles, [0, -1, size_of(turns.fine_cos, 2)]), [0], length, [1])
        return op.Transpose(cast(op, rows, dtype), perm=[0, 2, 1])

    cos_f, sin_f = turns.fine_cos, turns.fine_sin
    return side("Sub", (sin_r, cos_f), (cos_r, sin_f)), side("Add", (cos_r, cos_f), (sin_r, sin_f))


def _relative(
    op: Ops,
    q: ir.Value,
    ahead: ir.Value,
    turns: Turns[ir.Value],
    position_bias: ir.Value,
    r_proj: ir.Value,
    scale: float,
    causal: bool,
    ort: bool,
) -> ByHead:
    heads, shape = biased_onnx(op, q, position_bias, scale), [*shape_of(position_bias), -1]
    queries, length = op.Shape(q, start=1, end=2), op.Shape(ahead, start=1, end=2)

    def few(op: Ops) -> ir.Value:
        return op.Slice(turned_onnx(op, heads, turns, r_proj, shape), [0], length, [3])

    def parts(op: Ops) -> list[ir.Value]:
        table = op.MatMul(r_proj, op.Concat(*_table_onnx(op, turns, length, dtype_of(heads)), axis=1))
        return [heads, op.Reshape(table, [0, *shape])]

    def laid(heads: ir.Value, queries: ir.Value, parts: Parts) -> ByHead:
        return slid(heads, queries, causal, few, parts, lambda op, *parts: op.MatMul(*parts), ort)

    def spans(op: Ops) -> Callable[[Ops, Span], ByHead]:
        all_heads, table = parts(op)

        def of_span(op: Ops, span: Span) -> ByHead:
            own = [span.of_queries(op, all_heads, 2), columns_onnx(op, table, queries, span)]
            return laid(heads, op.Unsqueeze(span.count, [0]), lambda op: own)

        return of_span

    made = laid(heads, queries, parts)
    return attrs.evolve(made, spans=spans) if causal else made


add_by_head(difference_relative_score, _relative)
