"""Rotations of queries and keys in one tensor, before these are taken apart, and of a part of the heads.

[B, S, 3, N, D] -> rotation of the first two -> queries and keys. The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from absorbed_graphs import model_of
from descriptions import described
from onnx import TensorProto
from rewrite_helpers import rewritten_model
from small_graphs import HEADS, HIDDEN, SIZE, Graph, _info, _model, run

from posexport.graphs.attention.angles import NotLinear, _linear
from posexport.rewrite.rewriter import REWRITTEN

PAIRS = SIZE // 2
THETA = 100.0
FREQUENCIES = THETA ** (-np.arange(PAIRS) / PAIRS)


def packed(
    order: Sequence[int], *, factor: Sequence[float] = (1.0, 1.0), scale: float = 1.0, parts: int = 2
) -> onnx.ModelProto:
    """Attention whose packed queries, keys and values have the axes [B, S, 3, N, D] in this `order`.

    The first `parts` of the three are rotated, with the angles of queries and keys multiplied by `factor`, and sines by
    `scale`.
    """
    g, x = Graph(), "features"
    projected = g.op("MatMul", x, g.random("qkv_proj", HIDDEN, 3 * HIDDEN))
    both = g.op("Reshape", projected, g.constant([0, 0, 3, HEADS, SIZE]))
    both = g.op("Transpose", both, perm=[*order])
    at = [*order].index(2)
    rotated, rest = g.parts("Split", 2, both, g.constant([parts, 3 - parts]), axis=at)
    count = g.op("Squeeze", g.op("Shape", x, start=1, end=2), g.constant([0]))
    places = g.op("Cast", g.op("Range", g.constant(0), count, g.constant(1)), to=TensorProto.FLOAT)
    shape = [1, 1, 1, 1, PAIRS]
    shape[[*order].index(1)] = -1
    angles = g.op("Mul", g.op("Unsqueeze", places, g.constant([1])), g.constant(FREQUENCIES, np.float32))
    angles = g.op("Reshape", angles, g.constant(shape))
    if len({*factor}) > 1:
        shape[[*order].index(1)], shape[at], shape[4] = 1, 2, 1
        angles = g.op("Mul", angles, g.op("Reshape", g.constant(factor, np.float32), g.constant(shape)))
    cos, sin = g.op("Cos", angles), g.op("Mul", g.op("Sin", angles), g.constant(scale, np.float32))
    a, b = g.parts("Split", 2, rotated, g.constant([PAIRS, PAIRS]), axis=4)
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    second = g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin))
    whole = g.op("Concat", g.op("Concat", first, second, axis=4), rest, axis=at)
    q, k, v = (g.op("Gather", whole, g.constant(part), axis=at) for part in range(3))
    left = [axis for axis in order if axis != 2]
    q, k, v = (g.op("Transpose", one, perm=[left.index(axis) for axis in (0, 3, 1, 4)]) for one in (q, k, v))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32))
    out = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    g.op("Reshape", g.op("Transpose", out, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]), name="output")
    features, output = (_info(name, TensorProto.FLOAT, "batch", "seq", HIDDEN) for name in ("features", "output"))
    return _model(g, [features], [output], 18)


def check_equal(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    for rows, tokens in ((2, 1), (3, 7), (1, 400)):
        features = np.random.default_rng(tokens).standard_normal((rows, tokens, HIDDEN)).astype(np.float32)
        expected, actual = (run(one, {"features": features})["output"] for one in (model, other))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5 * float(np.abs(expected).max()))


ORDERS = [(0, 1, 2, 3, 4), (2, 0, 3, 1, 4), (0, 2, 3, 1, 4), (1, 0, 2, 3, 4)]


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("order", ORDERS)
def test_queries_and_keys_are_rotated_by_one_operator(order: tuple[int, ...], form: str) -> None:
    model = packed(order)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("RotaryEmbedding") == 1
    check_equal(model, proto)
    assert described(model)["encoding"] == {"name": "rope", "layout": "half", "theta": THETA}


FAULTS: list[Callable[[], onnx.ModelProto]] = [
    lambda: packed(ORDERS[0], factor=(1.0, -1.0)),
    lambda: packed(ORDERS[1], factor=(1.0, 1.001)),
    lambda: packed(ORDERS[0], scale=0.5),
    lambda: packed(ORDERS[2], scale=0.999),
    lambda: packed(ORDERS[0], parts=1),
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_near_misses_stay_what_they_are(fault: int) -> None:
    model = FAULTS[fault]()
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    check_equal(model, proto)
    found = described(model)["encoding"]
    assert found["name"] != "rope"


def some_heads(g: Graph, value: str) -> str:
    """The first two heads are rotated."""
    count = g.op("Squeeze", g.op("Shape", value, start=2, end=3), g.constant([0]))
    places = g.op("Cast", g.op("Range", g.constant(0), count, g.constant(1)), to=TensorProto.FLOAT)
    angles = g.op("Mul", g.op("Unsqueeze", places, g.constant([1])), g.constant(FREQUENCIES, np.float32))
    cos, sin = g.op("Cos", angles), g.op("Sin", angles)
    rotated, rest = g.parts("Split", 2, value, g.constant([2, HEADS - 2]), axis=1)
    a, b = g.parts("Split", 2, rotated, g.constant([PAIRS, PAIRS]), axis=3)
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    second = g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin))
    return g.op("Concat", g.op("Concat", first, second, axis=3), rest, axis=1)


def test_some_heads_are_rotated() -> None:
    """An operator rotates these heads. The description doesn't say that all are rotated."""
    model = model_of(q=some_heads, k=some_heads)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("RotaryEmbedding") == 2
    check_equal(model, proto)
    assert described(model)["encoding"]["reason"]["code"] == "rotation-unknown"


def test_one_position_has_no_frequencies() -> None:
    """Numpy would print a line of LAPACK for a slope over one place."""
    with pytest.raises(NotLinear):
        _linear(np.zeros(1), np.ones((1, PAIRS), complex))
