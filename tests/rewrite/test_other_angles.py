"""Rotations whose cosines and sines are unusual only at positions beyond short rows keep their nodes; others do not.

The oracle is ONNX Runtime with the original graph, on rows that reach these positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from absorbed_graphs import HIDDEN, SIZE, long, many, model_of
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

FAR, EDGE = 400, 256
HALF = SIZE // 2
FREQUENCIES = (10_000.0 ** (-np.arange(HALF) / HALF)).astype(np.float32)

Pair = tuple[str, str]
Angles = Callable[[Graph], Pair]
"""Cosines and sines [T, D]."""


def places(g: Graph) -> str:
    """The positions [T]."""
    count = g.op("Squeeze", many(g), g.constant([0]))
    return g.op("Range", g.constant(0), count, g.constant(1))


def angles_of(g: Graph, positions: str) -> str:
    """Angles [T, D / 2]."""
    column = g.op("Unsqueeze", g.op("Cast", positions, to=TensorProto.FLOAT), g.constant([1]))
    return g.op("Mul", column, g.constant(FREQUENCIES, np.float32))


def of_angles(g: Graph, first: str, second: str) -> Pair:
    joined = g.op("Concat", first, second, axis=-1)
    return g.op("Cos", joined), g.op("Sin", joined)


def computed(g: Graph) -> Pair:
    angles = angles_of(g, places(g))
    return of_angles(g, angles, angles)


def computed_twice(g: Graph) -> Pair:
    return of_angles(g, angles_of(g, places(g)), angles_of(g, places(g)))


def table(*, late: float = 1.0) -> Angles:
    """The first T rows of a table. From row EDGE on, the angles of the second half are `late` times as large."""

    def made(g: Graph) -> Pair:
        angles = np.arange(1024)[:, None] * FREQUENCIES
        both = np.concatenate([angles, angles], 1)
        both[EDGE:, HALF:] *= late
        cut = (g.constant([0]), many(g), g.constant([0]))
        cos, sin = (g.op("Slice", g.constant(f(both), np.float32), *cut) for f in (np.cos, np.sin))
        return cos, sin

    return made


def looked_up(g: Graph) -> Pair:
    """Rows of a table by position."""
    angles = np.arange(1024)[:, None] * FREQUENCIES
    both = np.concatenate([angles, angles], 1)
    where = places(g)
    cos, sin = (g.op("Gather", g.constant(f(both), np.float32), where) for f in (np.cos, np.sin))
    return cos, sin


def rows_of_computed(g: Graph) -> Pair:
    """The graph computes three more rows than there are tokens, and takes the last T."""
    count = g.op("Add", g.op("Squeeze", many(g), g.constant([0])), g.constant(3))
    angles = angles_of(g, g.op("Range", g.constant(0), count, g.constant(1)))
    cut = (g.constant([3]), g.constant([2**31 - 1]), g.constant([0]))
    cos, sin = (g.op("Slice", value, *cut) for value in of_angles(g, angles, angles))
    return cos, sin


def bounded(g: Graph) -> Pair:
    """The angles of the second half do not grow after position EDGE - 1."""
    where = places(g)
    return of_angles(g, angles_of(g, where), angles_of(g, g.op("Min", where, g.constant(EDGE - 1))))


def chosen(g: Graph) -> Pair:
    """The angles of the second half are doubled in long rows."""
    angles = angles_of(g, places(g))
    return of_angles(g, angles, g.op("Where", long(g), g.op("Add", angles, angles), angles))


def scaled(g: Graph) -> Pair:
    """The second half of the cosines is multiplied by a larger number in long rows."""
    cos, sin = computed(g)
    steps = g.op("Add", g.op("Div", many(g), g.constant([EDGE])), g.constant([1]))
    halves = g.parts("Split", 2, cos, g.constant([HALF, HALF]), axis=1)
    return g.op("Concat", halves[0], g.op("Mul", halves[1], g.op("Cast", steps, to=TensorProto.FLOAT)), axis=1), sin


def two_selections(g: Graph) -> Pair:
    """Each half takes rows of the same table, by different positions."""
    angles = (np.arange(1024)[:, None] * FREQUENCIES).astype(np.float32)
    where = places(g)
    cos, sin = (
        g.op("Concat", *(g.op("Gather", rows, at) for at in (where, g.op("Min", where, g.constant(EDGE - 1)))), axis=1)
        for rows in (g.constant(np.cos(angles), np.float32), g.constant(np.sin(angles), np.float32))
    )
    return cos, sin


def columns_by_length(g: Graph) -> Pair:
    """The columns of a table have another order in long rows."""
    angles = np.arange(1024)[:, None] * FREQUENCIES
    both = np.concatenate([angles, angles], 1)
    there = np.roll(np.arange(SIZE), 1)
    columns = g.op("Where", long(g), g.constant(there), g.constant(np.arange(SIZE)))
    cut = (g.constant([0]), many(g), g.constant([0]))
    cos, sin = (
        g.op("Gather", g.op("Slice", g.constant(f(both), np.float32), *cut), columns, axis=1) for f in (np.cos, np.sin)
    )
    return cos, sin


def product(g: Graph) -> Pair:
    """Positions [T, 1] times frequencies [1, D], which are repeated in the constant."""
    column = g.op("Unsqueeze", g.op("Cast", places(g), to=TensorProto.FLOAT), g.constant([1]))
    angles = g.op("MatMul", column, g.constant(np.tile(FREQUENCIES, 2)[None], np.float32))
    return g.op("Cos", angles), g.op("Sin", angles)


def row_of_product(*, late: float = 1.0) -> Angles:
    """A product with a table chooses its rows. From row EDGE on, the angles of the second half are `late` times as
    large."""

    def made(g: Graph) -> Pair:
        both = np.arange(512)[:, None] * np.tile(FREQUENCIES, 2)
        both[EDGE:, HALF:] *= late
        column = g.op("Unsqueeze", places(g), g.constant([1]))
        rows = g.op("Cast", g.op("Equal", column, g.constant(np.arange(512)[None])), to=TensorProto.FLOAT)
        cos, sin = (g.op("MatMul", rows, g.constant(f(both), np.float32)) for f in (np.cos, np.sin))
        return cos, sin

    return made


def by_rank(g: Graph) -> Pair:
    """torch's older exporter writes a choice by the number of axes, which is the same on all inputs."""
    angles = angles_of(g, places(g))
    rank = g.op("Size", g.op("Shape", angles))
    other = g.op(
        "Concat", g.op("Expand", g.constant([1]), g.op("Reshape", rank, g.constant([1]))), g.length(angles, 0), axis=0
    )
    bodies = {}
    for name, kind, inputs in (("then_branch", "Reshape", [angles, other]), ("else_branch", "Identity", [angles])):
        node = helper.make_node(kind, inputs, [f"{name}_angles"], name=name)
        value = helper.make_tensor_value_info(f"{name}_angles", TensorProto.FLOAT, None)
        bodies[name] = helper.make_graph([node], name, [], [value])
    chosen = g.op("If", g.op("Less", rank, g.constant(2)), **bodies)
    both = g.op("Tile", chosen, g.constant([1, 2]))
    return g.op("Cos", both), g.op("Sin", both)


def rotated(angles: Angles) -> dict[str, Any]:
    """Hooks that rotate queries and keys [B, N, T, D] in the layout half."""

    def turn(g: Graph, value: str) -> str:
        cos, sin = angles(g)
        first, second = g.parts("Split", 2, value, g.constant([HALF, HALF]), axis=3)
        turned = g.op("Concat", g.op("Neg", second), first, axis=3)
        return g.op("Add", g.op("Mul", value, cos), g.op("Mul", turned, sin))

    return {"q": turn, "k": turn}


def outputs(model: onnx.ModelProto, *others: onnx.ModelProto) -> list[np.ndarray[Any, Any]]:
    features = np.random.default_rng(1).standard_normal((2, FAR, HIDDEN)).astype(np.float32)
    return [run(one, {"features": features})["output"] for one in (model, *others)]


FAULTS: dict[str, Angles] = {
    "late rows of a table": table(late=1.5),
    "late rows of a product": row_of_product(late=1.5),
    "the last positions": bounded,
    "a choice by the length": chosen,
    "a factor by the length": scaled,
    "two selections of rows": two_selections,
    "columns by the length": columns_by_length,
}


EQUAL = [computed, computed_twice, table(), looked_up, rows_of_computed, product, row_of_product(), by_rank]
"""Angles that are equal for both halves at all positions."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "fault"), [*itertools.product(["native", "contrib"], FAULTS)])
def test_other_angles_further_on_stay(fault: str, form: str) -> None:
    model = model_of(**rotated(FAULTS[fault]))
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert "RotaryEmbedding" not in {node.op_type for node in proto.graph.node}
    expected, actual, usual = outputs(model, proto, model_of(**rotated(computed)))
    assert float(np.abs(expected - usual).max()) > 1e-3 * float(np.abs(expected).max())  # The inputs reach the fault.
    assert actual.shape == expected.shape and np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("seed", "hooks"), [*itertools.product(range(4), ["q", "k", "qk"])])
def test_a_factor_that_a_truth_value_decides_stays(hooks: str, seed: int) -> None:
    """A random draw of one bool misses a difference half the time."""

    def turned_and_scaled(g: Graph, value: str) -> str:
        quarter = g.op("Mul", g.op("Cast", long(g), to=TensorProto.FLOAT), g.constant([0.25], np.float32))
        factor = g.op("Add", quarter, g.constant([1.0], np.float32))
        return g.op("Mul", rotated(computed)["q"](g, value), factor)

    model = model_of(**rotated(computed) | dict.fromkeys(hooks, turned_and_scaled))
    _, proto = rewritten_model(model, form="native", target="ort", seed=seed)
    expected, actual, usual = outputs(model, proto, model_of(**rotated(computed)))
    assert float(np.abs(expected - usual).max()) > 1e-3 * float(np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("angles", EQUAL)
def test_equal_angles_are_one_operator(angles: Angles, form: str) -> None:
    model = model_of(**rotated(angles))
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("RotaryEmbedding") == 2
    expected, actual = outputs(model, proto)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
