"""Manifests of files without a spec: whole models, modules and rewritten graphs. False statements must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import cli
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from posexport.artifact.graph_file import read_graph
from posexport.artifact.loaded import contradictions
from posexport.artifact.manifest import OnnxManifest, read_manifest_of, write_manifest
from posexport.artifact.onnx_artifact import write_onnx
from posexport.artifact.signing import SigningKey
from posexport.errors import MismatchError, RequestError
from posexport.export.modules import export_any
from posexport.verify.graph.subject import read_file, read_subject


class Attention(nn.Module):
    """One head without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1)


def module(folder: Path) -> Path:
    """The export of a torch module."""
    path = folder / "module.onnx"
    write_onnx(export_any(Attention().eval(), (torch.randn(1, 5, 8),), form="decomposed").model, path)
    return path


def foreign(path: Path, **external: str) -> Path:
    """An attention that another tool made, with its weight in `w.bin`."""
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    (path.parent / "w.bin").write_bytes(weight.tobytes())
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 8], data_location=1)
    for key, value in {"location": "w.bin", **external}.items():
        tensor.external_data.add(key=key, value=value)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["k"]),
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def rewritten(folder: Path) -> Path:
    """A graph of another tool, rewritten to another form."""
    made = cli("rewrite", foreign(folder / "foreign.onnx"), "--form", "native", "-o", folder / "rewritten.onnx")
    assert made.exit_code == 0, made.output
    return folder / "rewritten.onnx"


FILES = {"module": module, "rewritten": rewritten}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {name: write(folder) for name, write in FILES.items()}


FALSE: dict[str, Any] = {
    "opset": 9,
    "domains": {"": 18, "com.other": 3},
    "inputs": lambda tensors: [{**tensors[0], "dtype": "fp16"}],
    "outputs": lambda tensors: [{**tensors[0], "name": "z"}],
    "form": "contrib",
    "target": "tensorrt",
    "version": "9.9",
    "module": {"name": "Other"},
    "tools": {"torch": "1.0"},
    "weights": {"source": "random", "seed": 3},
    "attentions": [{"layer": 0}],
}
"""For each key, a false value, or a function that makes its value false."""

OF_THE_GRAPH = ("opset", "domains", "inputs", "outputs", "form", "weights", "module", "attentions")
"""The keys that are checked for a file that was rewritten or that another tool made."""


@pytest.mark.parametrize("name", FILES)
def test_true_manifests_contradict_nothing(name: str, made: dict[str, Path]) -> None:
    manifest = read_manifest_of(OnnxManifest, made[name])
    assert manifest is not None
    assert contradictions(manifest, read_graph(made[name])) == ""


@pytest.mark.parametrize(
    ("name", "key"), [("module", key) for key in FALSE] + [("rewritten", key) for key in OF_THE_GRAPH]
)
def test_what_is_false_of_a_file_is_found(name: str, key: str, made: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(made[name], tmp_path / "x.onnx"))
    for data_file in made[name].parent.glob("*.bin"):
        shutil.copy(data_file, tmp_path)
    data = json.loads(made[name].with_name(f"{made[name].name}.json").read_text(encoding="utf-8"))
    data[key] = FALSE[key](data[key]) if callable(FALSE[key]) else FALSE[key]
    (tmp_path / "x.onnx.json").write_text(json.dumps(data), encoding="utf-8")
    manifest = read_manifest_of(OnnxManifest, path)
    assert manifest is not None
    assert contradictions(manifest, read_graph(path)) == f"its {key}"


@pytest.mark.few_inputs
def test_every_command_notices(made: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(made["module"], tmp_path / "x.onnx"))
    data = json.loads(made["module"].with_name("module.onnx.json").read_text(encoding="utf-8"))
    (tmp_path / "x.onnx.json").write_text(json.dumps({**data, "opset": 9}), encoding="utf-8")
    said = "its manifest x.onnx.json contradicts the file in its opset"
    checked = cli("verify", path, "--runtime", "ort-cpu", "--json")
    assert checked.exit_code == 1
    assert json.loads(checked.stdout)["verdicts"][0]["reason"] == said
    looked = cli("inspect", path)
    assert looked.exit_code == 0
    assert said in looked.output
    for command, output in (("compile", "x.plan"), ("package --triton", "p"), ("rewrite", "y.onnx")):
        done = cli(*command.split(), path, "-o", tmp_path / output)
        assert done.exit_code == 2, done.output
        assert said in done.output
        assert not (tmp_path / output).exists()


@pytest.mark.parametrize("name", FILES)
def test_files_without_a_spec_can_be_trusted(name: str, made: dict[str, Path], tmp_path: Path) -> None:
    key, other = (SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([seed] * 32))) for seed in (1, 2))
    path = Path(shutil.copy(made[name], tmp_path / made[name].name))
    for data_file in made[name].parent.glob("*.bin"):
        shutil.copy(data_file, tmp_path)
    graph, manifest = read_file(path), read_manifest_of(OnnxManifest, made[name])
    with pytest.raises(MismatchError, match="so it is not signed"):
        read_subject(graph, (key.trusted(),))
    assert manifest is not None
    write_manifest(path, manifest, key)
    assert [read_subject(graph, each).signature.code for each in ((key.trusted(),), ())] == ["trusted", "unchecked"]
    with pytest.raises(MismatchError, match="not one of the trusted keys"):
        read_subject(graph, (other.trusted(),))


def test_a_file_that_nobody_signed_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"no graph")
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([1] * 32)))
    with pytest.raises(MismatchError, match="so it is not signed"):
        read_file(path, (key.trusted(),))


@pytest.mark.parametrize("text", ["{bad", "[]", '{"sha256": 1}', "folder"])
def test_a_manifest_that_cannot_be_used_is_refused_beside_both_files(text: str, tmp_path: Path) -> None:
    path = foreign(tmp_path / "x.onnx")
    if text == "folder":
        (tmp_path / "x.onnx.json").mkdir()
    else:
        (tmp_path / "x.onnx.json").write_text(text)
    with pytest.raises(RequestError, match=r"the manifest .*x\.onnx\.json' can't be"):
        read_subject(read_file(path))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("external", [{}, {"offset": "0"}, {"length": "256"}, {"offset": "0", "length": "256"}])
def test_external_data_need_not_say_where_they_lie(external: dict[str, str], tmp_path: Path) -> None:
    """By default, ONNX takes offset 0 and the rest of the file as length."""
    graph = read_graph(foreign(tmp_path / "x.onnx", **external))
    (tensor,) = graph.model.graph.initializer
    assert {entry.key: entry.value for entry in tensor.external_data}["length"] == "256"
    assert numpy_helper.to_array(tensor, str(tmp_path)).shape == (8, 8)
    done = cli("rewrite", tmp_path / "x.onnx", "--form", "native", "-o", tmp_path / "y.onnx")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("external", "said"),
    [
        ({"offset": "4"}, "is not [8, 8]"),
        ({"offset": "300"}, "missing or cut short"),
        ({"offset": "x"}, "has the offset 'x', which is no number of bytes"),
        ({"length": "-1"}, "has the length '-1', which is no number of bytes"),
    ],
)
def test_external_data_that_are_elsewhere_are_refused(external: dict[str, str], said: str, tmp_path: Path) -> None:
    done = cli("inspect", foreign(tmp_path / "x.onnx", **external))
    assert done.exit_code == 2
    assert said in done.output.replace("\n", " ")


@pytest.mark.parametrize("key", ["weights", "module", "attentions"])
def test_a_manifest_that_claims_to_be_of_a_rewritten_file_states_no_more(
    key: str, made: dict[str, Path], tmp_path: Path
) -> None:
    """These keys would not be compared with the metadata of a rewritten file. So they are refused: somebody may have
    added the key `rewrite`."""
    path = Path(shutil.copy(made["module"], tmp_path / "x.onnx"))
    of_module, of_rewritten = (
        json.loads(made[name].with_name(f"{made[name].name}.json").read_text(encoding="utf-8")) for name in FILES
    )
    del of_module["module"]
    data = of_module | {"file": "x.onnx", "rewrite": of_rewritten["rewrite"], key: FALSE[key]}
    (tmp_path / "x.onnx.json").write_text(json.dumps(data), encoding="utf-8")
    manifest = read_manifest_of(OnnxManifest, path)
    assert manifest is not None
    assert contradictions(manifest, read_graph(path)) == f"its {key}"


def contradiction(path: Path, data: dict[str, Any]) -> str:
    """The contradiction that is found between a manifest and its file."""
    path.with_name(f"{path.name}.json").write_text(json.dumps(data), encoding="utf-8")
    manifest = read_manifest_of(OnnxManifest, path)
    assert manifest is not None
    return contradictions(manifest, read_graph(path))


def manifest_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("form", [None, "contrib", "function"])
def test_the_form_of_a_rewritten_file_has_its_operators(
    form: str | None, made: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(made["rewritten"], tmp_path / "x.onnx"))
    for data_file in made["rewritten"].parent.glob("*.bin"):
        shutil.copy(data_file, tmp_path)
    data = {**manifest_of(made["rewritten"]), "file": "x.onnx"}
    assert contradiction(path, data) == ""
    assert contradiction(path, {**data, "form": form} if form else {k: v for k, v in data.items() if k != "form"}) == (
        "its form"
    )


class TwoHeads(nn.Module):
    """Two heads without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.few_inputs
def test_the_form_of_a_rewritten_module_is_that_of_its_metadata(tmp_path: Path) -> None:
    write_onnx(export_any(TwoHeads().eval(), (torch.randn(1, 5, 8),), form="decomposed").model, tmp_path / "a.onnx")
    done = cli("rewrite", tmp_path / "a.onnx", "--form", "native", "--target", "ort", "-o", tmp_path / "x.onnx")
    assert done.exit_code == 0, done.output
    path, data = tmp_path / "x.onnx", manifest_of(tmp_path / "x.onnx")
    assert contradiction(path, data) == ""
    assert contradiction(path, {**data, "form": "decomposed"}) == "its form"
    assert contradiction(path, {**data, "target": "tensorrt"}) == "its target"


def test_a_key_rewrite_that_was_added_explains_no_other_file(made: dict[str, Path], tmp_path: Path) -> None:
    """If nothing was rewritten, the file must be the original file."""
    path, data = Path(shutil.copy(made["module"], tmp_path / "x.onnx")), manifest_of(made["module"])
    del data["module"]
    record = {**manifest_of(made["rewritten"])["rewrite"], "changed": False, "attentions": [], "whole": None}
    said = contradiction(path, {**data, "file": "x.onnx", "rewrite": record, "version": "9.9"})
    assert said == "its rewrite.source"


def test_a_file_that_nobody_rewrote_has_no_form(tmp_path: Path, made: dict[str, Path]) -> None:
    path, data = foreign(tmp_path / "x.onnx"), manifest_of(made["rewritten"])
    sha256 = read_graph(path).sha256
    given = {**data, "file": "x.onnx", "sha256": sha256, "opset": 18, "domains": {"": 18}}
    del given["rewrite"]
    assert contradiction(path, given) == "its form, target"


@pytest.mark.parametrize(
    "change", [{"target": "cuda"}, {"form": "fast"}, {"version": 1}, {"tools": {"torch": 2}}, {"tools": ["torch"]}]
)
def test_values_that_a_manifest_can_not_have_are_refused(
    change: dict[str, Any], made: dict[str, Path], tmp_path: Path
) -> None:
    path, data = Path(shutil.copy(made["rewritten"], tmp_path / "x.onnx")), manifest_of(made["rewritten"])
    with pytest.raises(RequestError, match=r"x\.onnx"):
        contradiction(path, {**data, "file": "x.onnx", **change})
