"""The expansions of attention operators and rotations (posexport.graphs.operators), by domain and operator.

Shapes: B rows, N query heads, K key heads, S queries, P cached keys, T keys, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import onnx_ir as ir

from posexport.graphs import grouped, single_rows
from posexport.graphs.attention_parts import (
    LEAST_FILTER,
    band,
    counted,
    head_size,
    joined,
    length_of,
    padded,
    sized,
    split_heads,
    weighted,
)
from posexport.graphs.operators import Call, Expansion, Unexpanded, default_scale
from posexport.graphs.packed_attention import packed_attention, quantised_attention

Results = Sequence["ir.Value | None"]


def attention(call: Call) -> Results:
    """ONNX Attention-23, 24 and 25.

    With `nonpad_kv_seqlen` [B], row b has that many keys, and its last S are those of the queries.
    """
    known = (
        "is_causal",
        "kv_num_heads",
        "left_window_size",
        "q_num_heads",
        "qk_matmul_output_mode",
        "right_window_size",
        "scale",
        "softcap",
        "softmax_precision",
    )
    call.check(known, 7)
    q, k, v, mask, past_key, past_value, lengths = (call.input(index) for index in range(7))
    if q is None or k is None or v is None or (past_key is None) != (past_value is None):
        raise Unexpanded("it lacks an input")
    nodes, heads, kv_heads = call.nodes, call.integer("q_num_heads"), call.integer("kv_num_heads")
    keys = call.shape(k)[-2] + (0 if past_key is None else call.shape(past_key)[2])
    if mask is not None and call.shape(mask)[-1] < keys:
        raise Unexpanded("its mask is shorter than its keys")
    flat, size, value_size = len(call.shape(q)) == 3, head_size(call, q, heads or 1), head_size(call, v, kv_heads or 1)
    heads, kv_heads = heads or call.size(q, 1), kv_heads or call.size(k, 1)
    q_heads, key, value = split_heads(call, q, heads), split_heads(call, k, kv_heads), split_heads(call, v, kv_heads)
    first = nodes.constant(0)
    if past_key is not None and past_value is not None:
        first = length_of(call, past_key, 2)
        key, value = (nodes.one("Concat", *pair, axis=2) for pair in ((past_key, key), (past_value, value)))
    call = sized(call, heads, kv_heads, size, value_size)
    seen: list[ir.Value] = []
    bias = mask
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        bias, seen = None, [mask]
    queries, count = length_of(call, q_heads, 2), length_of(call, key, 2)
    if lengths is not None:
        ends = nodes.one("Unsqueeze", lengths, nodes.constant([1, 2, 3]))
        first = nodes.one("Sub", ends, queries)
        seen.append(nodes.one("Less", counted(call, nodes.constant(0), count), ends, dtype=ir.DataType.BOOL))
    left, right = call.integer("left_window_size", -1), call.integer("right_window_size", -1)
    right = 0 if call.integer("is_causal") else right
    if left >= 0 or right >= 0:
        seen += band(call, queries, count, first, left=left, right=right)
    scale = call.number("scale") or default_scale(size)
    softcap = call.number("softcap")
    zeros = mask is not None or lengths is not None or left >= 0  # these may hide all keys
    out = weighted(call, q_heads, key, value, scale=scale, softcap=softcap, bias=bias, seen=seen, zeros=zeros)
    return [joined(call, out, flat, heads * value_size), key, value]


def multi_head_attention(call: Call) -> Results:
    """com.microsoft MultiHeadAttention.

    Queries are [B, S, N*D], and keys and values the same, or [B, N, T, D]. Keys and values may also be packed as
    [B, T, N, 2, D], and all three as [B, S, N, 3, D].
    """
    call.check(("num_heads", "scale", "unidirectional", "mask_filter_value"), 8)
    q, k, v, added, padding, bias, past_key, past_value = (call.input(index) for index in range(8))
    nodes, heads = call.nodes, call.integer("num_heads")
    if q is not None and len(call.shape(q)) == 5 and k is None and v is None:
        call, (q, k, v) = _apart(call, q, heads, 3)
    elif k is not None and len(call.shape(k)) == 5 and v is None:
        call, (k, v) = _apart(call, k, heads, 2)
    if q is None or k is None or v is None or len(call.shape(q)) != 3 or len(call.shape(k)) not in (3, 4):
        raise Unexpanded("its queries, keys and values are not laid out in a known way")
    size, value_size = head_size(call, q, heads), head_size(call, v, heads)
    if added is not None:
        widths = nodes.constant([heads * size, heads * size, heads * value_size])
        parts = nodes.op("Split", [added, widths], {"axis": 0}, outputs=3, dtype=added.dtype)
        plain = (q, k, v)
        q = nodes.one("Add", q, parts[0])
        if len(call.shape(k)) == 3:  # a cache already has its bias
            k, v = (nodes.one("Add", value, part) for value, part in zip((k, v), parts[1:], strict=True))
        biased = {new.name or "": call.shape(old) for new, old in zip((q, k, v), plain, strict=True)}
        call = attrs.evolve(call, shapes={**call.shapes, **biased})
    q_heads, key, value = (split_heads(call, one, heads) for one in (q, k, v))
    first = nodes.constant(0)
    if past_key is not None and past_value is not None:
        first = length_of(call, past_key, 2)
        key, value = (nodes.one("Concat", *pair, axis=2) for pair in ((past_key, key), (past_value, value)))
    seen: list[ir.Value] = []
    if padding is not None:
        if call.number("mask_filter_value", LEAST_FILTER) > LEAST_FILTER:
            raise Unexpanded("its mask_filter_value hides no keys")
        seen += padded(call, padding, q, key)
    scale = call.number("scale") or default_scale(size)
    if call.integer("unidirectional"):
        if call.shape(q)[1] != call.shape(k)[-2]:  # ONNX Runtime computes neither of the two triangles
            raise Unexpanded("it is unidirectional, and its keys are not as many as its queries")
        seen += band(call, length_of(call, q_heads, 2), length_of(call, key, 2), first)
    call = sized(call, heads, heads, size, value_size)
    out = weighted(call, q_heads, key, value, scale=scale, bias=bias, seen=seen)
    return [joined(call, out, True, heads * value_size), key, value]


def _apart(call: Call, packed: ir.Value, heads: int, count: int) -> tuple[Call, list[ir.Value]]:
    """The `count` parts [B, S, N*D] of a value [B, S, N, count, D], and the call with their shapes."""
    size = call.size(packed, 4)
    if (call.size(packed, 2), call.size(packed, 3)) != (heads, count):
        raise Unexpanded(f"its packed values don't have {heads} heads of {count} parts")
    parts = [
        call.nodes.shaped(call.nodes.one("Gather", packed, call.nodes.constant(at), axis=3), 0, 0, heads * size)
        for at in range(count)
    ]
    shapes = {part.name or "": (*call.shape(packed)[:2], heads * size) for part in parts}
    return attrs.evolve(call, shapes={**call.shapes, **shapes}), parts


def group_query_attention(call: Call) -> Results:
    """com.microsoft GroupQueryAttention, causal or not, with its rotation if it has one.

    Row b has seqlens_k[b] + 1 keys; the last S are new and come after the row's cached keys. Output caches are as long
    as the given buffer, or as all keys if these are more.
    """
    known = ("num_heads", "kv_num_heads", "scale", "local_window_size", "softcap", "causal", "smooth_softmax")
    call.check((*known, "do_rotary", "rotary_interleaved", "qk_norm_epsilon"), 16)
    q, k, v, past_key, past_value, last, total, cos, sin, positions = (call.input(index) for index in range(10))
    if q is None or last is None or total is None or (past_key is None) != (past_value is None):
        raise Unexpanded("it lacks an input")
    if call.input(12) is not None or call.input(13) is not None:
        raise Unexpanded("its cache is quantised")
    nodes, heads, kv_heads = call.nodes, call.integer("num_heads"), call.integer("kv_num_heads")
    if k is None or v is None:
        q, k, v = _unpacked(call, q, heads, kv_heads)
        call = attrs.evolve(call, shapes={**call.shapes, **_token_shapes(call, q, k, v, heads, kv_heads)})
    size, value_size = head_size(call, q, heads), head_size(call, v, kv_heads)
    q_heads, key, value = split_heads(call, q, heads), split_heads(call, k, kv_heads), split_heads(call, v, kv_heads)
    queries = length_of(call, q_heads, 2)
    count = nodes.one("Add", nodes.cast(nodes.shaped(last, -1), ir.DataType.INT64), nodes.constant(1))
    starts = nodes.one("Max", nodes.one("Sub", count, queries), nodes.constant(0))
    norms = call.input(14), call.input(15)
    if None not in norms:
        q_heads, key = (_normed(call, one, norm) for one, norm in zip((q_heads, key), norms, strict=True) if norm)
    whole = nodes.one("Squeeze", nodes.cast(total, ir.DataType.INT64))
    if call.integer("do_rotary"):
        if cos is None or sin is None:
            raise Unexpanded("it rotates without tables")
        steps = counted(call, nodes.constant(0), queries)
        places = nodes.one("Add", nodes.one("Unsqueeze", starts, nodes.constant([1])), steps)
        if positions is not None:  # of a first prompt, ONNX Runtime reads only one position
            lone = nodes.one("Add", nodes.one("Gather", nodes.shaped(positions, -1), nodes.constant([0])), steps)
            is_first = nodes.one("Equal", queries, whole, dtype=ir.DataType.BOOL)
            places = nodes.one("Where", is_first, lone, positions, dtype=ir.DataType.INT64)
        pairs, interleaved = call.size(cos, -1), bool(call.integer("rotary_interleaved"))
        tables = [nodes.one("Gather", table, places, axis=0, dtype=table.dtype) for table in (cos, sin)]
        q_heads, key = (
            _turned(call, one, tables, size=size, pairs=pairs, axis=1, interleaved=interleaved)
            for one in (q_heads, key)
        )
    if past_key is not None and past_value is not None:
        key, value = (
            _written(call, past, new, starts, queries, whole) for past, new in ((past_key, key), (past_value, value))
        )
    call = sized(call, heads, kv_heads, size, value_size)
    keys = length_of(call, key, 2)
    first, window = nodes.one("Unsqueeze", starts, nodes.constant([1, 2, 3])), call.integer("local_window_size", -1)
    is_causal = bool(call.integer("causal", 1))
    seen = band(call, queries, keys, first, left=window - 1 if window > 0 else -1, right=0 if is_causal else -1)
    if not is_causal:
        ends = nodes.one("Unsqueeze", count, nodes.constant([1, 2, 3]))
        seen.append(nodes.one("Less", counted(call, nodes.constant(0), keys), ends, dtype=ir.DataType.BOOL))
    bias, sinks = call.input(10), call.input(11)
    if sinks is None and call.integer("smooth_softmax"):  # one more logit of 0
        sinks = nodes.constant([0.0] * heads, q.dtype or ir.DataType.FLOAT)
    if bias is not None:  # as long as the keys so far; the buffer may be longer
        more = nodes.one("Sub", nodes.shaped(keys, 1), nodes.length(bias, 3))
        bias = nodes.one("Pad", bias, nodes.one("Concat", nodes.constant([0] * 7), more, axis=0))
    out = weighted(
        call,
        q_heads,
        key,
        value,
        scale=call.number("scale") or default_scale(size),
        softcap=call.number("softcap"),
        bias=bias,
        seen=seen,
        sinks=sinks,
    )
    return [joined(call, out, True, heads * value_size), key, value]


def _unpacked(call: Call, packed: ir.Value, heads: int, kv_heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries, keys and values from one value [B, S, (N + 2K)*D]."""
    size = call.size(packed, -1) // (heads + 2 * kv_heads)
    widths = call.nodes.constant([heads * size, kv_heads * size, kv_heads * size])
    q, k, v = call.nodes.op("Split", [packed, widths], {"axis": 2}, outputs=3, dtype=packed.dtype)
    return q, k, v


def _token_shapes(
    call: Call, q: ir.Value, k: ir.Value, v: ir.Value, heads: int, kv_heads: int
) -> dict[str, tuple[int, ...]]:
    packed = call.shape(call.node.inputs[0] or q)
    size = packed[-1] // (heads + 2 * kv_heads)
    counts = ((q, heads), (k, kv_heads), (v, kv_heads))
    return {value.name or "": (*packed[:2], count * size) for value, count in counts}


def _normed(call: Call, x: ir.Value, weight: ir.Value) -> ir.Value:
    """RMSNorm of each head of [B, N, S, D]."""
    nodes, dtype = call.nodes, x.dtype or ir.DataType.FLOAT
    squares = nodes.one("ReduceMean", nodes.one("Mul", x, x), nodes.constant([-1]), keepdims=1)
    epsilon = nodes.constant(call.number("qk_norm_epsilon", 1e-6), dtype)
    return nodes.one("Mul", nodes.one("Div", x, nodes.one("Sqrt", nodes.one("Add", squares, epsilon))), weight)


def _written(
    call: Call, past: ir.Value, new: ir.Value, starts: ir.Value, queries: ir.Value, total: ir.Value
) -> ir.Value:
    """The cache [B, K, max(P, T), D] with the new rows of `new` [B, K, S, D] from starts[b] on."""
    nodes = call.nodes
    length = nodes.length(past, 2)
    more = nodes.one("Max", nodes.one("Sub", nodes.shaped(total, 1), length), nodes.constant([0]))
    past = nodes.one("Pad", past, nodes.one("Concat", nodes.constant([0] * 6), more, nodes.constant([0]), axis=0))
    slots = counted(call, nodes.constant(0), length_of(call, past, 2))
    steps = nodes.one("Sub", slots, nodes.one("Unsqueeze", starts, nodes.constant([1])))  # [B, T]
    inside = nodes.one(
        "And",
        nodes.one("GreaterOrEqual", steps, nodes.constant(0), dtype=ir.DataType.BOOL),
        nodes.one("Less", steps, queries, dtype=ir.DataType.BOOL),
    )
    rows = nodes.one("Min", nodes.one("Max", steps, nodes.constant(0)), nodes.one("Sub", queries, nodes.constant(1)))
    by_token = nodes.one("Transpose", new, perm=[0, 2, 1, 3])
    placed = nodes.one("GatherND", by_token, nodes.one("Unsqueeze", rows, nodes.constant([2])), batch_dims=1)
    placed = nodes.one("Transpose", placed, perm=[0, 2, 1, 3])
    return nodes.one("Where", nodes.one("Unsqueeze", inside, nodes.constant([1, 3])), placed, past, dtype=past.dtype)


def rotary_embedding(call: Call) -> Results:
    """ONNX RotaryEmbedding-23: x, cos, sin, and positions if cos and sin are tables."""
    call.check(("interleaved", "num_heads", "rotary_embedding_dim"), 4)
    x, cos, sin, positions = (call.input(index) for index in range(4))
    if x is None or cos is None or sin is None:
        raise Unexpanded("it lacks an input")
    if positions is not None:
        cos, sin = (call.nodes.one("Gather", table, positions, axis=0, dtype=table.dtype) for table in (cos, sin))
    return [_rotated(call, x, cos, sin, call.size(call.node.inputs[1] or x, -1))]


def microsoft_rotary_embedding(call: Call) -> Results:
    """com.microsoft RotaryEmbedding: x, positions [B, S] or the first one [1], cos and sin as tables."""
    call.check(("interleaved", "num_heads", "rotary_embedding_dim"), 4)
    x, positions, cos, sin = (call.input(index) for index in range(4))
    if x is None or positions is None or cos is None or sin is None:
        raise Unexpanded("it lacks an input")
    nodes = call.nodes
    if len(call.shape(positions)) == 1:
        axis = 1 if len(call.shape(x)) == 3 else 2
        steps = counted(call, nodes.constant(0), length_of(call, x, axis))
        positions = nodes.one("Unsqueeze", nodes.one("Add", positions, steps), nodes.constant([0]))
    pairs = call.size(cos, -1)
    cos, sin = (nodes.one("Gather", table, positions, axis=0, dtype=table.dtype) for table in (cos, sin))
    return [_rotated(call, x, cos, sin, pairs)]


def _rotated(call: Call, x: ir.Value, cos: ir.Value, sin: ir.Value, pairs: int) -> ir.Value:
    """The rotation of the first 2P features of each head by cos and sin [B or 1, S, P]."""
    nodes, width = call.nodes, call.size(x, -1)
    flat, heads = len(call.shape(x)) == 3, call.integer("num_heads")
    if flat and not heads:
        if call.integer("rotary_embedding_dim"):
            raise Unexpanded("its number of heads is not stated")
        heads = width // (2 * pairs)
    size = width // heads if flat else width
    by_heads = nodes.shaped(x, 0, 0, heads, size) if flat else x
    interleaved = bool(call.integer("interleaved"))
    out = _turned(call, by_heads, (cos, sin), size=size, pairs=pairs, axis=2 if flat else 1, interleaved=interleaved)
    return nodes.shaped(out, 0, 0, width) if flat else out


def _turned(
    call: Call, x: ir.Value, angles: Sequence[ir.Value], *, size: int, pairs: int, axis: int, interleaved: bool
) -> ir.Value:
    """[B, N, S, D] or [B, S, N, D] rotated by cos and sin [B or 1, S, P]; `axis` is that of the heads."""
    nodes, kept = call.nodes, None
    cos, sin = (nodes.one("Unsqueeze", one, nodes.constant([axis])) for one in angles)
    if 2 * pairs < size:
        widths = nodes.constant([2 * pairs, size - 2 * pairs])
        x, kept = nodes.op("Split", [x, widths], {"axis": 3}, outputs=2, dtype=x.dtype)
    last = 3
    if interleaved:
        last, x = 4, nodes.shaped(x, 0, 0, 0, pairs, 2)
        cos, sin = (nodes.one("Unsqueeze", one, nodes.constant([4])) for one in (cos, sin))
    first, second = nodes.op("Split", [x], {"axis": last, "num_outputs": 2}, outputs=2, dtype=x.dtype)
    turned = nodes.one("Sub", nodes.one("Mul", first, cos), nodes.one("Mul", second, sin))
    other = nodes.one("Add", nodes.one("Mul", first, sin), nodes.one("Mul", second, cos))
    out = nodes.one("Concat", turned, other, axis=last)
    if interleaved:
        out = nodes.shaped(out, 0, 0, 0, 2 * pairs)
    return out if kept is None else nodes.one("Concat", out, kept, axis=3)


EXPANSIONS: dict[tuple[str, str], Expansion] = {
    ("", "MatMul"): grouped.matmul,
    ("", "Einsum"): grouped.einsum,
    ("", "Gemm"): single_rows.gemm,
    ("", "Attention"): attention,
    ("", "RotaryEmbedding"): rotary_embedding,
    ("com.microsoft", "Attention"): packed_attention,
    ("com.microsoft", "QAttention"): quantised_attention,
    ("com.microsoft", "MultiHeadAttention"): multi_head_attention,
    ("com.microsoft", "GroupQueryAttention"): group_query_attention,
    ("com.microsoft", "RotaryEmbedding"): microsoft_rotary_embedding,
}
"""The expansion of each operator; of products, only those around a softmax."""
