"""`posexport rewrite` for files with attention in the body of an If or of another operator."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from helpers import cli
from onnx import TensorProto, helper

pytestmark = [pytest.mark.few_bands, pytest.mark.all_inputs]


@pytest.fixture(autouse=True)
def _one_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    helpers.only_one_runtime(monkeypatch, tmp_path)


def _with_if(model: onnx.ModelProto, flag: str = "flag") -> onnx.ModelProto:
    """The same graph in a branch of an If, with a node after it."""
    inner, other = onnx.GraphProto(name="then"), onnx.GraphProto(name="else")
    inner.node.extend(model.graph.node)
    inner.output.append(model.graph.output[0])
    other.node.append(helper.make_node("ConstantOfShape", [f"{flag} none"], [f"{flag} zeros"]))
    other.output.append(helper.make_tensor_value_info(f"{flag} zeros", TensorProto.FLOAT, None))
    chosen = helper.make_node("If", [flag], [f"{flag} chosen"], then_branch=inner, else_branch=other)
    inputs = [*model.graph.input, helper.make_tensor_value_info(flag, TensorProto.BOOL, [])]
    weights = [*model.graph.initializer, helper.make_tensor(f"{flag} none", TensorProto.INT64, [3], [1, 1, 1])]
    outputs = [helper.make_tensor_value_info(f"{flag} less", TensorProto.FLOAT, ["b", "s", "v"])]
    negated = helper.make_node("Neg", [f"{flag} chosen"], [f"{flag} less"])
    graph = helper.make_graph([chosen, negated], "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=9)


def test_attention_in_a_branch_is_rewritten(tmp_path: Path) -> None:
    helpers.saved(tmp_path, _with_if(small_graphs.decoder(cache=False)))
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--input", "flag=mask")
    assert result.exit_code == 0, result.output
    assert "1 of 1 rewritten" in result.stdout and "ort-cpu      passed" in result.stdout


def test_attention_in_a_branch_of_a_branch_is_left_with_its_reason(tmp_path: Path) -> None:
    helpers.saved(tmp_path, _with_if(_with_if(small_graphs.decoder(cache=False), "inner"), "outer"))
    given = ("--input", "inner=mask", "--input", "outer=mask")
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", *given)
    assert result.exit_code == 0, result.output
    assert "is inside an If, Loop or Scan" in result.stdout
    assert "0 of 1 rewritten" in result.stdout
    assert Path("out.onnx").read_bytes() == Path("in.onnx").read_bytes()
