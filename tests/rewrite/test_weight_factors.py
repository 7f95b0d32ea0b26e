"""Attention weights that are multiplied by numbers before their product with values.

The numbers move to the result if each head has one number for all inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto
from small_graphs import Graph, run
from softmax_graphs import HEADS, HIDDEN, Mix, attention

from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.graphs.inspection import inspected
from posexport.report.attentions import more_text
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model

BY_HEAD = np.array([0.5, 0.25, -3.0, 1.1], np.float32).reshape(HEADS, 1, 1)


def changed(change: Callable[[Graph, str], str]) -> Mix:
    """Attention whose weights are changed by `change`."""
    return lambda g, scores, values: g.op("MatMul", change(g, g.op("Softmax", scores, axis=-1)), values)


def by(kind: str, number: Any) -> Mix:
    return changed(lambda g, weights: g.op(kind, weights, g.constant(number, np.float32)))


def by_root(g: Graph, weights: str) -> str:
    return g.op("Mul", g.op("Sqrt", g.constant(0.25, np.float32)), weights)


def by_root_of_heads(g: Graph, weights: str) -> str:
    """Multiplies the weights by a number that the graph computes from the number of heads."""
    heads = g.op("Cast", g.length(weights, 1), to=TensorProto.FLOAT)
    return g.op("Div", weights, g.op("Sqrt", heads))


def without_numbers(g: Graph, weights: str) -> str:
    """Zeros in place of NaN, and half of the weights."""
    seen = g.op("Where", g.op("IsNaN", weights), g.constant(0.0, np.float32), weights)
    return g.op("Mul", seen, g.constant(0.5, np.float32))


def by_length(g: Graph, weights: str) -> str:
    return g.op("Div", weights, g.op("Cast", g.length(weights, 3), to=TensorProto.FLOAT))


def by_place(axis: int) -> Callable[[Graph, str], str]:
    """Another number for each place of an axis: for each query or each key."""

    def change(g: Graph, weights: str) -> str:
        length = g.op("Squeeze", g.length(weights, axis), g.constant([0]))
        places = g.op("Cast", g.op("Range", g.constant(1), length, g.constant(1)), to=TensorProto.FLOAT)
        places = g.op("Concat", g.constant([5.0], np.float32), places, axis=0)
        return g.op("Mul", weights, g.op("Unsqueeze", places, g.constant([1])) if axis == 2 else places)

    return change


FACTORS: dict[str, Mix] = {
    "smaller": by("Mul", 0.95),
    "divided": by("Div", 3.0),
    "negative": by("Mul", -2.0),
    "one number of four axes": by("Mul", [[[[0.5]]]]),
    "by head": by("Mul", BY_HEAD),
    "by head, divided": by("Div", BY_HEAD),
    "a root": changed(by_root),
    "a root of a fixed size": changed(by_root_of_heads),
    "behind zeros for NaN": changed(without_numbers),
}

OTHERS: dict[str, Mix] = {
    "length": changed(by_length),
    "query": changed(by_place(2)),
    "key": changed(by_place(3)),
    "squared": changed(lambda g, weights: g.op("Mul", weights, weights)),
    "inverse": changed(lambda g, weights: g.op("Div", g.constant(0.5, np.float32), weights)),
    "zero": by("Mul", 0.0),
    "a head without weights": by("Mul", BY_HEAD * np.array([1, 0, 1, 1], np.float32).reshape(HEADS, 1, 1)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_move_behind_the_product(name: str, form: str) -> None:
    model = attention(FACTORS[name])
    done, proto = helpers.rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    given = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    want, found = (run(one, {"features": given})["output"] for one in (model, proto))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    plain = run(attention(changed(lambda g, weights: g.op("Identity", weights))), {"features": given})["output"]
    assert np.abs(plain - found).max() > 1e-3


def test_factors_are_listed(tmp_path: Path) -> None:
    for name, factors in (("smaller", [float(np.float32(0.95))]), ("by head", BY_HEAD.ravel().tolist())):
        path = helpers.saved(tmp_path, attention(FACTORS[name]))
        (one,) = inspected(read_with_weights_on_disk(path), {}).attentions
        assert (one["state"], one["weight_factors"]) == ("recognised", factors)
        assert "weights times" in more_text(one)


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes_of_weights_stay(name: str) -> None:
    done = rewrite_model(ir.from_proto(attention(OTHERS[name])), form="native", target="ort")
    assert [one.state for one in done.sites] in ([], [KEPT])
    assert {one.reason.code for one in done.sites if one.reason} <= {"weights", "not-the-same"}
