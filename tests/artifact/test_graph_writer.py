"""A graph of any origin is written with the bytes of every weight: all dtypes, inline and external, also inside
nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from posexport.artifact import onnx_file
from posexport.artifact.external import external
from posexport.artifact.graph_file import read_graph
from posexport.artifact.graph_writer import copy_graph, write_graph
from posexport.errors import RequestError
from posexport.files import staged
from posexport.graphs.load import load_model

DTYPES = [
    name
    for name in TensorProto.DataType.keys()  # noqa: SIM118
    if name not in ("UNDEFINED", "STRING") and TensorProto.DataType.Value(name) in onnx_file._BITS
]


def packed(dtype: int, shape: tuple[int, ...], seed: int) -> onnx.TensorProto:
    """A tensor of random bits."""
    size = (int(np.prod(shape)) * onnx_file._BITS[dtype] + 7) // 8
    raw = np.random.default_rng(seed).integers(0, 2, size, np.uint8).tobytes()  # bytes 0 and 1 are valid for bool too
    return TensorProto(name=f"w{dtype}", data_type=dtype, dims=shape, raw_data=raw)


def graph_of_everything() -> onnx.ModelProto:
    """A graph with small and large weights of every dtype, text, a weight in a subgraph and one in an attribute, and
    metadata."""
    weights = [packed(TensorProto.DataType.Value(name), (37, 61), n) for n, name in enumerate(DTYPES)]
    weights.append(helper.make_tensor("texts", TensorProto.STRING, [3], [b"a", b"bb" * 900, b""]))
    weights.append(helper.make_tensor("typed", TensorProto.FLOAT, [400], np.arange(400.0)))
    weights.append(helper.make_tensor("scale", TensorProto.FLOAT, [], [2.0]))
    weights[0].doc_string = "kept"
    large = numpy_helper.from_array(np.arange(500, dtype=np.float32), "inner")
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "inner"], ["sum"])],
        "branch",
        [],
        [helper.make_tensor_value_info("sum", 1, [500])],
    )
    branch.initializer.append(large)
    constant = numpy_helper.from_array(np.arange(600, dtype=np.int64), "")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=constant),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("Mul", ["y", "scale"], ["z"]),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, [500]), helper.make_tensor_value_info("yes", 9, [])]
    outputs = [helper.make_tensor_value_info("z", 1, [500]), helper.make_tensor_value_info("c", 7, [600])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights, doc_string="a graph")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], producer_name="somebody")
    model.metadata_props.add(key="author", value="somebody")
    return model


def bits(path: Path) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Every tensor of a file by its place: (dtype, dimensions, bytes). Only onnx reads the file."""
    model = onnx.load(path)
    found = {}
    graphs = [("", model.graph)]
    for prefix, graph in graphs:
        for tensor in graph.initializer:
            found[prefix + tensor.name] = tensor
        for at, node in enumerate(graph.node):
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    found[f"{prefix}{at}.{attribute.name}"] = attribute.t
                if attribute.HasField("g"):
                    graphs.append((f"{prefix}{at}.{attribute.name}.", attribute.g))
    return {
        name: (
            tensor.data_type,
            tuple(tensor.dims),
            b"\0".join(tensor.string_data)
            if tensor.data_type == TensorProto.STRING
            else tensor.raw_data or numpy_helper.to_array(tensor).tobytes(),
        )
        for name, tensor in found.items()
    }


def saved(folder: Path, how: str) -> Path:
    """Save the graph as one file, with one file of external data, or with one for each tensor, also inside nodes."""
    path = folder / "in.onnx"
    model = graph_of_everything()
    if how == "inline":
        onnx.save(model, path)
    else:
        onnx.save(
            model,
            path,
            save_as_external_data=True,
            all_tensors_to_one_file=how == "one",
            location="weights.bin" if how == "one" else None,
            size_threshold=0,
            convert_attribute=True,
        )
    return path


@pytest.mark.parametrize("write", ["write", "copy"])
@pytest.mark.parametrize("how", ["inline", "one", "many"])
def test_every_tensor_keeps_its_bytes(tmp_path: Path, how: str, write: str) -> None:
    source, out = saved(tmp_path, how), tmp_path / "elsewhere" / "out.onnx"
    out.parent.mkdir()
    graph = read_graph(source)
    with staged() as files:
        if write == "copy":
            hashes = copy_graph(graph, out, files)
        else:
            hashes = write_graph(load_model(source), source, out, files)
    before = bits(source)
    for file in [*tmp_path.glob("in.onnx"), *(tmp_path / name for name in graph.external_files())]:
        file.unlink()  # the written file must not depend on it
    assert bits(out) == before
    assert len(before) == len(DTYPES) + 6
    assert sorted(file.name for file in out.parent.iterdir()) == sorted(hashes)
    assert sorted(hashes) == (["out.onnx"] if how == "inline" else ["out.onnx", "out.onnx.data"])
    after = onnx.load(out)
    assert [(entry.key, entry.value) for entry in after.metadata_props] == [("author", "somebody")]
    assert (after.producer_name, after.graph.doc_string) == ("somebody", "a graph")
    assert {t.name: t.doc_string for t in after.graph.initializer}[
        f"w{TensorProto.DataType.Value(DTYPES[0])}"
    ] == "kept"


@pytest.mark.parametrize("write", ["write", "copy"])
def test_small_weights_alone_come_from_external_data_into_the_file(tmp_path: Path, write: str) -> None:
    source, out = tmp_path / "in.onnx", tmp_path / "elsewhere" / "out.onnx"
    out.parent.mkdir()
    graph = graph_of_everything()
    del graph.graph.initializer[:], graph.graph.node[:2]
    graph.graph.initializer.append(numpy_helper.from_array(np.float32([2]), "scale"))
    graph.graph.node[0].input[0] = "x"
    del graph.graph.output[1], graph.graph.input[1]
    onnx.save(graph, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = bits(source)
    with staged() as files:
        if write == "copy":
            hashes = copy_graph(read_graph(source), out, files)
        else:
            hashes = write_graph(load_model(source), source, out, files)
    (tmp_path / "weights.bin").unlink()
    assert [*hashes] == [file.name for file in out.parent.iterdir()] == ["out.onnx"]
    assert bits(out) == before
    assert len(before) == 1


@pytest.mark.parametrize("how", ["inline", "one", "many"])
def test_a_written_file_is_copied_and_written_to_the_same_bytes(tmp_path: Path, how: str) -> None:
    source = saved(tmp_path, how)
    results = []
    for number in range(3):
        out = tmp_path / str(number) / "out.onnx"
        out.parent.mkdir()
        with staged() as files:
            if number == 2:
                hashes = copy_graph(read_graph(source), out, files)
            else:
                hashes = write_graph(load_model(source), source, out, files)
        results.append({name: (out.parent / name).read_bytes() for name in hashes})
        source = out
    assert results[0] == results[1] == results[2]


def test_tensors_that_share_their_bytes_share_them_still(tmp_path: Path) -> None:
    source = saved(tmp_path, "one")
    model = onnx.load(source, load_external_data=False)
    first = next(tensor for tensor in model.graph.initializer if tensor.data_location)
    twin = model.graph.initializer.add()
    twin.CopyFrom(first)
    twin.name = "twin"
    onnx.save(model, source)
    for write in (True, False):
        out = tmp_path / f"{write}.onnx"
        with staged() as files:
            if write:
                write_graph(load_model(source), source, out, files)
            else:
                copy_graph(read_graph(source), out, files)
        places = {
            tensor.name: external(tensor) for tensor in onnx.load(out, load_external_data=False).graph.initializer
        }
        assert places["twin"] == places[first.name] != {}
        assert bits(out) == bits(source)


def test_many_weights_go_beside_the_file(tmp_path: Path) -> None:
    source, out = saved(tmp_path, "inline"), tmp_path / "out.onnx"
    with staged() as files:
        hashes = write_graph(load_model(source), source, out, files, external_from=1000)
    assert sorted(hashes) == ["out.onnx", "out.onnx.data"]
    assert bits(out) == bits(source)


def test_external_data_with_several_names_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path, "one")
    (tmp_path / "other").hardlink_to(tmp_path / "weights.bin")
    with pytest.raises(RequestError, match="which has several names"):
        load_model(source)


def test_a_weight_that_is_cut_short_meanwhile_writes_nothing(tmp_path: Path) -> None:
    source, out = saved(tmp_path, "one"), tmp_path / "out.onnx"
    model = load_model(source)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(RequestError, match="cut short meanwhile"), staged() as files:
        write_graph(model, source, out, files)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.onnx", "weights.bin"]


def test_a_file_that_changes_meanwhile_is_not_copied(tmp_path: Path) -> None:
    source = saved(tmp_path, "inline")
    graph = read_graph(source)
    source.write_bytes(source.read_bytes() + b"\0")
    with pytest.raises(RequestError, match="changed meanwhile"), staged() as files:
        copy_graph(graph, tmp_path / "out.onnx", files)
    assert not (tmp_path / "out.onnx").exists()
