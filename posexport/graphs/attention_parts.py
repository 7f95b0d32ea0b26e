"""The parts that expansions (posexport.graphs.expansions) are made of: heads, scores, masks and padding.

Shapes: B rows, N query heads, K key heads, S queries, P cached keys, T keys, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import onnx_ir as ir

from posexport.graphs.operators import HIDDEN, Call, Unexpanded

LEAST_FILTER = -10000.0
"""ONNX Runtime's default `mask_filter_value`, which is added to scores of padding: a larger one hides nothing."""


def split_heads(call: Call, value: ir.Value, heads: int) -> ir.Value:
    """[B, S, heads*D] as [B, heads, S, D]. A value with four axes already has that shape."""
    if len(call.shape(value)) == 4:
        return value
    if not heads:
        raise Unexpanded("its number of heads is not stated")
    nodes = call.nodes
    return nodes.one("Transpose", nodes.shaped(value, 0, 0, heads, call.size(value, -1) // heads), perm=[0, 2, 1, 3])


def head_size(call: Call, value: ir.Value, heads: int) -> int:
    """The size of a head."""
    size = call.size(value, -1)
    return size if len(call.shape(value)) == 4 else size // heads


def length_of(call: Call, value: ir.Value, axis: int) -> ir.Value:
    """The length of an axis, a scalar."""
    shape = call.nodes.length(value, axis)
    return call.nodes.one("Squeeze", shape)


def counted(call: Call, start: ir.Value, end: ir.Value) -> ir.Value:
    return call.nodes.one("Range", start, end, call.nodes.constant(1), dtype=ir.DataType.INT64)


def repeated(call: Call, value: ir.Value, group: int, heads: int, size: int) -> ir.Value:
    """[B, K, T, D] as [B, N, T, D]."""
    if group == 1:
        return value
    nodes = call.nodes
    grouped = nodes.one(
        "Expand", nodes.one("Unsqueeze", value, nodes.constant([2])), nodes.constant([1, 1, group, 1, 1])
    )
    return nodes.shaped(grouped, 0, heads, -1, size)


def times(call: Call, scores: ir.Value, scale: float, dtype: ir.DataType) -> ir.Value:
    """Scores times a float32 number. Operators multiply by it in float32, whatever the dtype of the scores."""
    wide = ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype
    product = call.nodes.one("Mul", call.nodes.cast(scores, wide), call.nodes.constant(scale, wide))
    return call.nodes.cast(product, dtype)


def hide(call: Call, scores: ir.Value, seen: ir.Value, lowest: float = HIDDEN) -> ir.Value:
    lowest = -65504.0 if lowest == HIDDEN and scores.dtype == ir.DataType.FLOAT16 else lowest
    hidden = call.nodes.constant(lowest, scores.dtype or ir.DataType.FLOAT)
    return call.nodes.one("Where", seen, scores, hidden, dtype=scores.dtype)


def weighted(
    call: Call,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: ir.Value | None = None,
    seen: Sequence[ir.Value] = (),
    sinks: ir.Value | None = None,
    zeros: bool = False,
) -> ir.Value:
    """softmax(softcap(scale q k^T) + bias, hidden where not seen) v, from [B, N, S, D] and [B, K, T, D].

    With `zeros`, queries that see no key get zeros.
    """
    nodes, dtype = call.nodes, q.dtype or ir.DataType.FLOAT
    heads, kv_heads = call.shapes["q"][1], call.shapes["k"][1]
    k = repeated(call, k, heads // kv_heads, heads, call.shapes["k"][3])
    v = repeated(call, v, heads // kv_heads, heads, call.shapes["v"][3])
    scores = nodes.one("MatMul", q, nodes.one("Transpose", k, perm=[0, 1, 3, 2]))
    scores = times(call, scores, scale, dtype)
    if softcap:
        cap = nodes.constant(softcap, dtype)
        scores = nodes.one("Mul", nodes.one("Tanh", nodes.one("Div", scores, cap)), cap)
    if bias is not None:
        scores = nodes.one("Add", scores, bias)
    for one in seen:
        scores = hide(call, scores, one, -math.inf if zeros else HIDDEN)
    if sinks is None:
        weights = nodes.one("Softmax", scores, axis=-1)
        if zeros:
            is_none = nodes.one("IsNaN", weights, dtype=ir.DataType.BOOL)
            weights = nodes.one("Where", is_none, nodes.constant(0.0, dtype), weights, dtype=dtype)
        return nodes.one("MatMul", weights, v)
    column = nodes.one(
        "Expand",
        nodes.shaped(sinks, 1, -1, 1, 1),
        nodes.one("Concat", nodes.length(scores, 0, 3), nodes.constant([1]), axis=0),
    )
    weights = nodes.one("Softmax", nodes.one("Concat", scores, column, axis=-1), axis=-1)
    weights = nodes.one("Slice", weights, nodes.constant([0]), nodes.constant([-1]), nodes.constant([3]))
    return nodes.one("MatMul", weights, v)


def joined(call: Call, out: ir.Value, flat: bool, width: int) -> ir.Value:
    if not flat:
        return out
    return call.nodes.shaped(call.nodes.one("Transpose", out, perm=[0, 2, 1, 3]), 0, 0, width)


def band(
    call: Call, queries: ir.Value, keys: ir.Value, first: ir.Value, *, left: int = -1, right: int = 0
) -> list[ir.Value]:
    """Which keys each query sees, [S, T]: `left` keys before its position and `right` after it; all if negative.

    Query i is at position first + i. The result is [B, 1, S, T] if each row has a first position of its own.
    """
    nodes = call.nodes
    places = nodes.one(
        "Add", first, nodes.one("Unsqueeze", counted(call, nodes.constant(0), queries), nodes.constant([1]))
    )
    ahead = nodes.one("Sub", places, counted(call, nodes.constant(0), keys))
    seen = []
    if right >= 0:
        seen.append(nodes.one("GreaterOrEqual", ahead, nodes.constant(-right), dtype=ir.DataType.BOOL))
    if left >= 0:
        seen.append(nodes.one("Less", ahead, nodes.constant(left + 1), dtype=ir.DataType.BOOL))
    return seen


def sized(call: Call, heads: int, kv_heads: int, size: int, value_size: int) -> Call:
    """The call with the shapes of its heads, [B, N, S, D], under the names q, k and v."""
    shapes = {**call.shapes, "q": (0, heads, 0, size), "k": (0, kv_heads, 0, size), "v": (0, kv_heads, 0, value_size)}
    return attrs.evolve(call, shapes=shapes)


def padded(call: Call, padding: ir.Value, rows: ir.Value, keys: ir.Value) -> list[ir.Value]:
    """Which keys [B, N, T, D] are not padding for an operator of ONNX Runtime, [B, 1, S or 1, T].

    `padding` contains zeros and ones [B, T] or [B, S, T], or numbers of tokens [B], or ends and then starts [2*B].
    `rows` is any value with B rows, [B, ...].
    """
    nodes, shape, batch = call.nodes, call.shape(padding), call.shape(rows)[0]
    if len(shape) in (2, 3):
        axes = nodes.constant([1, 2] if len(shape) == 2 else [1])
        return [nodes.one("Unsqueeze", nodes.cast(padding, ir.DataType.BOOL), axes)]
    if len(shape) != 1 or shape[0] not in (batch, 2 * batch):
        raise Unexpanded(f"its padding has the shape {list(shape)} for {batch} rows")
    bounds = nodes.one("Unsqueeze", nodes.cast(padding, ir.DataType.INT64), nodes.constant([1, 2, 3]))
    places = counted(call, nodes.constant(0), length_of(call, keys, 2))
    if shape[0] == batch:
        return [nodes.one("Less", places, bounds, dtype=ir.DataType.BOOL)]
    ends, starts = nodes.op("Split", [bounds], {"axis": 0, "num_outputs": 2}, outputs=2, dtype=ir.DataType.INT64)
    return [
        nodes.one("Less", places, ends, dtype=ir.DataType.BOOL),
        nodes.one("GreaterOrEqual", places, starts, dtype=ir.DataType.BOOL),
    ]
