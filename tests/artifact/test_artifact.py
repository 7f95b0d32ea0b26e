"""Artifacts on disk: complete or absent, the same bytes for the same command, weights inside or beside the file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
import torch
from helpers import cli, exported, inputs_for, refused, run_ort, small_spec, tree, weights_for
from manifest_data import plan_manifest, write_manifest_data

from posexport import __version__, files
from posexport.artifact import onnx_file
from posexport.artifact.loaded import load_artifact, manifest_mismatch
from posexport.artifact.manifest import WeightSource, matches_manifest
from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.bench.shapes import load_for_bench
from posexport.errors import MismatchError, RequestError
from posexport.files import sha256_of
from posexport.jsondata import unstructure
from posexport.spec.contract import graph_inputs, graph_outputs

pytestmark = pytest.mark.few_inputs

SPEC = small_spec("rope", bias=True, num_kv_heads=2)


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    manifest = write_onnx(exported(SPEC, "function"), path)
    found = read_onnx(path)
    assert (found.spec, found.form, found.opset, found.version) == (SPEC, "function", 18, __version__)
    weights = found.weights()
    assert list(weights) == list(weights_for(SPEC))
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_for(SPEC).items())
    assert found.inputs() == graph_inputs(SPEC)
    assert found.outputs() == graph_outputs(SPEC)
    assert found.manifest() == manifest
    assert unstructure(manifest) == json.loads((tmp_path / "block.onnx.json").read_bytes())
    assert manifest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert matches_manifest(path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert sorted(tree(tmp_path)) == ["block.onnx", "block.onnx.json"]


def test_manifest_says_what_the_contract_lists(tmp_path: Path) -> None:
    manifest = unstructure(write_onnx(exported(SPEC, "function"), tmp_path / "block.onnx"))
    assert list(manifest) == [
        "file", "sha256", "version", "form", "spec", "inputs", "outputs", "opset", "domains", "tools",
    ]  # fmt: skip
    assert manifest["inputs"] == [
        {"name": "hidden_states", "shape": ["batch", "seq", 32], "dtype": "fp32"},
        {"name": "position_ids", "shape": ["batch", "seq"], "dtype": "int64"},
    ]
    assert manifest["outputs"] == [{"name": "output", "shape": ["batch", "seq", 32], "dtype": "fp32"}]
    assert manifest["domains"] == {"": 18, "posexport": 1}
    assert set(manifest["tools"]) == {"torch", "onnx", "onnxscript", "onnx-ir"}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_external_data(tmp_path: Path, dtype: str) -> None:
    spec = small_spec("relative", dtype=dtype, layers=2)
    inside, beside = tmp_path / "inside.onnx", tmp_path / "beside.onnx"
    write_onnx(exported(spec), inside)
    manifest = write_onnx(exported(spec), beside, external_from=0)
    data = tmp_path / "beside.onnx.data"
    assert manifest.external_data == {data.name: hashlib.sha256(data.read_bytes()).hexdigest()}
    assert beside.stat().st_size < data.stat().st_size
    inputs = inputs_for(spec, 2, 5)
    assert np.array_equal(run_ort(beside, inputs)["output"], run_ort(inside, inputs)["output"])
    ours, weights = read_onnx(beside).weights(), weights_for(spec)
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
    onnx.checker.check_model(str(beside), full_check=True)
    assert {t.name for t in onnx.load(beside).graph.initializer} == {
        t.name for t in onnx.load(inside).graph.initializer
    }


def test_external_data_from_the_limit_on(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in weights_for(small_spec("none")).values())
    model = exported(small_spec("none"))
    assert write_onnx(model, tmp_path / "at.onnx", external_from=size).external_data
    assert not write_onnx(model, tmp_path / "below.onnx", external_from=size + 1).external_data
    assert onnx_file.EXTERNAL_FROM == 1_500_000_000


@pytest.mark.slow
def test_data_of_an_earlier_file_goes_with_it_if_its_manifest_names_it(tmp_path: Path) -> None:
    path, data = tmp_path / "block.onnx", tmp_path / "block.onnx.data"
    data.write_bytes(b"the user's own")
    model = exported(SPEC)
    write_onnx(model, path)
    assert data.read_bytes() == b"the user's own"
    assert json.loads(cli("inspect", path, "--json").stdout)["bytes"] == path.stat().st_size
    write_onnx(model, path, external_from=0)
    write_onnx(model, path)
    assert not data.exists()


def test_damage_after_writing_shows_in_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    assert write_onnx(exported(SPEC), path).sha256
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert matches_manifest(path) is False
    told = cli("inspect", path)
    assert told.exit_code == 0
    assert re.match(r"  manifest +does not match the file$", told.stdout.splitlines()[1])
    assert told.stderr == f"Warning: {path}: {mismatch(path)}.\n"
    (tmp_path / "block.onnx.json").unlink()
    assert matches_manifest(path) is None


def mismatch(path: Path) -> str | None:
    """The contradiction between an artifact and its manifest, or None."""
    artifact = read_onnx(path)
    manifest = artifact.manifest()
    reason = None if manifest is None else manifest_mismatch(artifact, manifest)
    return None if reason is None else reason.text


EDITS: dict[str, Any] = {
    "spec": lambda manifest: manifest["spec"].update(window=9),
    "inputs": lambda manifest: manifest["inputs"].pop(),
    "outputs": lambda manifest: manifest["outputs"][0].update(dtype="fp16"),
    "form": lambda manifest: manifest.update(form="native"),
    "opset": lambda manifest: manifest.update(opset=19),
    "domains": lambda manifest: manifest["domains"].update({"com.microsoft": 1}),
    "target": lambda manifest: manifest.update(target="ort"),
    "version": lambda manifest: manifest.update(version="0.0.1"),
    "weights": lambda manifest: manifest["weights"].update(seed=4),
    "tools": lambda manifest: manifest["tools"].update(torch="1.0"),
    "attentions": lambda manifest: manifest.update(attentions=[{"layer": 0}]),
}
SOURCE = WeightSource(source="random", seed=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_that_was_edited_does_not_match(name: str, tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    manifest = unstructure(write_onnx(exported(SPEC), path, weights=SOURCE))
    assert mismatch(path) is None
    EDITS[name](manifest)
    (tmp_path / "block.onnx.json").write_text(json.dumps(manifest))
    fault = f"its manifest block.onnx.json contradicts the file in its {name}"
    assert mismatch(path) == fault
    assert str(load_for_bench(path).mismatch) == fault
    told = cli("inspect", path, "--json")
    assert json.loads(told.stdout)["manifest"] == "does not match the file"
    assert told.stderr == f"Warning: {path}: {fault}.\n"


ATTENTIONS = [{"layer": layer, "operator": "Attention", "error": 1e-12} for layer in range(2)]


@pytest.mark.parametrize("stated", [ATTENTIONS[:1], ATTENTIONS * 2, [{**ATTENTIONS[0], "layer": 5}, ATTENTIONS[1]], []])
def test_attentions_that_the_file_does_not_have_are_refused(stated: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    manifest = unstructure(write_onnx(exported(SPEC), path, weights=SOURCE, attentions=ATTENTIONS))
    assert mismatch(path) is None
    (tmp_path / "block.onnx.json").write_text(json.dumps({**manifest, "attentions": stated}))
    assert mismatch(path) == "its manifest block.onnx.json contradicts the file in its attentions"
    assert cli("verify", path, "--runtime", "ort-cpu").exit_code == 1


OTHER_SOURCES: list[Any] = [
    None,
    {"source": "file", "file": "a.safetensors", "sha256": "0" * 64},
    {"source": "checkpoint", "folder": "a", "config_sha256": "0" * 64, "layer": 0},
    {"source": "random", "seed": 3, "layer": 0},
]


@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_weights_of_another_source_are_refused(source: Any, tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    manifest = unstructure(write_onnx(exported(SPEC), path, weights=SOURCE))
    manifest.pop("weights")
    (tmp_path / "block.onnx.json").write_text(json.dumps({**manifest, **({"weights": source} if source else {})}))
    assert mismatch(path) == "its manifest block.onnx.json contradicts the file in its weights"
    assert cli("package", path, "--triton", "-o", tmp_path / "models").exit_code == 2
    assert cli("verify", path, "--runtime", "ort-cpu").exit_code == 1


def test_what_a_file_of_an_earlier_version_does_not_say_is_not_compared(tmp_path: Path) -> None:
    path, data = tmp_path / "block.onnx", tmp_path / "block.onnx.json"
    manifest = unstructure(write_onnx(exported(SPEC), path, weights=SOURCE))
    model = onnx.load(path)
    (origin,) = (entry for entry in model.metadata_props if entry.key == "posexport.origin")
    model.metadata_props.remove(origin)
    onnx.save(model, path)
    data.write_text(json.dumps({**manifest, "sha256": sha256_of(path)}))
    assert mismatch(path) is None
    assert read_onnx(path).origin is None
    for text in ("{", "[]", '{"weights": null}', '{"weights": {"source": "guess"}, "tools": {}}'):
        origin.value = text
        model.metadata_props.append(origin)
        onnx.save(model, path)
        with pytest.raises(RequestError, match="has metadata that can't be used"):
            read_onnx(path)
        del model.metadata_props[-1]


def test_builds_of_one_version_of_a_tool_are_the_same_tool(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    manifest = unstructure(write_onnx(exported(SPEC), path, weights=SOURCE))
    manifest["tools"]["torch"] = manifest["tools"]["torch"].partition("+")[0] + "+else"
    (tmp_path / "block.onnx.json").write_text(json.dumps(manifest))
    assert mismatch(path) is None


@pytest.mark.parametrize("key", ["weights", "onnx.version"])
def test_a_plan_whose_manifest_says_other_things_of_its_onnx_file_is_refused(key: str, tmp_path: Path) -> None:
    path, plan = tmp_path / "block.onnx", tmp_path / "block.plan"
    source = unstructure(write_onnx(exported(SPEC), path, weights=SOURCE))
    plan.write_bytes(b"code")
    shared = {name: source[name] for name in source if name not in ("file", "sha256", "version", "tools")}
    sizes = {"batch": 1, "seq": 7}
    shapes = {each["name"]: [sizes.get(dim, dim) for dim in each["shape"]] for each in source["inputs"]}
    profiles = {name: dict.fromkeys(("min", "opt", "max"), shape) for name, shape in shapes.items()}
    manifest = plan_manifest(plan, path, profiles=profiles, **shared)
    write_manifest_data(plan, manifest)
    assert load_artifact(plan).plan is not None
    if key == "weights":
        manifest["weights"]["seed"] = 4
    else:
        manifest["onnx"]["version"] = "0.0.1"
    write_manifest_data(plan, manifest)
    with pytest.raises(MismatchError, match=f"block.plan.json contradicts block.onnx in its {key}:"):
        load_artifact(plan)


def test_a_file_that_is_renamed_with_its_manifest_still_matches(tmp_path: Path) -> None:
    write_onnx(exported(SPEC), tmp_path / "block.onnx", weights=SOURCE)
    for ending in (".onnx", ".onnx.json"):
        (tmp_path / f"block{ending}").rename(tmp_path / f"other{ending}")
    assert mismatch(tmp_path / "other.onnx") is None


def test_a_manifest_that_lacks_what_has_a_default_since_matches(tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    manifest = unstructure(write_onnx(exported(SPEC), path))
    del manifest["spec"]["softcap"]
    (tmp_path / "block.onnx.json").write_text(json.dumps(manifest))
    assert mismatch(path) is None


def test_files_have_the_users_own_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_onnx(exported(SPEC), tmp_path / "block.onnx")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "block.onnx").stat().st_mode) == 0o640


@pytest.mark.slow
@pytest.mark.usefixtures("traced_anew")
def test_two_exports_are_the_same_bytes(tmp_path: Path) -> None:
    """The exports run in different folders and processes, with different hash seeds."""
    folders = [tmp_path / "here", tmp_path / "there" / "deeper"]
    for folder in folders:
        folder.mkdir(parents=True)
    options = ("export", "--encoding", "relative", "--form", "function", "--hidden-size", "32", "--num-heads", "4")
    options += ("--block", "transformer", "--dtype", "fp16", "-o")
    assert cli(*options, folders[0] / "block.onnx").exit_code == 0
    command = [sys.executable, "-c", "from posexport.cli import main; main()", *options, str(folders[1] / "block.onnx")]
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "77"}, check=True, capture_output=True)
    made = [tree(folder) for folder in folders]
    assert made[0] == made[1]
    assert sorted(made[0]) == ["block.onnx", "block.onnx.json"]
    for content in made[0].values():
        assert str(tmp_path).encode() not in content


def raising(error: BaseException, after: int) -> Callable[..., int]:
    """A write that works `after` times and then fails."""
    left = [after]

    def write(self: Any, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise error
        self.sha256.update(data)
        self.size += len(data)
        return int(self._file.write(data))

    return write


FAILURES = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), RequestError),
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("external_from", [0, onnx_file.EXTERNAL_FROM])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, external_from: int
) -> None:
    error, expected = FAILURES[failure]
    path = tmp_path / "block.onnx"
    write_onnx(exported(small_spec("none")), path, external_from=external_from)
    before = tree(tmp_path)
    writes = 0
    while True:  # fail at the first write, then at the second, and so on, until a run succeeds
        with monkeypatch.context() as patch:
            patch.setattr(files.HashingFile, "write", raising(error, writes))
            try:
                write_onnx(exported(SPEC), path, external_from=external_from)
                break
            except expected:
                assert tree(tmp_path) == before
        writes += 1
    assert writes >= 4
    assert tree(tmp_path) != before


def test_a_failed_rename_or_sync_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    for owner, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RequestError, match="can't write the output"):
                write_onnx(exported(SPEC), tmp_path / "block.onnx")
        assert tree(tmp_path) == {}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    path = tmp_path / "block.onnx"
    path.write_bytes(b"the old file")
    monkeypatch.setattr(files.HashingFile, "write", raising(FAILURES[failure][0], 2))
    result = cli("export", "--encoding", "none", "--hidden-size", "32", "--num-heads", "4", "-o", path)
    if failure == "full disk":
        refused(result, "can't write the output (No space left on device)")
    else:
        assert (result.exit_code, result.stdout) == (130, "")
        said = "Error: interrupted: no file is half-written; files written before are kept."
        assert result.stderr.strip() == said  # click ends the line with ^C
    assert tree(tmp_path) == {"block.onnx": b"the old file"}


def test_json_is_written_whole_too(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    files.write_json(path, {"b": 1, "a": "ä"})
    assert path.read_text() == '{\n  "b": 1,\n  "a": "ä"\n}\n'
    with pytest.raises(TypeError):
        files.write_json(path, {"b": object()})
    assert list(tree(tmp_path)) == ["report.json"]
    with pytest.raises(RequestError, match="can't write to the folder"):
        files.write_json(tmp_path / "nowhere" / "report.json", {})
