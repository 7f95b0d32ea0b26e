"""Softmaxes and attention of other domains are reported with a reason, never as "no attention"."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_graphs import attention
from onnx import TensorProto, helper, numpy_helper

from posexport.artifact.graph_file import read_graph
from posexport.graphs.inspection import Inspection, inspected


def found_in(model: onnx.ModelProto, folder: Path) -> Inspection:
    path = folder / "graph.onnx"
    path.write_bytes(model.SerializeToString())
    return inspected(read_graph(path), {})


def with_softmax(operator: str, domain: str) -> onnx.ModelProto:
    """Attention whose softmax is another operator."""
    model = attention()
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type, softmax.domain = operator, domain
    del softmax.attribute[:]
    model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


SOFTMAXES = [("BiasSoftmax", "com.microsoft"), ("MaskedSoftmax", "vendor.plugin")]


@pytest.mark.parametrize(("operator", "domain"), SOFTMAXES, ids=str)
def test_other_softmaxes_have_a_reason(operator: str, domain: str, tmp_path: Path) -> None:
    (one,) = found_in(with_softmax(operator, domain), tmp_path).attentions
    assert one["reason"]["code"] == "operator" and operator in one["reason"]["text"]


def test_a_quantised_softmax_has_a_reason(tmp_path: Path) -> None:
    model = attention()
    at = next(at for at, node in enumerate(model.graph.node) if node.op_type == "Softmax")
    softmax, numbers = model.graph.node[at], {"logit": 0.1, "weight": 1 / 256}
    scales = [numpy_helper.from_array(np.array(number, np.float32), name) for name, number in numbers.items()]
    model.graph.initializer.extend([*scales, numpy_helper.from_array(np.array(128, np.uint8), "middle")])
    steps = [
        helper.make_node("QuantizeLinear", [softmax.input[0], "logit", "middle"], ["whole"]),
        helper.make_node(
            *("QLinearSoftmax", ["whole", "logit", "middle", "weight", "middle"], ["shares"], "quantised"),
            domain="com.microsoft",
        ),
        helper.make_node("DequantizeLinear", ["shares", "weight", "middle"], [softmax.output[0]]),
    ]
    steps[1].attribute.extend([helper.make_attribute("axis", -1), helper.make_attribute("opset", 13)])
    nodes = [*model.graph.node[:at], *steps, *model.graph.node[at + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    (one,) = found_in(model, tmp_path).attentions
    assert one["reason"]["code"] == "operator" and "QLinearSoftmax" in one["reason"]["text"]


def test_a_softmax_of_another_domain_that_weighs_nothing_is_no_attention(tmp_path: Path) -> None:
    model = with_softmax("MaskedSoftmax", "vendor.plugin")
    product = next(node for node in model.graph.node if any("softmax" in name for name in node.input))
    product.op_type = "Add"
    found = found_in(model, tmp_path)
    assert not found.attentions and found.reason is None


def plugin(operator: str, *, is_function: bool = False) -> onnx.ModelProto:
    """One operator on queries, keys and values; with `is_function`, a function that adds the first two."""
    names, shape = ["hidden_states", "keys", "values"], ["batch", "seq", 16]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)
    node = helper.make_node(operator, names, ["output"], name="plugin", domain="vendor")
    graph = helper.make_graph([node], "plugin", infos, [output])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("vendor", 1)]
    body = [helper.make_node("Add", ["q", "k"], ["y"])]
    function = helper.make_function("vendor", operator, ["q", "k", "v"], ["y"], body, opsets[:1])
    return helper.make_model(graph, opset_imports=opsets, functions=[function] if is_function else [], ir_version=10)


@pytest.mark.parametrize("operator", ["PagedAttention", "FlashAttention2", "AttentionPlugin"])
def test_attention_of_plugins_has_a_reason(operator: str, tmp_path: Path) -> None:
    (one,) = found_in(plugin(operator), tmp_path).attentions
    assert (one["name"], one["reason"]["code"]) == ("plugin", "operator") and operator in one["reason"]["text"]


def test_a_function_of_the_model_is_what_it_computes(tmp_path: Path) -> None:
    """The name of a function does not matter."""
    found = found_in(plugin("FlashAttention2", is_function=True), tmp_path)
    assert not found.attentions and found.reason is None


def test_linear_attention_has_no_softmax(tmp_path: Path) -> None:
    found = found_in(plugin("GatedLinearAttention"), tmp_path)
    assert not found.attentions and found.reason is None
