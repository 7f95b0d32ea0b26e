"""Other spellings of a rotation: features chosen by indices or by a condition, and a matrix for each angle.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from absorbed_graphs import HIDDEN, SIZE, long, many, model_of
from descriptions import described
from onnx import TensorProto
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

PAIRS = SIZE // 2
FREQUENCIES = 100.0 ** (-np.arange(PAIRS) / PAIRS)
SWAPPED = np.arange(SIZE) ^ 1
"""The other feature of each pair (2i, 2i + 1)."""

Turn = Callable[[Graph, str], str]


def angles(g: Graph, repeats: int = 1) -> str:
    """Angles [T, P], or each of them `repeats` times in a row."""
    count = g.op("Squeeze", many(g), g.constant([0]))
    places = g.op("Cast", g.op("Range", g.constant(0), count, g.constant(1)), to=TensorProto.FLOAT)
    return g.op("Mul", g.op("Unsqueeze", places, g.constant([1])), g.constant(FREQUENCIES.repeat(repeats), np.float32))


def turned(g: Graph, value: str, other: str) -> str:
    """value cos + other sin, where `other` has the other feature of each pair with its sign."""
    both = angles(g, 2)
    return g.op("Add", g.op("Mul", value, g.op("Cos", both)), g.op("Mul", other, g.op("Sin", both)))


def by_gather_nd(g: Graph, value: str) -> str:
    """value[..., indices], as torch.export writes it; the sines have the sign."""
    first = g.op("Transpose", value, perm=[3, 0, 1, 2])
    other = g.op("Transpose", g.op("GatherND", first, g.constant(SWAPPED[:, None])), perm=[1, 2, 3, 0])
    return turned(g, value, g.op("Mul", other, g.constant([-1.0, 1.0] * PAIRS, np.float32)))


def rolled(g: Graph, value: str, by: int) -> str:
    """torch.roll over the features."""
    parts = g.parts("Split", 2, value, g.constant([by % SIZE, SIZE - by % SIZE]), axis=3)
    return g.op("Concat", *parts[::-1], axis=3)


def by_where(g: Graph, value: str) -> str:
    even = g.constant([True, False] * PAIRS, np.bool_)
    other = g.op("Where", even, g.op("Neg", rolled(g, value, 1)), rolled(g, value, -1))
    return turned(g, value, other)


def by_length(g: Graph, value: str) -> str:
    """A fault: in long rows, another condition chooses the features."""
    condition = g.op("Xor", g.constant([True, False] * PAIRS, np.bool_), long(g))
    other = g.op("Where", condition, g.op("Neg", rolled(g, value, 1)), rolled(g, value, -1))
    return turned(g, value, other)


def matrices(g: Graph, scale: float = 1.0) -> str:
    """[T, P, 2, 2]; the cosines of the second feature are multiplied by `scale`."""
    both = angles(g)
    cos, sin = g.op("Cos", both), g.op("Sin", both)
    second = g.op("Mul", cos, g.constant(scale, np.float32))
    columns = [g.op("Unsqueeze", one, g.constant([2])) for one in (cos, g.op("Neg", sin), sin, second)]
    return g.op("Reshape", g.op("Concat", *columns, axis=2), g.constant([0, 0, 2, 2]))


def by_matrix(g: Graph, value: str, scale: float = 1.0) -> str:
    pairs = g.op("Reshape", value, g.constant([0, 0, 0, PAIRS, 2, 1]))
    return g.op("Reshape", g.op("MatMul", matrices(g, scale), pairs), g.constant([0, 0, 0, SIZE]))


def by_einsum(g: Graph, value: str) -> str:
    pairs = g.op("Reshape", value, g.constant([0, 0, 0, PAIRS, 2]))
    return g.op(
        "Reshape", g.op("Einsum", pairs, matrices(g), equation="bhspj,spij->bhspi"), g.constant([0, 0, 0, SIZE])
    )


def check_equal(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    for tokens in (1, 7, 400):
        features = np.random.default_rng(tokens).standard_normal((2, tokens, HIDDEN)).astype(np.float32)
        expected, actual = (run(one, {"features": features})["output"] for one in (model, other))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("turn", [by_gather_nd, by_where, by_matrix, by_einsum])
def test_a_rotation_is_one_operator(turn: Turn, form: str) -> None:
    model = model_of(q=turn, k=turn)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("RotaryEmbedding") == 2
    check_equal(model, proto)


@pytest.mark.parametrize("turn", [by_length, lambda g, value: by_matrix(g, value, 0.9)])
def test_what_is_no_rotation_stays(turn: Turn) -> None:
    model = model_of(q=turn, k=turn)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert "RotaryEmbedding" not in {node.op_type for node in proto.graph.node}
    check_equal(model, proto)


def decaying(g: Graph, value: str, *, keys: bool, fault: float = 1.0) -> str:
    """xPos: amplitudes that shrink with the position for queries, and their reciprocals for keys.

    Each amplitude is computed once for both features of its pair. A `fault` multiplies those of the second features.
    """
    places = angles(g)
    decay = np.log((2 * np.arange(PAIRS) / SIZE + 0.4) / 1.4) / 512 / FREQUENCIES
    sizes = g.op("Exp", g.op("Mul", places, g.constant(decay, np.float32)))
    pairs = g.op("Concat", *[g.op("Unsqueeze", sizes, g.constant([2]))] * 2, axis=2)
    wide = g.op("Reshape", pairs, g.constant([0, SIZE]))
    wide = g.op("Reciprocal", wide) if keys else wide
    wide = wide if fault == 1.0 else g.op("Mul", wide, g.constant([1.0, fault] * PAIRS, np.float32))
    both = angles(g, 2)
    other = g.op("Mul", g.op("Gather", value, g.constant(SWAPPED), axis=3), g.constant([-1.0, 1.0] * PAIRS, np.float32))
    cos, sin = (g.op("Mul", g.op(kind, both), wide) for kind in ("Cos", "Sin"))
    return g.op("Add", g.op("Mul", value, cos), g.op("Mul", other, sin))


@pytest.mark.parametrize(("fault", "rotations"), [(1.0, 2), (1.001, 0)])
def test_amplitudes_of_pairs(fault: float, rotations: int) -> None:
    model = model_of(
        q=lambda g, value: decaying(g, value, keys=False, fault=fault),
        k=lambda g, value: decaying(g, value, keys=True, fault=fault),
    )
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("RotaryEmbedding") == rotations
    check_equal(model, proto)
    assert (described(model)["encoding"]["name"] == "xpos") == (fault == 1.0)
