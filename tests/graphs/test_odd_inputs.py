"""Inputs with misleading names: images called masks, series called past; and inputs without a rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_graphs import attention, visible
from graph_signatures import graph_of
from onnx import TensorProto, helper

from posexport.artifact.graph_file import GraphFile, read_graph
from posexport.errors import RequestError
from posexport.graphs.inspection import inspected
from posexport.graphs.roles import roles_of

PICTURE: list[int | str] = [1, 1, 256, 256]


def read_by(kind: str, folder: Path, shape: list[int | str], name: str = "mask_input") -> GraphFile:
    """A graph in which an operator reads an input after a Cast."""
    nodes = [helper.make_node("Cast", [name], ["cast"], to=TensorProto.FLOAT)]
    nodes.append(helper.make_node(kind, ["cast", "weight"], ["result"]))
    return graph_of(folder, {name: (shape, "fp32")}, nodes=nodes, weights={"weight": np.ones((4, 1, 2, 2), np.float32)})


def test_a_mask_that_is_drawn_on_a_picture_is_a_picture(tmp_path: Path) -> None:
    """SAM's decoder takes such a mask image. A mask that is added to scores is not an image."""
    assert roles_of(read_by("Conv", tmp_path, PICTURE))["mask_input"].kind == "images"
    assert roles_of(read_by("Add", tmp_path, ["batch", 1, "seq", "seq"]))["mask_input"].kind == "attention_mask"


SERIES = {
    "past_values": "features",
    "past_time_features": "features",
    "past_observed_mask": "mask",
    "past_values_0": "past",
    "past.values.1": "past",
    "past_key": "past",
}


@pytest.mark.parametrize("name", SERIES)
def test_series_are_no_caches(name: str, tmp_path: Path) -> None:
    """PatchTST, Informer and TimeSeriesTransformer use these names."""
    assert roles_of(graph_of(tmp_path, {name: (["batch", "length", 3], "fp32")}))[name].kind == SERIES[name]


def test_caches_of_all_layers_may_have_the_name_of_a_series(tmp_path: Path) -> None:
    shape: list[int | str] = [2, "batch", 4, "past", 8]
    assert roles_of(graph_of(tmp_path, {"past_values": (shape, "fp32")}))["past_values"].kind == "past"


def without_rank(name: str, *, sequence: bool = False) -> onnx.ModelProto:
    """A graph with attention and one more input with an unknown number of dimensions."""
    model = attention(add=[visible()])
    info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    if sequence:
        info = helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)
    model.graph.input.append(info)
    node = helper.make_node("SequenceLength" if sequence else "Size", [name], ["more"])
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.INT64, ()))
    return model


@pytest.mark.parametrize("name", ["xyz", "input_features", "past_length"])
@pytest.mark.parametrize("given", [False, True])
def test_inputs_without_a_rank_are_said_to_have_none(name: str, given: bool, tmp_path: Path) -> None:
    """A role would not help, so the message does not ask for one."""
    path = tmp_path / "graph.onnx"
    path.write_bytes(without_rank(name).SerializeToString())
    found = inspected(read_graph(path), {name: "features"} if given else {})
    assert found.reason is not None and found.reason.code == "roles-unknown"
    assert "has no shape" in found.reason.text and "--input" not in found.reason.text


def test_what_is_no_tensor_is_not_said_to_lack_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    path.write_bytes(without_rank("parts", sequence=True).SerializeToString())
    with pytest.raises(RequestError, match="holds no tensor"):
        roles_of(read_graph(path))
