"""Damaged and hostile artifacts are refused in one sentence with exit code 2, and never lead out of their folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import cli, exported, refused, small_spec
from onnx import TensorProto, helper

from posexport.artifact.onnx_artifact import ForeignFileError, read_onnx, write_onnx
from posexport.errors import RequestError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound artifact with its weights inside."""
    path = tmp_path_factory.mktemp("whole") / "block.onnx"
    write_onnx(exported(small_spec("t5"), "function"), path)
    return path


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound artifact with its weights beside it."""
    path = tmp_path_factory.mktemp("outside") / "block.onnx"
    write_onnx(exported(small_spec("t5")), path, external_from=0)
    return path


def check(path: Path, *said: str) -> None:
    """Check that the library refuses to read a file with its weights, and that `inspect` refuses the file."""

    def read() -> None:
        read_onnx(path).weights()

    with pytest.raises(RequestError):
        read()
    refused(cli("inspect", path), *said)


@pytest.mark.parametrize("content", [b"", b"junk", b"\0" * 64, b"\x08\x0a", os.urandom(200), b"{}", b"<html></html>"])
def test_junk(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "block.onnx"
    path.write_bytes(content)
    check(path, "block.onnx")


def test_every_truncation(tmp_path: Path, whole: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "block.onnx"
    for length in (*range(0, 3000, 97), *range(3000, len(data), 1499), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(RequestError):
            read_onnx(path).weights()
    refused(cli("inspect", path), "block.onnx")


def test_not_there(tmp_path: Path) -> None:
    refused(cli("inspect", tmp_path / "block.onnx"), "is not there", "block.onnx")
    refused(cli("inspect", tmp_path / "block.plan"), "block.plan")
    refused(cli("inspect", tmp_path / "block.txt"), "neither .onnx nor .plan")
    (tmp_path / "folder.onnx").mkdir()
    refused(cli("inspect", tmp_path / "folder.onnx"), "is no regular file", "folder.onnx")
    refused(cli("inspect"), "FILE")


@pytest.mark.slow
def test_somebody_elses_model(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["x2"])], "g", [value], [])
    onnx.save(helper.make_model(graph), tmp_path / "block.onnx")
    with pytest.raises(
        ForeignFileError, match=r"is not an artifact of posexport.*posexport.spec, posexport.form"
    ) as told:
        read_onnx(tmp_path / "block.onnx")
    assert told.value.foreign
    assert list(told.value.graph.inputs()) == ["x"]
    assert cli("inspect", tmp_path / "block.onnx").exit_code == 0


def set_metadata(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        next(entry for entry in model.metadata_props if entry.key == f"posexport.{key}").value = value

    return change


def first(change: Callable[[TensorProto], None]) -> Callable[[onnx.ModelProto], None]:
    return lambda model: change(next(t for t in model.graph.initializer if t.name == "q_proj.weight"))


def floats(count: int) -> Callable[[TensorProto], None]:
    def change(tensor: TensorProto) -> None:
        tensor.ClearField("raw_data")
        tensor.float_data.extend([0.0] * count)

    return change


def dims(*sizes: int) -> Callable[[TensorProto], None]:
    def change(tensor: TensorProto) -> None:
        tensor.dims[:] = sizes

    return change


def set_field(name: str, value: Any) -> Callable[[TensorProto], None]:
    return lambda tensor: setattr(tensor, name, value)


DAMAGED: dict[str, tuple[Callable[[onnx.ModelProto], None], tuple[str, ...]]] = {
    "spec is no JSON": (set_metadata("spec", "{"), ("has metadata that can't be used",)),
    "spec is a list": (set_metadata("spec", "[]"), ("has metadata that can't be used", "not a table")),
    "spec is deep": (set_metadata("spec", "[" * 100_000), ("has metadata that can't be used",)),
    "spec of nothing": (set_metadata("spec", "{}"), ("encoding is None",)),
    "unknown encoding": (set_metadata("spec", '{"encoding":{"name":"ypos"}}'), ("unknown encoding 'ypos'",)),
    "unknown field": (
        set_metadata("spec", '{"encoding":{"name":"rope"},"heads":3}'),
        ("unknown field of a spec 'heads'",),
    ),
    "theta NaN": (set_metadata("spec", '{"encoding":{"name":"rope","theta":NaN}}'), ("theta is nan",)),
    "huge number": (
        set_metadata("spec", '{"encoding":{"name":"rope"},"layers":1%s}' % ("0" * 400)),
        ("a whole number of 401 digits",),
    ),
    "unknown form": (set_metadata("form", "magic"), ("its form is 'magic'", "decomposed")),
    "another spec": (set_metadata("spec", '{"encoding":{"name":"none"},"hidden_size":16,"num_heads":4}'), ()),
    "no nodes": (lambda model: model.graph.ClearField("node"), ("holds no ONNX graph",)),
    "no opset": (lambda model: model.ClearField("opset_import"), ("holds no ONNX graph",)),
    "no default domain": (lambda model: model.opset_import.remove(model.opset_import[0]), ("holds no ONNX graph",)),
    "a weight is gone": (lambda model: model.graph.initializer.remove(model.graph.initializer[0]), ()),
    "raw data cut": (
        first(lambda tensor: setattr(tensor, "raw_data", tensor.raw_data[:-4])),
        ("is damaged", "q_proj.weight"),
    ),
    "no data": (first(floats(0)), ("is damaged", "q_proj.weight")),
    "data twice": (first(lambda tensor: tensor.int32_data.extend([0] * 1024)), ("q_proj.weight", "has its data twice")),
    "data here and in another file": (
        first(lambda tensor: setattr(tensor, "data_location", TensorProto.EXTERNAL)),
        ("q_proj.weight", "has its data twice"),
    ),
    "too few floats": (first(floats(5)), ("is damaged", "q_proj.weight")),
    "other dims": (first(dims(16, 64)), ()),
    "negative dims": (first(dims(-32, -32)), ()),
    "dims too large": (first(dims(2**40, 2**40)), ("is damaged", "q_proj.weight")),
    "a weight is text": (first(set_field("data_type", TensorProto.STRING)), ()),
    "a weight of no type": (first(set_field("data_type", 999)), ()),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(tmp_path: Path, whole: Path, name: str) -> None:
    change, said = DAMAGED[name]
    model = onnx.load(whole)
    change(model)
    path = tmp_path / "block.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(RequestError) as caught:
        read_onnx(path).weights()
    for part in said:
        assert part in str(caught.value), str(caught.value)
    result = cli("inspect", path)  # it reads no weights, so it may succeed, but it never ends in a traceback
    if result.exit_code or said:
        refused(result, *said)


def entries(**changes: str | None) -> Callable[[TensorProto], None]:
    """Change entries of a tensor's external data, or drop those that are None."""

    def change(tensor: TensorProto) -> None:
        found = {entry.key: entry.value for entry in tensor.external_data} | changes
        del tensor.external_data[:]
        for key, value in found.items():
            if value is not None:
                tensor.external_data.add(key=key, value=value)

    return change


HOSTILE: dict[str, tuple[dict[str, str | None], str]] = {
    "absolute": ({"location": "/etc/passwd", "offset": "0", "length": "4"}, "outside its own folder"),
    "parent": ({"location": "../secret.bin"}, "outside its own folder"),
    "through a folder": ({"location": "data/../../secret.bin"}, "outside its own folder"),
    "symlink": ({"location": "link.bin"}, "outside its own folder"),
    "linked folder": ({"location": "linked/secret.bin"}, "outside its own folder"),
    "the folder itself": ({"location": "."}, "outside its own folder"),
    "no location": ({"location": None}, "outside its own folder"),
    "empty location": ({"location": ""}, "outside its own folder"),
    "NUL": ({"location": "a\0b"}, ""),
    "missing": ({"location": "other.data"}, "missing or cut short"),
    "a folder": ({"location": "data"}, "missing or cut short"),
    "beyond the end": ({"offset": "99999999"}, "missing or cut short"),
    "too long": ({"length": "99999999"}, ""),
    "too short": ({"length": "4"}, ""),
    "no length": ({"length": None}, ""),
    "negative offset": ({"offset": "-8"}, ""),
    "negative length": ({"length": "-8"}, ""),
    "offset no number": ({"offset": "zero"}, ""),
    "a folder to begin at": ({"basepath": "../"}, "are allowed, each once"),
    "weights that are packed": ({"prepacked_0": "weight|0;8;0|"}, "are allowed, each once"),
}


@pytest.fixture
def hostile(tmp_path: Path, outside: Path) -> Path:
    """The path `block.onnx` that a test writes, in a folder with secrets around it."""
    (tmp_path / "secret.bin").write_bytes(b"s" * 8192)
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "block.onnx.data").write_bytes(outside.with_name("block.onnx.data").read_bytes())
    (home / "link.bin").symlink_to(tmp_path / "secret.bin")
    (home / "linked").symlink_to(tmp_path)
    return home / "block.onnx"


@pytest.mark.parametrize("name", HOSTILE)
def test_external_data_stays_in_the_folder(hostile: Path, outside: Path, name: str) -> None:
    changes, said = HOSTILE[name]
    model = onnx.load(outside, load_external_data=False)
    first(entries(**changes))(model)
    hostile.write_bytes(model.SerializeToString())
    check(hostile, said)


def test_external_data_that_lie_at_two_places_are_refused(hostile: Path, outside: Path) -> None:
    """If an entry occurs twice, one library takes the first and another the last."""
    model = onnx.load(outside, load_external_data=False)
    first(lambda tensor: tensor.external_data.add(key="offset", value="0"))(model)
    hostile.write_bytes(model.SerializeToString())
    check(hostile, "are allowed, each once")


def test_external_data_of_a_constant_stays_in_the_folder(hostile: Path, outside: Path) -> None:
    """Not only initializers refer to files. The tensor of a Constant may too, in the graph and in a function."""
    model = onnx.load(outside, load_external_data=False)
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    entries(location="../secret.bin", offset="0", length="16")(tensor)
    node = helper.make_node("Constant", [], ["stolen"], value=tensor)
    model.graph.node.insert(0, node)
    hostile.write_bytes(model.SerializeToString())
    check(hostile, "outside its own folder")
    del model.graph.node[0]
    model.functions.append(helper.make_function("posexport", "Thief", [], ["stolen"], [node], model.opset_import))
    hostile.write_bytes(model.SerializeToString())
    check(hostile, "outside its own folder")


@pytest.mark.parametrize("inside", ["graph", "branch", "function"])
def test_sparse_tensors_of_nodes_are_refused(tmp_path: Path, inside: str) -> None:
    """Runtimes also read the external data of sparse tensors, which may be anywhere."""
    values = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    values.external_data.add(key="location", value="/etc/passwd")
    node = helper.make_node("Constant", [], ["c"])
    attribute = node.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR)
    attribute.sparse_tensor.CopyFrom(onnx.SparseTensorProto(values=values, dims=[1]))
    output = helper.make_tensor_value_info("c", TensorProto.FLOAT, [1])
    nodes, functions = [node], []
    if inside == "branch":
        branch = helper.make_graph([node], "branch", [], [output])
        nodes = [helper.make_node("If", ["x"], ["c"], then_branch=branch, else_branch=branch)]
    if inside == "function":
        nodes = [helper.make_node("F", [], ["c"], domain="own")]
        functions = [helper.make_function("own", "F", [], ["c"], [node], [helper.make_opsetid("", 18)])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.BOOL, [])], [output])
    onnx.save(helper.make_model(graph, functions=functions), tmp_path / "x.onnx")
    refused(cli("inspect", tmp_path / "x.onnx"), "holds sparse tensors")


@pytest.mark.parametrize("kind", ["t", "tensors", "g", "sparse_tensor"])
def test_defaults_of_functions_come_from_no_other_file(tmp_path: Path, kind: str) -> None:
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    entries(location="/etc/passwd", offset="0", length="16")(tensor)
    node = helper.make_node("Constant", [], ["c"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, ref_attr_name="default")
    nodes = [node, helper.make_node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 18)])
    default = function.attribute_proto.add(name="default", type=onnx.AttributeProto.TENSOR)
    values = {
        "t": tensor,
        "tensors": tensor,
        "g": helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor)], "g", [], []),
        "sparse_tensor": onnx.SparseTensorProto(values=tensor),
    }
    field = getattr(default, kind)
    (field.add() if kind == "tensors" else field).CopyFrom(values[kind])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", [x], [y])
    onnx.save(helper.make_model(graph, functions=[function]), tmp_path / "x.onnx")
    refused(cli("inspect", tmp_path / "x.onnx"), "a function 'F' whose attribute 'default' is a graph")


def test_manifests(tmp_path: Path, whole: Path) -> None:
    path, manifest = tmp_path / "block.onnx", tmp_path / "block.onnx.json"
    path.write_bytes(whole.read_bytes())
    for content in (b"", b"{", b"[]", b"3", b"\xff\xfe"):
        manifest.write_bytes(content)
        refused(cli("inspect", path), "block.onnx.json", "can't be used, it is")
