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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import NUM_HEADS, REQUIRED, SCALE
from posexport.custom_ops.attention import Added, keys_onnx, weights_of, weights_onnx
from posexport.custom_ops.bias import fake_logits
from posexport.custom_ops.heads import CappedHeads, heads_onnx, to_heads
from posexport.custom_ops.operator import (
    ORT_FORMS,
    Ops,
    T,
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
from posexport.custom_ops.relative import biased, biased_onnx, fake_score, picked
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


def _keys(queries: int, length: int, causal: bool) -> int:
    """T, of L columns."""
    return length - (1 if causal else queries)


def _places(queries: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """The column of each query and key, [S, T]; that of the next key for all keys farther ahead, where causal."""
    steps = torch.arange(_keys(queries, length, causal), device=device)
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


def _bias_fake(call: Any) -> Tensor:
    numbers: Tensor = call.numbers
    queries = call.q.shape[1]
    return numbers.new_empty((*numbers.shape[:2], queries, _keys(queries, numbers.shape[3], call.causal)))


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
    return numbers[:, :, 0, _places(q.shape[1], numbers.shape[3], causal, numbers.device)]


@difference_bias.onnx
def _bias_onnx(op: Ops, numbers: ir.Value, q: ir.Value, causal: bool) -> ir.Value:
    queries = op.Shape(q, start=1, end=2)
    rows = op.Expand(numbers, op.Concat([1, 1], queries, [1], axis=0))
    return slid_onnx(op, rows, queries, causal)


def _laid_out(products: Tensor, causal: bool) -> Tensor:
    """[B, N, S, L] with a number for each difference to [B, N, S, T], each looked up; in the dtype of logits."""
    places = _places(products.shape[2], products.shape[3], causal, products.device)
    made: Tensor = products.gather(-1, places.expand(*products.shape[:2], -1, -1))
    return made.to(wide(products.dtype))


def _score_fake(call: Any) -> Tensor:
    index, queries = getattr(call, "rows", None), call.q.shape[1]
    length, heads = (
        (call.ahead.shape[1], call.position_bias.shape[0]) if index is None else (index.shape[1], call.num_heads)
    )
    return fake_logits(call.q, _keys(queries, length, call.causal), heads, call.q.dtype)


FEW = 32
"""Queries up to which ONNX Runtime multiplies them with a table before its rows are laid out, and not afterwards."""


def of_few_onnx(
    op: Ops, ort: bool, queries: ir.Value, few: Callable[[Ops], ir.Value], many: Callable[[Ops], ir.Value], limit: int
) -> ir.Value:
    """What `few` gives for at most `limit` queries, on ONNX Runtime; else `many`: an If divides TensorRT's kernels."""
    return either_onnx(op, op.LessOrEqual(op.Squeeze(queries), limit), few, many) if ort else many(op)


@operator("DifferenceScore", "score", fake=_score_fake)
def difference_score(
    q: Tensor, table: Tensor, rows: Tensor, num_heads: int = REQUIRED, scale: float = SCALE, causal: bool = False
) -> Tensor:
    """scale * q_i . table[rows[p_j - p_i]] for consecutive positions.

    Args:
        q: [B, S, num_heads*head_dim].
        table: [num_heads|1, R, head_dim], in q's dtype, of each head or for all.
        rows: int64 [B|1, L], the row of the table for each difference, from the key farthest behind on.
        num_heads: of the queries.
        scale: of the logits, by default head_dim**-0.5.
        causal: whether L is T + 1, without keys ahead of their query, and not S + T.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> table, rows = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[0, 1, 2, 2]])
        >>> difference_score(torch.ones(1, 2, 1), table, rows, num_heads=1)
        tensor([[[[2., 3.],
                  [1., 2.]]]])
    """
    products = to_heads(q, num_heads) * scale @ table.transpose(1, 2)  # [B, N, S, R]
    index = rows[:, _places(q.shape[1], rows.shape[1], causal, q.device)].expand(q.shape[0], -1, -1)
    return picked(products, index).to(wide(q.dtype))


def _score_onnx(
    op: Ops,
    q: ir.Value,
    table: ir.Value,
    rows: ir.Value,
    num_heads: int,
    scale: float,
    causal: bool,
    ort: bool = False,
) -> ir.Value:
    queries, factor = op.Shape(q, start=1, end=2), constant(op, scale, dtype_of(q))
    heads = op.Mul(heads_onnx(op, q, num_heads), factor)

    def few(op: Ops) -> ir.Value:
        products = op.MatMul(heads, _turned(op, op.Unsqueeze(table, [0])))
        shape = op.Concat([1, num_heads], queries, [1], axis=0)
        return op.GatherElements(products, _rows_like(op, rows, products, shape), axis=-1)

    def many(op: Ops) -> ir.Value:
        return op.MatMul(heads, _turned(op, rows_of_onnx(op, table, rows)))

    products = of_few_onnx(op, ort, queries, few, many, FEW)
    return cast(op, slid_onnx(op, products, queries, causal), ir.DataType.FLOAT)


difference_score.onnx(_score_onnx)
difference_score.form(*ORT_FORMS)(partial(_score_onnx, ort=True))


def _rows_like(op: Ops, rows: ir.Value, products: ir.Value, shape: ir.Value) -> ir.Value:
    """Indices [B|1, L] as [B, N, S, L]; `shape` is [1, N, S, 1]."""
    batch = op.Concat(op.Shape(products, start=0, end=1), [1, 1, 1], axis=0)
    return op.Expand(op.Unsqueeze(rows, [1, 2]), op.Max(shape, batch))


def rows_of_onnx(op: Ops, table: ir.Value, rows: ir.Value) -> ir.Value:
    """Rows [B|1, ...] of a table [N|1, R, head_dim], [B|1, N|1, ..., head_dim]."""
    num_heads, count = shape_of(table)[0], op.Shape(table, start=1, end=2)
    if num_heads == 1:
        return op.Unsqueeze(op.Gather(op.Squeeze(table, [0]), rows, axis=0), [1])
    # one gather for all heads, in the order of its result: a transpose would move all of it
    begins = op.Reshape(op.Mul(op.Range(0, num_heads, 1), count), [1, -1, *[1] * (rank_of(rows) - 1)])
    return op.Gather(op.Reshape(table, [-1, size_of(table, 2)]), op.Add(op.Unsqueeze(rows, [1]), begins), axis=0)


def _turned(op: Ops, table: ir.Value) -> ir.Value:
    """[..., L, head_dim] to [..., head_dim, L], of rank 4: of rank 3, ONNX Runtime 1.31 crashes on it in fp16."""
    return op.Transpose(table, perm=[0, 1, 3, 2])


def behind(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """p_i - p_j of each entry of the `rows` of `difference_key_score`, int64 [S + T]."""
    return torch.arange(keys + queries, device=device) - (queries - 1)


@operator("DifferenceKeyScore", "score", fake=lambda call: fake_score(call, call.k, call.num_heads))
def difference_key_score(
    k: Tensor,
    q: Tensor,
    table: Tensor,
    rows: Tensor,
    write_indices: Tensor | None = None,
    num_heads: int = REQUIRED,
    scale: float = SCALE,
    causal: bool = False,
) -> Tensor:
    """scale * k_j . table[rows[p_i - p_j]] for consecutive positions.

    In ONNX, keys are taken in blocks of as many as there are queries, so that each meets about as many differences.

    Args:
        k: [B, T, num_heads*head_dim] or [B, num_heads, T, head_dim] of a cache.
        q: [B, S, num_heads*head_dim], of as many queries as there are rows.
        table: [num_heads, R, head_dim], in k's dtype.
        rows: int64 [L], the row of the table for each difference, from the key farthest ahead on; L is S + T.
        write_indices: int64 [B], where the new keys begin in each row of a buffer; None for a cache that grows.
        num_heads: of the keys.
        scale: of the logits, by default head_dim**-0.5.
        causal: whether what stands at keys ahead of their query doesn't matter.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> k, table, rows = torch.ones(1, 2, 1), torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([0, 1, 2, 2])
        >>> difference_key_score(k, k, table, rows, num_heads=1)
        tensor([[[[2., 1.],
                  [3., 2.]]]])
    """
    heads, queries = to_heads(k, num_heads), q.shape[1]
    keys = heads.shape[2]
    steps = torch.arange(queries, device=q.device).unsqueeze(1)
    first = keys - queries if write_indices is None else write_indices[:, None, None]
    places = first + steps - torch.arange(keys, device=q.device) + (queries - 1)
    index = rows[places.clamp(0, rows.shape[0] - 1)].expand(q.shape[0], queries, keys)
    products = heads * scale @ table.transpose(1, 2)  # [B, N, T, R]
    return picked(products, index.transpose(1, 2)).transpose(2, 3).to(wide(q.dtype))


def _key_score_onnx(
    op: Ops,
    k: ir.Value,
    q: ir.Value,
    table: ir.Value,
    rows: ir.Value,
    write_indices: ir.Value | None,
    num_heads: int,
    scale: float,
    causal: bool,
    ort: bool = False,
) -> ir.Value:
    queries, factor = op.Shape(q, start=1, end=2), constant(op, scale, dtype_of(k))
    heads = k if rank_of(k) == 4 else heads_onnx(op, k, num_heads)
    if causal and rank_of(k) == 3:
        return cast(op, _own_keys_onnx(op, heads, table, rows, queries, factor), ir.DataType.FLOAT)
    keys = op.Shape(heads, start=2, end=3)
    first = op.Sub(keys, queries) if write_indices is None else write_indices
    first = op.Unsqueeze(first, [1])

    def rows_at(op: Ops, distances: ir.Value) -> ir.Value:
        """The rows for distances [B|1, ...], [B|1, N, ..., head_dim]."""
        last = op.Sub(op.Add(keys, queries), 1)
        places = op.Min(op.Max(op.Add(distances, op.Sub(queries, 1)), 0), last)
        return rows_of_onnx(op, table, op.Gather(rows, places))

    def one(op: Ops) -> ir.Value:
        taken = rows_at(op, op.Sub(first, op.Range(0, op.Squeeze(keys), 1)))
        score = op.ReduceSum(op.Mul(heads, taken), [-1], keepdims=0)
        return op.Unsqueeze(op.Mul(score, factor), [2])

    def many(op: Ops) -> ir.Value:
        blocks = op.Div(op.Sub(op.Add(keys, queries), 1), queries)
        spare = op.Sub(op.Mul(blocks, queries), keys)
        padded = op.Pad(heads, op.Concat([0], spare, axis=0), None, [2])
        padded = op.Reshape(padded, op.Concat([0, 0], blocks, queries, [size_of(q, -1) // num_heads], axis=0))
        # the key at t of the block from b on and query i are f + i - b - t apart: row t of a block moves left by t
        begins = op.Sub(first, op.Mul(op.Range(1, op.Add(op.Squeeze(blocks), 1), 1), queries))
        width = op.Range(1, op.Add(op.Squeeze(op.Mul(queries, 2)), 1), 1)
        taken = rows_at(op, op.Add(op.Unsqueeze(begins, [-1]), width))  # [B|1, N, blocks, 2 S, head_dim]
        products = op.Mul(op.MatMul(padded, op.Transpose(taken, perm=[0, 1, 2, 4, 3])), factor)
        moved = op.Slice(op.Reshape(products, [0, 0, 0, -1]), op.Sub(queries, 1), [-1], [3])
        slid = op.Slice(op.Reshape(moved, op.Concat([0, 0, 0], queries, [-1], axis=0)), [0], queries, [4])
        by_query = op.Transpose(slid, perm=[0, 1, 4, 2, 3])
        return op.Slice(op.Reshape(by_query, op.Concat([0, 0], queries, [-1], axis=0)), [0], keys, [3])

    return cast(op, of_few_onnx(op, ort, queries, one, many, 1), ir.DataType.FLOAT)


difference_key_score.onnx(_key_score_onnx)
difference_key_score.form(*ORT_FORMS)(partial(_key_score_onnx, ort=True))


def _own_keys_onnx(
    op: Ops, heads: ir.Value, table: ir.Value, rows: ir.Value, queries: ir.Value, factor: ir.Value
) -> ir.Value:
    """The score of keys [B, N, S, head_dim] that are those of the queries, for queries behind them only.

    Key j and query i are i - j apart: rows of S + 1 columns, of the differences from 0 on, read as rows of S."""
    ahead = op.Unsqueeze(op.Slice(rows, op.Sub(queries, 1), [2**31 - 1], [0]), [0])
    products = op.MatMul(heads, _turned(op, rows_of_onnx(op, table, ahead)))
    flat = op.Reshape(op.Mul(products, factor), [0, 0, -1])
    slid = op.Reshape(op.Slice(flat, [0], op.Mul(queries, queries), [2]), op.Concat([0, 0], queries, [-1], axis=0))
    return op.Transpose(slid, perm=[0, 1, 3, 2])


FINE = 128
"""Differences that share a coarse angle."""


def coarse_and_fine(ahead: Tensor) -> tuple[Tensor, Tensor]:
    """Positions whose angles `difference_relative_score` adds, int64 [B|1, R] and [1, FINE]: the p_i - p_j of columns
    0, FINE, 2 FINE, ..., and what the columns after each are less, of `ahead` [B|1, L]."""
    blocks = (ahead.shape[1] + FINE - 1) // FINE
    coarse = -ahead[:, :1] - FINE * torch.arange(blocks, device=ahead.device)
    return coarse, torch.arange(FINE, device=ahead.device).unsqueeze(0)


@dataclass(frozen=True)
class Turns(Generic[T]):
    """Cosines and sines of coarse and fine positions."""

    coarse_cos: T
    coarse_sin: T
    fine_cos: T
    fine_sin: T


@operator("DifferenceRelativeScore", "score", fake=_score_fake)
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
    """scale * (q_i + v) . W_r R(p_i - p_j), R sinusoidal, v = position_bias, for consecutive positions: terms (b) + (d)
    of Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section 3.3), with the shift of its appendix B.

    The angle of column 128 r + f is coarse angle r minus fine angle f, so that few cosines are computed.

    Args:
        q: [B, S, num_heads*head_dim].
        ahead: int64 [B|1, L], p_j - p_i of each column, from the key farthest behind on; only its size is read.
        coarse_cos, coarse_sin: float32 [B|1, R, P], of p_i - p_j in every 128th column; R is L / 128, rounded up.
        fine_cos, fine_sin: float32 [1, F, P], of 0 to F - 1, F is 128.
        position_bias: [num_heads, head_dim], in q's dtype.
        r_proj: [num_heads*head_dim, 2*P], in q's dtype: W_r.
        scale: of the logits, by default head_dim**-0.5.
        causal: whether L is T + 1, without keys ahead of their query, and not S + T.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> one, ahead = torch.tensor([1.0]), torch.tensor([[-1, 0, 1, 2]])
        >>> coarse, fine = sinusoids(torch.tensor([[1]]), one), sinusoids(torch.arange(128)[None], one)
        >>> q, v, w = torch.ones(1, 2, 1), torch.zeros(1, 1), torch.tensor([[0.0, 1.0]])
        >>> difference_relative_score(q, ahead, *coarse, *fine, v, w)
        tensor([[[[1.0000, 0.5403],
                  [0.5403, 1.0000]]]])
    """
    cos_r, sin_r, cos_f, sin_f = coarse_cos.unsqueeze(2), coarse_sin.unsqueeze(2), fine_cos, fine_sin
    sides = (sin_r * cos_f - cos_r * sin_f, cos_r * cos_f + sin_r * sin_f)
    rows = torch.cat(sides, -1).flatten(1, 2)[:, : ahead.shape[1]].to(q.dtype)  # [B|1, L, 2*P]
    table = rows.unsqueeze(1) @ r_proj.unflatten(0, position_bias.shape).transpose(1, 2)
    return _laid_out(biased(q, position_bias, scale) @ table.transpose(2, 3), causal)


def _table_onnx(
    op: Ops, turns: Turns[ir.Value], length: ir.Value, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """sin and cos of all columns, each [B|1, P, L]."""
    cos_r, sin_r = (op.Unsqueeze(side, [2]) for side in (turns.coarse_cos, turns.coarse_sin))

    def side(name: str, first: tuple[ir.Value, ir.Value], second: tuple[ir.Value, ir.Value]) -> ir.Value:
        angles = getattr(op, name)(op.Mul(*first), op.Mul(*second))  # [B|1, R, FINE, P]
        rows = op.Slice(op.Reshape(angles, [0, -1, size_of(turns.fine_cos, 2)]), [0], length, [1])
        return op.Transpose(cast(op, rows, dtype), perm=[0, 2, 1])

    cos_f, sin_f = turns.fine_cos, turns.fine_sin
    return side("Sub", (sin_r, cos_f), (cos_r, sin_f)), side("Add", (cos_r, cos_f), (sin_r, sin_f))


def _of_many_onnx(
    op: Ops, heads: ir.Value, turns: Turns[ir.Value], length: ir.Value, r_proj: ir.Value, shape: list[int]
) -> ir.Value:
    """W_r R of all differences, and then its product with the queries `heads`: [B, N, S, L]."""
    halves = op.Split(r_proj, num_outputs=2, axis=-1, _outputs=2)
    sides = _table_onnx(op, turns, length, dtype_of(heads))
    table = op.Add(*(op.MatMul(half, side) for half, side in zip(halves, sides, strict=True)))
    return op.MatMul(heads, op.Reshape(table, [0, *shape]))


def _of_few_onnx(
    op: Ops, heads: ir.Value, turns: Turns[ir.Value], length: ir.Value, r_proj: ir.Value, shape: list[int]
) -> ir.Value:
    """Queries times W_r, turned by the coarse angles and then multiplied with the fine ones: [B, N, S, L].

    With s sin(c - f) + o cos(c - f) = (s sin c + o cos c) cos f + (o sin c - s cos c) sin f, in fp32."""
    products = cast(op, op.MatMul(heads, op.Reshape(r_proj, shape)), ir.DataType.FLOAT)
    s, o = op.Split(op.Unsqueeze(products, [3]), num_outputs=2, axis=-1, _outputs=2)  # [B, N, S, 1, P]
    cos_c, sin_c = (op.Unsqueeze(side, [1, 2]) for side in (turns.coarse_cos, turns.coarse_sin))
    by_cos = op.Add(op.Mul(s, sin_c), op.Mul(o, cos_c))
    by_sin = op.Sub(op.Mul(o, sin_c), op.Mul(s, cos_c))
    fine = (op.Transpose(op.Squeeze(side, [0]), perm=[1, 0]) for side in (turns.fine_cos, turns.fine_sin))
    scores = op.Add(*(op.MatMul(one, other) for one, other in zip((by_cos, by_sin), fine, strict=True)))
    scores = op.Slice(op.Reshape(scores, [0, 0, 0, -1]), [0], length, [3])
    return cast(op, scores, dtype_of(heads))


def _relative_onnx(
    op: Ops,
    q: ir.Value,
    ahead: ir.Value,
    turns: Turns[ir.Value],
    position_bias: ir.Value,
    r_proj: ir.Value,
    scale: float,
    causal: bool,
    ort: bool = False,
) -> ir.Value:
    heads, shape = biased_onnx(op, q, position_bias, scale), [*shape_of(position_bias), -1]
    queries, length = op.Shape(q, start=1, end=2), op.Shape(ahead, start=1, end=2)

    def many(op: Ops) -> ir.Value:
        return _of_many_onnx(op, heads, turns, length, r_proj, shape)

    def few(op: Ops) -> ir.Value:
        return _of_few_onnx(op, heads, turns, length, r_proj, shape)

    products = of_few_onnx(op, ort, queries, few, many, FEW)
    return cast(op, slid_onnx(op, products, queries, causal), ir.DataType.FLOAT)


difference_relative_score.onnx(_relative_onnx)
difference_relative_score.form(*ORT_FORMS)(partial(_relative_onnx, ort=True))


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
    out = weights.transpose(1, 2) @ table[:, _places(q.shape[1], table.shape[1], causal, q.device)]
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
