"""`posexport inspect` with files that posexport did not write: its text, its JSON, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from attention_graphs import SIZE, attention, padding, rotation, visible
from helpers import cli, refused
from onnx import TensorProto, helper

from posexport.graphs import inspection
from posexport.report.attentions import alike, encoding_text, more_text, recognised

FREQUENCIES = 500_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect in this process, because a child process takes seconds to start."""

    def inspect(graph: Any, roles: Any = None, progress: Any = None, *, attention: bool = True) -> Any:
        return inspection.inspected(graph, roles or {}, attention=attention)

    monkeypatch.setattr(inspection, "inspect_graph", inspect)


def saved(folder: Path, model: onnx.ModelProto | None = None, name: str = "graph.onnx") -> Path:
    """Save this graph, by default that of a decoder layer."""
    whole = attention(rotate=rotation(FREQUENCIES), add=[visible(), padding()], cached=True, key_heads=2)
    path = folder / name
    path.write_bytes((whole if model is None else model).SerializeToString())
    return path


def test_a_file_of_another_tool(tmp_path: Path) -> None:
    path = saved(tmp_path)
    result = cli("inspect", path)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("attention 0"))
    assert lines[start].startswith("attention 0: node_softmax_")
    assert lines[start + 1 : start + 6] == [
        "heads 4 heads over 2, size 16",
        "mask causal, padding from attention_mask",
        "encoding rope half theta=500000",
        "cache grown: past_key, past_value",
        "operator Softmax, fp32",
    ]
    assert lines[start + 6].startswith("ort-cpu not one kernel, ONNX Runtime fuses no decomposed attention")
    assert lines[start + 8] == "tensorrt not one kernel, fp32 has no fused attention kernel: use fp16 or bf16"
    for line in (
        "manifest none",
        "opset 18",
        "hidden_states fp32 ['batch', 'seq', 64] features",
        "attention_mask int64 ['batch', 'total'] attention_mask",
        "Softmax 1",
    ):
        assert line in lines


@pytest.mark.usefixtures("in_process")
def test_json_has_everything(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = json.loads(cli("inspect", path, "--json").stdout)
    assert found["roles"]["past_key"] == "past" and found["attention_reason"] is None
    (one,) = found["attentions"]
    assert one["encoding"] == {"name": "rope", "layout": "half", "theta": 500_000.0}
    assert len(found["weights"]) > 5 and "q_proj.weight" not in {weight["name"] for weight in found["weights"]}
    for weight in found["weights"]:
        assert weight.keys() == {"name", "shape", "dtype", "external"} and weight["external"] is False
        assert weight["dtype"] in ("fp32", "int64") and all(isinstance(size, int) for size in weight["shape"])
    graph = onnx.load(path).graph
    for kind, values in (("inputs", graph.input), ("outputs", graph.output)):
        assert found[kind] == [
            {
                "name": value.name,
                "shape": [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
                "dtype": {TensorProto.FLOAT: "fp32", TensorProto.INT64: "int64"}[value.type.tensor_type.elem_type],
            }
            for value in values
        ]
    assert found["bytes"] == path.stat().st_size and "spec" not in found
    without = json.loads(cli("inspect", path, "--json", "--no-attention").stdout)
    assert "attentions" not in without and without["roles"] == found["roles"]


@pytest.mark.usefixtures("in_process")
def test_an_artifact_of_posexport_shows_its_attention_too(tmp_path: Path) -> None:
    path = tmp_path / "own.onnx"
    small = ("--hidden-size", "32", "--num-heads", "2", "--layers", "2", "--form", "function")
    assert cli("export", "--encoding", "rope", "--causal", *small, "-o", path).exit_code == 0
    result = cli("inspect", path)
    assert result.exit_code == 0
    for said in ("attention 0 to 1: ", "posexport.PositionalAttention, fp32"):
        assert said in result.stdout, result.stdout
    found = json.loads(cli("inspect", path, "--json").stdout)
    assert found["spec"]["encoding"]["name"] == found["attentions"][1]["encoding"]["name"] == "rope"
    assert found["attentions"][1]["nodes"]["softmax"] == "layers.1.node_attend"


@pytest.mark.usefixtures("in_process")
def test_what_cant_be_looked_for_leaves_the_rest(tmp_path: Path) -> None:
    model = attention(add=[visible()])
    model.graph.input.append(helper.make_tensor_value_info("xyz", TensorProto.INT64, ("batch", 7, 3)))
    model.graph.node.append(helper.make_node("ReduceSum", ["xyz"], ["sum"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.INT64, ()))
    path = saved(tmp_path, model)
    result = cli("inspect", path)
    assert result.exit_code == 0 and "attention was not looked for, what the input 'xyz'" in result.stdout
    found = json.loads(cli("inspect", path, "--json").stdout)
    assert found["attentions"] is None and found["attention_reason"]["code"] == "roles-unknown"
    assert found["operators"]["Softmax"] == 1
    given = json.loads(cli("inspect", path, "--json", "--input", "xyz=index").stdout)
    assert given["attention_reason"] is None and len(given["attentions"]) == 1


@pytest.mark.usefixtures("in_process")
def test_a_file_without_attention_says_so(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 3)) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]), ir_version=9)
    result = cli("inspect", saved(tmp_path, model))
    assert result.exit_code == 0 and "no attention found" in result.stdout


def test_wrong_roles_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    refused(cli("inspect", path, "--input", "past_key"), "--input 'past_key' is not NAME=ROLE")
    refused(cli("inspect", path, "--input", "past_keys=past"), "did you mean 'past_key'")
    refused(cli("inspect", tmp_path / "x.plan", "--input", "a=past"), "x.plan")


def test_attentions_that_are_alike_stand_together() -> None:
    one = {"name": "a", "layer": 0, "nodes": {}, "cache": {"kind": "grown", "inputs": {"key": "k0"}}, "scale": 1.0}
    other = {**one, "name": "b", "layer": 1, "cache": {"kind": "grown", "inputs": {"key": "k1"}}}
    assert [len(group) for group in alike([one, other, {**other, "scale": 2.0}, one])] == [2, 1, 1]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ({"name": "none"}, "none"),
        (
            {"name": "rope", "layout": "half", "theta": 5e5, "scaling": "llama3", "factor": 8.0},
            "rope half theta=500000 llama3 factor=8",
        ),
        ({"name": "rope", "layout": "interleaved", "rotary_dim": 64}, "rope interleaved rotary_dim=64"),
        ({"name": "rope", "layout": "half", "frequencies": [1.0] * 9}, "rope half frequencies=[1,1,1,1,...]"),
        ({"name": "unknown", "of": "distance", "reason": {"code": "a", "text": "because"}}, "unknown (because)"),
        ({"name": "rope", "near": {"theta": 1e4, "difference": 4e-4}}, "rope near theta=10000 (differs by 0.0004)"),
        (None, ""),
    ],
)
def test_encodings_in_words(encoding: dict[str, Any] | None, text: str) -> None:
    assert encoding_text(encoding) == text


def record(**changes: Any) -> dict[str, Any]:
    """A record of an attention."""
    one: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16, "scale": 0.25}
    one |= dict.fromkeys(("softcap", "qk_norm", "bias", "query_factor", "input_encoding", "cache"))
    one |= {
        "sinks": False,
        "head_scales": False,
        "weight_factors": [],
        "prefix_tokens": 0,
        "dtype": "fp16",
        "softmax_dtype": "fp16",
    }
    one |= {"mask": {"kind": "none", "window": None, "chunk": None, "padding": []}, "encoding": {"name": "none"}}
    return {**one, **changes}


def test_records_in_words() -> None:
    assert recognised(record()) == "4 heads over 2, size 16"
    assert recognised(record(head_dim=None)) == "not known"
    assert recognised(record(num_heads=None, num_kv_heads=None)) == "number of heads not known, size 16"
    mask = {"kind": "window", "window": 9, "chunk": None, "padding": ["m"]}
    found = recognised(record(mask=mask, cache={"kind": "grown"}, encoding={"name": "alibi"}, num_kv_heads=4))
    assert found == "4 heads, size 16, causal, window 9, padding, grown cache, alibi"
    assert more_text(record()) == ""
    more = record(softcap=30.0, sinks=True, scale=0.5, softmax_dtype="fp32", bias={"name": "t5"}, prefix_tokens=1)
    norms = {"queries": None, "keys": {"kind": "rms"}}
    assert more_text(record(qk_norm=norms)) == "rms norm of keys"
    assert more_text(record(weight_factors=[0.5])) == "weights times a number"
    assert more_text(record(weight_factors=[0.5] * 4)) == "weights times a number for each head"
    assert more_text(record(qk_norm={key: {"kind": "l2"} for key in norms})) == "l2 norm of queries and keys"
    assert more_text(more) == "scale 0.5, softcap 30, sinks, 1 tokens without position, bias t5, softmax in fp32"
