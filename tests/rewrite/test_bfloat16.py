"""Attention in bfloat16 graphs, with inputs, caches, weights and masks in a dtype that numpy does not have."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_graphs import SIZE, decoder

from posexport.graphs.load import load_model
from posexport.rewrite.evidence import LIMIT
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model

LEAST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)


def in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in bfloat16, except for its angles: their cosines and sines are cast to bfloat16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name != "inv_freq":
            array = np.maximum(numpy_helper.to_array(tensor), LEAST)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(ml_dtypes.bfloat16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type in ("Cos", "Sin"):
            (name,) = node.output
            node.output[0] = f"{name}_wide"
            nodes.append(helper.make_node("Cast", [f"{name}_wide"], [name], f"{name}_cast", to=TensorProto.BFLOAT16))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["function", "native", "contrib"])
def test_every_form_takes_bfloat16(tmp_path: Path, form: str) -> None:
    onnx.save(in_bfloat16(decoder(layers=2)), tmp_path / "in.onnx")
    model = load_model(tmp_path / "in.onnx")
    done = rewrite_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN] * 2
    for value in (*done.model.graph.inputs, *done.model.graph.outputs):
        assert value.dtype in (ir.DataType.BFLOAT16, ir.DataType.INT64)
    onnx.checker.check_model(ir.to_proto(done.model), full_check=True)


def test_the_evidence_and_the_scale_are_those_of_bfloat16(tmp_path: Path) -> None:
    onnx.save(in_bfloat16(decoder()), tmp_path / "in.onnx")
    done = rewrite_model(load_model(tmp_path / "in.onnx"), form="native", target="portable")
    (site,) = done.sites
    assert site.evidence is not None
    assert site.evidence.cases >= 12
    assert site.evidence.error <= LIMIT
    attention = next(node for node in done.model.graph if node.op_type == "Attention")
    assert attention.attributes["scale"].as_float() == float(ml_dtypes.bfloat16(SIZE**-0.5)) != np.float32(SIZE**-0.5)
