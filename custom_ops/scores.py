"""Logits that mix position and content, and what positions add to the values.

Query i is at p_i and key j at p_j. Logits are fp32.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.angles import Positions
from posexport.custom_ops.arguments import NUM_HEADS, REQUIRED, SCALE
from posexport.custom_ops.attention import Added, keys_onnx, weights_of, weights_onnx
from posexport.custom_ops.bias import ahead_onnx, clipped, clipped_onnx, distances
from posexport.custom_ops.by_head import ByHead, add_by_head, by_head, scan_onnx
from posexport.custom_ops.heads import CappedHeads, heads_onnx, to_heads
from posexport.custom_ops.operator import (
    ORT_FORMS,
    TENSORRT_FORMS,
    Ops,
    cast,
    constant,
    dtype_of,
    few_onnx,
    operator,
    size_of,
    wide,
)
from posexport.custom_ops.relative import fake_score
from posexport.custom_ops.tables import index_onnx, picked, picked_onnx
from posexport.custom_ops.visibility import keyed_onnx, lengths_onnx


@operator(
    "OffsetScore", "score", fake=lambda call: fake_score(call, call.k_positions, call.q.shape[2] // call.table.shape[1])
)
def offset_score(
    q: Tensor, q_positions: Tensor, k_positions: Tensor, table: Tensor, behind: int, ahead: int, scale: float = SCALE
) -> Tensor:
    """scale * q_i . table[clip(p_j - p_i, -behind, ahead) + behind] (Shaw et al. 2018, arXiv:1803.02155, eq. 4).

    Args:
        q: [B, S, num_heads*head_dim].
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        table: [behind + ahead + 1, head_dim], in q's dtype, shared by all heads.
        behind, ahead: the largest distances with their own table rows.
        scale: factor on the score, by default head_dim**-0.5.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> q, at, table = torch.ones(1, 1, 1), torch.tensor([[4]]), torch.tensor([[1.0], [2.0], [3.0]])
        >>> offset_score(q, at, torch.tensor([[3, 4, 9]]), table, behind=1, ahead=1)
        tensor([[[[1., 2., 3.]]]])
    """
    scores = to_heads(q, q.shape[-1] // table.shape[1]) * scale @ table.T
    index = clipped(-distances(q_positions, k_positions), behind, ahead)
    return picked(scores, index).to(wide(q.dtype))


def _offset_score(
    op: Ops,
    q: ir.Value,
    positions: Positions[ir.Value],
    table: ir.Value,
    behind: int,
    ahead: int,
    scale: float,
    ort: bool,
) -> ByHead:
    heads = op.Mul(heads_onnx(op, q, size_of(q, -1) // size_of(table, 1)), constant(op, scale, dtype_of(q)))

    def make(op: Ops, count: int, heads: ir.Value, index: ir.Value) -> ir.Value:
        scores = op.MatMul(heads, op.Transpose(table, perm=[1, 0]))
        return cast(op, picked_onnx(op, scores, index, count), ir.DataType.FLOAT)

    index = index_onnx(op, clipped_onnx(op, ahead_onnx(op, positions), behind, ahead))
    return by_head(op, heads, (heads, index), make)


add_by_head(offset_score, _offset_score)


@operator("OffsetValues", "added", fake=lambda call: torch.empty_like(call.q))
def offset_values(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    write_indices: Tensor | None = None,
    q_positions: Tensor = REQUIRED,
    k_positions: Tensor = REQUIRED,
    table: Tensor = REQUIRED,
    num_heads: int = REQUIRED,
    num_kv_heads: int = NUM_HEADS,
    scale: float = SCALE,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    behind: int = REQUIRED,
    ahead: int = REQUIRED,
) -> Tensor:
    """Sum over j of a_ij table[clip(p_j - p_i, -behind, ahead) + behind]. a are the weights of `attend`. The sum is
    added to its result (Shaw et al. 2018, arXiv:1803.02155, eq. 3).

    Args:
        q: [B, S, num_heads*head_dim].
        k: [B, T, num_kv_heads*head_dim] or, for a cache, [B, num_kv_heads, T, head_dim], in q's dtype.
        bias: float32 [B|1, num_heads|1, S, T], added to the logits.
        mask: int64 [B, T], 0 for hidden keys, such as padding.
        sinks: [num_heads], one more logit per head, without a value.
        write_indices: int64 [B], the first index of the new keys in each row of a buffer; None for a growing cache.
        q_positions: int64 [B, S], positions of the queries.
        k_positions: int64 [B, T], positions of the keys.
        table: [behind + ahead + 1, head_dim], in q's dtype, shared by all heads.
        num_heads, num_kv_heads, scale, causal, window, chunk, softcap: as in `attend`.
        behind, ahead: the largest distances with their own table rows.

    Returns:
        A tensor like q.

    Example:
        >>> q, at, table = torch.zeros(1, 2, 1), torch.tensor([[0, 1]]), torch.tensor([[1.0], [2.0], [4.0]])
        >>> offset_values(q, q, q_positions=at, k_positions=at, table=table, num_heads=1, behind=1, ahead=1)
        tensor([[[3.0000],
                 [1.5000]]])
    """
    heads, added = (
        CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap),
        Added(bias, mask, sinks),
    )
    rows = table[clipped(-distances(q_positions, k_positions), behind, ahead)]
    return weighted(to_heads(q, num_heads), to_heads(k, num_kv_heads), added, heads, write_indices, rows)


def weighted(
    q: Tensor, k: Tensor, added: Added[Tensor], heads: CappedHeads, write_indices: Tensor | None, rows: Tensor
) -> Tensor:
    """Return the sum over j of a_ij rows_ij, [B, S, N*head_dim], with a the weights of `attend`.

    q [B, N, S, head_dim], k [B, K, T, head_dim] and rows [(B|1,) S, T, head_dim]. The result is 0 for a query that sees
    no key.
    """
    weights, seen = weights_of(q, k, added, heads, write_indices)
    out = weights.transpose(1, 2) @ rows
    if added.mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1).unsqueeze(-1).transpose(1, 2), 0.0)
    return out.flatten(2)


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
    target: str = "portable",
) -> ir.Value:
    lengths = lengths_onnx(op, q, k)
    weights, seen = weights_onnx(op, q, keys_onnx(op, q, k, heads), added, heads, lengths, write_indices)
    if added.sinks is not None:  # sinks are the first column
        weights = op.Slice(weights, [1], [2**31 - 1], [3])
    index = clipped_onnx(op, ahead_onnx(op, positions), behind, ahead)

    # rows of the identity are shorter than rows of a small table; the sums of weights are then multiplied by the table
    small = target != "tensorrt" and size_of(table, 0) < size_of(table, 1)
    identity = ir.tensor(np.eye(size_of(table, 0), dtype=np.float32))
    looked_up = cast(op, op.Constant(value=identity), dtype_of(table)) if small else table

    def few(op: Ops) -> ir.Value:
        return op.MatMul(op.Transpose(weights, perm=[0, 2, 1, 3]), op.Gather(looked_up, index, axis=0))

    def one(op: Ops, number: ir.Value) -> ir.Value:
        rows = op.Gather(looked_up, op.Gather(index, number, axis=1), axis=0)
        return op.MatMul(op.Gather(weights, number, axis=2), rows)

    def many(op: Ops) -> ir.Value:
        """Compute one query after the other, because each needs a row for every key: [S, B, N, head_dim]."""
        return op.Transpose(scan_onnx(op, lengths[0], one), perm=[1, 0, 2, 3])

    out = few_onnx(op, True, op.Shape(q, start=1, end=2), few, many) if target == "ort" else few(op)
    out = op.MatMul(out, table) if small else out
    if added.mask is not None and added.sinks is None:
        assert seen is not None
        keyed = cast(op, keyed_onnx(op, seen, dtype_of(q)), dtype_of(q))
        out = op.Mul(out, op.Transpose(keyed, perm=[0, 2, 1, 3]))
    return op.Reshape(out, [0, 0, -1])


offset_values.onnx(_offset_values_onnx)
offset_values.form(*ORT_FORMS)(partial(_offset_values_onnx, target="ort"))
offset_values.form(*TENSORRT_FORMS)(partial(_offset_values_onnx, target="tensorrt"))
