"""Decomposed attention for prompts on ONNX Runtime, in blocks of queries with the keys that one of them may see.

Otherwise, half of the work of causal attention is on hidden keys, and nearly all of the work of a window. No array
contains all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posexport.custom_ops import ir
from posexport.custom_ops.attention import KINDS, attended_onnx, by_heads_onnx, decomposed_onnx, finished_onnx
from posexport.custom_ops.attention_forms import Call, Results, call_of
from posexport.custom_ops.by_head import Span, count_of_blocks, scan_onnx
from posexport.custom_ops.cache import scattered_onnx
from posexport.custom_ops.operator import Operator, Ops, few_onnx, shape_of, size_of
from posexport.custom_ops.visibility import Lengths

WHOLE = 256
"""The maximum number of queries that are computed all at once."""

LEAST, BLOCKS, MOST = 128, 8, 512
"""The minimum queries of a block, the number of blocks of a prompt, and the maximum queries of a block.

A prompt is divided into more blocks only if a block would otherwise exceed the maximum. Each block copies the keys that
it sees, so too many blocks take longer (8 are fastest for 1024 and 4096 tokens).
"""


def attended_by_queries_onnx(call: Call) -> Results:
    """Attention in standard operators. With a cache, also returns the present keys and values."""
    length = shape_of(call.q)[1]
    if call.bias is not None or not hides(call) or (isinstance(length, int) and length <= WHOLE):
        return decomposed_onnx(call, scattered_onnx)

    def many(call: Call, k: ir.Value, v: ir.Value, lengths: Lengths) -> ir.Value:
        return divided_onnx(call, k, v, lengths, _of_span, LEAST)

    return in_two_ways_onnx(call, lambda op: None, many, WHOLE)


Many = Callable[[Call, "ir.Value", "ir.Value", Lengths], "ir.Value"]
"""`many(call, k, v, lengths)` returns attention [B, S, N*value_dim].

The queries are those of the call. Keys k [B, N, T, head_dim], values v [B, N, T, value_dim].
"""


def in_two_ways_onnx(
    call: Call, bias_of_few: Callable[[Ops], ir.Value | None], many: Many, most: int | None
) -> Results:
    """Attention that computes up to `most` queries (by default FEW) at once with a bias, and more queries with `many`.

    With a cache, also returns the present keys and values.
    """
    present, lengths, heads = call.present(scattered_onnx), call.lengths(), call.heads
    # Heads are laid out before the If, where it needs no copy. Keys are transposed inside, as part of a product.
    pairs = zip(present or (call.k, call.v), (call.head_dim, call.value_dim), strict=True)
    k, v = (by_heads_onnx(call.op, t, heads, width) for t, width in pairs)

    def few(op: Ops) -> ir.Value:
        return _at_once(replace(call, op=op, bias=bias_of_few(op)), k, v, lengths)

    queries = call.op.Shape(call.q, start=1, end=2)
    out = few_onnx(call.op, True, queries, few, lambda op: many(replace(call, op=op), k, v, lengths), most)
    # the shape of both branches, which an If may hide
    return call.op.Reshape(out, [0, -1, heads.num_heads * call.value_dim]), *present


def _at_once(call: Call, k: ir.Value, v: ir.Value, lengths: Lengths, first: ir.Value | None = None) -> ir.Value:
    return finished_onnx(call, *attended_onnx(call, call.op.Transpose(k, perm=[0, 1, 3, 2]), v, lengths, first))


def hides(call: Call) -> bool:
    """Whether keys that some queries see are hidden from others."""
    return call.heads.causal or (call.heads.window > 0 and call.write_indices is None)


Attended = Callable[[Call, "ir.Value", "ir.Value", Span, "ir.Value"], "ir.Value"]
"""`attended(call, k, v, span, first)` returns attention [B, S, N*value_dim] for the queries of a call.

Keys k [B, N, T, head_dim] and values v [B, N, T, value_dim] belong to a span. `first` is the index of the first query
among these keys.
"""


def _of_span(call: Call, k: ir.Value, v: ir.Value, span: Span, first: ir.Value) -> ir.Value:
    return _at_once(call, k, v, span.lengths(call.op), first)


def divided_onnx(call: Call, keys: ir.Value, v: ir.Value, lengths: Lengths, attended: Attended, least: int) -> ir.Value:
    """Return [B, S, N*value_dim], computed for one block of queries after the other in a Scan.

    Keys [B, N, T, head_dim], values [B, N, T, value_dim]. A block has at least `least` queries.
    """
    op, heads, (seq, total) = call.op, call.heads, lengths
    count = op.Min(count_of_blocks(op, seq, least), op.Max(BLOCKS, count_of_blocks(op, seq, MOST)))
    size = count_of_blocks(op, seq, count)
    spare = op.Sub(op.Mul(count, size), seq)  # queries of zeros in front, so that the last block ends with the prompt
    width = size_of(call.q, -1)
    q = op.Pad(call.q, op.Concat(op.Unsqueeze(spare, [0]), [0], axis=0), None, [1])
    q = op.Reshape(q, op.Concat([0], op.Unsqueeze(count, [0]), [-1, width], axis=0))
    q = op.Transpose(q, perm=[1, 0, 2, 3])
    q.shape = ir.Shape([None, None, None, width])
    indices = op.Sub(total, seq) if call.write_indices is None else call.write_indices

    def one(op: Ops, number: ir.Value, q: ir.Value) -> ir.Value:
        # the index of the first query; with a shared cache, one for each row
        of_all = op.Sub(op.Mul(number, size), spare)
        first = last = own = op.Add(indices, of_all)
        if call.write_indices is not None:
            first, last = op.ReduceMin(first, [0], keepdims=0), op.ReduceMax(last, [0], keepdims=0)
        end, start = op.Add(last, size), op.Constant(value_int=0)
        if not heads.causal:  # keys after a query are as near as those before it
            end = op.Add(end, heads.window - 1)
        end = op.Min(end, total)
        if heads.window and not heads.chunk:  # chunks are counted from the first of all keys
            start = op.Max(start, op.Sub(first, heads.window - 1))
        span = Span(first=of_all, count=size, start=start, end=end)
        small = replace(
            call,
            op=op,
            q=q,
            mask=None if call.mask is None else span.of_keys(op, call.mask, 1),
            write_indices=None if call.write_indices is None else op.Sub(own, start),
        )
        return attended(small, span.of_keys(op, keys, 2), span.of_keys(op, v, 2), span, op.Sub(first, start))

    made = op.Transpose(scan_onnx(op, count, one, [q]), perm=[1, 0, 2, 3])
    made = op.Reshape(made, [0, -1, heads.num_heads * call.value_dim])
    return op.Slice(made, op.Unsqueeze(spare, [0]), [2**31 - 1], [1])


def _add(operator: Operator[..., Any]) -> None:
    @operator.form("decomposed:ort", "function:ort")
    def body(op: Ops, *args: Any) -> Results:
        return attended_by_queries_onnx(call_of(operator, op, args))


for _kind in KINDS:
    _add(_kind)
