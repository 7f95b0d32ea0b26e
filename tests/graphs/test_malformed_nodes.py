"""Nodes with missing operands after the inputs of a graph: inputs get roles, or there is one error message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from helpers import cli, refused
from onnx import helper
from small_graphs import decoder

from posexport.graphs import roles
from posexport.graphs.load import InvalidGraphError

ROLES = {"input_ids": "token_ids", "attention_mask": "attention_mask", "position_ids": "position_ids"}


def with_node(kind: str, *inputs: str, domain: str = "", **attributes: Any) -> onnx.ModelProto:
    """A decoder with an additional node that nothing reads."""
    model = decoder(cache=False)
    model.graph.node.append(helper.make_node(kind, inputs, ["more"], domain=domain, **attributes))
    return model


def compared_with_a_text() -> onnx.ModelProto:
    model = with_node("Cast", "input_ids", to=onnx.TensorProto.STRING)
    model.graph.node.append(helper.make_node("Equal", ["more", "text"], ["is"]))
    model.graph.initializer.append(helper.make_tensor("text", onnx.TensorProto.STRING, [1], ["<pad>"]))
    return model


MALFORMED = {
    "a cast to nothing": lambda: with_node("Cast", "input_ids"),
    "a rotation without tables": lambda: with_node("RotaryEmbedding", "hidden", "position_ids", domain="com.microsoft"),
    "a comparison with a text": compared_with_a_text,
    "a sum of one": lambda: with_node("Add", "input_ids"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_inputs_keep_their_roles(name: str) -> None:
    model = MALFORMED[name]()
    model.graph.initializer.append(helper.make_tensor("hidden", onnx.TensorProto.FLOAT, [1], [0.0]))
    found = roles.roles_of(ir.from_proto(model))
    assert {name: role.kind for name, role in found.items()} == ROLES


def test_whatever_else_is_wrong_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def stumble(*_: Any) -> Any:
        raise KeyError("axis")

    monkeypatch.setattr(roles, "compared_ids", stumble)
    with pytest.raises(InvalidGraphError, match=r"a node after them is wrong \(KeyError\): export it again\.$"):
        roles.roles_of(ir.from_proto(decoder()))
    onnx.save(decoder(), "in.onnx")
    refused(cli("verify", "in.onnx"), "in.onnx", "a node after them is wrong")
