"""Files that are made to hang, to exhaust memory, or to reach other files: each is refused at once in one sentence."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import cli, exported, refused, small_spec
from onnx import TensorProto, helper

from posexport import machine
from posexport.artifact import onnx_file, onnx_limits
from posexport.artifact.graph_shape import longest_path
from posexport.artifact.loaded import load_artifact
from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.files import TEXT_LIMIT, check_regular, open_file, read_bytes, sha256_of
from posexport.runtimes.npz import read_arrays

pytestmark = pytest.mark.few_inputs

HUGE = 2**40


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def tcp(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)  # the path of a socket must be short
        listening.bind(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def nothing(path: Path) -> None:
    path.symlink_to("nowhere")


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (fifo, "it is a pipe"),
    "zero": (zero, "it is a device"),
    "socket": (tcp, "it is a socket"),
    "folder": (folder, "it is a folder"),
    "hole": (hole, "nearly all of which are a hole|larger than"),  # depends on whether there is a limit
    "dangling": (nothing, "No such file"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def block(here: Path) -> Path:
    write_onnx(exported(small_spec("rope", hidden_size=16, num_heads=2), "function"), here / "a.onnx")
    return here / "a.onnx"


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, here: Path) -> None:
    make, said = SPECIAL[kind]
    make(here / "x")
    for read in (open_file, check_regular, sha256_of, lambda path: read_bytes(path, TEXT_LIMIT)):
        with pytest.raises(OSError, match=said):
            read(here / "x")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bytes(tmp_path / "x", 4)
    if Path("/proc/self/smaps").exists():  # its stated size is 0 bytes
        with pytest.raises(OSError, match="larger than 10 bytes"):
            read_bytes(Path("/proc/self/smaps"), 10)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="no file can have such a name"):
            read_bytes(tmp_path / name, 5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [*SPECIAL])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("x.onnx", "inspect x.onnx"),
        ("x.onnx", "verify x.onnx --runtime ort-cpu"),
        ("x.onnx", "compile x.onnx"),
        ("x.onnx", "rewrite x.onnx -o y.onnx"),
        ("x.plan", "inspect x.plan"),
        ("x.json", "report x.json"),
        ("x.json", "export --from x.json"),
        ("x.toml", "export --config x.toml"),
        ("x.toml", "build --project x.toml"),
        ("x.toml", "sweep x.toml --dry-run"),
        ("x.safetensors", "export --encoding rope --weights x.safetensors"),
        ("x.npz", "verify a.onnx --inputs x.npz --runtime ort-cpu"),
    ],
)
def test_commands_refuse_special_files(name: str, command: str, kind: str, block: Path) -> None:
    SPECIAL[kind][0](block.parent / name)
    if kind == "folder" and name == "x.onnx":
        name = "a folder that holds nothing"
    done = cli(*command.split())
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_manifest_is_no_missing_one(kind: str, block: Path) -> None:
    beside = block.with_name("a.onnx.json")
    beside.unlink()
    SPECIAL[kind][0](beside)
    with pytest.raises(RequestError, match="can't be read"):
        load_artifact(block).source.manifest()


def change(path: Path, mutate: Callable[[onnx.ModelProto], object]) -> Path:
    """Change the artifact and remove its manifest."""
    model = onnx.load(path)
    mutate(model)
    onnx.save(model, path)
    path.with_name(path.name + ".json").unlink(missing_ok=True)
    return path


def nested(levels: int, times: int) -> Callable[[onnx.ModelProto], object]:
    """Add `levels` functions. Each calls the one before it `times` times."""

    def mutate(model: onnx.ModelProto) -> None:
        for level in range(levels):
            function = model.functions.add(name=f"F{level}", domain="posexport", input=["x"], output=["y"])
            called = ("Relu", "") if level == 0 else (f"F{level - 1}", "posexport")
            names = ["x", *(f"v{index}" for index in range(times - 1)), "y"]
            for before, after in itertools.pairwise(names):
                function.node.append(helper.make_node(called[0], [before], [after], domain=called[1]))
        model.graph.node.append(helper.make_node(f"F{levels - 1}", ["output"], ["more"], domain="posexport"))

    return mutate


def in_subgraph(model: onnx.ModelProto) -> None:
    """The calls are in a subgraph of a subgraph."""
    nested(40, 2)(model)
    inner = helper.make_graph([model.graph.node.pop()], "inner", [], [])
    middle = helper.make_graph([helper.make_node("If", ["c"], ["d"], then_branch=inner)], "middle", [], [])
    model.graph.node.append(helper.make_node("If", ["c"], ["d"], then_branch=middle))


def calling_itself(model: onnx.ModelProto) -> None:
    for name, other in (("A", "B"), ("B", "A")):
        function = model.functions.add(name=name, domain="posexport", input=["x"], output=["y"])
        function.node.append(helper.make_node(other, ["x"], ["y"], domain="posexport"))


def tensor(**fields: Any) -> Callable[[onnx.ModelProto], object]:
    return lambda model: model.graph.initializer.append(TensorProto(name="more", **fields))


def sparse(model: onnx.ModelProto) -> None:
    made = model.graph.sparse_initializer.add(dims=[2**40])
    made.values.CopyFrom(TensorProto(name="s", dims=[1], data_type=1, float_data=[1.0]))
    made.indices.CopyFrom(TensorProto(dims=[1], data_type=7, int64_data=[3]))


def far_output(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "seq":
                dim.dim_value = 10**12


def spec_with(**fields: Any) -> Callable[[onnx.ModelProto], object]:
    def mutate(model: onnx.ModelProto) -> None:
        entry = next(entry for entry in model.metadata_props if entry.key == "posexport.spec")
        entry.value = json.dumps({**json.loads(entry.value), **fields})

    return mutate


EXPLODING: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "2^40 nodes": (nested(40, 2), "nodes once its functions are inlined"),
    "1000^20 nodes": (nested(20, 1000), r"more than 10\^15 nodes"),
    "2^40 nodes in a subgraph": (in_subgraph, "nodes once its functions are inlined"),
    "1000 levels": (nested(1000, 1), "1000 deep"),
    "recursion": (calling_itself, "that calls itself"),
    "two of a name": (lambda model: model.functions.append(model.functions[0]), "holds two functions"),
    "two weights of a name": (
        lambda model: model.graph.initializer.append(model.graph.initializer[0]),
        "weight .* twice",
    ),
    "opset -5": (lambda model: setattr(model.opset_import[0], "version", -5), "a known opset"),
    "opset 2^62": (lambda model: setattr(model.opset_import[0], "version", 2**62), "a known opset"),
    "raw tensor": (tensor(dims=[2**40], data_type=1, raw_data=b"1234"), r"'more' is not \[1099511627776\]"),
    "int32 tensor": (tensor(dims=[2**40], data_type=6), "'more' is not"),
    "int4 tensor": (tensor(dims=[2**40], data_type=22, raw_data=b"1"), "'more' is not"),
    "texts": (tensor(dims=[2**40], data_type=8, string_data=[b"a"]), "'more' is not"),
    "negative": (tensor(dims=[-1], data_type=1), "'more' is not"),
    "many dims": (tensor(dims=[2**62] * 5000, data_type=1), "'more' is not"),
    "unknown dtype": (tensor(dims=[1], data_type=99, raw_data=b"1234"), "'more' is not"),
    "sparse": (sparse, "holds sparse tensors"),
    "sizes": (far_output, "alone, in float64"),
    "layers": (spec_with(layers=10**9), "layers is 1000000000"),
    "pattern": (spec_with(layers=1000, layer_pattern=[{"encoding": {"name": "rope"}}] * 5000), "5000 layers"),
    "number": (spec_with(hidden_size=10**400), "a whole number of 401 digits"),
}


@pytest.mark.parametrize("what", EXPLODING)
def test_what_would_explode_is_refused_before(what: str, block: Path) -> None:
    mutate, said = EXPLODING[what]
    change(block, mutate)
    before = machine.forget_peak()
    with pytest.raises(RequestError, match=said):
        load_artifact(block)
    if sys.platform == "linux":
        assert machine.peak() - before < 200e6


def test_nested_functions_that_stay_small_are_taken(block: Path) -> None:
    change(block, nested(10, 2))
    assert len(onnx_file.read(block)[0].functions) > 10


@pytest.mark.slow
def test_tiny_nodes_are_weighed_before_they_are_parsed(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty node takes only two bytes in the file."""
    data = block.read_bytes()

    def with_nodes(count: int) -> bytes:
        body = b"\x0a\x00" * count
        return data + b"\x3a" + onnx_file._varint(len(body)) + body

    block.write_bytes(with_nodes(onnx_limits.MOST_NODES + 1))
    with pytest.raises(RequestError, match="nodes, so it is not read"):
        onnx_file.read(block)
    for name, limit, said in (
        ("available", lambda: 10**6, "of memory are free"),
        ("LARGEST_STRUCTURE", 10**4, "beside its weights"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(onnx_limits, name, limit)
            with pytest.raises(RequestError, match=said):
                onnx_file.read(block)
    for wrong in (b"\x00" * 10**6, b"\x08\x01" * 10**7):  # a field without a number; ten million fields
        block.write_bytes(wrong)
        refused(cli("inspect", block), "is not an ONNX file")
        with pytest.raises(RequestError, match="is not an ONNX file"):
            onnx_file.read(block)


def test_a_long_chain_has_its_path_without_a_copy_for_each_node() -> None:
    nodes = [helper.make_node("Relu", [f"v{index}"], [f"v{index + 1}"]) for index in range(20_000)]
    before = machine.forget_peak()
    assert len(longest_path(nodes, "v0", "v20000")) == 20_000
    if sys.platform == "linux":
        assert machine.peak() - before < 100e6  # copies of all paths would be 1.6 GB


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../outside", "a/../../outside", "link", "", ".", "..", "a\0b", "nested/data", "\ud800"]
)
def test_external_data_stays_in_its_folder(location: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret" * 100)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to("../outside")
    (inside / "nested").mkdir()
    (inside / "nested" / "data").write_bytes(b"1234")
    path = inside / "a.onnx"
    write_onnx(exported(small_spec("rope", hidden_size=16, num_heads=2)), path)

    def mutate(model: onnx.ModelProto) -> None:
        made = model.graph.initializer[0]
        made.ClearField("raw_data")
        made.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", str(4 * 16 * 16))):
            made.external_data.add(key=key, value=value)

    if location == "\ud800":  # protobuf refuses lone surrogates, but takes bytes that are not UTF-8
        location = "?data"
        change(path, mutate)
        path.write_bytes(path.read_bytes().replace(b"?data", b"\xffdata"))
    else:
        change(path, mutate)
    with pytest.raises(RequestError, match=r"outside its own folder|is not UTF-8"):
        onnx_file.read(path)
    with pytest.raises(RequestError, match=r"outside its own folder|is not UTF-8"):
        onnx_file.load(path)


@pytest.mark.parametrize("kind", ["fifo", "zero", "hole"])
def test_external_data_is_a_regular_file_of_its_size(kind: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "a.onnx"
    write_onnx(exported(small_spec("rope")), path, external_from=1)
    (here / "a.onnx.data").unlink()
    SPECIAL[kind][0](here / "a.onnx.data")
    with pytest.raises(RequestError, match=r"missing or cut short|outside its own folder|larger than that"):
        onnx_file.read(path)


def test_an_archive_that_unpacks_to_gigabytes_is_not_unpacked(here: Path, block: Path) -> None:
    with zipfile.ZipFile(here / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as file:
        raw = io.BytesIO()
        np.lib.format.write_array_header_1_0(raw, {"descr": "<f4", "fortran_order": False, "shape": (2**26,)})
        file.write(raw.getvalue())
        for _ in range(64):
            file.write(bytes(2**22))
    assert (here / "bomb.npz").stat().st_size < 10**6
    before = machine.forget_peak()
    with pytest.raises(RequestError, match=r"unpack from .* to 268\.44 MB"):
        read_arrays(here / "bomb.npz")
    if sys.platform == "linux":
        assert machine.peak() - before < 100e6


@pytest.mark.parametrize("name", ["\x1b[2Jpwn", "x" * 6000, "a\nError: all is well"])
def test_names_in_a_file_are_escaped_and_shortened(name: str, block: Path) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        model.graph.node[0].op_type = name
        model.graph.input[0].name = name
        model.graph.initializer[0].name = name

    change(block, mutate)
    for command in ("inspect", "verify"):
        done = cli(command, block, *(["--runtime", "ort-cpu"] if command == "verify" else []))
        assert all(line.isprintable() for line in done.output.splitlines()), repr(done.output)
        assert "x" * 500 not in done.output
        assert not any(line.startswith("Error: all") for line in done.output.splitlines())


def test_an_unknown_element_type_has_its_number(block: Path) -> None:
    def mutate(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = 99

    done = cli("inspect", change(block, mutate))
    assert (done.exit_code, "type 99" in done.output) == (0, True)
    assert "type 99" in str(load_artifact(block).contract_violation)


def test_the_command_line_takes_no_more_memory_than_is_free(block: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("limits of memory are Linux's")
    code = (
        "import sys, posexport.machine as machine, posexport.artifact.paths as paths\n"
        "machine.available = lambda: 2**29\n"
        "paths.check_onnx = lambda path: bytearray(2**32)\n"  # stands in for reading a hostile file
        "from posexport.cli import main\n"
        "sys.exit(main(['inspect', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(block)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "Error: there is not enough memory (MemoryError): free some, or ask for less.\n"


@pytest.mark.skipif(sys.platform == "win32", reason="names are UTF-16 there")
def test_a_name_that_is_not_utf_8_is_one_sentence(block: Path) -> None:
    odd = block.with_name(os.fsdecode(b"b\xff.onnx"))
    odd.write_bytes(block.read_bytes())
    plan = odd.with_suffix(".plan")
    plan.write_bytes(b"plan")
    for command in (
        ("inspect", odd),
        ("inspect", plan),
        ("compile", odd),
        ("compile", block, "-o", plan),
        ("verify", odd),
        ("rewrite", odd, "-o", block.with_name("y.onnx")),
        ("rewrite", block, "-o", odd),
        ("export", "--encoding", "rope", "-o", odd),
    ):
        refused(cli(*command), "has a name that is not UTF-8")
