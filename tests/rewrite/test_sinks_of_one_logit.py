"""Softmaxes with a number added to their sum or with another base: these are rewritten, and near misses are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from onnx import numpy_helper
from sink_graphs import NEAR_MISSES, SPELLINGS, padded, weights_of
from small_graphs import run
from softmax_graphs import HEADS, HIDDEN, SIZE, attention

from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.graphs.inspection import inspected
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model

Array = np.ndarray[Any, Any]


def features(tokens: int = 6) -> Array:
    return np.random.default_rng(tokens).standard_normal((2, tokens, HIDDEN)).astype(np.float32)


def expected(model: onnx.ModelProto, given: Array, **options: Any) -> Array:
    """The attention in numpy, in float64."""
    stored = {one.name: numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer}
    rows, tokens, _ = given.shape
    q, k, v = (
        (given.astype(np.float64) @ stored[name]).reshape(rows, tokens, HEADS, SIZE).transpose(0, 2, 1, 3)
        for name in "qkv"
    )
    mixed: Array = weights_of(q @ k.swapaxes(-1, -2) * SIZE**-0.5, **options) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(rows, tokens, HIDDEN)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_is_rewritten(spelling: str, form: str) -> None:
    mix, options = SPELLINGS[spelling]
    model = attention(mix)
    done, proto = helpers.rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    assert done.sites[0].evidence is not None and done.sites[0].evidence.error < 1e-12
    for tokens in (2, 6):
        given = features(tokens)
        want = expected(model, given, **options)
        for one in (model, proto):
            np.testing.assert_allclose(run(one, {"features": given})["output"], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fault", NEAR_MISSES)
def test_a_near_miss_stays(fault: str) -> None:
    code, mix = NEAR_MISSES[fault]
    done = rewrite_model(ir.from_proto(attention(mix)), form="native", target="ort")
    found = [(one.state, one.reason.code if one.reason else None) for one in done.sites]
    assert found == ([] if code is None else [(KEPT, code)]) or (code is None and found == [(KEPT, "softmax-form")])


def test_the_sink_is_listed(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, attention(padded()))
    (one,) = inspected(read_with_weights_on_disk(path), {}).attentions
    assert (one["state"], one["sinks"]) == ("recognised", True)
