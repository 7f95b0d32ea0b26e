"""bench with files from other tools: the sizes that they accept, by meaning, and the inputs with these sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_signatures import Signature, model_of
from onnx import TensorProto, helper, numpy_helper
from small_graphs import decoder

from posexport.artifact.graph_file import read_graph
from posexport.bench.loading import load_timed
from posexport.bench.scenarios import read_scenario
from posexport.bench.timed_graph import TimedGraph, timed_graph
from posexport.bench.worker import _inputs_by_role
from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES, ort

CACHED: Signature = {
    "input_ids": (["batch_size", "sequence_length"], "int64"),
    "attention_mask": (["batch_size", "total_length"], "int64"),
    "position_ids": (["batch_size", "sequence_length"], "int64"),
    "past_key_values.0.key": (["batch_size", 2, "past_length", 8], "fp32"),
    "past_key_values.0.value": (["batch_size", 2, "past_length", 8], "fp32"),
}
PRESENT: Signature = {
    name.replace("past_key_values", "present"): (["batch_size", 2, "total_length", 8], "fp32")
    for name in CACHED
    if name.startswith("past")
}
SHARED: Signature = CACHED | {
    name: (["batch_size", 2, "room", 8], "fp32") for name in CACHED if name.startswith("past")
}
SHARED_PRESENT: Signature = {name: (["batch_size", 2, "room", 8], "fp32") for name in PRESENT}
PICTURES: Signature = {"pixel_values": (["n", 3, "h", "w"], "fp32")}
FIXED: Signature = {"x": ([2, 16, 8], "fp32")}
TOKENS: Signature = {"input_ids": (["b", "s"], "int64"), "attention_mask": (["b", "s"], "int64")}

SIGNATURES: dict[str, tuple[Signature, Signature]] = {
    "cached": (CACHED, PRESENT),
    "shared": (SHARED, SHARED_PRESENT),
    "pictures": (PICTURES, {}),
    "fixed": (FIXED, {}),
    "tokens": (TOKENS, {}),
}


def graph(folder: Path, name: str) -> TimedGraph:
    inputs, outputs = SIGNATURES[name]
    path = folder / f"{name}.onnx"
    pasts = {name.replace("past_key_values", "present"): name for name in inputs if name.startswith("past_key")}
    nodes = [helper.make_node("Identity", [past], [present]) for present, past in pasts.items()]
    path.write_bytes(model_of(inputs, outputs or None, nodes).SerializeToString())
    return timed_graph(read_graph(path), {})


DEFAULTS = {
    "cached": ["batch=1,seq=512,past_seq=0", "batch=1,seq=1,past_seq=512"],
    "shared": ["batch=1,seq=512,past_seq=0,max_seq=1024", "batch=1,seq=1,past_seq=512,max_seq=1024"],
    "pictures": ["batch=1,height=64,width=64"],
    "fixed": ["batch=2,seq=16"],
    "tokens": ["batch=1,seq=128", "batch=1,seq=512"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_defaults_are_a_prefill_and_a_step_or_two_lengths(tmp_path: Path, name: str) -> None:
    assert [str(sizes) for sizes in graph(tmp_path, name).default_sizes()] == DEFAULTS[name]


SCENARIOS = {
    ("cached", "prefill:16"): "batch=1,seq=16,past_seq=0",
    ("cached", "decode:2048"): "batch=1,seq=1,past_seq=2048",
    ("cached", "batch:4"): "batch=4,seq=512,past_seq=0",
    ("shared", "decode:9"): "batch=1,seq=1,past_seq=9,max_seq=1024",
    ("shared", "decode:2048"): "batch=1,seq=1,past_seq=2048,max_seq=2049",
    ("pictures", "batch:4"): "batch=4,height=64,width=64",
    ("fixed", "prefill:16"): "batch=2,seq=16",
    ("tokens", "prefill:7"): "batch=1,seq=7",
}


@pytest.mark.parametrize(("name", "text"), SCENARIOS)
def test_a_scenario_has_sizes_by_meaning(tmp_path: Path, name: str, text: str) -> None:
    assert str(graph(tmp_path, name).scenario_sizes(read_scenario(text)[0])) == SCENARIOS[name, text]


SHAPES = {
    ("cached", "seq=3"): "batch=1,seq=3,past_seq=0",
    ("cached", "batch_size=2,sequence_length=1,past_length=5"): "batch=2,seq=1,past_seq=5",
    ("shared", "seq=1,past_seq=5,room=9"): "batch=1,seq=1,past_seq=5,max_seq=9",
    ("pictures", "h=32,width=96,batch=2"): "batch=2,height=32,width=96",
    ("fixed", "batch=2,seq=16"): "batch=2,seq=16",
}


@pytest.mark.parametrize(("name", "text"), SHAPES)
def test_a_shape_names_dimensions_by_meaning_or_as_the_file_does(tmp_path: Path, name: str, text: str) -> None:
    found = graph(tmp_path, name).read_sizes(text)
    assert str(found) == SHAPES[name, text]
    assert graph(tmp_path, name).read_sizes(str(found)) == found


REFUSED = {
    ("cached", "total_length=5"): "unknown dimension in --shape 'total_length'",
    ("cached", "seq=1,sequence_length=2"): "gives sequence_length twice",
    ("cached", "seq=0"): "seq is '0': it must be a whole number from 1",
    ("cached", "past_seq=-1"): "past_seq is '-1'",
    ("shared", "seq=3,past_seq=7,max_seq=9"): "past_seq \\+ seq is 10: the cache has 9 places",
    ("pictures", "seq=3"): "unknown dimension in --shape 'seq'",
    ("fixed", "seq=15"): "seq is 15: 'fixed.onnx' takes exactly 16",
    ("fixed", "batch=1"): "batch is 1: 'fixed.onnx' takes exactly 2",
}


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_sizes_that_a_graph_cannot_take_are_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(RequestError, match=REFUSED[name, text]):
        graph(tmp_path, name).read_sizes(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokens", "decode:8", "'tokens.onnx' has no cache, so give prefill or batch"),
        ("pictures", "prefill:8", "'pictures.onnx' takes no tokens, so give batch"),
        ("fixed", "prefill:8", "--scenario prefill:8: seq is 8: 'fixed.onnx' takes exactly 16"),
    ],
)
def test_scenarios_that_a_graph_cannot_take_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        graph(tmp_path, name).scenario_sizes(read_scenario(text)[0])


def test_no_more_tokens_than_the_table_of_positions_has_rows(tmp_path: Path) -> None:
    model = decoder()
    model.graph.node.append(helper.make_node("Gather", ["table", "position_ids"], ["looked up"]))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((64, 3), np.float32), "table"))
    onnx.save(model, tmp_path / "table.onnx")
    (one,) = load_timed([tmp_path / "table.onnx"], (), {})
    assert [str(sizes) for sizes in one.default_sizes()] == ["batch=1,seq=64,past_seq=0", "batch=1,seq=1,past_seq=63"]
    with pytest.raises(RequestError, match="past_seq \\+ seq is 65: the table of positions has 64 rows"):
        one.scenario_sizes(read_scenario("decode:64")[0])


def test_several_tokens_after_others_are_for_one_row_where_group_query_attention_stands(tmp_path: Path) -> None:
    model = decoder()
    model.graph.node.append(helper.make_node("GroupQueryAttention", ["logits"], ["o"], domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "grouped.onnx")
    (one,) = load_timed([tmp_path / "grouped.onnx"], (), {})
    assert str(one.read_sizes("batch=2,seq=1,past_seq=4")) == "batch=2,seq=1,past_seq=4"
    with pytest.raises(RequestError, match="takes several tokens after others for batch=1 only"):
        one.read_sizes("batch=2,seq=3,past_seq=4")


def drawn(one: TimedGraph, text: str, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    request = one.request(one.read_sizes(text))
    return _inputs_by_role(request.pop("roles"), request, seed)


def test_workers_draw_inputs_of_the_sizes_without_padding(tmp_path: Path) -> None:
    one = graph(tmp_path, "shared")
    inputs = drawn(one, "batch=2,seq=3,past_seq=5,max_seq=9")
    assert json.loads(json.dumps(one.request(one.read_sizes("seq=3"))))  # It is sent to a process.
    assert {name: array.shape for name, array in inputs.items()} == {
        "input_ids": (2, 3),
        "attention_mask": (2, 8),
        "position_ids": (2, 3),
        "past_key_values.0.key": (2, 2, 9, 8),
        "past_key_values.0.value": (2, 2, 9, 8),
    }
    assert inputs["position_ids"].tolist() == [[5, 6, 7]] * 2
    assert (inputs["attention_mask"] == 1).all()
    key = inputs["past_key_values.0.key"]
    assert (key != 0).all()
    again, other = (drawn(one, "batch=2,seq=3,past_seq=5,max_seq=9", seed) for seed in (0, 1))
    assert all((inputs[name] == again[name]).all() for name in inputs)
    assert (inputs["input_ids"] != other["input_ids"]).any()


@pytest.mark.parametrize("name", ["cached", "shared"])
def test_buffers_are_written_in_place_and_grown_caches_are_not(tmp_path: Path, name: str) -> None:
    one = graph(tmp_path, name)
    options = one.engine_options(RUNTIMES["ort-cpu"], [])
    pairs = {present: present.replace("present", "past_key_values") for present in PRESENT}
    assert options == ({"shared": pairs} if name == "shared" else {})


def test_a_bound_run_writes_into_the_buffer_that_it_reads(tmp_path: Path) -> None:
    """`present` is past + 1. From 1, two runs in place give 3, and two runs into separate memory give 2."""
    path, shape = tmp_path / "add.onnx", ["b", 2]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("past", "present")]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    nodes = [helper.make_node("Add", ["past", "one"], ["present"])]
    model = helper.make_model(
        helper.make_graph(nodes, "add", values[:1], values[1:], [one]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    onnx.save(model, path)
    for shared, expected in (({"present": "past"}, 3.0), ({}, 2.0)):
        runner = ort.load(path, {"shared": shared})
        binding, held = runner._bind({"past": np.ones((3, 2), np.float32)})
        for _ in range(2):
            runner._session.run_with_iobinding(binding)
        assert (binding.copy_outputs_to_cpu()[0] == expected).all(), held
