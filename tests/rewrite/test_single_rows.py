"""Attention of one sequence [S, D], without axes of rows and heads, as MatMul or as Gemm with its factors.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.graphs import single_rows
from posexport.rewrite.rewriter import KEPT, REWRITTEN

HIDDEN = 16


def model_of(g: Graph, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, dtype, ["seq", HIDDEN]) for name in ("features", "output")]
    graph = helper.make_graph(g.nodes, "main_graph", values[:1], values[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def projected(g: Graph, name: str) -> str:
    return g.op("Gemm", "features", g.random(name, HIDDEN, HIDDEN), g.random(f"{name}_bias", HIDDEN))


def causal(g: Graph) -> str:
    """0 for keys up to the query, and -1e9 for others, [S, S]."""
    count = g.length("features", 0)
    hidden = g.op("Expand", g.constant([[-1e9]], np.float32), g.op("Concat", count, count, axis=0))
    return g.op("Trilu", hidden, g.constant(1), upper=1)


def products(g: Graph) -> str:
    scores = g.op("MatMul", projected(g, "q"), g.op("Transpose", projected(g, "k"), perm=[1, 0]))
    scores = g.op("Add", g.op("Mul", scores, g.constant(0.25, np.float32)), causal(g))
    return g.op("MatMul", g.op("Softmax", scores, axis=-1), projected(g, "v"))


def gemms(g: Graph, **factors: float) -> str:
    """The scores and the values are results of Gemm, which also adds the mask."""
    scores = g.op("Gemm", projected(g, "q"), projected(g, "k"), causal(g), transB=1, **factors)
    return g.op("Gemm", g.op("Softmax", scores, axis=1), projected(g, "v"))


def turned(g: Graph) -> str:
    """Queries are columns: Gemm transposes them."""
    columns = g.op("Transpose", projected(g, "q"), perm=[1, 0])
    scores = g.op("Gemm", columns, projected(g, "k"), transA=1, transB=1, alpha=0.25)
    return g.op("MatMul", g.op("Softmax", scores, axis=1), projected(g, "v"))


def per_head(g: Graph) -> str:
    """Each of two heads has its own nodes."""
    parts = [g.parts("Split", 2, projected(g, name), axis=1) for name in "qkv"]
    heads = []
    for q, k, v in zip(*parts, strict=True):
        scores = g.op("MatMul", q, g.op("Transpose", k, perm=[1, 0]))
        heads.append(g.op("MatMul", g.op("Softmax", scores, axis=-1), v))
    return g.op("Concat", *heads, axis=1)


STYLES: dict[str, tuple[Callable[[Graph], str], int]] = {
    "products": (products, 1),
    "Gemm": (lambda g: gemms(g, alpha=0.2), 1),
    "Gemm with two factors": (lambda g: gemms(g, alpha=0.2, beta=0.5), 1),
    "Gemm with columns": (turned, 1),
    "a head at a time": (per_head, 2),
}


def over_queries(g: Graph) -> str:
    """The softmax is over the queries, so that the weights of a query have no fixed sum."""
    scores = g.op("MatMul", projected(g, "q"), g.op("Transpose", projected(g, "k"), perm=[1, 0]))
    return g.op("MatMul", g.op("Softmax", scores, axis=0), projected(g, "v"))


def classified(g: Graph) -> str:
    """The mean of learned rows, weighted by a classifier of each token: its operands are weights."""
    logits = g.op("Gemm", "features", g.random("classes", HIDDEN, 9), g.random("bias", 9))
    return g.op("Gemm", g.op("Softmax", logits, axis=1), g.random("rows", 9, HIDDEN))


def outputs(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    for length in (1, 2, 9, 23):
        features = {"features": np.random.default_rng(length).standard_normal((length, HIDDEN)).astype(np.float32)}
        expected, actual = run(model, features)["output"], run(other, features)["output"]
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("style", STYLES)
def test_attention_of_one_sequence_is_rewritten(style: str, form: str) -> None:
    made, count = STYLES[style]
    g = Graph()
    g.op("MatMul", made(g), g.random("out", HIDDEN, HIDDEN), name="output")
    done, proto = rewritten_model(model_of(g), form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN] * count
    operators = [node.op_type for node in proto.graph.node]
    assert sum(kind in ("Attention", "MultiHeadAttention") for kind in operators) == count
    assert "Softmax" not in operators
    outputs(model_of(g), proto)


@pytest.mark.parametrize("other", [over_queries, classified])
def test_what_is_no_attention_of_one_sequence_stays(other: Callable[[Graph], str]) -> None:
    g = Graph()
    g.op("Identity", other(g), name="output")
    model = model_of(g)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert REWRITTEN not in [one.state for one in done.sites]
    assert [node.op_type for node in proto.graph.node] == [node.op_type for node in model.graph.node]
    outputs(model, proto)


def test_a_wrong_factor_of_gemm_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    monkeypatch.setattr(single_rows, "_times", lambda call, value, factor: value)
    g = Graph()
    g.op("Identity", gemms(g, alpha=0.2), name="output")
    path = helpers.saved(tmp_path, model_of(g))
    (one,) = helpers.rewritten(path, tmp_path / "out.onnx", form="native", target="ort").attentions
    assert (one["state"], one["reason"]["code"]) == (KEPT, "whole-graph-differs")
