"""Softmaxes that are written out are rewritten where they are one, and named with a reason where that is not known; the
oracle is numpy."""

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
from small_graphs import Graph, run
from softmax_graphs import HEADS, HIDDEN, NEAR_MISSES, REASONS, SIZE, SPELLINGS, attention

from posexport.artifact.mapped_file import read_mapped
from posexport.graphs.inspection import inspected
from posexport.rewrite.rewriter import KEPT, REWRITTEN, rewrite_model


def features(seed: int = 0, tokens: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((2, tokens, HIDDEN)).astype(np.float32)


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
    """The softmax of a layer over features, behind attention, whose weights are multiplied with features."""

    def routed(g: Graph, scores: str, values: str) -> str:
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
        gates = g.op("Softmax", g.op("MatMul", mixed, g.random("gate", SIZE, SIZE)), axis=-1)
        return g.op("Mul", g.op("MatMul", gates, g.random("experts", SIZE, SIZE)), mixed)

    done = rewrite_model(ir.from_proto(attention(routed)), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]


@pytest.mark.parametrize("kind", ["Gemm", "MatMul"])
def test_a_head_without_rows_has_the_reason_rank(kind: str) -> None:
    """torch.mm of matrices, as TorchScript and dynamo write it."""
    g = Graph()
    q, k, v = (g.op("MatMul", "features", g.random(name, HIDDEN, HIDDEN)) for name in "qkv")
    turned = {"Gemm": {"transB": 1, "alpha": 0.125}, "MatMul": {}}[kind]
    weights = g.op("Softmax", g.op(kind, q, k if turned else g.op("Transpose", k, perm=[1, 0]), **turned), axis=-1)
    g.op(kind, weights, v, name="output")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["seq", HIDDEN]) for name in ("features", "output")]
    graph = helper.make_graph(g.nodes, "main_graph", infos[:1], infos[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    (site,) = rewrite_model(ir.from_proto(model), form="native", target="ort").sites
    assert site.state == KEPT and site.reason is not None and site.reason.code == "rank"


def with_operator(kind: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node(kind, ["features"] * 3, ["mixed"], "attention", domain="com.microsoft", num_heads=HEADS),
        helper.make_node("Relu", ["mixed"], ["output"], "relu"),
    ]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", HIDDEN])
        for name in ("features", "output")
    ]
    graph = helper.make_graph(nodes, "main_graph", infos[:1], infos[1:])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


@pytest.mark.parametrize(
    "kind",
    ["QAttention", "PackedAttention", "SparseAttention", "LongformerAttention", "DecoderMaskedMultiHeadAttention"],
)
def test_operators_that_are_not_read_are_listed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)
    path, out = helpers.saved(tmp_path, with_operator(kind)), tmp_path / "out.onnx"
    (one,) = inspected(read_mapped(path), {}).attentions
    assert (one["name"], one["state"], one["reason"]["code"]) == ("attention", "unknown", "operator")
    result = helpers.rewritten(path, out, form="native", target="ort")
    assert [(one["state"], one["reason"]["code"]) for one in result.attentions] == [("kept", "operator")]
    assert path.read_bytes() == out.read_bytes()


def test_linear_attention_has_no_softmax(tmp_path: Path) -> None:
    path = helpers.saved(tmp_path, with_operator("LinearAttention"))
    assert inspected(read_mapped(path), {}).attentions == ()
