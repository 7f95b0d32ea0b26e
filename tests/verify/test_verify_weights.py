"""`posexport verify` and weights: a file fails if it differs from its manifest or is not an export of its original."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from checkpoint_files import LLAMA, llama_tensors, written
from helpers import case, cli, exported, refused, tree
from manifest_data import plan_manifest, read_manifest_data, write_manifest_data
from safetensors.torch import save_file
from verify_helpers import write

from posexport.artifact.loaded import load_artifact
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import candidates
from posexport.errors import MismatchError
from posexport.export.exporter import export
from posexport.files import sha256_of
from posexport.models.checkpoints import read_checkpoint
from posexport.models.weights import weight_shapes
from posexport.runtimes import RUNTIMES

pytestmark = pytest.mark.few_inputs

MISSING = next((name for name, row in RUNTIMES.items() if row.missing() is not None), None)


def scaled(path: Path, name: str = "q_proj.weight", factor: float = 1.5) -> Path:
    """Multiply a weight of the artifact and keep its manifest."""
    model = onnx.load(path, load_external_data=False)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    values = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, path)
    return path


def verdicts(*arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the verdicts as JSON."""
    result = cli("verify", *arguments, "--json")
    assert result.stderr == "", result.stderr
    return result.exit_code, json.loads(result.stdout)["verdicts"]


def test_changed_weights_fail_on_every_runtime_and_in_every_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scaled(write(tmp_path, "rope", case("rope")))
    reports = ("--junit", tmp_path / "r.xml", "--markdown", tmp_path / "r.md")
    names = [name for name in ("torch", "ort-cpu", MISSING) if name is not None]
    code, found = verdicts(path, *reports, *(part for name in names for part in ("--runtime", name)))
    assert code == 1
    assert [verdict["runtime"] for verdict in found] == [name for name in RUNTIMES if name in names]
    reason = "the file is not the one that its manifest rope.onnx.json describes (their sha256 differ)"
    for verdict in found:
        assert (verdict["state"], verdict["reason_code"], verdict["reason"]) == ("failed", "manifest", reason)
        assert verdict["weights"] == {"code": "different", "text": reason}
        assert verdict["sha256"] == sha256_of(path)
    failures = ElementTree.parse(tmp_path / "r.xml").getroot().findall("testcase/failure")
    assert [failure.get("message") for failure in failures] == [reason] * len(names)
    assert (tmp_path / "r.md").read_text().count("(their sha256 differ)") == len(names)
    monkeypatch.chdir(tmp_path)  # so that the table does not fold
    table = cli("verify", path.name, "--runtime", "torch")
    assert (table.exit_code, table.stderr) == (1, "")
    assert reason in " ".join(table.stdout.split())


def test_without_a_manifest_the_verdict_says_that_weights_were_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scaled(write(tmp_path, "rope", case("rope")))
    path.with_name("rope.onnx.json").unlink()
    reports = ("--junit", tmp_path / "r.xml", "--markdown", tmp_path / "r.md")
    code, (verdict,) = verdicts(path, "--runtime", "torch", *reports)
    assert (code, verdict["state"]) == (0, "passed")
    assert verdict["weights"] == {"code": "no-manifest", "text": "not checked, no manifest"}
    text = "weights: not checked, no manifest"
    assert text in (tmp_path / "r.md").read_text()
    assert text in str(ElementTree.parse(tmp_path / "r.xml").getroot().findtext("testcase/system-out"))
    monkeypatch.chdir(tmp_path)  # so that the table folds little
    words = cli("verify", path.name, "--runtime", "torch", "--reach", "seq=9").stdout.split()
    assert {*text.split()} <= {*words}


def test_with_its_manifest_the_reports_say_that_weights_are_as_it_says(tmp_path: Path) -> None:
    path = write(tmp_path, "rope", case("rope"))
    result = cli("verify", path, "--runtime", "torch", "--junit", tmp_path / "r.xml")
    assert result.exit_code == 0
    assert "weights" not in result.stdout
    said = ElementTree.parse(tmp_path / "r.xml").getroot().findtext("testcase/system-out")
    assert "weights: as its manifest says" in str(said)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an artifact whose weights are external data."""
    folder = tmp_path_factory.mktemp("large")
    write_onnx(exported(case("rope")), folder / "a.onnx", external_from=0)
    return folder


@pytest.mark.parametrize("name", ["a.onnx", "a.onnx.data"])
def test_a_bit_flipped_anywhere_is_told_before_the_file_is_read(large: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    whole = file.read_bytes()
    for at in [0, 1, 2, *range(3, len(whole), len(whole) // 50), len(whole) - 1]:
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        file.write_bytes(data)
        with pytest.raises(MismatchError) as caught:
            load_artifact(tmp_path / "a.onnx")
        assert caught.value.reason.code == "manifest", at
        assert (name if name.endswith("data") else "the file") in caught.value.reason.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_file_cut_short_is_not_what_its_manifest_says(large: Path, tmp_path: Path, length: int) -> None:
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "a.onnx"
    path.write_bytes(path.read_bytes()[:length])
    code, (verdict,) = verdicts(path, "--runtime", "torch")
    assert (code, verdict["reason_code"]) == (1, "manifest")


def test_weights_beside_it_that_grew_or_gained_a_file_are_told(large: Path, tmp_path: Path) -> None:
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    path, data = tmp_path / "a.onnx", tmp_path / "a.onnx.data"
    whole = data.read_bytes()
    for other in (whole + b"\0", whole + bytes(2**22), whole[:-1], b""):
        data.write_bytes(other)
        with pytest.raises(MismatchError, match=r"its weights in a\.onnx\.data"):
            load_artifact(path)
    shutil.copy(large / "a.onnx.data", data)
    manifest = read_manifest_data(path)
    for external in ({}, {**manifest["external_data"], "b.data": "0"}):
        write_manifest_data(path, {**manifest, "external_data": external})
        with pytest.raises(MismatchError, match=r"its weights in"):
            load_artifact(path)


BROKEN: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda beside: beside.write_text("{"),
    "a list": lambda beside: beside.write_text("[]"),
    "no sha256": lambda beside: beside.write_text(
        json.dumps({key: value for key, value in json.loads(beside.read_text()).items() if key != "sha256"})
    ),
    "not text": lambda beside: beside.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BROKEN)
def test_a_manifest_that_cannot_be_read_proves_nothing(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "none", case("none"))
    BROKEN[name](path.with_name("none.onnx.json"))
    refused(cli("verify", path, "--runtime", "torch", "--junit", tmp_path / "r.xml"), "none.onnx.json")
    errors = ElementTree.parse(tmp_path / "r.xml").getroot().findall("testcase/error")
    assert ["none.onnx.json" in str(error.get("message")) for error in errors] == [True]


def test_one_file_that_differs_does_not_hide_the_others(tmp_path: Path) -> None:
    write(tmp_path, "a", case("none"))
    scaled(write(tmp_path, "b", case("none")))
    write(tmp_path, "c", case("alibi"))
    code, found = verdicts(tmp_path, "--runtime", "torch")
    assert code == 1
    states = [(Path(verdict["artifact"]).stem, verdict["state"]) for verdict in found]
    assert states == [("a", "passed"), ("b", "failed"), ("c", "passed")]


def test_a_plan_fails_where_its_builder_is_not_asked_for_too(tmp_path: Path) -> None:
    plan, onnx_file = tmp_path / "x.plan", tmp_path / "x.onnx"
    plan.write_bytes(b"code" * 300)
    onnx_file.write_bytes(b"graph")
    write_manifest_data(plan, plan_manifest(plan, onnx_file))
    plan.write_bytes(b"more" * 300)
    _, found = verdicts(plan)
    assert [(one["runtime"], one["state"]) for one in found] == [("tensorrt-rtx", "failed")]
    code, found = verdicts(plan, "--runtime", "ort-cpu")
    assert (code, [(one["runtime"], one["state"]) for one in found]) == (1, [("ort-cpu", "failed")])


@pytest.mark.parametrize("command", ["compile", "package"])
def test_nothing_is_made_of_a_file_that_contradicts_its_manifest_or_its_spec(tmp_path: Path, command: str) -> None:
    def make(path: Path) -> Any:
        options = ("--triton", "-o", tmp_path / "m") if command == "package" else ("--runtime", "tensorrt-rtx")
        before = tree(tmp_path)
        result = cli(command, path, *options)
        assert tree(tmp_path) == before
        return result

    if command == "compile" and RUNTIMES["tensorrt-rtx"].package is not None:
        pytest.importorskip("tensorrt_rtx")
    refused(make(scaled(write(tmp_path, "a", case("rope")))), "their sha256 differ")
    edited = write(tmp_path, "b", case("rope"))
    write_manifest_data(edited, {**read_manifest_data(edited), "spec": case("rope-half").to_dict()})
    refused(make(edited), "contradicts the file in its spec")
    other = write(tmp_path, "c", case("rope"))
    model = onnx.load(other)
    entry = next(entry for entry in model.metadata_props if entry.key == "posexport.spec")
    entry.value = attrs.evolve(case("rope"), padding_mask=True).to_json()
    onnx.save(model, other)
    other.with_name("c.onnx.json").unlink()
    refused(make(other), "contradicts its own spec", "attention_mask")
    heads = write(tmp_path, "d", case("rope"))
    model = onnx.load(heads)
    entry = next(entry for entry in model.metadata_props if entry.key == "posexport.spec")
    entry.value = attrs.evolve(case("rope"), num_kv_heads=2).to_json()
    onnx.save(model, heads)
    heads.with_name("d.onnx.json").unlink()
    refused(make(heads), "initializer 'k_proj.weight' has shape [32, 32], its spec needs [16, 32]")


def test_bench_says_that_what_it_times_is_not_what_its_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "ALWAYS", ("lower_bound",))
    path = scaled(write(tmp_path, "rope", case("rope")))
    result = cli(
        "bench", path, "--runtime", "ort-cpu", "--shape", "seq=4", "--rounds", "1", "--processes", "1", "--json"
    )
    assert result.exit_code == 0, result.output
    (warning,) = json.loads(result.stdout)["manifest_warnings"]
    assert "their sha256 differ" in warning
    assert f"Warning: {warning}." in result.stderr
    assert "their sha256 differ" in cli("inspect", path).stderr


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers with grouped heads, biases and the half layout."""
    folder = tmp_path_factory.mktemp("llama") / "tiny"
    folder.mkdir()
    written(folder, **LLAMA)
    save_file(llama_tensors(), folder / "model.safetensors")
    return folder


def exported_from(llama: Path, path: Path, layer: int = 0, layers: int = 1, **changes: Any) -> Path:
    """Export a checkpoint with a fault in its encoding. The manifest agrees with the faulty file."""
    found = read_checkpoint(llama, layer, layers, {"kv_cache": "concat"})
    assert found.weights is not None
    spec = attrs.evolve(found.spec, encoding=attrs.evolve(found.spec.encoding, **changes))
    write_onnx(export(spec, found.weights), path)
    return path


@pytest.mark.slow
def test_an_interleaved_export_of_a_half_checkpoint_fails(llama: Path, tmp_path: Path) -> None:
    sound = exported_from(llama, tmp_path / "sound.onnx")
    wrong = exported_from(llama, tmp_path / "wrong.onnx", layout="interleaved")
    asked = ("--from", llama, "--layer", "0", "--runtime", "torch", "--runtime", "ort-cpu")
    assert verdicts(wrong, "--runtime", "ort-cpu")[0] == 0  # the file matches its own spec
    reports = ("--junit", tmp_path / "r.xml", "--markdown", tmp_path / "r.md")
    code, found = verdicts(sound, wrong, *asked, *reports)
    assert code == 1
    assert [(Path(one["artifact"]).stem, one["state"], one["reason_code"]) for one in found] == [
        *[("sound", "passed", None)] * 2,
        *[("wrong", "failed", "other-spec")] * 2,
    ]
    held = "those of checkpoint tiny, layer 0"
    assert found[0]["weights"] == {"code": "as-original", "text": held}
    reason = "layout of rope is interleaved in the file and half in the original"
    assert reason in found[2]["reason"]
    for report in ("r.xml", "r.md"):
        text = (tmp_path / report).read_text()
        assert reason in text and f"weights: {held}" in text


def test_weights_that_are_not_the_originals_fail_though_the_manifest_agrees(llama: Path, tmp_path: Path) -> None:
    path = scaled(exported_from(llama, tmp_path / "a.onnx"))
    write_manifest_data(path, {**read_manifest_data(path), "sha256": sha256_of(path)})
    assert verdicts(path, "--runtime", "torch")[0] == 0
    code, (verdict,) = verdicts(path, "--runtime", "torch", "--from", llama)
    assert (code, verdict["reason_code"]) == (1, "other-weights")
    assert "q_proj.weight has different weights" in verdict["reason"]
    file = tmp_path / "w.safetensors"
    found = read_checkpoint(llama, 0, 1, {})
    assert found.weights is not None
    save_file(dict(found.weights), file)
    code, (verdict,) = verdicts(path, "--runtime", "torch", "--weights", file)
    assert (code, verdict["reason_code"]) == (1, "other-weights")
    sound = exported_from(llama, tmp_path / "b.onnx")
    code, (verdict,) = verdicts(sound, "--runtime", "ort-cpu", "--weights", file)
    assert (code, verdict["weights"]["text"]) == (0, "those of weights w.safetensors")


def test_the_sign_of_a_zero_is_a_part_of_the_weights(tmp_path: Path) -> None:
    from posexport.artifact.original import Original

    spec = case("rope")
    values = {name: torch.zeros(shape) for name, shape in weight_shapes(spec).items()}
    save_file(values, tmp_path / "w.safetensors")
    original = Original(weights=tmp_path / "w.safetensors")
    assert original.mismatch(spec, values) is None
    changed = {**values, "q_proj.weight": values["q_proj.weight"].clone()}
    changed["q_proj.weight"][3, 5] = -0.0
    assert "q_proj.weight has -0.0 in place of 0.0" in str(original.mismatch(spec, changed))


@pytest.mark.slow
def test_the_reason_says_where_the_manifest_has_the_weights_from(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "second.onnx"
    assert cli("export", "--from", llama, "--layer", "2", "-o", path).exit_code == 0
    code, (verdict,) = verdicts(path, "--runtime", "torch", "--from", llama)
    assert code == 1
    assert verdict["reason"].endswith("by its manifest its weights are from: checkpoint tiny, layer 2")


@pytest.mark.slow
def test_a_stack_is_held_against_its_layers(llama: Path, tmp_path: Path) -> None:
    path = exported_from(llama, tmp_path / "stack.onnx", layer=1, layers=2)
    assert verdicts(path, "--runtime", "ort-cpu", "--from", llama, "--layer", "1")[0] == 0
    code, (verdict,) = verdicts(path, "--runtime", "ort-cpu", "--from", llama)
    assert (code, verdict["reason_code"]) == (1, "other-weights")


def test_the_references_are_computed_with_the_originals_weights(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the comparison of tensors sees nothing, the runtimes still show the fault."""
    from posexport.artifact.original import Original

    path = scaled(exported_from(llama, tmp_path / "a.onnx"))
    path.with_name("a.onnx.json").unlink()
    monkeypatch.setattr(Original, "mismatch", lambda *_: None)
    code, (verdict,) = verdicts(path, "--runtime", "ort-cpu", "--from", llama)
    assert (code, verdict["reason_code"]) == (1, "over-limit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--weights", "w.safetensors", "--from", "tiny"), "both --weights and --from"),
        (("--layer", "1"), "--layer was given without --from"),
        (("--prefix-tokens", "1", "--weights", "w.safetensors"), "--prefix-tokens was given without --from"),
        (("--from", "tiny", "--layer", "7"), "7 is none of them"),
        (("--from", "tiny", "--layer", "x"), "--layer is 'x'"),
        (("--from", "tiny/config.json"), "a file without weights: give the folder"),
        (("--from", "nowhere"), "nowhere"),
        (("--weights", "w.safetensors"), "can't be read as .safetensors"),
    ],
)
def test_an_original_that_cannot_be_read_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, "tiny")
    write(tmp_path, "none", case("none"))
    refused(cli("verify", "none.onnx", "--runtime", "torch", *arguments), sentence)


def test_an_original_is_of_files_and_not_of_a_project(llama: Path) -> None:
    refused(cli("verify", "--from", llama), "without files")
