"""Files with unsorted nodes, or without a valid graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import cli
from onnx import helper
from small_graphs import decoder

from posexport.graphs.load import InvalidGraphError, inlined, load_model, model_at

COMMANDS = ["verify", "plot", "rewrite", "tune"]


def saved(path: Path, nodes: list[onnx.NodeProto], output: str) -> Path:
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]) for name in ("x", output)]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


INVALID = {
    "redeclared": ([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])], "redeclared"),
    "a value that nothing gives": ([helper.make_node("Add", ["x", "z"], ["y"])], "'z'"),
    "an output that nothing gives": ([helper.make_node("Relu", ["x"], ["z"])], "'y'"),
    "cycle": ([helper.make_node("Add", ["x", "y"], ["z"]), helper.make_node("Relu", ["z"], ["y"])], "cycle"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_graph_is_refused(tmp_path: Path, kind: str) -> None:
    nodes, word = INVALID[kind]
    path = saved(tmp_path / "invalid.onnx", nodes, "y")
    with pytest.raises(InvalidGraphError, match=word):
        load_model(path)


@pytest.mark.parametrize("kind", ["redeclared", "a value that nothing gives"])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_an_invalid_graph_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "invalid.onnx", INVALID[kind][0], "y")
    target = {"plot": ["-o", "a.png"], "rewrite": ["-o", "a.onnx", "--form", "native"], "tune": ["-o", "a.onnx"]}
    result = cli(command, "invalid.onnx", *target.get(command, []))
    assert result.exit_code == 2, result.output
    assert "holds no valid graph" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["invalid.onnx"]


def test_inspect_shows_the_rest_of_an_invalid_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "invalid.onnx", INVALID["redeclared"][0], "y")
    result = cli("inspect", "invalid.onnx")
    assert result.exit_code == 0
    assert "attention was not looked for, " in result.stdout
    assert "holds no valid graph" in result.stdout
    assert "export it again.\n" in result.stdout


def test_nodes_come_in_the_order_that_onnx_asks_for(tmp_path: Path) -> None:
    model = decoder()
    names = [node.name for node in model.graph.node]
    onnx.save(model, tmp_path / "sorted.onnx")
    assert [node.name for node in load_model(tmp_path / "sorted.onnx").graph] == names
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "reversed.onnx")
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)} | {""}
    for node in load_model(tmp_path / "reversed.onnx").graph:
        assert {value.name for value in node.inputs if value is not None} <= known
        known |= {value.name for value in node.outputs}


def test_weights_of_functions_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read from the working folder, which has another file with the same name."""
    for folder, number in (("beside", 3), ("working", 9)):
        (tmp_path / folder).mkdir()
        np.full(4, number, np.float32).tofile(tmp_path / folder / "w.bin")
    weight = onnx.TensorProto(data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    nodes = [helper.make_node("Constant", [], ["c"], value=weight), helper.make_node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 18)])
    path = saved(tmp_path / "beside" / "x.onnx", [helper.make_node("F", ["x"], ["y"], domain="own")], "y")
    model = onnx.load(path)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(model, path)
    monkeypatch.chdir(tmp_path / "working")
    for read in (inlined(load_model(path)), model_at(path), model_at(Path("../beside/x.onnx"))):
        (constant,) = (node for node in read.graph if node.op_type == "Constant")
        assert constant.attributes["value"].as_tensor().numpy().tolist() == [3, 3, 3, 3]
