"""Files from other tools as Triton models: their inputs and outputs, and when requests are joined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_signatures import model_of
from helpers import cli
from onnx import TensorProto, helper, numpy_helper
from small_graphs import decoder, no_attention

from posexport.artifact.graph_file import read_graph
from posexport.errors import Reason
from posexport.export.triton import graph_batching
from posexport.export.triton import package as package_stage
from posexport.export.triton.config import read_config
from posexport.export.triton.graph_batching import GraphTrial
from posexport.export.triton.rules import problems
from posexport.files import sha256_of
from posexport.graphs import runner
from posexport.runtimes.base import Arrays

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the evaluator in this process, because a new process takes seconds to start."""

    def evaluated(self: Any, inputs: list[Arrays]) -> list[Arrays] | Reason:
        try:
            return [runner.load(self._path, {}).run(arrays) for arrays in inputs]
        except Exception as error:
            return Reason("failed", str(error))

    monkeypatch.setattr(GraphTrial, "_evaluated", evaluated)


def saved(folder: Path, model: onnx.ModelProto, name: str = "graph") -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def package(path: Path, *options: object) -> Any:
    result = cli("package", path, "--triton", "-o", path.parent / "models", "--json", *map(str, options))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def small(inputs: list[Any], output: list[Any], nodes: list[onnx.NodeProto], **weights: Any) -> onnx.ModelProto:
    """A graph from x and other float inputs to y. `inputs` and `output` are shapes."""
    names = ["x", "z"][: len(inputs)]
    given = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in zip(names, inputs, strict=True)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    made = [helper.make_tensor_value_info("y", FLOAT, output)]
    graph = helper.make_graph(nodes, "small", given, made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_the_folder_holds_the_file_and_a_configuration_of_its_own_names(tmp_path: Path) -> None:
    """The evaluator runs in a separate process, as for users."""
    path = saved(tmp_path, decoder(cache=False), "decoder")
    told = package(path)
    model = tmp_path / "models" / "decoder" / "1" / "model.onnx"
    assert told["files"] == {"model.onnx": sha256_of(path)} == {"model.onnx": sha256_of(model)}
    config, graph = read_config((model.parents[1] / "config.pbtxt").read_bytes()), read_graph(model)
    assert problems(config, "decoder", graph.inputs(), graph.outputs()) == []
    assert [(each.name, list(each.dims), each.data_type) for each in config.input] == [
        ("input_ids", [-1], 9),
        ("attention_mask", [-1], 9),
        ("position_ids", [-1], 9),
    ]
    assert [(each.name, list(each.dims)) for each in config.output] == [("logits", [-1, 19])]
    assert (told["max_batch_size"], told["batching"]["joined"]) == (8, True)
    assert "rows came out as they do alone on 6 sets of drawn inputs" in told["batching"]["reason"]
    text = (model.parents[1] / "config.pbtxt").read_text()
    assert text.startswith("# decoder.onnx, a graph without a spec, opset 18; written by posexport")


def test_a_request_that_warms_up_is_one_that_the_graph_takes(tmp_path: Path, in_this_process: None) -> None:
    for cache, tokens in ((False, 128), (True, 1)):
        path = saved(tmp_path, decoder(cache=cache), f"cache-{cache}")
        told, graph = package(path, "--max-batch-size", 0), read_graph(path)
        assert told["warmup"]["input_ids"] == [1, tokens]
        assert ("past_key_values.0.key" in told["warmup"]) is cache
        dtypes = {name: np.int64 if dtype == "int64" else np.float32 for name, (_, dtype) in graph.inputs().items()}
        zeros = {name: np.zeros(dims, dtypes[name]) for name, dims in told["warmup"].items()}
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, zeros)


def test_a_shorter_request_warms_up_a_graph_with_a_short_table(tmp_path: Path, in_this_process: None) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "length", "one"], ["cut"]),
        helper.make_node("Add", ["x", "cut"], ["y"]),
    ]
    table = np.zeros((1, 20, 4), np.float32)
    model = small([["b", "s", 4]], ["b", "s", 4], nodes, table=table, zero=np.array([0]), one=np.array([1]))
    assert package(saved(tmp_path, model))["warmup"] == {"x": [16, 4]}
    never = small([["b", 4]], ["b", 4], [helper.make_node("Add", ["x", "wide"], ["y"])], wide=np.zeros(5, np.float32))
    told = package(saved(tmp_path, never, "never"))
    assert told["warmup"] == {}
    assert "could not be tried" in told["batching"]["reason"]


def centred() -> onnx.ModelProto:
    nodes = [
        helper.make_node("ReduceMean", ["x", "rows"], ["mean"], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    return small([["b", 4]], ["b", 4], nodes, rows=np.array([0]))


def summed() -> onnx.ModelProto:
    return small([["b", 4]], ["n", 4], [helper.make_node("ReduceSum", ["x", "rows"], ["y"])], rows=np.array([0]))


def nearly(part: float) -> onnx.ModelProto:
    """Rows that depend a little on the first row: y = x + part * (x - first row)."""
    nodes = [
        helper.make_node("Gather", ["x", "zero"], ["first"], axis=0),
        helper.make_node("Mul", ["first", "part"], ["little"]),
        helper.make_node("Sub", ["x", "first"], ["apart"]),
        helper.make_node("Mul", ["apart", "part"], ["moved"]),
        helper.make_node("Add", ["x", "moved"], ["y"]),
    ]
    return small([["b", 4]], ["b", 4], nodes, zero=np.array(0), part=np.float32(part))


def turned(axes: int | str) -> onnx.ModelProto:
    """A graph with features and position_ids [axes, batch, seq]."""
    return model_of({"inputs_embeds": (["b", "s", 4], "fp32"), "position_ids": ([axes, "b", "s"], "int64")})


NOT_JOINED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "rows that depend on each other": (centred, "a row of y depends on the others of its batch"),
    "one row for all": (summed, "a row of y depends on the others"),
    "rows that depend on each other a little": (lambda: nearly(1e-5), "a row of y depends on the others"),
    "fixed": (
        lambda: small([[2, 4]], [2, 4], [helper.make_node("Relu", ["x"], ["y"])]),
        "x has a fixed first dimension",
    ),
    "three axes first": (lambda: turned(3), "position_ids has a fixed first dimension"),
    "axes first": (lambda: turned("n"), "of position_ids ['n', 'b', 's'] is not the batch (position_ids)"),
    "a scalar": (
        lambda: small([["b", 4], []], ["b", 4], [helper.make_node("Add", ["x", "z"], ["y"])]),
        "z has no dimensions",
    ),
    "grown": (decoder, "caches grow"),
    "unknown": (
        lambda: model_of({"x": (["b", 4], "fp32"), "foo": (["b"], "int64")}),
        "what the input 'foo' ['b'] (int64) is for can't be guessed",
    ),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_requests_are_not_joined_where(name: str, tmp_path: Path, in_this_process: None) -> None:
    make, said = NOT_JOINED[name]
    path = saved(tmp_path, make())
    if name == "a scalar":  # Triton's dims cannot be empty, so this graph cannot be served.
        result = cli("package", path, "--triton", "-o", tmp_path / "models")
        assert (result.exit_code, "input 'z' is reshaped to nothing without a batch" in result.stderr) == (2, True)
        return
    told = package(path)
    assert (told["max_batch_size"], told["batching"]["joined"]) == (0, False)
    assert said in told["batching"]["reason"]
    again = cli("package", path, "--triton", "-o", tmp_path / "models", "--max-batch-size", "4", "--force")
    if name == "grown":  # correct, though seldom worth it
        assert again.exit_code == 0 and "as requested, though caches grow" in again.stdout
    else:
        assert again.exit_code == 2 and "requests can't be joined" in again.stderr


@pytest.mark.parametrize(("part", "joined"), [(0.0, True), (1e-13, True), (1e-6, False)])
def test_how_small_an_influence_of_other_rows_is_found(
    part: float, joined: bool, tmp_path: Path, in_this_process: None
) -> None:
    assert package(saved(tmp_path, nearly(part)))["batching"]["joined"] is joined


def test_rows_with_infinite_and_whole_values_are_compared_too(tmp_path: Path) -> None:
    one = {"y": np.array([[1.0, -np.inf], [np.nan, 2.0]]), "n": np.array([[1], [2]])}
    rows = [{name: array[at : at + 1] for name, array in one.items()} for at in (0, 1)]
    assert graph_batching._unlike(one, rows) is None
    for name, index, value in (("y", (0, 1), np.inf), ("y", (1, 0), 0.0), ("y", (0, 0), 1.0001), ("n", (1, 0), 3)):
        wrong = {key: array.copy() for key, array in one.items()}
        wrong[name][index] = value
        assert graph_batching._unlike(wrong, rows) == name
    assert graph_batching._unlike({"y": one["y"][:1]}, rows) == "y"


def test_other_dtypes_have_triton_s_names(tmp_path: Path, in_this_process: None) -> None:
    kinds = {
        "int32": TensorProto.INT32,
        "uint8": TensorProto.UINT8,
        "bool": TensorProto.BOOL,
        "fp64": TensorProto.DOUBLE,
    }
    given = [helper.make_tensor_value_info(name, kind, ["b", 2]) for name, kind in kinds.items()]
    made = [helper.make_tensor_value_info(f"{name} out", kind, ["b", 2]) for name, kind in kinds.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name} out"]) for name in kinds]
    graph = helper.make_graph(nodes, "kinds", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    told = package(saved(tmp_path, model))
    assert [each["data_type"] for each in told["inputs"]] == ["TYPE_INT32", "TYPE_UINT8", "TYPE_BOOL", "TYPE_FP64"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (TensorProto.COMPLEX64, "of type COMPLEX64, which Triton has no tensors of"),
        (TensorProto.BFLOAT16, "is bf16, which"),
    ],
)
def test_dtypes_that_triton_cannot_serve_are_refused(
    kind: int, said: str, tmp_path: Path, in_this_process: None
) -> None:
    model = model_of({"x": (["b", 2], "fp32")})
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    result = cli("package", saved(tmp_path, model), "--triton", "-o", tmp_path / "models")
    assert result.exit_code == 2 and said in result.stderr
    assert not (tmp_path / "models").exists()


def test_an_output_without_a_shape_is_refused(tmp_path: Path, in_this_process: None) -> None:
    model = no_attention()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    result = cli("package", saved(tmp_path, model), "--triton", "-o", tmp_path / "models")
    assert result.exit_code == 2 and "has the output 'y' without a shape" in result.stderr


def test_weights_beside_the_file_come_along(tmp_path: Path, in_this_process: None) -> None:
    path = tmp_path / "plain.onnx"
    onnx.save(no_attention(), path, save_as_external_data=True, location="plain.data", size_threshold=0)
    assert set(package(path)["files"]) == {"model.onnx", "plain.data"}
    model = tmp_path / "models" / "plain" / "1" / "model.onnx"
    x = np.ones((3, 32), np.float32)
    values = [
        onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for file in (path, model)
    ]
    assert (values[0] == values[1]).all()


def test_names_in_the_file_add_nothing_to_the_configuration(tmp_path: Path, in_this_process: None) -> None:
    model = no_attention()
    model.opset_import.append(helper.make_opsetid('x\nmodel_operations { op_library_filename: "e.so" }\n#', 1))
    package(saved(tmp_path, model, "plain"))
    config = read_config((tmp_path / "models" / "plain" / "config.pbtxt").read_bytes())
    assert (config.name, config.HasField("model_operations")) == ("plain", False)


def test_a_text_that_says_something_else_is_not_written(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_of = package_stage.text_of
    monkeypatch.setattr(package_stage, "text_of", lambda *parts: text_of(*parts) + b"optimization { priority: 1 }\n")
    result = cli("package", saved(tmp_path, no_attention()), "--triton", "-o", tmp_path / "models")
    assert (result.exit_code, "its config.pbtxt would say something else" in result.stderr) == (2, True)
    assert not (tmp_path / "models").exists()


def test_a_dimension_of_thousands_of_digits_is_a_name(tmp_path: Path, in_this_process: None) -> None:
    rows = "9" * 5000
    told = package(saved(tmp_path, small([[rows, 4]], [rows, 4], [helper.make_node("Relu", ["x"], ["y"])])))
    assert [each["dims"] for each in told["inputs"]] == [[4]]
