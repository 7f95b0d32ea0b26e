"""Inspection of any file in a child process: roles, attention, and reasons why attention was not searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from attention_graphs import SIZE, attention, rotation, visible
from onnx import TensorProto, helper

from posexport.artifact.graph_file import GraphFile, read_graph
from posexport.errors import RequestError
from posexport.export import export
from posexport.graphs import inspection
from posexport.graphs.attention.origins import call_sites
from posexport.graphs.inspection import inspect_graph, inspected
from posexport.graphs.shape_profiles import graph_profiles
from posexport.graphs.view import view_of
from posexport.models import read_spec
from posexport.models.weights import seeded_weights

FREQUENCIES = 10_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))


def saved(folder: Path, model: onnx.ModelProto | None = None) -> GraphFile:
    """A file with this graph; by default a decoder of one layer."""
    whole = attention(rotate=rotation(FREQUENCIES), add=[visible()], cached=True)
    path = folder / "graph.onnx"
    path.write_bytes((whole if model is None else model).SerializeToString())
    return read_graph(path)


def test_roles_and_attention_come_from_another_process(tmp_path: Path) -> None:
    steps: list[str] = []
    found = inspect_graph(saved(tmp_path), progress=steps.append)
    assert found.reason is None
    assert found.roles == {
        "hidden_states": "features",
        "position_ids": "position_ids",
        "past_key": "past",
        "past_value": "past",
    }
    (one,) = found.attentions
    assert one["encoding"] == {"name": "rope", "layout": "half", "theta": 10_000.0}
    assert steps[-1] == "describing attention 1 of 1"
    json.dumps(found.attentions)


def test_a_process_that_ends_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __init__(self, *_: str) -> None:
            pass

        def ask(self, *_: Any) -> dict[str, Any]:
            return {"ok": False, "code": "killed", "error": "crashed: the process was killed by SIGKILL"}

        def close(self) -> None:
            pass

    monkeypatch.setattr(inspection, "Worker", Dying)
    found = inspect_graph(saved(tmp_path))
    assert found.reason is not None and found.reason.code == "killed"
    assert list(found.roles) == ["hidden_states", "position_ids", "past_key", "past_value"] and not found.attentions


def with_strange_input() -> onnx.ModelProto:
    """A decoder of one layer with an extra integer input of unknown meaning."""
    model = attention(add=[visible()])
    model.graph.input.append(helper.make_tensor_value_info("xyz", TensorProto.INT64, ("batch", 7, 3)))
    model.graph.node.append(helper.make_node("ReduceSum", ["xyz"], ["sum"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.INT64, ()))
    return model


def test_an_input_of_unknown_role_leaves_the_others_known(tmp_path: Path) -> None:
    graph = saved(tmp_path, with_strange_input())
    found = inspected(graph, {})
    assert found.roles == {"hidden_states": "features", "xyz": None}
    assert found.reason is not None and found.reason.code == "roles-unknown" and "--input xyz=" in found.reason.text
    given = inspected(graph, {"xyz": "index"})
    assert given.reason is not None or given.attentions


@pytest.mark.parametrize("roles", [{"nope": "features"}, {"hidden_states": "nonsense"}, {"hidden_states": "token_ids"}])
def test_roles_that_cant_be_are_refused(tmp_path: Path, roles: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"hidden_states|nope"):
        inspect_graph(saved(tmp_path), roles)


def test_a_graph_that_cant_be_evaluated_has_a_reason(tmp_path: Path) -> None:
    model = attention(add=[visible()])
    model.graph.node[0].op_type = "NoSuchOperator"
    found = inspected(saved(tmp_path, model), {})
    assert found.reason is not None and found.reason.code == "not-evaluated"
    assert found.roles == {"hidden_states": "features"}


def test_an_attention_that_cant_be_described_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posexport.graphs.attention.describe import Describer

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(Describer, "describe", broken)
    (one,) = inspected(saved(tmp_path), {}).attentions
    assert (one["state"], one["reason"]["code"], one["operator"]) == ("unknown", "failed", "Softmax")


def test_time_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LONGEST", -1.0)
    (one,) = inspected(saved(tmp_path), {}).attentions
    assert (one["state"], one["reason"]["code"]) == ("unknown", "time")


def test_a_file_without_attention_needs_no_roles(tmp_path: Path) -> None:
    model = with_strange_input()
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "Sigmoid"
    del softmax.attribute[:]
    found = inspected(saved(tmp_path, model), {})
    assert found.reason is None and found.attentions == ()


def test_profiles_have_the_names_of_artifacts(tmp_path: Path) -> None:
    """The file has other names for its dimensions, and a different one for each cache."""
    model = attention(rotate=rotation(FREQUENCIES), add=[visible()], cached=True)
    for value, name in zip(model.graph.input, ("n", "n", "p1", "p2"), strict=True):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in ("seq", "past"):
                dim.dim_param = name
            elif dim.dim_param:
                dim.dim_param = "b"
    graph = saved(tmp_path, model)
    found = inspected(graph, {})
    inputs = {name: shape for name, (shape, _) in graph.inputs().items()}
    profiles = graph_profiles(inputs, found, ["seq=1:2:3", "past_seq=0:5:9"])
    assert profiles["past_key"] == profiles["past_value"]
    assert profiles["past_key"]["max"] == [8, 4, 9, SIZE] and profiles["position_ids"]["opt"] == [1, 2]
    assert graph_profiles(inputs, found, ["n=1:2:3", "p2=0:5:9"]) == profiles
    with pytest.raises(RequestError, match="did you mean 'past_seq'"):
        graph_profiles(inputs, found, ["pastseq=1"])


def test_a_mask_is_as_long_as_the_cache_and_the_new_tokens(tmp_path: Path) -> None:
    from attention_graphs import padding

    graph = saved(tmp_path, attention(add=[visible(), padding()], cached=True))
    inputs = {name: shape for name, (shape, _) in graph.inputs().items()}
    profiles = graph_profiles(inputs, inspected(graph, {}), ["seq=1:2:3", "past_seq=0:5:9"])
    assert profiles["attention_mask"] == {"min": [1, 1], "opt": [1, 7], "max": [8, 12]}


def test_without_roles_dimensions_have_the_names_of_the_file(tmp_path: Path) -> None:
    graph = saved(tmp_path, with_strange_input())
    found = inspected(graph, {})
    inputs = {name: shape for name, (shape, _) in graph.inputs().items()}
    assert graph_profiles(inputs, found)["hidden_states"]["max"] == [8, 4096, 64]


def test_calls_are_kept_while_bodies_take_their_places() -> None:
    """Otherwise, a new node could get the memory address of a deleted call and be mistaken for it."""
    spec = read_spec({"encoding": {"name": "rope"}, "hidden_size": 32, "num_heads": 2, "layers": 2})
    model = export(spec, seeded_weights(spec, 0), form="function")
    calls = {node for node in model.graph if node.op_identifier() in model.functions}
    sites = call_sites(model)
    view_of(model)
    assert calls
    assert calls <= sites.nodes
