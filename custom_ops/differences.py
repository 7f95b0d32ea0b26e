"""Logits by the difference of consecutive positions, each computed once and laid out for all queries by a slide.

Query i of S has the index i + T - S among T keys, so key j stands a = j - i - (T - S) ahead of it. Numbers for the L
differences a = -(T - 1), ..., one column each, are laid out by out[i, j] = numbers[j - i + S - 1]. The torch bodies
look each one up. In ONNX, rows of L columns read as rows of L - 1 move by one from row to row (the shift of
Transformer-XL: Dai et al. 2019, arXiv:1901.02860, appendix B): Reshape and Slice, and no gather.

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
from posexport.custom_ops.heads import CappedHeads, heads_onnx, to_heads
from posexport.custom_ops.operator import (
    Ops,
    cast,
    constant,
    dtype_of,
    either_onnx,
    operator,
    rank_of,
    shape_of,
    size_of,
    wide,
)
from posexport.custom_ops.relative import biased, biased_onnx, fake_score
from posexport.custom_ops.visibility import keyed_onnx, lengths_onnx


def columns(queries: int, keys: int, causal: bool) -> int:
    """L: how many differences there are columns for."""
    return keys + 1 if causal else keys + queries


def ahead(queries: int, keys: int, causal: bool, device: torch.device | None = None) -> Tensor:
    """p_j - p_i of each column, int64 [L]."""
    return torch.arange(columns(queries, keys, causal), device=device) - (keys - 1)


def _keys(queries: int, length: int, causal: bool) -> int:
    """T, of L columns."""
    return length - (1 if causal else queries)


def _places(queries: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """The column of each query and key, [S, T]; that of the next key for all keys farther ahead, where causal."""
    steps = torch.arange(_keys(queries, length, causal), device=device)
    by_query = torch.arange(queries, device=device).unsqueeze(1)
    return (steps - by_query + queries - 1).clamp(max=length - 1)


def slid_onnx(op: Ops, numbers: ir.Value, queries: ir.Value, causal: bool) -> ir.Value:
    """[A, N, S, L] with a number for each difference to [A, N, S, T]; `queries` is S, int64 [1]."""
    flat = op.Reshape(numbers, [0, 0, -1])
    moved = op.Slice(flat, op.Sub(queries, 1), [-1], [2])  # S (L - 1) of them
    rows = op.Reshape(moved, op.Concat([0, 0], queries, [-1], axis=0))
    if causal:
        return rows
    length = op.Shape(numbers, start=3, end=4)
    return op.Slice(rows, [0], op.Sub(length, queries), [3])


def _bias_fake(call: Any) -> Tensor:
    numbers: Tensor = call.numbers
    queries = call.q.shape[1]
    return numbers.new_empty((1, numbers.shape[1], queries, _keys(queries, numbers.shape[3], call.causal)))


@operator("DifferenceBias", "bias", fake=_bias_fake)
def difference_bias(numbers: Tensor, q: Tensor, causal: bool = False) -> Tensor:
    """A bias by the difference of consecutive positions, laid out for all queries.

    Args:
        numbers: float32 [1, num_heads, 1, L], the bias of each difference, from the key farthest behind on.
        q: [B, S, D], of as many queries as there are rows.
        causal: whether L is T + 1, without keys ahead of their query, and not S + T.

    Returns:
        The bias, float32 [1, num_heads, S, T].

    Example:
        >>> difference_bias(torch.tensor([[[[-2.0, -1.0, 0.0, 1.0]]]]), torch.zeros(1, 2, 1))
        tensor([[[[-1.,  0.],
                  [-2., -1.]]]])
    """
    return numbers[:, :, 0, _places(q.shape[1], numbers.shape[3], causal, numbers.device)]


@difference_bias.onnx
def _bias_onnx(op: Ops, numbers: ir.Value, q: ir.Value, causal: bool) -> ir.Value:
    queries = op.Shape(q, start=1, end=2)
    rows = op.Expand(numbers, op.Concat([1, 1], queries, [1], axis=0))
    return slid_onnx(op, rows, queries, causal)


def _picked(products: Tensor, causal: bool) -> Tensor:
    """[B, N, S, L] with a number for each difference to [B, N, S, T], each looked up; in the dtype of logits."""
    places = _places(products.shape[2], products.shape[3], causal, products.device)
    picked: Tensor = products.gather(-1, places.expand(*products.shape[:2], -1, -1))
    return picked.to(wide(products.dtype))


def _score_fake(call: Any) -> Tensor:
    table, queries = getattr(call, "table", None), call.q.shape[1]
    length, heads = (
        (call.cos.shape[1], call.position_bias.shape[0]) if table is None else (table.shape[1], call.num_heads)
    )
    return fake_logits(call.q, _keys(queries, length, call.causal), heads, call.q.dtype)


@operator("DifferenceScore", "score", fake=_score_fake)
def difference_score(
    q: Tensor, table: Tensor, num_heads: int = REQUIRED, scale: float = SCALE, causal: bool = False
) -> Tensor:
    """scale * q_i . table[p_j - p_i] for consecutive positions.

    Args:
        q: [B, S, num_heads*head_dim].
        table: [num_heads|1, L, head_dim], in q's dtype: a row for each difference, from the key farthest behind on, for
            each head or for all.
        num_heads: of the queries.
        scale: of the logits, by default head_dim**-0.5.
        causal: whether L is T + 1, without keys ahead of their query, and not S + T.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> table = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
        >>> difference_score(torch.ones(1, 2, 1), table, num_heads=1)
        tensor([[[[2., 3.],
                  [1., 2.]]]])
    """
    return _picked(to_heads(q, num_heads) * scale @ table.transpose(1, 2), causal)


@difference_score.onnx
def _score_onnx(op: Ops, q: ir.Value, table: ir.Value, num_heads: int, scale: float, causal: bool) -> ir.Value:
    heads = op.Mul(heads_onnx(op, q, num_heads), constant(op, scale, dtype_of(q)))
    products = op.MatMul(heads, _turned(op, op.Unsqueeze(table, [0])))
    return cast(op, slid_onnx(op, products, op.Shape(q, start=1, end=2), causal), ir.DataType.FLOAT)


def _turned(op: Ops, table: ir.Value) -> ir.Value:
    """[..., L, head_dim] to [..., head_dim, L], of rank 4: of rank 3, ONNX Runtime 1.31 crashes on it in fp16."""
    return op.Transpose(table, perm=[0, 1, 3, 2])


def behind(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """p_i - p_j of each row of the table of `difference_key_score`, int64 [S + T]."""
    return torch.arange(keys + queries, device=device) - (queries - 1)


@operator("DifferenceKeyScore", "score", fake=lambda call: fake_score(call, call.k, call.num_heads))
def difference_key_score(
    k: Tensor, q: Tensor, table: Tensor, num_heads: int = REQUIRED, scale: float = SCALE
) -> Tensor:
    """scale * k_j . table[p_i - p_j] for consecutive positions.

    In ONNX, keys are taken in blocks of S, so that each meets about as many differences as there are queries.

    Args:
        k: [B, T, num_heads*head_dim] or [B, num_heads, T, head_dim] of a cache.
        q: [B, S, num_heads*head_dim], of as many queries as there are rows.
        table: [num_heads, L, head_dim], in k's dtype: a row for each difference, from the key farthest ahead on; L is
            S + T.
        num_heads: of the keys.
        scale: of the logits, by default head_dim**-0.5.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> k, table = torch.ones(1, 2, 1), torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
        >>> difference_key_score(k, k, table, num_heads=1)
        tensor([[[[2., 1.],
                  [3., 2.]]]])
    """
    heads, queries = to_heads(k, num_heads), q.shape[1]
    keys = heads.shape[2]
    steps = torch.arange(queries, device=q.device).unsqueeze(1)
    places = steps - torch.arange(keys, device=q.device) + (keys - 1)
    products = heads * scale @ table.transpose(1, 2)  # [B, N, T, L]
    picked = products.transpose(2, 3).gather(2, places.expand(*heads.shape[:2], -1, -1))
    return picked.to(wide(q.dtype))


@difference_key_score.onnx
def _key_score_onnx(op: Ops, k: ir.Value, q: ir.Value, table: ir.Value, num_heads: int, scale: float) -> ir.Value:
    heads = k if rank_of(k) == 4 else heads_onnx(op, k, num_heads)
    queries, keys = op.Shape(q, start=1, end=2), op.Shape(k, start=rank_of(k) - 2, end=rank_of(k) - 1)
    blocks = op.Div(op.Sub(op.Add(keys, queries), 1), queries)
    spare = op.Sub(op.Mul(blocks, queries), keys)
    heads = op.Mul(op.Pad(heads, op.Concat([0], spare, axis=0), None, [2]), constant(op, scale, dtype_of(k)))
    heads = op.Reshape(heads, op.Concat([0, 0], blocks, queries, [size_of(q, -1) // num_heads], axis=0))
    # the key of a block at b S meets the differences of the table's rows T - S - b S to T + S - 1 - b S
    firsts = op.Sub(op.Sub(keys, queries), op.Mul(op.Range(0, op.Squeeze(blocks), 1), queries))
    wide_rows = op.Range(0, op.Squeeze(op.Mul(queries, 2)), 1)
    rows = op.Gather(table, op.Max(op.Add(op.Unsqueeze(firsts, [1]), wide_rows), 0), axis=1)
    products = op.MatMul(heads, _turned(op, rows))  # [B, N, blocks, S keys, 2 S]
    moved = op.Slice(op.Reshape(products, [0, 0, 0, -1]), op.Sub(queries, 1), [-1], [3])
    slid = op.Slice(op.Reshape(moved, op.Concat([0, 0, 0], queries, [-1], axis=0)), [0], queries, [4])
    by_query = op.Reshape(op.Transpose(slid, perm=[0, 1, 4, 2, 3]), op.Concat([0, 0], queries, [-1], axis=0))
    return cast(op, op.Slice(by_query, [0], keys, [3]), ir.DataType.FLOAT)


FEW = 32
"""Queries up to which `difference_relative_score` multiplies W_r with them, and not with the vectors of all
differences."""


@operator("DifferenceRelativeScore", "score", fake=_score_fake)
def difference_relative_score(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_bias: Tensor,
    r_proj: Tensor,
    scale: float = SCALE,
    causal: bool = False,
) -> Tensor:
    """scale * (q_i + v) . W_r R(p_i - p_j), R sinusoidal, v = position_bias, for consecutive positions: terms (b) + (d)
    of Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section 3.3), with the shift of its appendix B.

    Args:
        q: [B, S, num_heads*head_dim].
        cos, sin: float32 [1, L, P], of p_i - p_j, from the key farthest behind on.
        position_bias: [num_heads, head_dim], in q's dtype.
        r_proj: [num_heads*head_dim, 2*P], in q's dtype: W_r.
        scale: of the logits, by default head_dim**-0.5.
        causal: whether L is T + 1, without keys ahead of their query, and not S + T.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> cos, sin = sinusoids(torch.tensor([[1, 0, -1, -2]]), torch.tensor([1.0]))
        >>> q, v, w = torch.ones(1, 2, 1), torch.zeros(1, 1), torch.tensor([[0.0, 1.0]])
        >>> difference_relative_score(q, cos, sin, v, w)
        tensor([[[[1.0000, 0.5403],
                  [0.5403, 1.0000]]]])
    """
    rows = torch.cat((sin, cos), -1)[0].to(q.dtype)
    table = (r_proj @ rows.T).unflatten(0, position_bias.shape)
    return _picked(biased(q, position_bias, scale) @ table, causal)


def _relative_onnx(
    op: Ops,
    q: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    position_bias: ir.Value,
    r_proj: ir.Value,
    scale: float,
    causal: bool,
) -> ir.Value:
    heads, shape = biased_onnx(op, q, position_bias, scale), [*shape_of(position_bias), -1]
    # features before rows: a transpose here crashes ONNX Runtime 1.31 in fp16
    sides = [op.Transpose(op.Squeeze(cast(op, side, dtype_of(q)), [0]), perm=[1, 0]) for side in (sin, cos)]
    queries = op.Shape(q, start=1, end=2)

    def of_many(op: Ops) -> ir.Value:
        halves = op.Split(r_proj, num_outputs=2, axis=-1, _outputs=2)
        table = op.Add(*(op.MatMul(half, side) for half, side in zip(halves, sides, strict=True)))
        return op.MatMul(heads, op.Reshape(table, shape))

    def of_few(op: Ops) -> ir.Value:
        halves = op.Split(op.MatMul(heads, op.Reshape(r_proj, shape)), num_outputs=2, axis=-1, _outputs=2)
        return op.Add(*(op.MatMul(half, side) for half, side in zip(halves, sides, strict=True)))

    products = either_onnx(op, op.LessOrEqual(op.Squeeze(queries), FEW), of_few, of_many)
    return cast(op, slid_onnx(op, products, queries, causal), ir.DataType.FLOAT)


difference_relative_score.onnx(_relative_onnx)


@operator("DifferenceValues", "added", fake=lambda call: torch.empty_like(call.q))
def difference_values(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
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
        table: [L, head_dim], in q's dtype: a row for each difference, from the key farthest behind on, for all heads; L
            is S + T, or T + 1 where `causal`.
        num_heads, num_kv_heads, scale, causal, window, chunk, softcap: as in `attend`.

    Returns:
        A tensor like q.

    Example:
        >>> q, table = torch.zeros(1, 2, 1), torch.tensor([[1.0], [2.0], [4.0], [0.0]])
        >>> difference_values(q, q, table=table, num_heads=1)
        tensor([[[3.0000],
                 [1.5000]]])
    """
    heads, added = (
        CappedHeads(num_heads, num_kv_heads, scale, causal, window, chunk, softcap),
        Added(bias, mask, sinks),
    )
    weights, seen = weights_of(to_heads(q, num_heads), to_heads(k, num_kv_heads), added, heads, None)
    out = weights.transpose(1, 2) @ table[_places(q.shape[1], table.shape[0], causal, q.device)]
    if mask is not None and seen is not None:
        out = out.masked_fill(~seen.any(-1).unsqueeze(-1).transpose(1, 2), 0.0)
    return out.flatten(2)


@difference_values.onnx
def _values_onnx(
    op: Ops, q: ir.Value, k: ir.Value, added: Added[ir.Value], table: ir.Value, heads: CappedHeads
) -> ir.Value:
    lengths = lengths_onnx(op, q, k)
    weights, seen = weights_onnx(op, q, keys_onnx(op, q, k, heads), added, heads, lengths, None)
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
    return op.Reshape(op.Transpose(op.MatMul(rows, table), perm=[0, 2, 1, 3]), [0, 0, -1])
