"""Graphs as other tools leave them: ONNX Runtime's own operators in the standard's domain, nodes in no order."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from helpers import sampled
from onnx import helper
from small_graphs import SHAPES, decoder, inputs, run

from posexport.graphs.load import load_model
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model

SIMPLIFIED = "SimplifiedLayerNormalization"
"""ONNX Runtime's RMSNorm, which it has in the standard's domain, where onnx knows none of this name."""


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


@pytest.mark.parametrize(
    ("level", "form"),
    sampled(itertools.product(["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"], ["decomposed", "native", "contrib"]), 5),
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
