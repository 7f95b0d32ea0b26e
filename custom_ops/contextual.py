"""Logits of contextual positions, which are sums of gates over keys (CoPE). fp32."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import NUM_HEADS, REQUIRED, SCALE
from posexport.custom_ops.attention import keys_onnx, logits_of
from posexport.custom_ops.by_head import ByHead, add_by_head, blocks_of, by_head, padded_onnx
from posexport.custom_ops.heads import Heads, heads_onnx, to_heads
from posexport.custom_ops.operator import Ops, cast, constant, dtype_of, operator, rank_of, size_of
from posexport.custom_ops.relative import fake_score
from posexport.custom_ops.visibility import lengths_onnx, visible, visible_onnx


@operator("ContextualScore", "score", fake=lambda call: fake_score(call, call.k, call.num_heads))
def contextual_score(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    write_indices: Tensor | None = None,
    pos_emb: Tensor = REQUIRED,
    num_heads: int = REQUIRED,
    num_kv_heads: int = NUM_HEADS,
    scale: float = SCALE,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
) -> Tensor:
    """q_i . e[c_ij], interpolated between whole numbers. c_ij is the sum of sigmoid(scale q_i . k_t) for t from j to i,
    at most the last row (CoPE: Golovneva et al. 2024, arXiv:2405.18719, eq. 3 to 5, and the listing in its appendix).

    Args:
        q: [B, S, num_heads*head_dim].
        k: [B, T, num_kv_heads*head_dim] or, for a cache, [B, num_kv_heads, T, head_dim], in q's dtype.
        mask: int64 [B, T], 0 for hidden keys, such as padding.
        write_indices: int64 [B], the first index of the new keys in each row of a buffer; None for a growing cache.
        pos_emb: [head_dim, rows], in q's dtype: the table e, shared by all heads.
        num_heads, num_kv_heads, scale, causal, window, chunk: as in `attend`.

    Returns:
        The score, float32 [B, num_heads, S, T].

    Example:
        >>> q, k = torch.ones(1, 1, 1), torch.zeros(1, 2, 1)
        >>> contextual_score(q, k, pos_emb=torch.tensor([[0.0, 10.0]]), num_heads=1)
        tensor([[[[10.,  5.]]]])
    """
    heads = Heads(num_heads, num_kv_heads, scale, causal, window, chunk)
    queries, keys = to_heads(q, heads.num_heads), to_heads(k, heads.num_kv_heads)
    logits = logits_of(queries, keys, heads)
    seen = visible(heads, q.shape[1], keys.shape[2], mask, write_indices, q.device)
    gates = torch.sigmoid(logits)
    gates = gates if seen is None else gates.masked_fill(~seen, 0.0)
    places = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=pos_emb.shape[1] - 1)
    scores = (queries @ pos_emb).to(logits.dtype)
    low, high = places.floor(), places.ceil()
    part = places - low
    return scores.gather(-1, high.long()) * part + scores.gather(-1, low.long()) * (1 - part)


def _contextual(
    op: Ops,
    q: ir.Value,
    k: ir.Value,
    mask: ir.Value | None,
    write_indices: ir.Value | None,
    pos_emb: ir.Value,
    heads: Heads,
    ort: bool,
) -> ByHead:
    lengths, rows = lengths_onnx(op, q, k), size_of(pos_emb, 1)
    queries = heads_onnx(op, q, heads.num_heads)

    def scores(op: Ops, gates: ir.Value, q: ir.Value) -> ir.Value:
        """Return the scores from gates and queries in fp32. There are as many keys as gates."""
        sums = _sums_onnx(op, gates) if ort else op.CumSum(gates, -1, reverse=1)
        places = op.Clip(sums, constant(op, 0.0), constant(op, float(rows - 1)))
        products = cast(op, op.MatMul(q, pos_emb), ir.DataType.FLOAT)
        above = op.Pad(op.Slice(products, [1], [2**31 - 1], [3]), [0, 1], None, [3])  # there is no row above the last
        # a line through two rows of the table: its slope, and its value at place 0
        slopes, steps = op.Sub(above, products), op.Cast(op.Range(0, rows, 1), to=ir.DataType.FLOAT)
        starts, index = op.Sub(products, op.Mul(slopes, steps)), op.Cast(places, to=ir.DataType.INT32)
        start, slope = (op.GatherElements(t, index, axis=-1) for t in (starts, slopes))
        return op.Add(start, op.Mul(places, slope))

    def make(op: Ops, count: int, q: ir.Value, scaled: ir.Value, k: ir.Value, seen: ir.Value | None) -> ir.Value:
        gates = op.Sigmoid(cast(op, op.MatMul(scaled, k), ir.DataType.FLOAT))
        gates = gates if seen is None else op.Mul(gates, seen)
        if not ort:
            return scores(op, gates, q)
        padded = padded_onnx(op, gates, blocks_of(op, lengths[1], BLOCK), 3, 0.0)
        return op.Slice(scores(op, padded, q), [0], op.Unsqueeze(lengths[1], [0]), [3])

    def of_product(op: Ops, product: ir.Value, q: ir.Value) -> ir.Value:
        return op.Add(product, scores(op, op.Sigmoid(product), q))

    def parts(op: Ops) -> list[ir.Value | None]:
        seen = visible_onnx(op, heads, lengths, mask, write_indices)
        if seen is not None:
            seen = op.Cast(seen if rank_of(seen) == 4 else op.Unsqueeze(seen, [0, 1]), to=ir.DataType.FLOAT)
        # as decomposed attention does it, so that ONNX Runtime computes both products once
        scaled = heads_onnx(op, op.Mul(q, constant(op, heads.scale, dtype_of(q))), heads.num_heads)
        return [queries, scaled, keys_onnx(op, q, k, heads), seen]

    of_all = attrs.evolve(by_head(op, queries, parts, make), of_product=of_product, block=BLOCK)
    return attrs.evolve(of_all, spans=lambda _: lambda op, span: of_all)  # for any product


BLOCK = 32
"""The number of keys whose gates are summed by one product."""


def _sums_onnx(op: Ops, gates: ir.Value) -> ir.Value:
    """Return the sums from each key on, of [B, N, S, T], with T a multiple of BLOCK.

    The result equals that of CumSum, which has one thread in ONNX Runtime 1.31.
    """
    blocks = op.Reshape(gates, [0, 0, 0, -1, BLOCK])
    within = op.MatMul(blocks, op.Trilu(op.Expand(constant(op, 1.0), [BLOCK, BLOCK]), upper=0))
    behind = op.CumSum(op.ReduceSum(blocks, [4]), 3, exclusive=1, reverse=1)
    return op.Reshape(op.Add(within, behind), [0, 0, 0, -1])


add_by_head(contextual_score, _contextual)
