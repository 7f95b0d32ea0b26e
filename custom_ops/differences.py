"""Logits by the difference of consecutive positions, each computed once and laid out for all queries by a slide.

Query i of S has the index f + i among T keys, f = T - S, or write_indices[b] in shared buffers, so key j stands
a = j - i - f ahead of it. Numbers for the L differences a = 1 - S - f, 2 - S - f, ..., one column each, are laid out by
out[i, j] = numbers[j - i + S - 1]. The torch bodies look each one up. In ONNX, rows of L columns read as rows of L - 1
move by one from row to row (the shift of Transformer-XL: Dai et al. 2019, arXiv:1901.02860, appendix B): Reshape and
Slice, and no gather.

L is S + T: one column more than there are differences, so that L - 1 >= T for one query too. With `causal`, columns of
keys ahead are left out, L is T + 1, and what stands at hidden keys is any of the numbers: attention masks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import NUM_HEADS, REQUIRED, SCALE
from posexport.custom_ops.attention import Added, keys_onnx, weights_of, weights_onnx
from posexport.custom_ops.bias import fake_logits
from posexport.custom_ops.heads import CappedHeads, to_heads
from posexport.custom_ops.operator import Ops, cast, dtype_of, operator, wide
from posexport.custom_ops.visibility import keyed_onnx, lengths_onnx


def columns(queries: int, keys: int, causal: bool) -> int:
    """L: how many differences there are columns for."""
    return keys + 1 if causal else keys + queries


def ahead(
    queries: int, keys: int, causal: bool, device: torch.device | None = None, write_indices: Tensor | None = None
) -> Tensor:
    """p_j - p_i of each column, int64 [1, L], or [B, L] in shared buffers."""
    steps = torch.arange(columns(queries, keys, causal), device=device).unsqueeze(0)
    if write_indices is None:
        return steps - (keys - 1)
    return steps - (write_indices.unsqueeze(1) + (queries - 1))


def keys_of(queries: int, length: int, causal: bool) -> int:
    """T, of L columns."""
    return length - (1 if causal else queries)


def places_of(queries: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """The column of each query and key, [S, T]; that of the next key for all keys farther ahead, where causal."""
    steps = torch.arange(keys_of(queries, length, causal), device=device)
    by_query = torch.arange(queries, device=device).unsqueeze(1)
    return (steps - by_query + queries - 1).clamp(max=length - 1)


def slid_onnx(op: Ops, numbers: ir.Value, queries: ir.Value, causal: bool) -> ir.Value:
    """[B|1, N, S, L] with a number for each difference to [B|1, N, S, T]; `queries` is S, int64 [1]."""
    flat = op.Reshape(numbers, [0, 0, -1])
    moved = op.Slice(flat, op.Sub(queries, 1), [-1], [2])  # S (L - 1) of them
    rows = op.Reshape(moved, op.Concat([0, 0], queries, [-1], axis=0))
    if causal:
        return rows
    length = op.Shape(numbers, start=3, end=4)
    return op.Slice(rows, [0], op.Sub(length, queries), [3])


def laid_out(products: Tensor, causal: bool) -> Tensor:
    """[B, N, S, L] with a number for each difference to [B, N, S, T], each looked up; in the dtype of logits."""
    places = places_of(products.shape[2], products.shape[3], causal, products.device)
    made: Tensor = products.gather(-1, places.expand(*products.shape[:2], -1, -1))
    return made.to(wide(products.dtype))


def fake_by_difference(call: Any) -> Tensor:
    index, queries = getattr(call, "rows", None), call.q.shape[1]
    length, heads = (
        (call.ahead.shape[1], call.position_bias.shape[0]) if index is None else (index.shape[1], call.num_heads)
    )
    return fake_logits(call.q, keys_of(queries, length, call.causal), heads, call.q.dtype)


def _bias_fake(call: Any) -> Tensor:
    numbers: Tensor = call.numbers
    queries = call.q.shape[1]
    return numbers.new_empty((*numbers.shape[:2], queries, keys_of(queries, numbers.shape[3], call.causal)))


@operator("DifferenceBias", "bias", fake=_bias_fake)
def difference_bias(numbers: Tensor, q: Tensor, causal: bool = False) -> Tensor:
    """A bias by the difference of consecutive positions, laid out for all queries.

    Args:
        numbers: float32 [B|1, num_heads, 1, L], the bias of each difference, from the key farthest behind on.
        q: [B, S, D], of as many queries as there are rows.
        causal: whether L is T + 1, without keys ahead of their query, and not S + T.

    Returns:
        The bias, float32 [B|1, num_heads, S, T].

    Example:
        >>> difference_bias(torch.tensor([[[[-2.0, -1.0, 0.0, 1.0]]]]), torch.zeros(1, 2, 1))
        tensor([[[[-1.,  0.],
                  [-2., -1.]]]])
    """
    return numbers[:, :, 0, places_of(q.shape[1], numbers.shape[3], causal, numbers.device)]


@difference_bias.onnx
def _bias_onnx(op: Ops, numbers: ir.Value, q: ir.Value, causal: bool) -> ir.Value:
    queries = op.Shape(q, start=1, end=2)
    rows = op.Expand(numbers, op.Concat([1, 1], queries, [1], axis=0))
    return slid_onnx(op, rows, queries, causal)


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
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Sum over j of a_ij table[p_j - p_i] for consecutive positions, a the weights of `attend`, to whose result it is
    added.

    Args:
        q: [B, S, num_heads*head_dim].
        k: [B, T, num_kv_heads*head_dim] or [B, num_kv_heads, T, head_dim] of a cache, in q's dtype.
        bias: float32 [B|1, num_heads|1, S, T], added to the logits.
        mask: int64 [B, T], 0 for keys that are hidden, such as padding.
        sinks: [num_heads], one more logit per head, without a value.
        write_indices: int64 [B], where the new keys begin in each row of a buffer; None for a cache that grows.
        table: [B|1, L, head_dim], in q's dtype: a row for each difference, from the key farthest behind on, for all
            heads; L is S + T, or T + 1 where `causal`.
        num_heads, num_kv_heads, scale, causal, window, chunk, softcap: as in `attend`.

    Returns:
        A tensor like q.

    Example:
        >>> q, table = torch.zeros(1, 2, 1), torch.tensor([[[1.0], [2.0], [4.0], [0.0]]])
        >>> difference_values(q, q, table=table, num_heads=1)
        tensor([[[3.0000],
                 [1.5000]]])
    """
    heads, added = (
        CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap),
        Added(bias, mask, sinks),
    )
    weights, seen = weights_of(to_heads(q, num_heads), to_heads(k, num_kv_heads), added, heads, write_indices)
    out = weights.transpose(1, 2) @ table[:, places_of(q.shape[1], table.shape[1], causal, q.device)]
    if mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1).unsqueeze(-1).transpose(1, 2), 0.0)
    return out.flatten(2)


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
    lengths = lengths_onnx(op, q, k)
    weights, seen = weights_onnx(op, q, keys_onnx(op, q, k, heads), added, heads, lengths, write_indices)
    if added.sinks is not None:  # they are the first column
        weights = op.Slice(weights, [1], [2**31 - 1], [3])
    if added.mask is not None and added.sinks is None:  # before the slide, so that no row reaches into the next one
        assert seen is not None
        weights = op.Mul(weights, cast(op, keyed_onnx(op, seen, dtype_of(q)), dtype_of(q)))
    # the slide the other way round: rows of L - 1 read as rows of L
    queries = op.Shape(q, start=1, end=2)
    before = op.Sub(queries, 1)
    if not heads.causal:
        weights = op.Pad(weights, op.Concat([0], before, axis=0), None, [3])
    flat = op.Pad(op.Reshape(weights, [0, 0, -1]), op.Concat(before, [1], axis=0), None, [2])
    rows = op.Reshape(flat, op.Concat([0, 0], queries, [-1], axis=0))
    return op.Reshape(op.Transpose(op.MatMul(rows, op.Unsqueeze(table, [1])), perm=[0, 2, 1, 3]), [0, 0, -1])
