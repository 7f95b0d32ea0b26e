"""Sums at indices in fp16 run in ONNX Runtime on CPUs, whose kernels for fp16 take no reduction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from helpers import cli
from onnx import TensorProto, helper
from small_decoders import exported_model
from tiny_models import checkpoint

from posexport.export.half_scatters import reduce_in_fp32

SHAPES = {"ScatterND": ([3, 1], [3, 2]), "ScatterElements": ([3, 2], [3, 2])}
"""By operator: the shapes of the indices and of the updates."""


def run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, given
    )
    return np.asarray(made[0])


@pytest.mark.parametrize("output", ["made", "after"])
@pytest.mark.parametrize("operator", SHAPES)
def test_a_reduction_in_fp16(operator: str, output: str) -> None:
    """`output` is the scatter's own result, or that of a node after it."""
    indices, updates = SHAPES[operator]
    nodes = [
        helper.make_node(operator, ["data", "indices", "updates"], ["made"], reduction="add"),
        helper.make_node("Neg", ["made"], ["after"]),
    ]
    half = TensorProto.FLOAT16
    inputs = [
        helper.make_tensor_value_info("data", half, [4, 2]),
        helper.make_tensor_value_info("indices", TensorProto.INT64, indices),
        helper.make_tensor_value_info("updates", half, updates),
    ]
    outputs = [helper.make_tensor_value_info(output, half, [4, 2])]
    graph = helper.make_graph(nodes, "sums", inputs, outputs)  # the dtype of "made" is not stated
    before = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    rng = np.random.default_rng(0)
    given = {
        "data": rng.standard_normal((4, 2)).astype(np.float16),
        "indices": np.array([1, 1, 3]).repeat(indices[1]).reshape(indices),
        "updates": rng.standard_normal(updates).astype(np.float16),
    }
    with pytest.raises(Exception, match=r"not supported|NOT_IMPLEMENTED|not implemented"):
        run(before, given)
    model = ir.from_proto(before)
    reduce_in_fp32(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert [each.name for each in after.graph.output] == [output]
    wanted = given["data"].astype(np.float64)
    np.add.at(wanted, np.array([1, 1, 3]), given["updates"].astype(np.float64))
    sign = -1 if output == "after" else 1
    made = run(after, given)
    assert made.dtype == np.float16
    assert np.abs(made - sign * wanted).max() < 4e-3


@pytest.mark.slow
def test_experts_one_after_the_other_in_fp16(tmp_path: Path) -> None:
    exported_model(checkpoint("dbrx"), tmp_path / "model.onnx", "--dtype", "fp16")
    result = cli("generate", tmp_path / "model.onnx", "--prompt-ids", "5,6,7", "--max-new-tokens", "3")
    assert result.exit_code == 0, result.output
