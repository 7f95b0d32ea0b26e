"""Softmaxes that are written out in single operators are rewritten; doubtful ones are kept with a reason.

The oracle is numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
import softmax_graphs
from onnx import TensorProto, helper
from small_graphs import KV_HEADS, Graph, run
from softmax_graphs import HEADS, HIDDEN, NEAR_MISSES, REASONS, SIZE, SPELLINGS, attention

from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.graphs.inspection import inspected
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model


def features(seed: int = 0, tokens: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((2, tokens, HIDDEN)).astype(np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_is_rewritten(spelling: str, form: str) -> None:
    model = attention(SPELLINGS[spelling])
    done, proto = helpers.rewritten_model(model, form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for tokens in (1, 6):
        given = features(tokens=tokens)
        want = softmax_graphs.expected(model, given)
        for one in (model, proto):
            np.testing.assert_allclose(run(one, {"features": given})["output"], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("least", [None, -np.inf, -1.0])
def test_a_maximum_goes_but_one_that_may_be_another_number(least: float | None) -> None:
    """A value that may not be the maximum is added to the scores, like any value that is computed from features."""
    model = attention(softmax_graphs.jax(least=least))
    done, proto = helpers.rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert any(node.op_type == "ReduceMax" for node in proto.graph.node) is (least == -1.0)
    expected, actual = (run(one, {"features": features()})["output"] for one in (model, proto))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_two_axes_of_heads(late: bool) -> None:
    """jax.nn.softmax of scores [B, K, G, S, T]. If the product is divided instead, the attention is kept."""
    g, groups = Graph(), HEADS // KV_HEADS
    shapes = {"q": [0, 0, KV_HEADS, groups, SIZE], "k": [0, 0, KV_HEADS, SIZE], "v": [0, 0, KV_HEADS, SIZE]}
    q, k, v = (
        g.op("Reshape", g.op("MatMul", "features", g.random(name, HIDDEN, int(np.prod(shape[2:])))), g.constant(shape))
        for name, shape in shapes.items()
    )
    scores = g.op("Einsum", q, k, equation="bskgd,btkd->bkgst")
    powers = g.op("Exp", g.op("Sub", scores, softmax_graphs.reduced(g, "ReduceMax", scores, 4, 4)))
    total = softmax_graphs.reduced(g, "ReduceSum", powers, 4, 4)
    if late:
        mixed = g.op("Div", g.op("Einsum", powers, v, equation="bkgst,btkd->bkgsd"), total)
        mixed = g.op("Transpose", mixed, perm=[0, 3, 1, 2, 4])
    else:
        mixed = g.op("Einsum", g.op("Div", powers, total), v, equation="bkgst,btkd->bskgd")
    rows = g.op("Reshape", mixed, g.constant([0, 0, HIDDEN]))
    g.op("MatMul", rows, g.random("o", HIDDEN, HIDDEN), name="output")
    model = model_of(g, ["batch", "seq", HIDDEN])
    done, proto = helpers.rewritten_model(model, form="native", target="ort")
    assert [one.reason and one.reason.code for one in done.sites] == ["softmax-form" if late else None]
    expected, actual = (run(one, {"features": features()})["output"] for one in (model, proto))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def model_of(g: Graph, shape: list[str | int]) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("features", "output")]
    domains = {node.domain for node in g.nodes} - {""}
    imports = [helper.make_opsetid("", 18), *(helper.make_opsetid(domain, 1) for domain in domains)]
    graph = helper.make_graph(g.nodes, "main_graph", infos[:1], infos[1:], g.weights)
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


@pytest.mark.parametrize("fault", NEAR_MISSES)
def test_a_near_miss_is_not_recognised(fault: str) -> None:
    model = attention(NEAR_MISSES[fault])
    given = features()
    gap = np.abs(run(model, {"features": given})["output"] - softmax_graphs.expected(model, given)).max()
    assert gap > 1e-3
    done = rewrite_model(ir.from_proto(model), form="native", target="ort")
    assert [one.state for one in done.sites] in ([], [KEPT])
    assert [one.attention.state for one in done.sites] in ([], ["unknown"])


@pytest.mark.parametrize("graph", REASONS)
def test_what_is_no_plain_softmax_has_a_reason(graph: str) -> None:
    code, mix = REASONS[graph]
    (site,) = rewrite_model(ir.from_proto(attention(mix)), form="native", target="ort").sites
    assert site.state == KEPT and site.reason is not None and site.reason.code == code


def test_a_router_is_no_attention() -> None:
    """A layer with a softmax over features after an attention; its weights are multiplied with features."""

    def routed(g: Graph, scores: str, values: str) -> str:
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
        gates = g.op("Softmax", g.op("MatMul", mixed, g.random("gate", SIZE, SIZE)), axis=-1)
        return g.op("Mul", g.op("MatMul", gates, g.random("experts", SIZE, SIZE)), mixed)

    done = rewrite_model(ir.from_proto(attention(routed)), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]


def with_operator(kind: str) -> onnx.ModelProto:
    g = Graph()
    read = ["features"] * 3
    node = helper.make_node(kind, read, ["mixed"], "attention", domain="com.microsoft", num_heads=HEADS)
    g.nodes.append(node)
    g.op("Relu", "mixed", name="output")
    return model_of(g, ["batch", "seq", HIDDEN])


@pytest.mark.parametrize(
    "kind", ["PackedAttention", "SparseAttention", "LongformerAttention", "DecoderMaskedMultiHeadAttention"]
)
def test_operators_that_are_not_read_are_listed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    path, out = helpers.saved(tmp_path, with_operator(kind)), tmp_path / "out.onnx"
    (one,) = inspected(read_with_weights_on_disk(path), {}).attentions
    assert (one["name"], one["state"], one["reason"]["code"]) == ("attention", "unknown", "operator")
    result = helpers.rewritten(path, out, form="native", target="ort")
    assert [(one["state"], one["reason"]["code"]) for one in result.attentions] == [("kept", "operator")]
    assert path.read_bytes() == out.read_bytes()


def test_a_file_whose_operators_are_not_read_may_have_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    model = with_operator("PackedAttention")
    model.graph.input.append(helper.make_tensor_value_info("text", TensorProto.STRING, ["batch"]))
    path, out = helpers.saved(tmp_path, model), tmp_path / "out.onnx"
    result = helpers.rewritten(path, out, form="native", target="ort")
    assert [(one["state"], one["reason"]["code"]) for one in result.attentions] == [("kept", "operator")]


@pytest.mark.parametrize("kind", ["PrepareAttentionMask", "AttentionBias"])
def test_what_makes_a_mask_or_a_bias_is_no_attention(kind: str, tmp_path: Path) -> None:
    assert inspected(read_with_weights_on_disk(helpers.saved(tmp_path, with_operator(kind))), {}).attentions == ()


def test_linear_attention_has_no_softmax(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, with_operator("LinearAttention"))
    assert inspected(read_with_weights_on_disk(path), {}).attentions == ()
