"""Logits that depend on the difference of consecutive positions. Each is computed once and laid out by a slide.

Query i of S has the index f + i among T keys. f = T - S, or write_indices[b] in shared buffers. Key j is a = j - i - f
ahead of the query. There is one column of numbers for each of the L differences a = -S - f, 1 - S - f, ... They are
laid out by out[i, j] = numbers[j - i + S].

The torch bodies look up each number. In ONNX no number is looked up. Rows of L columns are read as rows of L - 1
columns, so that they move by one from row to row (the shift of Transformer-XL: Dai et al. 2019, arXiv:1901.02860,
appendix B). The first S of the S L numbers are left out.

L is S + T, one more than the number of differences. Then L - 1 >= T for one query too, and as many numbers are left out
as there are queries. With `causal`, L is T + 1, without the columns of keys ahead. Hidden keys then get arbitrary
numbers, because attention masks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.bias import fake_logits
from posexport.custom_ops.by_head import ByHead, Make, Parts, Span, add_by_head, slice_onnx
from posexport.custom_ops.operator import Ops, cast, constant, operator, size_of, wide


def columns(queries: int, keys: int, causal: bool) -> int:
    """Return L, the number of columns."""
    return keys + 1 if causal else keys + queries


def ahead(
    queries: int, keys: int, causal: bool, device: torch.device | None = None, write_indices: Tensor | None = None
) -> Tensor:
    """Return p_j - p_i of each column, int64 [1, L], or [B, L] in shared buffers."""
    steps = torch.arange(columns(queries, keys, causal), device=device).unsqueeze(0)
    if write_indices is None:
        return steps - keys
    return steps - (write_indices.unsqueeze(1) + queries)


def keys_of(queries: int, length: int, causal: bool) -> int:
    """Return T for L columns."""
    return length - (1 if causal else queries)


def places_of(queries: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """Return the column of each query and key, [S, T].

    With causal, all keys farther ahead have the column of the next key.
    """
    steps = torch.arange(keys_of(queries, length, causal), device=device)
    by_query = torch.arange(queries, device=device).unsqueeze(1)
    return (steps - by_query + queries).clamp(max=length - 1)


def slid(
    like: ir.Value, queries: ir.Value, causal: bool, few: Callable[[Ops], ir.Value], parts: Parts, many: Make, ort: bool
) -> ByHead:
    """Return float32 [B|1, N, S, T] from [B|1, N, S, L] with one number for each difference.

    `many` computes these numbers from the parts. On ONNX Runtime, `few` computes those of a few queries. `like` is
    [B|1, N, ...], `queries` is S, int64 [1].
    """

    def slide(op: Ops, moved: ir.Value, count: int) -> ir.Value:
        rows = op.Reshape(moved, op.Concat([0, count], queries, [-1], axis=0))
        if not causal:
            length = op.Shape(rows, start=3, end=4)
            rows = op.Slice(rows, [0], op.Sub(op.Add(length, 1), queries), [3])
        return cast(op, rows, ir.DataType.FLOAT)

    def of_few(op: Ops) -> ir.Value:
        numbers = op.Reshape(few(op), [0, 0, 1, -1])
        return slide(op, op.Slice(numbers, queries, [2**63 - 1], [3]), size_of(like, 1))

    def make(op: Ops, count: int, *parts: ir.Value) -> ir.Value:
        numbers = many(op, *parts)
        if ort:
            moved = blocks_onnx(op, numbers, queries, (1, op.Shape(numbers, start=3, end=4)))
        else:
            moved = op.Slice(op.Reshape(numbers, [0, 0, -1]), queries, [2**63 - 1], [2])
        return slide(op, moved, count)

    return ByHead(like, queries, parts, make, of_few)


def blocks_onnx(op: Ops, numbers: ir.Value, size: ir.Value, part: tuple[Any, Any]) -> ir.Value:
    """Return some blocks of `size` numbers of [B|1, N, ...]: [B|1, N, part, size]. All numbers are int64 [1].

    `part` gives the first block and the block after the last. Uses Gather, because ONNX Runtime's Slice has one thread.
    """
    blocks, (first, end) = op.Reshape(numbers, op.Concat([0, 0, -1], size, axis=0)), part
    # The range starts one later, and 1 is subtracted. ONNX Runtime turns a Gather with a Range into a Slice.
    rows = op.Sub(op.Range(op.Add(first, 1), op.Add(op.Squeeze(end), 1), 1), 1)
    return op.Gather(blocks, rows, axis=2)


def columns_onnx(op: Ops, numbers: ir.Value, queries: ir.Value, span: Span) -> ir.Value:
    """Return the columns of a span from [..., L] with one number for each difference, with causal."""
    behind = op.Sub(op.Squeeze(queries), op.Add(span.first, span.count))
    return slice_onnx(op, numbers, op.Add(behind, span.start), op.Add(op.Add(behind, span.end), 1), 3)


def laid_out(products: Tensor, causal: bool) -> Tensor:
    """Look up [B, N, S, T] from [B, N, S, L] with one number for each difference, in the dtype of logits."""
    places = places_of(products.shape[2], products.shape[3], causal, products.device)
    made: Tensor = products.gather(-1, places.expand(*products.shape[:2], -1, -1))
    return made.to(wide(products.dtype))


def fake_laid_out(call: Any, length: int, heads: int) -> Tensor:
    """Return an empty tensor with the shape of a score of `length` columns."""
    return fake_logits(call.q, keys_of(call.q.shape[1], length, call.causal), heads, call.q.dtype)


def _bias_fake(call: Any) -> Tensor:
    numbers: Tensor = call.numbers
    queries = call.tokens.shape[1]
    return numbers.new_empty((*numbers.shape[:2], queries, keys_of(queries, numbers.shape[3], call.causal)))


@operator("DifferenceBias", "bias", fake=_bias_fake)
def difference_bias(numbers: Tensor, tokens: Tensor, causal: bool = False) -> Tensor:
    """A bias that depends on the difference of consecutive positions, laid out for all queries.

    Args:
        numbers: float32 [B|1, num_heads, 1, L], the bias of each difference, starting with the farthest key.
        tokens: [B, S, D], of which only the number of tokens S is used.
        causal: whether differences of keys ahead of their query are left out; L is then T + 1, otherwise S + T.

    Returns:
        The bias, float32 [B|1, num_heads, S, T].

    Example:
        >>> difference_bias(torch.tensor([[[[-2.0, -1.0, 0.0, 1.0]]]]), torch.zeros(1, 2, 1))
        tensor([[[[ 0.,  1.],
                  [-1.,  0.]]]])
    """
    return numbers[:, :, 0, places_of(tokens.shape[1], numbers.shape[3], causal, numbers.device)]


def _bias_by_head(op: Ops, numbers: ir.Value, tokens: ir.Value, causal: bool, ort: bool) -> ByHead:
    return _bias(op, numbers, op.Shape(tokens, start=1, end=2), causal, ort)


def _bias(op: Ops, numbers: ir.Value, queries: ir.Value, causal: bool, ort: bool) -> ByHead:
    """Return the bias of `queries` queries, int64 [1]."""

    def few(op: Ops) -> ir.Value:
        return op.Expand(numbers, op.Concat([1, 1], queries, [1], axis=0))

    def many(op: Ops, numbers: ir.Value) -> ir.Value:
        # the same row for every query; Expand has one thread
        return op.Gather(numbers, op.Expand([0], queries), axis=2) if ort else few(op)

    def hide(op: Ops, hidden: ir.Value) -> ByHead:
        """Add a mask of all rows to the one row of all queries, before the numbers move."""
        flat = op.Concat(op.Expand(constant(op, 0.0), queries), op.Reshape(hidden, [-1]), axis=0)
        before = op.Unsqueeze(op.Reshape(flat, op.Concat(queries, [-1], axis=0)), [0, 1])

        def masked(op: Ops, numbers: ir.Value, before: ir.Value) -> ir.Value:
            return op.Add(numbers, before)

        return slid(numbers, queries, causal, few, lambda op: [numbers, before], masked, ort)

    def of_span(op: Ops, span: Span) -> ByHead:
        return _bias(op, columns_onnx(op, numbers, queries, span), op.Unsqueeze(span.count, [0]), causal, ort)

    made = slid(numbers, queries, causal, few, lambda op: [numbers], many, ort)
    return attrs.evolve(made, hide=hide, spans=lambda _: of_span) if causal else made


add_by_head(difference_bias, _bias_by_head)
