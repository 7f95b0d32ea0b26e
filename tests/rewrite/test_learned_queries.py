"""Attention among queries that a model has learned, as in DETR: its values depend on no input, only on its rows.

The oracle is ONNX Runtime on the graph as it was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto, helper
from small_graphs import HEADS, HIDDEN, SIZE, Graph, _info, _model

QUERIES = 5


def repeated(g: Graph, how: str) -> str:
    """Learned queries [batch, QUERIES, HIDDEN] of an op, or zeros, or numbers of the places of tokens."""
    rows = g.length("features", 0)
    table = g.random("table", 1, QUERIES, HIDDEN)
    shape = g.op("Concat", rows, g.constant([QUERIES, HIDDEN]), axis=0)
    if how == "zeros":
        return g.op("ConstantOfShape", shape, value=helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0]))
    if how == "tiled":
        return g.op("Tile", table, g.op("Concat", rows, g.constant([1, 1]), axis=0))
    if how == "places":
        places = g.op("Range", g.constant(0), g.op("Squeeze", g.length("features", 1)), g.constant(1))
        wide = g.op("Unsqueeze", g.op("Cast", places, to=TensorProto.FLOAT), g.constant([0, 2]))
        return g.op("Mul", wide, g.random("rates", 1, 1, HIDDEN))
    return g.op("Expand", table, shape)


def attended(g: Graph, name: str, queries: str, keys: str, values: str) -> str:
    split = g.constant([0, 0, HEADS, SIZE])

    def heads(side: str, source: str, order: list[int]) -> str:
        projected = g.op("MatMul", source, g.random(f"{name}_{side}", HIDDEN, HIDDEN))
        biased = g.op("Add", projected, g.random(f"{name}_{side}_bias", HIDDEN))
        return g.op("Transpose", g.op("Reshape", biased, split), perm=order)

    scores = g.op("MatMul", heads("q", queries, [0, 2, 1, 3]), heads("k", keys, [0, 2, 3, 1]))
    weights = g.op("Softmax", g.op("Mul", scores, g.constant(SIZE**-0.5, np.float32)), axis=-1)
    mixed = g.op("MatMul", weights, heads("v", values, [0, 2, 1, 3]))
    tokens = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HIDDEN]))
    return g.op("Add", queries, g.op("MatMul", tokens, g.random(f"{name}_o", HIDDEN, HIDDEN)))


def decoder(how: str) -> onnx.ModelProto:
    """Learned queries see one another, then all tokens."""
    g = Graph()
    target = repeated(g, how)
    places = g.op("Add", target, g.random("places", QUERIES, HIDDEN)) if how != "places" else target
    own = attended(g, "own", places, places, target)
    g.op("Identity", attended(g, "cross", own, "features", "features"), name="output")
    inputs = [_info("features", TensorProto.FLOAT, "batch", "tokens", HIDDEN)]
    return _model(g, inputs, [_info("output", TensorProto.FLOAT, "batch", "queries", HIDDEN)], 18)


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("how", ["expanded", "tiled", "zeros"])
def test_learned_queries_see_one_another(how: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    path, out = helpers.saved(tmp_path, decoder(how)), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form=form, target="ort")
    assert [(one["state"], one["reason"]) for one in result.attentions] == [("rewritten", None)] * 2
    for shape in ((1, 1), (2, 7), (3, 4)):
        features = {"features": np.random.default_rng(1).standard_normal((*shape, HIDDEN)).astype(np.float32)}
        before, after = helpers.ran(path, features)[0], helpers.ran(out, features)[0]
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * float(np.abs(before).max()))


def test_places_of_tokens_are_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    path = helpers.saved(tmp_path, decoder("places"))
    result = helpers.rewritten(path, tmp_path / "out.onnx", form="native", target="ort")
    assert result.attentions[0]["reason"]["code"] == "features-unknown"
