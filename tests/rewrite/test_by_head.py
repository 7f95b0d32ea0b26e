"""An axis of queries or keys is not taken for the axis of heads if both have the same length.

The sizes of the inputs are fixed, and only far positions show the difference. The oracle is ONNX Runtime with the
original graph.
"""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import numpy as np
import pytest
from attention_graphs import Writer
from onnx import TensorProto
from rewrite_helpers import rewritten_model
from small_graphs import run

FAR = 60_000


def _far(g: Writer, *shape: int) -> str:
    """A number for each position, reshaped to `shape`: 3 at far positions and 1 at others."""
    positions = g.input("position_ids", TensorProto.INT64, 1, graphs.HEADS)
    is_far = g.op("Greater", positions, g.const(FAR - 1))
    return g.op("Reshape", g.op("Where", is_far, g.floats(3.0), g.floats(1.0)), g.const([*shape]))


def scaled_queries(g: Writer, scores: str) -> str:
    return g.op("Mul", scores, _far(g, 1, 1, -1, 1))


def scaled_keys(g: Writer, scores: str) -> str:
    return g.op("Mul", scores, _far(g, 1, 1, 1, -1))


def scaled_heads(g: Writer, scores: str) -> str:
    return g.op("Mul", scores, _far(g, 1, -1, 1, 1))


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize(
    ("scale", "state"), [(scaled_queries, "kept"), (scaled_keys, "kept"), (scaled_heads, "rewritten")]
)
def test_scales(scale: Callable[[Writer, str], str], state: str, form: str) -> None:
    model = graphs.attention(fixed=(1, graphs.HEADS), add=[scale])
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [state]
    features = np.random.default_rng(1).standard_normal((1, graphs.HEADS, graphs.HEADS * graphs.SIZE))
    for first in (0, FAR - 1):
        arrays = {"hidden_states": features.astype(np.float32)}
        arrays["position_ids"] = np.arange(first, first + graphs.HEADS)[None]
        expected, actual = (run(one, arrays)["output"] for one in (model, proto))
        assert actual.shape == expected.shape and np.isfinite(expected).all()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
