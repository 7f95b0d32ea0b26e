"""Softmaxes that are written out with the mask after the exponentials are rewritten if they are a masked softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
import softmax_graphs
from onnx import numpy_helper
from small_graphs import run
from softmax_graphs import HEADS, HIDDEN, NOT_ZEROED, SIZE, ZEROED, attention

from posexport.graphs.attention.describe import Describer
from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import KEPT, REWRITTEN

Array = np.ndarray[Any, Any]


def features(tokens: int) -> Array:
    return np.random.default_rng(tokens).standard_normal((2, tokens, HIDDEN)).astype(np.float32)


def expected(model: Any, given: Array, seen: Array) -> Array:
    """Attention with a mask in numpy, in float64."""
    weights = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer}
    rows, tokens, _ = given.shape
    q, k, v = (
        (given.astype(np.float64) @ weights[name]).reshape(rows, tokens, HEADS, SIZE).transpose(0, 2, 1, 3)
        for name in "qkv"
    )
    powers = np.where(seen, np.exp(q @ k.swapaxes(-1, -2) * SIZE**-0.5), 0.0)
    mixed: Array = powers / powers.sum(-1, keepdims=True) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(rows, tokens, HIDDEN)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("spelling", ZEROED)
def test_a_mask_behind_the_exponentials_is_rewritten(spelling: str, form: str) -> None:
    model = attention(ZEROED[spelling])
    done, proto = helpers.rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for tokens in (1, 6, 13):
        given, places = features(tokens), np.arange(tokens)
        seen = places != 2 if spelling == "by key" else places <= places[:, None] + 2
        want = expected(model, given, seen)
        for one in (model, proto):
            np.testing.assert_allclose(run(one, {"features": given})["output"], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fault", NOT_ZEROED)
def test_what_is_no_softmax_of_the_keys_that_are_seen_is_kept(fault: str) -> None:
    model = attention(NOT_ZEROED[fault])
    done, proto = helpers.rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [KEPT]
    given = features(9)
    assert np.array_equal(run(model, {"features": given})["output"], run(proto, {"features": given})["output"])


def test_the_other_keys_hidden_stay_the_other_keys() -> None:
    """An inverted mask is rewritten into the same mask, or kept."""
    model = attention(softmax_graphs.zeroed("hidden", keys_only=True))
    _, proto = helpers.rewritten_model(model, form="native", target="ort")
    given = features(7)
    before, after = (run(one, {"features": given})["output"] for one in (model, proto))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_rows_that_see_no_key_are_left_out_and_the_others_tested(form: str) -> None:
    model = attention(softmax_graphs.zeroed_by_input)
    done, proto = helpers.rewritten_model(model, form=form, target="ort")
    (site,) = done.sites
    assert site.state == REWRITTEN and site.evidence is not None and site.evidence.cases > 4
    given, mask = features(8), np.ones((2, 8), np.float32)
    mask[0, 5:], mask[1] = 0.0, 0.0
    inputs = {"features": given, "attention_mask": mask}
    with np.errstate(invalid="ignore"):
        want = expected(model, given, mask[:, None, None].astype(bool))
    before, after = (run(one, inputs)["output"] for one in (model, proto))
    assert np.isnan(before[1]).all() and np.isnan(want[1]).all()
    for one in (before, after):
        np.testing.assert_allclose(one[0], want[0], rtol=0, atol=1e-5)


def test_the_mask_is_described() -> None:
    view = view_of(ir.from_proto(attention(softmax_graphs.zeroed_by_input)))
    (found,) = (Describer(view).describe(one) for one in view.attentions)
    assert (found["mask"]["kind"], found["mask"]["padding"]) == ("none", ["attention_mask"])
    view = view_of(ir.from_proto(attention(softmax_graphs.zeroed())))
    (found,) = (Describer(view).describe(one) for one in view.attentions)
    assert found["bias"] is None and found["mask"]["kind"] == "other"
