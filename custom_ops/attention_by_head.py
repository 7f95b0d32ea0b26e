"""Decomposed attention on ONNX Runtime with a bias that is computed together with each head or block of queries.

Attention is computed one head after the other, or some queries at a time. No array contains the logits of all heads and
queries. Intermediate results stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posexport.custom_ops import ir
from posexport.custom_ops.attention import KINDS, MASKED, finished_onnx
from posexport.custom_ops.attention_by_queries import divided_onnx, hides, in_two_ways_onnx
from posexport.custom_ops.attention_forms import Call, Results, call_of
from posexport.custom_ops.by_head import ByHead, Span, blocks_of, each_row_onnx, padded_onnx
from posexport.custom_ops.by_queries import ByQueries, some_queries_onnx
from posexport.custom_ops.heads import Heads, heads_onnx
from posexport.custom_ops.operator import Operator, Ops, cast, constant, dtype_of, rank_of
from posexport.custom_ops.visibility import Lengths, visible_onnx
from posexport.errors import RequestError

LEAST = 256
"""The minimum number of queries in a block."""


def _joined(call: Call, logits: ByHead | ByQueries) -> Results:
    """Attention with these logits as its bias.

    A few queries are computed all at once. Many queries are computed one head after the other, or some queries at a
    time with all heads. If the logits can be computed for a span, queries are divided into blocks, each with the keys
    that one of its queries may see.
    """

    def many(call: Call, k: ir.Value, v: ir.Value, lengths: Lengths) -> ir.Value:
        if logits.spans is None or not hides(call):
            return _attended(call, k, v, logits, lengths)
        logits_of = logits.spans(call.op)

        def one(call: Call, k: ir.Value, v: ir.Value, span: Span, first: ir.Value) -> ir.Value:
            return _attended(call, k, v, logits_of(call.op, span), span.lengths(call.op), first)

        return divided_onnx(call, k, v, lengths, one, LEAST)

    return in_two_ways_onnx(call, logits.few, many, None)


def _attended(
    call: Call, k: ir.Value, v: ir.Value, logits: ByHead | ByQueries, lengths: Lengths, first: ir.Value | None = None
) -> ir.Value:
    """Return [B, S, N*value_dim] for k [B, N, T, head_dim] and v [B, N, T, value_dim]. `first` as in `visible_onnx`."""
    op, heads, seen = call.op, call.heads, None
    if call.mask is not None:
        seen = visible_onnx(op, heads, lengths, call.mask, call.write_indices, first=first)
    hidden, q = _hidden_onnx(call, lengths, seen, first), heads_onnx(op, call.q, heads.num_heads)
    if isinstance(logits, ByHead):
        made = _by_head(op, logits, q, k, v, hidden, lengths[1], heads)
    else:
        made = _by_queries(op, logits, q, k, v, hidden, heads.scale)
    return finished_onnx(call, made, seen)


def _by_head(
    op: Ops,
    logits: ByHead,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    hidden: ir.Value | None,
    count: ir.Value,
    heads: Heads,
) -> ir.Value:
    """Return [B, N, S, value_dim], computed one head after the other.

    q [B, N, S, head_dim], k [B, N, T, head_dim], v [B, N, T, value_dim]. `hidden` hides keys as in `_hidden_onnx`.
    `count` is T.
    """
    if logits.of_product is None:
        return each_row_onnx(op, heads.num_heads, (q, k, v), *_with_logits(op, logits, hidden, heads.scale))
    total = blocks_of(op, count, logits.block)
    k, v = (padded_onnx(op, t, total, 2, 0.0) for t in (k, v))
    if hidden is None:
        hidden = op.Unsqueeze(
            op.Mul(op.Cast(op.Range(0, count, 1), to=ir.DataType.FLOAT), constant(op, 0.0)), [0, 1, 2]
        )
    hidden = padded_onnx(op, hidden, total, 3, MASKED)
    return each_row_onnx(op, heads.num_heads, (q, k, v), [hidden], _with_product(logits.of_product, heads.scale))


def _by_queries(
    op: Ops, logits: ByQueries, q: ir.Value, k: ir.Value, v: ir.Value, hidden: ir.Value | None, scale: float
) -> ir.Value:
    """Do the same as `_by_head`, some queries at a time with all heads."""

    def some(op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, numbers: ir.Value, hidden: ir.Value | None) -> ir.Value:
        added = logits.make(op, numbers)
        added = added if hidden is None else op.Add(added, hidden)
        return _weighted_onnx(op, op.Add(cast(op, op.MatMul(q, k), ir.DataType.FLOAT), added), v)

    q = op.Mul(q, constant(op, scale, dtype_of(q)))
    parts = [logits.numbers(op), None if hidden is None else op.Squeeze(hidden, [1])]
    return some_queries_onnx(op, q, k, v, parts, some)


Head = Callable[..., "ir.Value"]
"""`head(op, q, k, v, *parts)`: attention [S, head_dim] of one head, q [S, head_dim], k and v [T, head_dim]."""


def _with_logits(
    op: Ops, logits: ByHead, hidden: ir.Value | None, scale: float
) -> tuple[Sequence[ir.Value | None], Head]:
    """Return the parts of logits and mask, and a head that adds the logits to its product."""
    under = logits.under(op, hidden)

    def head(op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, *parts: ir.Value) -> ir.Value:
        added = op.Squeeze(under.make(op, 1, *parts), [0, 1])
        return _weighted_onnx(op, _summed_onnx(op, q, k, added, scale), v)

    return under.parts(op), head


def _with_product(of_product: Callable[..., ir.Value], scale: float) -> Head:
    """Return a head whose logits need its product of queries and keys. `of_product` adds them to it."""

    def head(op: Ops, q: ir.Value, k: ir.Value, v: ir.Value, hidden: ir.Value) -> ir.Value:
        product = _summed_onnx(op, q, k, op.Squeeze(hidden, [0, 1]), scale)
        summed = of_product(op, *(op.Unsqueeze(t, [0, 1]) for t in (product, q)))
        return _weighted_onnx(op, op.Squeeze(summed, [0, 1]), v)

    return head


def _weighted_onnx(op: Ops, logits: ir.Value, v: ir.Value) -> ir.Value:
    return op.MatMul(cast(op, op.Softmax(logits, axis=-1), dtype_of(v)), v)


def _summed_onnx(op: Ops, q: ir.Value, k: ir.Value, added: ir.Value, scale: float) -> ir.Value:
    """Return scale * q k^T + added, float32 [S, T], for q [S, head_dim] and k [T, head_dim]."""
    if dtype_of(q) == ir.DataType.FLOAT:  # one Gemm, without another pass for the sum
        return op.Gemm(q, k, added, alpha=scale, transB=1)
    product = op.MatMul(op.Mul(q, constant(op, scale, dtype_of(q))), op.Transpose(k, perm=[1, 0]))
    return op.Add(cast(op, product, ir.DataType.FLOAT), added)


def _hidden_onnx(call: Call, lengths: Lengths, seen: ir.Value | None, first: ir.Value | None = None) -> ir.Value | None:
    """Return the mask that is added to logits, [B|1, 1, S, T]. None if every query sees every key.

    With a mask, `seen` are the visible keys. `first` as in `visible_onnx`.
    """
    op, heads, lowest = call.op, call.heads, constant(call.op, MASKED)
    if heads.causal and not heads.local and call.mask is None and call.write_indices is None:
        # in fp32, because ONNX Runtime's Where has one thread
        seq, total = lengths
        queries, keys = (op.Cast(op.Range(first, total, 1), to=ir.DataType.FLOAT) for first in (op.Sub(total, seq), 0))
        behind = op.Sub(op.Unsqueeze(queries, [1]), keys)
        hidden = op.Mul(op.Clip(behind, constant(op, -1.0), constant(op, 0.0)), op.Neg(lowest))
    else:
        if seen is None:
            seen = visible_onnx(op, heads, lengths, call.mask, call.write_indices, first=first)
        if seen is None:
            return None
        hidden = op.Mul(op.Cast(op.Not(seen), to=ir.DataType.FLOAT), lowest)
    return hidden if rank_of(hidden) == 4 else op.Unsqueeze(hidden, [0, 1])


def _add(operator: Operator[..., Any]) -> None:
    @operator.joined
    def join(op: Ops, logits: ByHead | ByQueries, *args: Any) -> Results:
        call = call_of(operator, op, args)
        if call.heads.softcap or call.sinks is not None:
            raise RequestError("Logits with a cap or sinks are computed for all heads at once.")
        return _joined(call, logits)


for _kind in KINDS:
    _add(_kind)
