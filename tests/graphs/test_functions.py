"""Functions of a file: their bodies replace their calls, unless this changes the meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from attention_graphs import attention
from helpers import cli
from onnx import TensorProto, helper

from posexport.artifact.graph_file import read_graph
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.load import InvalidGraphError, inlined
from posexport.graphs.roles import roles_of
from posexport.graphs.view import view_of

HEAD = '<ir_version: 9, opset_import: ["": 18, "own": 1]>'
CALL = "g (float[batch, seq, 4] hidden_states) => (float[batch, seq, 4] y) { y = own.soft (hidden_states) }"


def model_of(call: str, functions: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(f"{HEAD} {call} {functions}"))


def soft(opset: int, body: str = "b = Softmax (a)", domains: str = "") -> str:
    return f'<domain: "own", opset_import: ["": {opset}{domains}]> soft (a) => (b) {{ {body} }}'


def test_a_function_of_another_opset_stays_a_call() -> None:
    """Before opset 13, Softmax was over all axes from the second on."""
    model = inlined(model_of(CALL, soft(11)))
    assert [node.op_type for node in model.graph] == ["soft"]
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    powers = np.exp(x.astype(np.float64).reshape(2, 12))
    result = Evaluator(model).run({"hidden_states": torch.from_numpy(x)})["y"]
    np.testing.assert_allclose(result.numpy(), (powers / powers.sum(1, keepdims=True)).reshape(x.shape), rtol=1e-12)


@pytest.mark.parametrize("domains", ["", ', "own": 7'], ids=["opset", "its own domain"])
def test_a_function_of_operators_that_did_not_change_is_put_in_place(domains: str) -> None:
    model = inlined(model_of(CALL, soft(13, "b = Softmax (a)", domains)))
    assert [node.op_type for node in model.graph] == ["Softmax"]
    assert not model.functions
    assert model.opset_imports[""] == 18


def test_what_a_function_that_stays_calls_stays_too() -> None:
    """Inlined, it would be in another opset than its own."""
    inner = '<domain: "own", opset_import: ["": 18]> inner (a) => (b) { b = Softmax (a) }'
    outer = soft(11, "c = Softmax (a) b = own.inner (c)", ', "own": 1')
    model = inlined(model_of(CALL.replace("y = own", "z = own.inner (hidden_states) y = own"), f"{outer} {inner}"))
    assert [node.op_type for node in model.graph] == ["inner", "soft"]


def test_a_function_that_is_given_a_graph_stays_a_call() -> None:
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["one"], value_float=1.0)],
        "branch",
        [],
        [helper.make_tensor_value_info("one", TensorProto.FLOAT, [])],
    )
    model = onnx.parser.parse_model(f"{HEAD} {CALL} {soft(18)}")
    model.graph.node[0].attribute.append(helper.make_attribute("branch", branch))
    model.functions[0].attribute.append("branch")
    assert [node.op_type for node in inlined(ir.from_proto(model)).graph] == ["soft"]


WRONG = {
    "a circle": soft(18, "b = own.soft (a)", ', "own": 1'),
    "an input too many": '<domain: "own", opset_import: ["": 18]> soft () => (b) { b = Constant <value_int = 1> () }',
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_sentence(name: str) -> None:
    with pytest.raises(InvalidGraphError, match=r"^the graph calls a function wrongly \(.*\): export it again\.$"):
        inlined(model_of(CALL, WRONG[name]))


def with_a_function() -> onnx.ModelProto:
    """Attention in the graph, and attention in a function of another opset."""
    model = attention()
    body = "c = Transpose <perm = [0, 2, 1]> (a) s = MatMul (a, c) w = Softmax <axis = 2> (s) b = MatMul (w, a)"
    text = onnx.parser.parse_model(f"{HEAD} {CALL} {soft(11, body)}")
    model.functions.extend(text.functions)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node.append(helper.make_node("soft", ["output"], ["more"], name="call", domain="own"))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["batch", "seq", 64]))
    return model


def test_attention_in_a_function_that_stays_is_named() -> None:
    first, second = view_of(ir.from_proto(with_a_function())).attentions
    assert isinstance(first, Attention) and isinstance(second, UnknownAttention)
    assert (second.name, second.layer, second.reason.code) == ("call", 1, "function")


def test_the_roles_of_such_a_file_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(with_a_function(), "in.onnx")
    assert {name: role.kind for name, role in roles_of(read_graph(Path("in.onnx"))).items()} == {
        "hidden_states": "features"
    }
    result = cli("inspect", "in.onnx")
    assert result.exit_code == 0, result.output
    assert "calls a function of another opset" in " ".join(result.stdout.split())
