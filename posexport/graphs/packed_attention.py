"""The expansions of com.microsoft Attention, which ONNX Runtime's optimizer writes for BERT and GPT-2, and QAttention.

    q, k, v = x weights + bias,   x [B, S, C], weights [C, 3*N*D], the cache [2, B, N, P, D]

QAttention, which ONNX Runtime's quantizer writes, has integers as x and weights, with their scales and zero points.

Shapes: B rows, N heads, S queries, P cached keys, T keys, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import onnx_ir as ir

from posexport.graphs.attention_parts import LEAST_FILTER, band, joined, length_of, padded, sized, split_heads, weighted
from posexport.graphs.operators import Call, Unexpanded, default_scale

_KNOWN = (
    *("num_heads", "qkv_hidden_sizes", "scale", "unidirectional", "mask_filter_value"),
    *("do_rotary", "past_present_share_buffer", "rotary_embedding_dim"),
)


def packed_attention(call: Call) -> Sequence[ir.Value | None]:
    """The projection, attention and cache of the operator in standard operators."""
    call.check(_KNOWN, 6)
    x, weights, bias, mask, past, added = (call.input(index) for index in range(6))
    heads = call.integer("num_heads")
    if x is None or weights is None or not heads:
        raise Unexpanded("it lacks an input or its number of heads")
    if call.integer("do_rotary") or call.integer("past_present_share_buffer"):
        raise Unexpanded("it rotates its queries and keys, or its cache is a buffer")
    projected = call.nodes.one("MatMul", x, weights)
    projected = projected if bias is None else call.nodes.one("Add", projected, bias)
    return _of_projected(call, x, weights, projected, (mask, past, added))


def quantised_attention(call: Call) -> Sequence[ir.Value | None]:
    """The product of integers, times both scales, attention and cache of the operator in standard operators."""
    call.check(_KNOWN, 9)
    x, weights, bias, x_scale, scale, mask, x_zero, zero, past = (call.input(index) for index in range(9))
    if x is None or weights is None or x_scale is None or scale is None or not call.integer("num_heads"):
        raise Unexpanded("it lacks an input or its number of heads")
    if call.integer("do_rotary") or call.integer("past_present_share_buffer"):
        raise Unexpanded("it rotates its queries and keys, or its cache is a buffer")
    if zero is not None and any(size > 1 for size in call.shape(zero)):
        raise Unexpanded("its weights have several zero points")
    nodes, dtype = call.nodes, x_scale.dtype or ir.DataType.FLOAT
    zeros = [] if x_zero is None and zero is None else [x_zero, zero]
    product = nodes.op("MatMulInteger", [x, weights, *zeros], {}, dtype=ir.DataType.INT32)[0]
    factor = nodes.one("Mul", x_scale, scale, dtype=dtype)
    projected = nodes.one("Mul", nodes.cast(product, dtype), factor, dtype=dtype)
    projected = projected if bias is None else nodes.one("Add", projected, bias, dtype=dtype)
    return _of_projected(call, x, weights, projected, (mask, past, None))


def _of_projected(
    call: Call, x: ir.Value, weights: ir.Value, projected: ir.Value, others: tuple[ir.Value | None, ...]
) -> Sequence[ir.Value | None]:
    """The result and the cache for queries, keys and values [B, S, 3*N*D] beside each other.

    `others` are the mask, the cache, and what is added to scores.
    """
    (mask, past, added), heads = others, call.integer("num_heads")
    nodes, width, dtype = call.nodes, call.size(weights, 1), projected.dtype or ir.DataType.FLOAT
    widths = list(call.node.attributes.get_ints("qkv_hidden_sizes", ())) or [width // 3] * 3
    parts = nodes.op("Split", [projected, nodes.constant(widths)], {"axis": 2}, outputs=3, dtype=dtype)
    shapes = {part.name or "": (*call.shape(x)[:2], size) for part, size in zip(parts, widths, strict=True)}
    call = attrs.evolve(call, shapes={**call.shapes, **shapes})
    size, value_size = widths[0] // heads, widths[2] // heads
    q, key, value = (split_heads(call, part, heads) for part in parts)
    queries, first = length_of(call, q, 2), nodes.constant(0)
    if past is not None:
        first = length_of(call, past, 3)
        cached = (nodes.one("Gather", past, nodes.constant(place), axis=0) for place in (0, 1))
        key, value = (nodes.one("Concat", old, new, axis=2) for old, new in zip(cached, (key, value), strict=True))
    keys = length_of(call, key, 2)
    seen: list[ir.Value] = []
    if mask is not None:
        if len(call.shape(mask)) == 4:
            mask = nodes.one("Squeeze", _part_of_all_places(call, mask, first, queries, keys), nodes.constant([1]))
            call = attrs.evolve(call, shapes={**call.shapes, mask.name or "": (0, 0, 0)})
        less = _less(call, padded(call, mask, x, key), dtype)
        added = less if added is None else nodes.one("Add", less, added)
    if call.integer("unidirectional"):
        seen += band(call, queries, keys, first)
    call = sized(call, heads, heads, size, value_size)
    scale = call.number("scale") or default_scale(size)
    out = weighted(call, q, key, value, scale=scale, bias=added, seen=seen)
    present = None
    if size == value_size:
        both = [nodes.one("Unsqueeze", one, nodes.constant([0])) for one in (key, value)]
        present = nodes.one("Concat", *both, axis=0)
    return [joined(call, out, True, heads * value_size), present]


def _less(call: Call, seen: Sequence[ir.Value], dtype: ir.DataType) -> ir.Value:
    """What is added to the scores of padding.

    If no key is visible, as with the lengths 0 that the optimizer writes for no mask, it is added to all scores, which
    changes no weight.
    """
    nodes, (whole, *others) = call.nodes, seen
    for one in others:
        whole = nodes.one("And", whole, one, dtype=ir.DataType.BOOL)
    filter_value = nodes.constant(call.number("mask_filter_value", LEAST_FILTER), dtype)
    return nodes.one("Where", whole, nodes.constant(0.0, dtype), filter_value)


def _part_of_all_places(call: Call, mask: ir.Value, first: ir.Value, queries: ir.Value, keys: ir.Value) -> ir.Value:
    """The part [B, 1, S, T] for these queries and keys, of a mask [B, 1, M, M] for all places, as Megatron has it."""
    nodes, zero = call.nodes, call.nodes.constant([0])
    starts = nodes.one("Concat", nodes.shaped(first, 1), zero, axis=0)
    ends = nodes.one("Concat", nodes.shaped(nodes.one("Add", first, queries), 1), nodes.shaped(keys, 1), axis=0)
    return nodes.one("Slice", mask, starts, ends, nodes.constant([2, 3]))
