"""A softmax that is written out, whose maximum is replaced where all keys of a row are hidden.

The oracle is numpy, by `softmax_graphs.expected`, and ONNX Runtime with the original graph.
"""

from __future__ import annotations

import numpy as np
import pytest
import rewrite_helpers as helpers
import softmax_graphs
from small_graphs import HIDDEN, Graph, run
from softmax_graphs import Mix, attention

from posexport.rewrite.rewriter import REWRITTEN


def number(g: Graph, value: float) -> str:
    return g.constant(value, np.float32)


def is_infinite(g: Graph, most: str) -> str:
    """jax.nn.logsumexp replaces what is not finite."""
    return g.op("Where", g.op("IsInf", most), number(g, 0), most)


def is_finite(g: Graph, most: str) -> str:
    """torch.isfinite, as torch's exporters write it."""
    finite = g.op("Not", g.op("Or", g.op("IsInf", most), g.op("IsNaN", most)))
    return g.op("Where", finite, most, number(g, 0))


def is_low(g: Graph, most: str) -> str:
    return g.op("Where", g.op("Greater", most, number(g, -1e30)), most, number(g, 0))


def in_size(g: Graph, most: str) -> str:
    """abs(x) < infinity."""
    return g.op("Where", g.op("Less", g.op("Abs", most), number(g, np.inf)), most, number(g, 0))


def is_positive(g: Graph, most: str) -> str:
    """No guard: rows with usual scores get another number, too."""
    return g.op("Where", g.op("Greater", most, number(g, 0)), most, number(g, 3))


def guarded(guard: object, axis: int = -1) -> Mix:
    def mix(g: Graph, scores: str, values: str) -> str:
        most = guard(g, g.op("ReduceMax", scores, g.constant([axis])))  # type: ignore[operator]
        powers = g.op("Exp", g.op("Sub", scores, most))
        return g.op("MatMul", g.op("Div", powers, g.op("ReduceSum", powers, g.constant([-1]))), values)

    return mix


def features(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).standard_normal((2, tokens, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("guard", [is_infinite, is_finite, is_low, in_size, is_positive])
def test_guards_of_rows_without_keys_go(guard: object) -> None:
    """A value that is no guard is added to the scores, like any value that is computed from features."""
    model = attention(guarded(guard))
    done, proto = helpers.rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert any(node.op_type == "ReduceMax" for node in proto.graph.node) is (guard is is_positive)
    for tokens in (1, 6):
        want = softmax_graphs.expected(model, features(tokens))
        for one in (model, proto):
            np.testing.assert_allclose(run(one, {"features": features(tokens)})["output"], want, rtol=0, atol=1e-5)


def test_a_guarded_maximum_over_queries_is_no_maximum() -> None:
    model = attention(guarded(is_infinite, axis=-2))
    _, proto = helpers.rewritten_model(model, form="native", target="ort")
    for tokens in (1, 6):
        want, got = (run(one, {"features": features(tokens)})["output"] for one in (model, proto))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        assert (
            tokens == 1
            or np.abs(want - softmax_graphs.expected(attention(guarded(is_infinite)), features(tokens))).max() > 0
        )
