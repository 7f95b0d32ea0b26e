"""`posexport package --triton`: the repository that it writes, and refusals that leave everything unchanged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from helpers import cli, exported, inputs_for, refused, run_block, run_ort, small_spec, tree, weights_for
from manifest_data import plan_manifest, write_manifest_data

from posexport import files
from posexport.artifact.manifest import matches_manifest
from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.artifact.profiles import profiles_of
from posexport.errors import RequestError
from posexport.export import export
from posexport.export.triton import repository as repository_stage
from posexport.export.triton.config import read_config
from posexport.export.triton.package import PackageOptions, package_triton
from posexport.export.triton.rules import problems
from posexport.files import sha256_of, write_folder
from posexport.spec.contract import graph_inputs, graph_outputs

pytestmark = pytest.mark.few_inputs

FORMS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "function": (small_spec("rope"), {"form": "function"}, 0),
    "contrib": (small_spec("rope", causal=True, kv_cache="shared"), {"form": "contrib", "target": "ort"}, 1 << 40),
    "consecutive": (small_spec("learned", causal=True, positions="consecutive"), {"form": "native"}, 1 << 40),
}
"""Spec, options of the export, and the size in bytes from which weights go to a separate file."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one artifact of each of FORMS."""
    folder = tmp_path_factory.mktemp("artifacts")
    for name, (spec, options, external_from) in FORMS.items():
        write_onnx(export(spec, weights_for(spec), **options), folder / f"{name}.onnx", external_from=external_from)
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A fake TensorRT plan with a manifest that matches it."""
    spec, path = small_spec("rope", dtype="fp16"), tmp_path / "block.plan"
    path.write_bytes(b"code" * 300)
    values = {
        kind: [{"name": name, "shape": list(shape), "dtype": dtype} for name, (shape, dtype) in given.items()]
        for kind, given in (("inputs", graph_inputs(spec)), ("outputs", graph_outputs(spec)))
    }
    shapes = {name: shape for name, (shape, _) in graph_inputs(spec).items()}
    more = {
        "spec": spec.to_dict(),
        **values,
        "runtime": {"name": "tensorrt", "version": "10.14.1"},
        "profiles": profiles_of(shapes, ["batch=1:4:16"]),
    }
    write_manifest_data(path, plan_manifest(path, path, **more))
    return path


def package(path: Path, *options: object, repository: Path) -> Any:
    result = cli("package", path, "--triton", "-o", repository, "--json", *map(str, options))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_graph_of_functions_with_weights_beside_it(made: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    told = package(made / "function.onnx", repository=repository)
    assert set(tree(repository)) == {
        "function/config.pbtxt",
        "function/1/model.onnx",
        "function/1/model.onnx.json",
        "function/1/function.onnx.data",
    }
    home = repository / "function"
    model = home / "1" / "model.onnx"
    assert told["files"] == {name: sha256_of(home / "1" / name) for name in ("model.onnx", "function.onnx.data")}
    assert (told["kind"], told["name"], told["model_version"]) == ("package", "function", 1)
    artifact = read_onnx(model)  # The weights file has the name that the graph uses.
    config = read_config((home / "config.pbtxt").read_bytes())
    assert problems(config, home.name, artifact.inputs(), artifact.outputs()) == []
    assert told["max_batch_size"] == config.max_batch_size == 8
    assert matches_manifest(model)
    inputs = inputs_for(artifact.spec, 2, 3)
    truth = run_block(artifact.spec, artifact.weights(), inputs)
    np.testing.assert_allclose(run_ort(model, inputs)["output"], truth, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_verify_takes_the_packaged_file(name: str, made: Path, tmp_path: Path) -> None:
    package(made / f"{name}.onnx", repository=tmp_path / "m")
    result = cli("verify", tmp_path / "m" / name / "1" / "model.onnx", "--runtime", "ort-cpu")
    assert (result.exit_code, "1 passed" in result.stdout) == (0, True), result.output


def test_the_warm_up_is_a_request_that_the_graph_takes(made: Path, tmp_path: Path) -> None:
    """Builds the request as Triton does: zeros with the given dims, the batch before them, then the reshape."""
    told = package(
        made / "contrib.onnx", "--max-batch-size", "4", "--cpu", "--instances", "2", repository=tmp_path / "m"
    )
    assert told["instances"] == {"kind": "KIND_CPU", "count": 2}
    assert "in a batch of one only" in told["batching"]["reason"]
    config = read_config((tmp_path / "m/contrib/config.pbtxt").read_bytes())
    reshaped = {entry.name for entry in config.input if entry.HasField("reshape")}
    session = onnxruntime.InferenceSession(tmp_path / "m/contrib/1/model.onnx")
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    dtypes = {value.name: types[value.type] for value in session.get_inputs()}
    sample = config.model_warmup[0].inputs
    made_up = {
        name: np.zeros([1, *(() if name in reshaped else tensor.dims)], dtypes[name]) for name, tensor in sample.items()
    }
    assert session.run(["output"], made_up)[0].shape == (1, 1, 32)


def test_requests_of_consecutive_tokens_say_where_each_begins(made: Path, tmp_path: Path) -> None:
    package(made / "consecutive.onnx", repository=tmp_path / "m")
    config = read_config((tmp_path / "m/consecutive/config.pbtxt").read_bytes())
    assert {entry.name: list(entry.dims) for entry in config.input}["position_ids"] == [1]
    model = tmp_path / "m/consecutive/1/model.onnx"
    artifact = read_onnx(model)
    inputs = inputs_for(artifact.spec, 2, 3)
    inputs["position_ids"] = np.array([[7], [0]])
    truth = run_block(artifact.spec, artifact.weights(), inputs)
    np.testing.assert_allclose(run_ort(model, inputs)["output"], truth, atol=1e-5)


def test_a_plan(plan: Path, tmp_path: Path) -> None:
    told = package(plan, "--name", "vit-b.16", "--version", "3", repository=tmp_path / "m")
    assert (told["backend"], told["max_batch_size"]) == ("tensorrt", 16)
    assert told["batching"]["preferred"] == [4, 16]
    assert told["instances"] == {"kind": "KIND_GPU", "count": 1}
    files = tree(tmp_path / "m")
    assert set(files) == {"vit-b.16/config.pbtxt", "vit-b.16/3/model.plan", "vit-b.16/3/model.plan.json"}
    assert files["vit-b.16/3/model.plan"] == plan.read_bytes()
    assert matches_manifest(tmp_path / "m/vit-b.16/3/model.plan")
    assert b"only TensorRT 10.14.1 can open it" in files["vit-b.16/config.pbtxt"]


def test_people_see_a_table(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("package", made / "function.onnx", "--triton")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "model_repository/function/1/model.onnx").is_file()
    for said in ("hidden_states", "TYPE_INT64", "[-1, 32]", "up to 8 rows", "tritonserver --model-repository"):
        assert said in result.stdout


def test_versions_stand_side_by_side_under_one_configuration(made: Path, tmp_path: Path) -> None:
    source, repository = made / "function.onnx", tmp_path / "m"
    package(source, "--name", "block", repository=repository)
    package(source, "--name", "block", "--version", "2", repository=repository)
    before = tree(repository)
    assert {name.split("/")[1] for name in before} == {"1", "2", "config.pbtxt"}
    again = ("package", source, "--triton", "-o", repository, "--name", "block")
    refused(cli(*again), "block/1' is there", "--force")
    other = refused(cli(*again, "--version", "3", "--instances", "2"), "version 1 shares it")
    assert "--force" not in other
    refused(cli(*again, "--version", "2", "--instances", "2", "--force"), "version 1 shares it")
    refused(cli("package", made / "contrib.onnx", *again[2:], "--version", "3"), "version 1 shares it")
    assert tree(repository) == before
    (repository / "block/config.pbtxt").write_text("no_such_field: 1")
    refused(cli(*again, "--version", "3"), "version 1 shares it")
    (repository / "block/1/stray").write_text("of the version before")
    refused(cli(*again, "--force"), "version 2 shares it")
    shutil.rmtree(repository / "block/2")
    refused(cli(*again[:5], "--name", "block", "--version", "2"), "version 1 shares it")
    package(source, "--name", "block", "--instances", "2", "--force", repository=repository)
    after = tree(repository)
    assert set(after) == {name for name in before if "/2/" not in name}
    assert read_config(after["block/config.pbtxt"]).instance_group[0].count == 2
    shutil.rmtree(repository / "block/1")
    refused(cli(*again), "differs from the configuration of this version", "--force")


def test_what_triton_cannot_serve_is_refused(made: Path, plan: Path, tmp_path: Path) -> None:
    def refuse(path: Path, *options: str, said: str) -> None:
        refused(cli("package", path, "--triton", "-o", tmp_path / "m", *options), said)

    write_onnx(exported(small_spec("rope", dtype="bf16")), tmp_path / "bf16.onnx")
    refuse(tmp_path / "bf16.onnx", said="is bf16, which Triton's onnxruntime backend has no tensors of")
    refuse(plan, "--cpu", said="runs on GPUs only")
    refuse(plan, "--max-batch-size", "17", said="takes up to 16 rows")
    manifest = plan.with_name("block.plan.json")
    manifest.write_text(manifest.read_text().replace('"tensorrt"', '"tensorrt-rtx"'))
    refuse(plan, said="Triton's TensorRT backend can't load: build it with 'posexport compile --runtime tensorrt'")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "../up"), "name '../up' can't be used"),
        (("--name", ".hidden"), "name '.hidden' can't be used"),
        (("--name", ""), "--name was given an empty text"),
        (("--version", "0"), "version is '0'"),
        (("--version", "one"), "version is 'one'"),
        (("--instances", "0"), "instances is '0'"),
        (("--max-batch-size", "-1"), "--max-batch-size is '-1'"),
        (("-o", "no/such/folder"), "'no/such' is not there"),
        (("-o", "taken"), "'taken' is a file"),
        (("-o", "\udcff"), "/1' has a name that is not UTF-8"),
    ],
)
def test_bad_options_are_refused(
    options: tuple[str, ...], said: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    refused(cli("package", made / "function.onnx", "--triton", *options), said)
    assert set(tree(tmp_path)) == {"taken"}


def test_only_numbers_are_versions(made: Path, tmp_path: Path) -> None:
    for name in ("²", "1st"):
        (tmp_path / "model" / name).mkdir(parents=True)
    (tmp_path / "model" / "config.pbtxt").write_text("")
    again = ("package", made / "function.onnx", "--triton", "-o", tmp_path, "--name", "model")
    refused(cli(*again), "differs from the configuration of this version: give another --name, or --force")
    assert cli(*again, "--force").exit_code == 0


def test_bad_files_are_refused(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(cli("package", made / "function.onnx"), "give --triton")
    refused(cli("package", "block.pt", "--triton"), "neither .onnx nor .plan")
    refused(cli("package", "gone.onnx", "--triton"), "'gone.onnx' is not there")
    refused(cli("package", "gone.plan", "--triton"), "'gone.plan' is not there")
    for name in ("function.onnx", "function.onnx.json", "function.onnx.data"):
        Path(name).write_bytes((made / name).read_bytes())
    manifest = Path("function.onnx.json")
    right = manifest.read_text()
    manifest.write_text(right.replace('"causal": false', '"causal": true'))
    assert manifest.read_text() != right
    refused(cli("package", "function.onnx", "--triton"), "function.onnx.json contradicts the file in its spec")
    manifest.write_text(right)
    data = bytearray(Path("function.onnx.data").read_bytes())
    data[0] ^= 1
    Path("function.onnx.data").write_bytes(data)
    refused(cli("package", "function.onnx", "--triton"), "weights in function.onnx.data are not those that its")
    Path("function.onnx.json").unlink()  # Without a manifest, its hash cannot be checked.
    assert cli("package", "function.onnx", "--triton").exit_code == 0
    assert "function/1/model.onnx.json" not in tree(Path("model_repository"))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, beside = tmp_path / "model", tmp_path / "config"
    target.mkdir()
    (target / "old").write_text("old")
    beside.write_text("old")
    before = tree(tmp_path)

    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(target, fails)
    assert tree(tmp_path) == before
    with pytest.raises(RequestError, match="can't write the folder"):
        write_folder(target, lambda folder: None, {tmp_path / "no" / "config": b"new"})
    assert tree(tmp_path) == before
    with pytest.raises(RequestError, match="can't write the folder"):
        write_folder(tmp_path / "no" / "model", lambda folder: None)
    write_folder(target, lambda folder: (folder / "new").write_text("new") and None, {beside: b"new"})
    assert tree(tmp_path) == {"model/new": b"new", "config": b"new"}
    assert files.__doc__


def test_a_folder_replaces_nothing_where_that_is_not_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fill(folder: Path) -> None:
        (folder / "new").write_text("new")

    assert write_folder(target, fill, replace=False)
    (target / "new").write_text("theirs")
    assert not write_folder(target, fill, replace=False)
    assert tree(tmp_path) == {"model/new": b"theirs"}
    assert write_folder(target, fill)
    assert tree(tmp_path) == {"model/new": b"new"}


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [("other", 1, {"mine/1", "other/1"}), ("mine", 2, {"mine/1", "mine/2"}), ("mine", 1, {"mine/1"})],
)
def test_what_is_packaged_meanwhile_stays(
    name: str, version: int, expected: set[str], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes a model while this one copies its own into a new repository."""
    path, models, copy = made / "function.onnx", tmp_path / "models", repository_stage.copy_file
    others = [PackageOptions(name=name, version=version)]

    def copies(*arguments: Any) -> str:
        if others:
            package_triton(path, models, others.pop())
        return copy(*arguments)

    monkeypatch.setattr(repository_stage, "copy_file", copies)
    mine = PackageOptions(name="mine", version=1)
    if (name, version) == ("mine", 1):
        with pytest.raises(RequestError, match="is there: give another --version or --name"):
            package_triton(path, models, mine)
    else:
        package_triton(path, models, mine)
    assert {str(Path(file).parent) for file in tree(models) if file.endswith(".onnx")} == expected


def test_what_can_not_be_removed_of_the_old_folder_makes_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is files that a server wrote into it as another user."""

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    target = tmp_path / "model"
    (target / "cache").mkdir(parents=True)
    (target / "cache" / "old").write_text("old")
    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "chmod"):
            patch.setattr(os, name, refuses)
        write_folder(target, lambda folder: (folder / "new").write_text("new") and None)
    assert tree(target) == {"new": b"new"}
