"""Scores that are transposed in every way before the softmax, and back before the product with the values."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto
from small_graphs import Graph, run
from softmax_graphs import HIDDEN, Mix, attention

from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model

ORDERS = [order for order in permutations(range(4)) if order != (0, 1, 2, 3)]


def transposed(order: tuple[int, ...], softmax_over: int, masked: str = "", back: tuple[int, ...] | None = None) -> Mix:
    """A softmax over the axis that was `softmax_over` before the scores were transposed.

    A mask of keys and queries is added before or after the transpose (`masked`). By default, `back` transposes the
    weights back.
    """

    def mix(g: Graph, scores: str, values: str) -> str:
        length = g.op("Squeeze", g.length(scores, 3), g.constant([0]))
        places = g.op("Range", g.constant(0), length, g.constant(1))
        later = g.op("Greater", places, g.op("Unsqueeze", places, g.constant([1])))
        less = g.op("Mul", g.op("Cast", later, to=TensorProto.FLOAT), g.constant(-1e9, np.float32))
        less = g.op("Unsqueeze", less, g.constant([0, 1]))
        scores = g.op("Add", scores, less) if masked == "before" else scores
        turned = g.op("Transpose", scores, perm=list(order))
        if masked == "behind":
            turned = g.op("Add", turned, g.op("Transpose", less, perm=list(order)))
        weights = g.op("Softmax", turned, axis=order.index(softmax_over))
        perm = [order.index(axis) for axis in range(4)] if back is None else list(back)
        return g.op("MatMul", g.op("Transpose", weights, perm=perm), values)

    return mix


def plain(masked: bool) -> Mix:
    return transposed((0, 1, 2, 3), 3, "before" if masked else "")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("masked", ["", "before", "behind"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_followed(order: tuple[int, ...], masked: str, form: str) -> None:
    model = attention(transposed(order, 3, masked))
    done, proto = helpers.rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for tokens in (1, 5):
        given = {"features": np.random.default_rng(0).standard_normal((3, tokens, HIDDEN)).astype(np.float32)}
        want = run(attention(plain(bool(masked))), given)["output"]
        for one in (model, proto):
            np.testing.assert_allclose(run(one, given)["output"], want, rtol=0, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("over", [0, 1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_softmax_over_other_axes_stays(order: tuple[int, ...], over: int) -> None:
    done = rewrite_model(ir.from_proto(attention(transposed(order, over))), form="native", target="ort")
    assert [one.state for one in done.sites] in ([], [KEPT])


@pytest.mark.parametrize("masked", ["", "before"])
def test_weights_that_are_not_transposed_back_stay(masked: str) -> None:
    """The product takes the weights of the queries for each key."""
    mix = transposed((0, 1, 3, 2), 3, masked, back=(0, 1, 2, 3))
    done = rewrite_model(ir.from_proto(attention(mix)), form="native", target="ort")
    assert [one.state for one in done.sites] in ([], [KEPT])
