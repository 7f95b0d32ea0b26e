"""Scores from rows of a table for each difference of consecutive positions (posexport.custom_ops.differences)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import REQUIRED, SCALE
from posexport.custom_ops.by_head import ByHead, add_by_head
from posexport.custom_ops.differences import fake_laid_out, places_of, slid
from posexport.custom_ops.heads import heads_onnx, to_heads
from posexport.custom_ops.operator import Ops, constant, dtype_of, operator, size_of, wide
from posexport.custom_ops.tables import picked, rows_of_onnx, turned_onnx


def _fake(call: Any) -> Tensor:
    return fake_laid_out(call, call.rows.shape[1], call.num_heads)


@operator("DifferenceScore", "score", fake=_fake)
def difference_score(
    q: Tensor, table: Tensor, rows: Tensor, num_heads: int = REQUIRED, scale: float = SCALE, causal: bool = False
) -> Tensor:
    """scale * q_i . table[rows[p_j - p_i]] for consecutive positions.

    Args:
        q: [B, S, num_heads*head_dim].
        table: [num_heads|1, R, head_dim], in q's dtype, one for each head or one for all heads.
        rows: int64 [B|1, L], the table row for each difference, starting with the farthest key.
        num_heads: number of query heads.
        scale: factor on the score, by default head_dim**-0.5.
        causal: whether differences of keys ahead of their query are left out; L is then T + 1, otherwise S + T.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> table, rows = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[0, 0, 1, 2]])
        >>> difference_score(torch.ones(1, 2, 1), table, rows, num_heads=1)
        tensor([[[[2., 3.],
                  [1., 2.]]]])
    """
    products = to_heads(q, num_heads) * scale @ table.transpose(1, 2)  # [B, N, S, R]
    index = rows[:, places_of(q.shape[1], rows.shape[1], causal, q.device)].expand(q.shape[0], -1, -1)
    return picked(products, index).to(wide(q.dtype))


def products_onnx(op: Ops, heads: ir.Value, rows: ir.Value) -> ir.Value:
    """Return [B, N, S, L] from [B, N, S, head_dim] and [B|1, N|1, L, head_dim]."""
    return op.MatMul(heads, turned_onnx(op, rows))


SMALL = 128
"""The maximum number of table rows that are multiplied with queries before they are laid out.

Such a table has fewer rows than there are differences.
"""


def difference_score_by_head(
    op: Ops, q: ir.Value, table: ir.Value, rows: ir.Value, num_heads: int, scale: float, causal: bool, ort: bool
) -> ByHead:
    """The body of `difference_score`."""
    queries, factor = op.Shape(q, start=1, end=2), constant(op, scale, dtype_of(q))
    heads = op.Mul(heads_onnx(op, q, num_heads), factor)

    of_table = ort and size_of(table, 1) <= SMALL

    def index(op: Ops, count: ir.Value) -> ir.Value:
        """Return the index [B, N, S, L] for `count` heads N."""
        each = op.Unsqueeze(op.Cast(rows, to=ir.DataType.INT32), [1, 2])
        return op.Expand(each, op.Concat(op.Shape(each, start=0, end=1), count, queries, [1], axis=0))

    def few(op: Ops) -> ir.Value:
        made = products_onnx(op, heads, op.Unsqueeze(table, [0]))
        every = op.Expand(index(op, op.Shape(made, start=1, end=2)), op.Concat(op.Shape(made, end=3), [1], axis=0))
        return op.GatherElements(made, every, axis=-1)

    def parts(op: Ops) -> list[ir.Value]:
        if of_table:
            return [heads, op.Unsqueeze(table, [0]), index(op, op.Constant(value_ints=[1]))]
        return [heads, rows_of_onnx(op, table, rows)]

    def many(op: Ops, heads: ir.Value, rows: ir.Value, index: ir.Value | None = None) -> ir.Value:
        made = products_onnx(op, heads, rows)
        return made if index is None else op.GatherElements(made, index, axis=-1)

    return slid(heads, queries, causal, few, parts, many, ort)


add_by_head(difference_score, difference_score_by_head)
