"""What consecutive positions add to the values: a few rows of a table, times the weights of keys near their query."""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import NUM_HEADS, REQUIRED, SCALE
from posexport.custom_ops.attention import Added, keys_onnx, weights_onnx
from posexport.custom_ops.heads import CappedHeads, to_heads
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, size_of
from posexport.custom_ops.scores import weighted
from posexport.custom_ops.visibility import keyed_onnx, lengths_onnx


@operator("DifferenceValues", "added", fake=lambda call: torch.empty_like(call.q))
def difference_values(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    write_indices: Tensor | None = None,
    table: Tensor = REQUIRED,
    num_heads: int = REQUIRED,
    num_kv_heads: int = NUM_HEADS,
    scale: float = SCALE,
    causal: bool = True,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Sum over j of a_ij table[max(R - 1 - d, 0)], with d = p_i - p_j >= 0 for consecutive positions. a are the weights
    of causal `attend`. The sum is added to its result.

    In ONNX, table[0] is multiplied by the sum of all weights, and table[r] - table[0] by the weight of one key.

    Args:
        q: [B, S, num_heads*head_dim].
        k: [B, T, num_kv_heads*head_dim] or, for a cache, [B, num_kv_heads, T, head_dim], in q's dtype.
        bias: float32 [B|1, num_heads|1, S, T], added to the logits.
        mask: int64 [B, T], 0 for hidden keys, such as padding.
        sinks: [num_heads], one more logit per head, without a value.
        write_indices: int64 [B], the first index of the new keys in each row of a buffer; None for a growing cache.
        table: [R, head_dim], in q's dtype, shared by all heads: the last row is for the key at the query's position,
            the first row for all keys at distance R - 1 or more.
        num_heads, num_kv_heads, scale, causal, window, chunk, softcap: as in `attend`; causal is True.

    Returns:
        A tensor like q.

    Example:
        >>> q, table = torch.zeros(1, 2, 1), torch.tensor([[1.0], [2.0]])
        >>> difference_values(q, q, table=table, num_heads=1)
        tensor([[[2.0000],
                 [1.5000]]])
    """
    heads = CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap)
    queries, keys = to_heads(q, num_heads), to_heads(k, num_kv_heads)
    steps, count = (torch.arange(size, device=q.device) for size in (q.shape[1], keys.shape[2]))
    first = keys.shape[2] - q.shape[1] if write_indices is None else write_indices[:, None, None]
    behind = first + steps.unsqueeze(1) - count
    last = table.shape[0] - 1
    rows = table[last - behind.clamp(0, last)]
    return weighted(queries, keys, Added(bias, mask, sinks), heads, write_indices, rows)


@difference_values.onnx
def _values_onnx(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    added: Added[ir.Value],
    write_indices: ir.Value | None,
    table: ir.Value,
    heads: CappedHeads,
) -> ir.Value:
    (seq, total), dtype = lengths_onnx(op, q, k), dtype_of(q)
    weights, seen = weights_onnx(op, q, keys_onnx(op, q, k, heads), added, heads, (seq, total), write_indices)
    for_all = far = op.Slice(table, [0], [1], [0])  # times the sum of all weights, which is 1 without sinks
    if added.sinks is not None:  # sinks are the first column
        for_all = op.Mul(op.Sub(constant(op, 1.0, dtype), op.Slice(weights, [0], [1], [3])), far)
        weights = op.Slice(weights, [1], [2**31 - 1], [3])
    count = op.Min(size_of(table, 0) - 1, total)  # rows for one key each
    near = op.Slice(table, op.Unsqueeze(op.Sub(size_of(table, 0), count), [0]), [2**31 - 1], [0])
    first = op.Unsqueeze(op.Sub(total, seq), [0]) if write_indices is None else write_indices
    behind = op.Range(op.Sub(count, 1), -1, -1)
    places = op.Sub(op.Add(op.Unsqueeze(first, [1, 2, 3]), op.Unsqueeze(op.Range(0, seq, 1), [1])), behind)
    there = op.Cast(op.GreaterOrEqual(places, 0), to=dtype)
    shape = op.Concat(op.Shape(weights, start=0, end=3), [1], axis=0)
    own = op.GatherElements(weights, op.Expand(op.Max(places, 0), shape), axis=-1)
    out = op.Add(op.MatMul(op.Mul(own, there), op.Sub(near, far)), for_all)
    if added.mask is not None and added.sinks is None:
        assert seen is not None
        out = op.Mul(out, cast(op, keyed_onnx(op, seen, dtype), dtype))
    return op.Reshape(op.Transpose(out, perm=[0, 2, 1, 3]), [0, 0, -1])
