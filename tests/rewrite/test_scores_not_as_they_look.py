"""Scores with one unusual number: each attention is kept with its reason, or computes the same after the rewrite.

The oracle is ONNX Runtime with the original graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from small_graphs import Graph, run
from softmax_graphs import HEADS, HIDDEN, attention

from posexport.graphs.attention import recognise
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.function_bodies import Functions
from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import KEPT, REWRITTEN, SiteResult, rewrite_model
from posexport.rewrite.surgery import lower


def rewritten(model: onnx.ModelProto) -> SiteResult:
    """The result of rewriting the only attention; asserts that both graphs compute the same."""
    done = rewrite_model(ir.from_proto(model), form="contrib", target="ort")
    (site,) = done.sites
    if site.state == REWRITTEN:
        features = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
        before, after = (run(one, {"features": features})["output"] for one in (model, ir.to_proto(done.model)))
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-5)
    return site


def floats(g: Graph, value: float) -> str:
    return g.constant(value, np.float32)


@pytest.mark.parametrize("bounds", [(), (-1e9,), (-1e9, -2e9), (-1e9, -0.1), (-0.1, -1e9)], ids=str)
def test_all_bounds_of_a_maximum_count(bounds: tuple[float, ...]) -> None:
    def mix(g: Graph, scores: str, v: str) -> str:
        bounded = g.op("Max", scores, *(floats(g, one) for one in bounds))
        return g.op("MatMul", g.op("Softmax", bounded, axis=-1), v)

    site, low = rewritten(attention(mix)), all(bound < -5e3 for bound in bounds)
    assert site.state == (REWRITTEN if low else KEPT)
    assert low or (site.reason is not None and site.reason.code == "score-bound")


@pytest.mark.parametrize("scaled", [None, "Mul", "Tanh"])
def test_what_changes_scores_and_sinks_is_not_taken_for_the_scores_alone(scaled: str | None) -> None:
    def mix(g: Graph, scores: str, v: str) -> str:
        rows, tokens = g.length(scores, 0), g.length(scores, 2)
        sinks = g.constant(np.linspace(-1, 2, HEADS).reshape(1, HEADS, 1, 1), np.float32)
        shape = g.op("Concat", rows, g.constant([HEADS]), tokens, g.constant([1]), axis=0)
        joined = g.op("Concat", scores, g.op("Expand", sinks, shape), axis=-1)
        if scaled is not None:
            joined = g.op("Mul", joined, floats(g, 3.0)) if scaled == "Mul" else g.op("Tanh", joined)
        weights = g.op("Softmax", joined, axis=-1)
        return g.op("MatMul", g.op("Slice", weights, g.constant([0]), g.constant([-1]), g.constant([-1])), v)

    site = rewritten(attention(mix))
    assert site.state == (REWRITTEN if scaled is None else KEPT)
    assert scaled is None or (site.reason is not None and site.reason.code == "score-order")


@pytest.mark.parametrize(("opset", "axis"), [(12, None), (12, 3), (12, 1), (13, None), (13, 3)], ids=str)
def test_logarithms_had_two_dimensions_before_opset_13_too(opset: int, axis: int | None) -> None:
    """Before opset 13, the default axis is the second, and all axes from it on are flattened."""

    def mix(g: Graph, scores: str, v: str) -> str:
        return g.op("MatMul", g.op("Exp", g.op("LogSoftmax", scores, **({} if axis is None else {"axis": axis}))), v)

    model = attention(mix)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    (found,) = view_of(ir.from_proto(model)).attentions
    last = axis == 3 or (opset == 13 and axis is None)
    assert isinstance(found, Attention if last else UnknownAttention)
    assert not isinstance(found, UnknownAttention) or found.reason.code == "softmax-axis"


def test_an_einsum_that_sums_a_letter_alone_is_no_product_and_loses_no_file() -> None:
    def mix(g: Graph, scores: str, v: str) -> str:
        weights = g.op("Softmax", scores, axis=-1)
        odd = g.op("Squeeze", g.op("Slice", v, g.constant([0]), g.constant([1]), g.constant([1])), g.constant([1]))
        summed = g.op("Einsum", weights, odd, equation="bhij,bjd->bid")
        return g.op("Add", g.op("MatMul", weights, v), g.op("Unsqueeze", summed, g.constant([1])))

    site = rewritten(attention(mix))
    assert site.reason is None or site.reason.code != "failed"


def test_an_error_that_nobody_foresaw_is_the_reason_of_its_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def mix(g: Graph, scores: str, v: str) -> str:
        return g.op("MatMul", g.op("Softmax", scores, axis=-1), v)

    def broken(*_: Any) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(recognise, "check_written_out", broken)
    site = rewritten(attention(mix))
    assert site.state == KEPT and site.reason is not None
    assert site.reason.code == "failed" and "KeyError" in site.reason.text
    monkeypatch.undo()
    monkeypatch.setattr(recognise, "softmax_of", lambda node: broken() if node.op_type == "Softmax" else None)
    site = rewritten(attention(mix))
    assert site.reason is not None and site.reason.code == "failed" and "KeyError" in site.reason.text


def test_maxima_that_the_graph_had_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ReduceMax of a repeated number that posexport wrote is replaced by that number.

    A ReduceMax of the original graph stays, because it may reduce another axis and drop it.
    """

    def mix(g: Graph, scores: str, v: str) -> str:
        number = g.op("ReduceMax", g.op("Shape", v), g.constant([0]), keepdims=1)
        wide = g.op("Expand", number, g.constant([3, 2]))
        largest = g.op("ReduceMax", wide, g.constant([1]), keepdims=0, name="of_the_graph")
        scaled = g.op("Mul", scores, g.op("Cast", g.op("Size", largest), to=1))
        return g.op("MatMul", g.op("Softmax", scaled, axis=-1), v)

    model = attention(mix)
    known = next(node for node in model.graph.node if node.op_type == "ReduceMax").output[0]
    model.graph.value_info.append(helper.make_tensor_value_info(known, onnx.TensorProto.INT64, [1]))
    model.graph.output.append(helper.make_tensor_value_info("of_the_graph", onnx.TensorProto.INT64, [3]))
    inner = ir.from_proto(model)
    lower(inner, Functions(form="decomposed", target="portable", opset=18), "decomposed")
    features = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    before, after = (run(one, {"features": features}) for one in (model, ir.to_proto(inner)))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
