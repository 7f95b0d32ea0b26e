"""Graphs as other tools write them: ONNX Runtime's operators in the domain of the standard, unsorted nodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from small_graphs import SHAPES, decoder, inputs, run

from posexport.graphs.load import load_model
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model

SIMPLIFIED = "SimplifiedLayerNormalization"
"""ONNX Runtime's RMSNorm. It is in the domain of the standard, but onnx does not know it."""


def with_own_norm(opset: int) -> onnx.ModelProto:
    """A decoder whose logits are normalised by ONNX Runtime's operator."""
    model = decoder(opset=opset)
    (last,) = [node for node in model.graph.node if "logits" in node.output]
    last.output[:] = ["before"]
    width = (
        next(value for value in model.graph.output if value.name == "logits").type.tensor_type.shape.dim[2].dim_value
    )
    scale = np.linspace(0.5, 1.5, width, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(scale, "norm.weight"))
    model.graph.node.append(
        helper.make_node(
            SIMPLIFIED, ["before", "norm.weight"], ["logits"], name="norm", axis=-1, epsilon=1e-5, stash_type=1
        )
    )
    return model


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_operators_that_onnx_does_not_know_stay_where_the_opset_rises(form: str) -> None:
    model = with_own_norm(opset=17)
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    proto = ir.to_proto(done.model)
    assert proto.opset_import[0].version > 17
    assert {entry.domain for entry in proto.opset_import} <= {"", "com.microsoft"}
    assert [node.domain for node in proto.graph.node if node.op_type == SIMPLIFIED] == [""]
    for batch, seq, past, left in SHAPES:
        arrays = inputs(batch, seq, past, left)
        expected, actual = run(model, arrays)["logits"], run(proto, arrays)["logits"]
        seen = arrays["attention_mask"][:, past:] == 1
        assert expected.shape == actual.shape
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[seen], expected[seen], rtol=0, atol=1e-4)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("level", "form"),
    [*itertools.product(["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"], ["decomposed", "native", "contrib"])],
)
def test_a_file_that_onnx_runtime_optimised(tmp_path: Path, level: str, form: str) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    model = decoder(layers=2)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    done = rewrite_model(load_model(tmp_path / "optimised.onnx"), form=form, target="ort")
    states = {one.state for one in done.sites}
    assert len(done.sites) == 2
    assert states == {REWRITTEN} or form == "decomposed"
    arrays = inputs(2, 6, 3, 2, layers=2)
    seen = arrays["attention_mask"][:, 3:] == 1
    expected, actual = run(model, arrays)["logits"], run(ir.to_proto(done.model), arrays)["logits"]
    np.testing.assert_allclose(actual[seen], expected[seen], rtol=0, atol=1e-4)


def test_a_file_whose_nodes_are_in_no_order(tmp_path: Path) -> None:
    model = decoder(layers=2)
    nodes = list(model.graph.node)
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(model)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(nodes[index] for index in np.random.default_rng(1).permutation(len(nodes)))
    onnx.save(shuffled, tmp_path / "shuffled.onnx")
    done = rewrite_model(load_model(tmp_path / "shuffled.onnx"), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN, REWRITTEN]
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    arrays = inputs(2, 5, 2, 1, layers=2)
    seen = arrays["attention_mask"][:, 2:] == 1
    np.testing.assert_allclose(
        run(proto, arrays)["logits"][seen], run(model, arrays)["logits"][seen], rtol=0, atol=1e-4
    )


def with_operator(
    *inputs: str, more: dict[str, Any], weights: dict[str, np.ndarray[Any, Any]], **attributes: Any
) -> Any:
    """A graph with one com.microsoft Attention, as ONNX Runtime's optimizer fuses it."""
    outputs = ["output", "present_0"] if "past_0" in more else ["output"]
    node = helper.make_node("Attention", inputs, outputs, "fused", domain="com.microsoft", num_heads=4, **attributes)
    floats = {"features": ["batch", "seq", 32], **{name: shape for name, shape in more.items() if name == "past_0"}}
    whole = {name: shape for name, shape in more.items() if name != "past_0"}
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in floats.items()]
    infos += [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, shape) for name, shape in whole.items()]
    made = [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", "seq", 32])]
    made += [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs[1:]]
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "graph", infos, made, stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


RANDOM = np.random.default_rng(0)
PROJECTION = {
    "w": (RANDOM.standard_normal((32, 96)) / 6).astype(np.float32),
    "b": RANDOM.standard_normal(96).astype(np.float32),
}


def of_heads(features: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], past: Any = None) -> np.ndarray[Any, Any]:
    """com.microsoft Attention in numpy; `mask` [B, 1, S, T] says which keys are visible."""
    parts = np.split(features.astype(np.float64) @ PROJECTION["w"] + PROJECTION["b"], 3, axis=-1)
    q, k, v = (part.reshape(*features.shape[:2], 4, 8).transpose(0, 2, 1, 3) for part in parts)
    if past is not None:
        k, v = (np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
    scores = np.where(mask, q @ k.transpose(0, 1, 3, 2) * 8**-0.5, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(features.shape)


@pytest.mark.parametrize("form", ["decomposed", "function", "native", "contrib"])
def test_attention_that_projects_becomes_any_form(form: str) -> None:
    """As the optimizer writes BERT."""
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    model = with_operator(
        "features", "w", "b", "attention_mask", more={"attention_mask": ["batch", "seq"]}, weights=PROJECTION
    )
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    features = RANDOM.standard_normal((2, 5, 32)).astype(np.float32)
    expected = of_heads(features, mask[:, None, None] != 0)
    for one in (model, ir.to_proto(done.model)):
        actual = run(one, {"features": features, "attention_mask": mask})["output"]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_lengths_of_zero_hide_nothing() -> None:
    """The optimizer writes them if it did not find a mask: all scores get the same number."""
    model = with_operator("features", "w", "b", "none", more={}, weights=PROJECTION)
    zero = onnx.numpy_helper.from_array(np.zeros(1, np.int32))
    model.graph.node.insert(0, helper.make_node("Shape", ["features"], ["rows"], end=1))
    model.graph.node.insert(1, helper.make_node("ConstantOfShape", ["rows"], ["none"], value=zero))
    done = rewrite_model(ir.from_proto(model), form="native", target="ort")
    features = RANDOM.standard_normal((2, 5, 32)).astype(np.float32)
    expected = of_heads(features, np.ones((2, 1, 5, 5), bool))
    np.testing.assert_allclose(run(ir.to_proto(done.model), {"features": features})["output"], expected, atol=1e-2)


@pytest.mark.parametrize("form", ["decomposed", "native"])
def test_attention_that_projects_keeps_its_cache(form: str) -> None:
    """As the optimizer writes GPT-2, with one cache for keys and values."""
    model = with_operator(
        "features",
        "w",
        "b",
        "",
        "past_0",
        more={"past_0": [2, "batch", 4, "past", 8]},
        weights=PROJECTION,
        unidirectional=1,
    )
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for seq, past in ((5, 0), (1, 4), (3, 2)):
        arrays = {
            "features": RANDOM.standard_normal((2, seq, 32)).astype(np.float32),
            "past_0": RANDOM.standard_normal((2, 2, 4, past, 8)).astype(np.float32),
        }
        seen = np.tril(np.ones((seq, past + seq), bool), past)[None, None]
        old, new = (run(one, arrays) for one in (model, ir.to_proto(done.model)))
        np.testing.assert_allclose(
            new["output"], of_heads(arrays["features"], seen, arrays["past_0"]), rtol=0, atol=2e-5
        )
        np.testing.assert_allclose(new["present_0"], old["present_0"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_a_product_that_transposes_its_rows(form: str) -> None:
    """FusedMatMul with transBatchA reads queries [S, B, N, D]."""
    text = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
      g (float[batch, seq, 32] features) => (float[batch, seq, 32] output) {
        shape = Constant<value_ints = [0, 0, 4, 8]>() flat = Constant<value_ints = [0, 0, 32]>()
        a = MatMul(features, w) b = MatMul(features, u) c = Reshape(a, shape) d = Reshape(b, shape)
        q = Transpose<perm = [1, 0, 2, 3]>(c) k = Transpose<perm = [0, 2, 1, 3]>(d)
        scores = com.microsoft.FusedMatMul<transBatchA = 1, transB = 1, alpha = 0.25>(q, k)
        weights = Softmax<axis = -1>(scores) mixed = MatMul(weights, k)
        back = Transpose<perm = [0, 2, 1, 3]>(mixed) output = Reshape(back, flat)
    }"""
    model = onnx.parser.parse_model(text)
    projections = {name: (RANDOM.standard_normal((32, 32)) / 6).astype(np.float32) for name in "wu"}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in projections.items())
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for batch, seq in ((1, 1), (2, 5), (4, 3)):
        features = RANDOM.standard_normal((batch, seq, 32)).astype(np.float32)
        q, k = ((features @ one).reshape(batch, seq, 4, 8).transpose(0, 2, 1, 3) for one in projections.values())
        powers = np.exp(q @ k.transpose(0, 1, 3, 2) * 0.25)
        mixed = (powers / powers.sum(-1, keepdims=True) @ k).transpose(0, 2, 1, 3).reshape(batch, seq, 32)
        np.testing.assert_allclose(run(ir.to_proto(done.model), {"features": features})["output"], mixed, atol=2e-5)


@pytest.mark.parametrize("form", ["decomposed", "native"])
@pytest.mark.parametrize("parts", [2, 3])
def test_packed_queries_keys_and_values(parts: int, form: str) -> None:
    """As the optimizer writes diffusion models for GPUs, which alone run it: [B, S, N, 3, D] and [B, T, N, 2, D]."""
    weights, biases = (PROJECTION[name].reshape(-1, 3, 4, 8).swapaxes(1, 2) for name in "wb")
    packed = {"w": weights[:, :, 3 - parts :].reshape(32, -1), "b": biases[:, :, 3 - parts :].reshape(-1)}
    plain = {"v": weights[:, :, 0].reshape(32, -1), "u": biases[:, :, 0].reshape(-1)}
    query = "a = MatMul(features, v) q = Add(a, u)" if parts == 2 else ""
    text = f"""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
      g (float[batch, seq, 32] features) => (float[batch, seq, 32] output) {{
        shape = Constant<value_ints = [0, 0, 4, {parts}, 8]>() {query}
        c = MatMul(features, w) d = Add(c, b) p = Reshape(d, shape)
        output = com.microsoft.MultiHeadAttention<num_heads = 4>({"q, p" if parts == 2 else "p"})
    }}"""
    model = onnx.parser.parse_model(text)
    stored = packed | (plain if parts == 2 else {})
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    done = rewrite_model(ir.from_proto(model), form=form, target="ort")
    assert [(one.state, one.reason) for one in done.sites] == [(REWRITTEN, None)]
    for batch, seq in ((1, 1), (2, 5), (4, 3)):
        features = RANDOM.standard_normal((batch, seq, 32)).astype(np.float32)
        expected = of_heads(features, np.ones((batch, 1, seq, seq), bool))
        actual = run(ir.to_proto(done.model), {"features": features})["output"]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_packed_heads_in_another_order_stay() -> None:
    text = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
      g (float[batch, seq, 96] features) => (float[batch, seq, 32] output) {
        shape = Constant<value_ints = [0, 0, 3, 4, 8]>() p = Reshape(features, shape)
        output = com.microsoft.MultiHeadAttention<num_heads = 4>(p)
    }"""
    done = rewrite_model(ir.from_proto(onnx.parser.parse_model(text)), form="native", target="ort")
    assert not done.changed
    assert [one.reason and one.reason.code for one in done.sites] == ["operator"]
