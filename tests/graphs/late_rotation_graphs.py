"""Attention that rotates keys after the cache, and attention that rotates a part of each head.

DeepSeek-V2 and V3 rotate a part of each head (arXiv:2405.04434). This file does not import posexport.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from attention_graphs import HEADS, SIZE, Rotate, Writer, repeated, rotation, visible
from onnx import TensorProto, helper
from rotation_graphs import angles, becoming_halves, halves, normed, sliced

Array = np.ndarray[Any, Any]

WIDTH = HEADS * SIZE

FREQUENCIES = 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
PART = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
"""Frequencies of whole heads, and of 8 features of them."""


def in_series(*rotations: Rotate) -> Rotate:
    """One rotation after the other."""

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        for one in rotations:
            heads = one(g, heads, queries)
        return heads

    return rotate


def keys_turn_late(
    key_heads: int, *, repeated_first: bool = False, given: bool = False, cached: bool = True
) -> onnx.ModelProto:
    """Causal attention whose cache holds keys that are not rotated.

    The keys of all tokens are rotated after the cache, and with `repeated_first` also after they are repeated for all
    heads. Queries are rotated by their index, or with `given` by an input `position_ids`. With `cached` False, there
    are no past tokens.
    """
    g, rng = Writer(), np.random.default_rng(0)
    x = g.input("hidden_states", g.type, "batch", "seq", WIDTH)
    q, k, v = (_projected(g, rng, x, count) for count in (HEADS, key_heads, key_heads))
    if cached:
        k, v = (_cached(g, name, new, key_heads, SIZE) for name, new in (("key", k), ("value", v)))
    total, seq = g.length(k, 2), g.length(x, 1)
    if not repeated_first:
        k = _turned(g, k, _by_places(g, g.const(0), total))
    k, v = (repeated(g, one, HEADS // key_heads) if key_heads < HEADS else one for one in (k, v))
    if repeated_first:
        k = _turned(g, k, _by_places(g, g.const(0), total))
    q = _turned(g, q, angles(g, FREQUENCIES) if given else _by_places(g, g.op("Sub", total, seq), total))
    return _attended(g, q, k, v, SIZE)


def latent(
    *,
    cached: bool = False,
    expand: str = "Expand",
    interleaved: bool = False,
    part_first: bool = False,
    keys_part_first: bool = False,
    plain: int = 8,
) -> onnx.ModelProto:
    """Multi-head latent attention: the last 8 features of each head are rotated, and all heads share those of the keys.

    `part_first` puts these features first, and `keys_part_first` only those of the keys. The operator `expand`
    (Expand or Tile) repeats the shared ones.
    """
    g, rng, part, value_dim = Writer(), np.random.default_rng(0), 8, 12
    dim = plain + part
    x = g.input("hidden_states", g.type, "batch", "seq", WIDTH)
    low = _normed(g, rng, g.op("MatMul", x, _weight(g, rng, WIDTH, 24)), 24)
    q = _split(g, g.op("MatMul", low, _weight(g, rng, 24, HEADS * dim)), HEADS, dim)
    shared = g.op("MatMul", x, _weight(g, rng, WIDTH, 20 + part))
    low = _normed(g, rng, sliced(g, shared, 0, 20), 20)
    wide = _split(g, g.op("MatMul", low, _weight(g, rng, 20, HEADS * (plain + value_dim))), HEADS, plain + value_dim)
    k, v = sliced(g, wide, 0, plain), sliced(g, wide, plain, plain + value_dim)
    turn = becoming_halves(PART) if interleaved else _part
    turned_q = turn(g, sliced(g, q, plain, dim))
    turned_k = turn(g, _split(g, sliced(g, shared, 20, 20 + part), 1, part))
    if expand == "Expand":
        shape = g.op("Concat", g.op("Shape", k, start=0, end=3), g.const([part]), axis=0)
        turned_k = g.op("Expand", turned_k, shape)
    else:
        turned_k = g.op("Tile", turned_k, g.const([1, HEADS, 1, 1]))
    q = _joined(g, sliced(g, q, 0, plain), turned_q, part_first)
    k = _joined(g, k, turned_k, part_first or keys_part_first)
    if cached:
        k, v = (_cached(g, name, new, HEADS, size) for name, new, size in (("key", k, dim), ("value", v, value_dim)))
    return _attended(g, q, k, v, value_dim)


def _part(g: Writer, heads: str) -> str:
    return g.op("Concat", *halves(sliced(g, heads, 0, 4), sliced(g, heads, 4, 8), *angles(g, PART), g), axis=-1)


def _joined(g: Writer, plain: str, turned: str, turned_first: bool) -> str:
    return g.op("Concat", *((turned, plain) if turned_first else (plain, turned)), axis=-1)


def _weight(g: Writer, rng: np.random.Generator, rows: int, columns: int) -> str:
    return g.floats(rng.standard_normal((rows, columns)) / np.sqrt(rows))


def _split(g: Writer, projected: str, heads: int, size: int) -> str:
    return g.op("Transpose", g.op("Reshape", projected, g.const([0, 0, heads, size])), perm=[0, 2, 1, 3])


def _projected(g: Writer, rng: np.random.Generator, x: str, heads: int) -> str:
    return _split(g, g.op("MatMul", x, _weight(g, rng, WIDTH, heads * SIZE)), heads, SIZE)


def _normed(g: Writer, rng: np.random.Generator, x: str, width: int) -> str:
    mean = g.op("ReduceMean", g.op("Mul", x, x), g.const([-1]), keepdims=1)
    root = g.op("Sqrt", g.op("Add", mean, g.floats(1e-6)))
    return g.op("Mul", g.op("Div", x, root), g.floats(rng.standard_normal(width)))


def _cached(g: Writer, name: str, new: str, heads: int, size: int) -> str:
    """New keys or values after cached ones; a copy of the result is an output."""
    whole = g.op("Concat", g.input(f"past_{name}", g.type, "batch", heads, "past", size), new, axis=2)
    g.nodes.append(helper.make_node("Identity", [whole], [f"present_{name}"]))
    g.outputs.append(helper.make_tensor_value_info(f"present_{name}", g.type, ("batch", heads, "keys", size)))
    return whole


def _by_places(g: Writer, first: str, last: str) -> tuple[str, str]:
    """Cosines and sines [tokens, P] of the positions from `first` to `last` - 1."""
    places = g.op("Cast", g.op("Range", first, last, g.const(1)), to=TensorProto.FLOAT)
    turns = g.op("Mul", g.op("Unsqueeze", places, g.const([1])), g.floats(FREQUENCIES))
    return g.op("Cos", turns), g.op("Sin", turns)


def _turned(g: Writer, heads: str, cos_sin: tuple[str, str]) -> str:
    a, b = sliced(g, heads, 0, SIZE // 2), sliced(g, heads, SIZE // 2, SIZE)
    return g.op("Concat", *halves(a, b, *cos_sin, g), axis=-1)


def _attended(g: Writer, q: str, k: str, v: str, value_dim: int) -> onnx.ModelProto:
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.floats(0.25))
    weights = g.op("Softmax", visible()(g, scores), axis=-1)
    out = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    g.nodes.append(helper.make_node("Reshape", [out, g.const([0, 0, HEADS * value_dim])], ["output"], name="node_out"))
    g.outputs.append(helper.make_tensor_value_info("output", g.type, ("batch", "seq", HEADS * value_dim)))
    graph = helper.make_graph(g.nodes, "attention", g.inputs, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


SLOW = 500.0 ** (-np.arange(0, SIZE, 2) / SIZE)
WHOLE = rotation(FREQUENCIES)
AGAIN = {
    "the same": in_series(WHOLE, WHOLE),
    "other angles": in_series(WHOLE, rotation(SLOW)),
    "another layout": in_series(rotation(SLOW, interleaved=True), WHOLE),
    "a part": in_series(rotation(PART), WHOLE),
    "of a part": in_series(WHOLE, rotation(PART)),
    "before a norm": in_series(WHOLE, normed(rotation(SLOW, interleaved=True))),
    "of a norm": in_series(normed(WHOLE), rotation(SLOW, interleaved=True)),
    "by a table": in_series(rotation(SLOW, table=64), WHOLE),
    "keys alone": lambda g, heads, queries: WHOLE(g, heads if queries else rotation(SLOW)(g, heads, queries), queries),
}
"""Pairs of rotations, one after the other."""
