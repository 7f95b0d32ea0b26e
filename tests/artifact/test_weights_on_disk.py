"""Files that are read with their weights left on disk: the same graph and the same checks for any file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_graph_writer import bits, graph_of_everything, saved

from posexport.artifact import onnx_file, onnx_limits, weights_on_disk
from posexport.artifact.graph_file import read_graph
from posexport.artifact.graph_writer import copy_graph, write_graph
from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.errors import RequestError
from posexport.files import staged
from posexport.graphs.load import model_of


@pytest.mark.parametrize("how", ["inline", "one", "many"])
def test_it_is_the_same_graph_without_the_weights(how: str, tmp_path: Path) -> None:
    path = saved(tmp_path, how)
    whole, left = read_graph(path), read_with_weights_on_disk(path)
    assert (left.sha256, left.inputs(), left.outputs()) == (whole.sha256, whole.inputs(), whole.outputs())
    assert left.external_files() == whole.external_files()
    assert left.external_sha256 == whole.external_sha256
    assert (left.metadata(), left.domains()) == (whole.metadata(), whole.domains())
    large = [tensor for tensor in left.model.graph.initializer if len(tensor.raw_data) > onnx_file.INLINE]
    assert not large
    onnx.load_external_data_for_model(left.model, str(path.parent))
    assert bits(path) == bits_of(left.model, tmp_path)


def bits_of(model: onnx.ModelProto, folder: Path) -> object:
    path = folder / "loaded.onnx"
    path.write_bytes(model.SerializeToString())
    return bits(path)


@pytest.mark.parametrize("how", ["inline", "one", "many"])
def test_it_is_written_as_the_whole_file_is(how: str, tmp_path: Path) -> None:
    path = saved(tmp_path, how)
    results = []
    for number, read in enumerate((read_graph, read_with_weights_on_disk)):
        for write in (True, False):
            out = tmp_path / f"{number}{write}" / "out.onnx"
            out.parent.mkdir()
            graph = read(path)
            with staged() as files:
                hashes = write_graph(model_of(graph), path, out, files) if write else copy_graph(graph, out, files)
            results.append((write, {name: (out.parent / name).read_bytes() for name in hashes}))
    assert results[0] == results[2] and results[1] == results[3]


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_a_file_with_several_names_is_read_whole(link: str, tmp_path: Path) -> None:
    path, other = saved(tmp_path, "inline"), tmp_path / "elsewhere" / "file.onnx"
    other.parent.mkdir()
    if link == "symbolic":
        other.symlink_to(path)
    else:
        other.hardlink_to(path)
    graph = read_with_weights_on_disk(other)
    assert graph.model == read_graph(path).model
    assert model_of(graph).graph.initializers["typed"].const_value is not None


def test_what_is_no_file_is_refused_with_the_same_words(tmp_path: Path) -> None:
    data = graph_of_everything().SerializeToString()
    path = tmp_path / "in.onnx"
    for size in [*range(0, len(data), len(data) // 40), len(data) - 1]:
        path.write_bytes(data[:size])
        sentences = []
        for read in (read_graph, read_with_weights_on_disk):
            with pytest.raises(RequestError) as raised:
                read(path)
            sentences.append(str(raised.value))
        assert sentences[0] == sentences[1]


def test_a_file_whose_beginning_is_sound_is_not_read_as_that(tmp_path: Path) -> None:
    """protobuf and ONNX Runtime also read the rest: a protobuf group, which ONNX does not use, and one more output."""
    model = graph_of_everything()
    model.doc_string = "d" * (2**20 - model.ByteSize() - 4)
    begin = model.SerializeToString()
    assert len(begin) == 2**20
    more = onnx.ModelProto()
    more.graph.node.add(op_type="Identity", input=[model.graph.output[0].name], output=["more"])
    more.graph.output.add(name="more").type.CopyFrom(model.graph.output[0].type)
    graph = more.graph.SerializeToString() + bytes([0x83, 0x08, 0x84, 0x08])  # the start and the end of group 128
    path = tmp_path / "in.onnx"
    path.write_bytes(begin + bytes([7 << 3 | 2, len(graph)]) + graph)
    assert [value.name for value in onnx.load(path).graph.output][-1] == "more"
    for read in (read_graph, read_with_weights_on_disk):
        with pytest.raises(RequestError, match="is not an ONNX file, or it is cut short"):
            read(path)


def test_a_file_that_is_cut_short_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process must not crash, as it would with a memory map of the file."""
    path = saved(tmp_path, "inline")

    def cut(*given: object) -> None:
        os.truncate(path, 100)
        onnx_limits.check_size(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(weights_on_disk, "check_size", cut)
    with pytest.raises(RequestError, match="or it is cut short"):
        read_with_weights_on_disk(path)


def test_weights_that_are_cut_short_meanwhile_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "inline")
    tensors = read_with_weights_on_disk(path).model.graph.initializer  # their data stay in the file
    tensor = next(one for one in tensors if one.data_location == onnx.TensorProto.EXTERNAL)
    assert onnx_file.array_of(path, tensor).nbytes > onnx_file.INLINE
    os.truncate(path, 100)
    with pytest.raises(RequestError, match="was cut short meanwhile"):
        onnx_file.array_of(path, tensor)


def _twice(tensor: onnx.TensorProto) -> None:
    tensor.float_data.extend([1.0])


def _external(tensor: onnx.TensorProto) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL


def _short(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = tensor.raw_data[:-4]


@pytest.mark.parametrize("fault", [_twice, _external, _short])
def test_a_damaged_weight_is_refused(fault: object, tmp_path: Path) -> None:
    model = graph_of_everything()
    fault(model.graph.initializer[0])  # type: ignore[operator]
    path = tmp_path / "in.onnx"
    path.write_bytes(model.SerializeToString())
    for read in (read_graph, read_with_weights_on_disk):
        with pytest.raises(RequestError, match=r"is damaged|has its data twice|no offset"):
            read(path)


def holding(where: str, tensor: onnx.TensorProto) -> onnx.ModelProto:
    """A graph with a weight in a constant of a node, of a function or of a branch, or among its initializers."""
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    relu = helper.make_node("Relu", ["w"], ["y"])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    functions, weights, nodes = [], [], [constant, relu]
    if where == "a weight":
        weights, nodes = [tensor], [relu]
    elif where == "a function":
        opsets = [helper.make_opsetid("", 18)]
        functions = [helper.make_function("own", "Weight", [], ["y"], [constant, relu], opsets)]
        nodes = [helper.make_node("Weight", [], ["y"], domain="own")]
    elif where == "a branch":
        branch = helper.make_graph([relu], "branch", [], [output], [tensor])
        condition = helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
        nodes = [condition, helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)]
    graph = helper.make_graph(nodes, "graph", [], [output], weights)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9, functions=functions)


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "packed"])
@pytest.mark.parametrize("where", ["a node", "a weight", "a function", "a branch"])
def test_weights_anywhere_are_no_structure(
    where: str, raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of weights can be read with ten megabytes of memory, because it does not count as structure."""
    numbers = np.ones(250_000, np.float32)
    tensor = helper.make_tensor("w", TensorProto.FLOAT, numbers.shape, numbers.tobytes() if raw else numbers, raw=raw)
    path = tmp_path / "a.onnx"
    path.write_bytes(holding(where, tensor).SerializeToString())
    monkeypatch.setattr(onnx_limits, "available", lambda: 10**7)
    monkeypatch.setattr(onnx_limits, "LARGEST_STRUCTURE", 10**4)
    for read in (read_graph, read_with_weights_on_disk):
        assert read(path).model.graph.node


def test_packed_numbers_are_weighed_as_they_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small number takes a byte in the file and eight in memory."""
    tensor = helper.make_tensor("w", TensorProto.INT64, [1_000_000], [1] * 1_000_000)
    path = tmp_path / "a.onnx"
    path.write_bytes(holding("a node", tensor).SerializeToString())
    monkeypatch.setattr(onnx_limits, "available", lambda: 10**7)
    with pytest.raises(RequestError, match="of memory are free"):
        read_graph(path)


def test_fields_are_counted_in_all_messages_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(holding("a node", numpy_helper.from_array(np.ones(2, np.float32), "w")).SerializeToString())
    monkeypatch.setattr(onnx_limits, "_MOST_FIELDS", 5)  # neither message has so many by itself
    with pytest.raises(RequestError, match="is not an ONNX file"):
        read_graph(path)
