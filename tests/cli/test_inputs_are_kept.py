"""No command overwrites a file that it reads. Files are compared by identity, so names and links do not matter."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import LLAMA, written
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import case, cli, exported, refused, tree
from safetensors.numpy import save_file

from posexport import files
from posexport.artifact.onnx_artifact import write_onnx
from posexport.artifact.signing import SigningKey, read_signing_key
from posexport.bench.tune import request
from posexport.errors import RequestError
from posexport.export import compile
from posexport.files import open_file, protect, protected_inputs, renewed, staged, write_folder, write_json
from posexport.models.weights import weight_shapes
from posexport.report.page import page
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.verify import verifier

pytestmark = pytest.mark.few_inputs

RUN = ("--runtime", "ort-cpu", "--reach", "seq=9")
BLOCK = ("--encoding", "rope", "--hidden-size", "64", "--num-heads", "4")
PROJECT = '[[artifact]]\nname = "block"\nencoding = "rope"\nhidden-size = 64\nnum-heads = 4\n'

LINKS: dict[str, Callable[[Path, Path], object]] = {
    "its name": lambda file, name: None,
    "a symbolic link": lambda file, name: name.symlink_to(file),
    "a hard link": lambda file, name: os.link(file, name),
    "a linked folder": lambda file, name: name.parent.joinpath("linked").symlink_to(file.parent),
}


def make_key(folder: Path) -> SigningKey:
    """Write a private key k.pem and its public key k.pub."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "k.pem").write_bytes(private)
    (folder / "k.pub").write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return read_signing_key(folder / "k.pem")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind of input: a signed artifact with external weights, and other files that commands
    read."""
    folder = tmp_path_factory.mktemp("inputs")
    spec = case("rope")
    write_onnx(exported(spec), folder / "a.onnx", external_from=0, key=make_key(folder))
    weights = {name: np.zeros(shape, np.float32) for name, shape in weight_shapes(spec).items()}
    save_file(weights, folder / "w.safetensors")
    np.savez(folder / "in.npz", hidden_states=np.zeros((1, 3, 64), np.float32))
    (folder / "c.toml").write_text('encoding = "rope"\n')
    (folder / "jobs.toml").write_text('[[job]]\ncommand = "verify"\nartifact = "a.onnx"\n')
    (folder / "checkpoint").mkdir()
    written(folder / "checkpoint", **LLAMA)
    save_file(weights, folder / "checkpoint" / "model.safetensors")
    write_json(folder / "result.json", {"kind": "verify"})
    return folder


@pytest.fixture
def inputs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder with inputs, as the working folder."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


ATTACKS = {
    "a manifest by --markdown": ("a.onnx.json", "verify a.onnx {run} --markdown {file}"),
    "a manifest by --junit": ("a.onnx.json", "verify a.onnx {run} --junit {file}"),
    "a manifest of a folder": ("a.onnx.json", "verify . {run} --junit {file}"),
    "a signature": ("a.onnx.json.sig", "verify a.onnx {run} --trust k.pub --junit {file}"),
    "a signature that is not checked": ("a.onnx.json.sig", "verify a.onnx {run} --junit {file}"),
    "external weights": ("a.onnx.data", "verify a.onnx {run} --markdown {file}"),
    "the artifact": ("a.onnx", "verify a.onnx {run} --markdown {file}"),
    "a trusted key": ("k.pub", "verify a.onnx {run} --trust k.pub --markdown {file}"),
    "given inputs": ("in.npz", "verify a.onnx --runtime ort-cpu --inputs in.npz --markdown {file}"),
    "given weights": ("w.safetensors", "verify a.onnx {run} --weights w.safetensors --markdown {file}"),
    "a checkpoint's config": ("checkpoint/config.json", "verify a.onnx {run} --from checkpoint --junit {file}"),
    "a checkpoint's weights": ("checkpoint/model.safetensors", "verify a.onnx {run} --from checkpoint --junit {file}"),
    "a page of results": ("result.json", "report result.json --markdown {file}"),
    "a manifest by report": ("a.onnx.json", "report a.onnx --markdown {file}"),
    "a manifest beside a value like an option": (
        "a.onnx.json",
        "report a.onnx -o page.html --title --help --markdown {file}",
    ),
    "a manifest by bench": ("a.onnx.json", "bench a.onnx --runtime ort-cpu --save {file}"),
    "a key by bench": ("k.pub", "bench a.onnx --runtime ort-cpu --trust k.pub --save {file}"),
    "a baseline": ("result.json", "bench a.onnx --runtime ort-cpu --baseline result.json --save {file}"),
    "a config by tune": ("c.toml", "tune --config c.toml --scenario prefill:8 --save {file}"),
    "weights by tune": ("w.safetensors", "tune {block} --weights w.safetensors --scenario prefill:8 --save {file}"),
    "a key by tune": ("k.pem", "tune {block} --sign k.pem --scenario prefill:8 --save {file}"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_report_replaces_no_input(name: str, link: str, inputs: Path) -> None:
    file, line = ATTACKS[name]
    target = {"its name": file, "a linked folder": f"linked/{Path(file).name}"}.get(link, "other.txt")
    LINKS[link](inputs / file, inputs / target if link != "a linked folder" else inputs / "linked")
    before = tree(inputs)
    line = line.format(file="{file}", run=" ".join(RUN), block=" ".join(BLOCK))
    result = cli(*(target if word == "{file}" else word for word in line.split()))
    refused(result, target)
    assert tree(inputs) == before


EXPORTS = {
    "weights": ("x.onnx.json", "w.safetensors", "--weights"),
    "a config": ("x.onnx.json", "c.toml", "--config"),
    "a key": ("x.onnx.json.sig", "k.pem", "--sign"),
    "a key that would be removed": ("x.onnx.json.sig", "w.safetensors", "--weights"),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_artifact_and_what_lies_beside_it_replace_no_input(name: str, inputs: Path) -> None:
    named, file, option = EXPORTS[name]
    (inputs / file).rename(inputs / named)
    before = tree(inputs)
    block = BLOCK if option != "--config" else BLOCK[2:]
    result = cli("export", *block, option, named, "-o", "x.onnx")
    refused(result, named)
    assert tree(inputs) == before


def test_a_project_keeps_its_own_file_and_its_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "posexport.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a command may overwrite its own outputs
        assert cli("build", "--force").exit_code == 0
    before = tree(tmp_path)
    manifest = next(path for path in tmp_path.rglob("*.onnx.json")).relative_to(tmp_path)
    for target in ("posexport.toml", str(manifest)):
        for option in ("--markdown", "--junit"):
            refused(cli("verify", *RUN, option, target), target)
    assert tree(tmp_path) == before


def test_a_model_repository_does_not_replace_the_artifact_in_it(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("package", "a.onnx", "--triton", "--name", "m").exit_code == 0
    inside = "model_repository/m/1/model.onnx"
    before = tree(inputs)
    refused(cli("package", inside, "--triton", "--name", "m", "--force"), "which this command reads")
    assert tree(inputs) == before


def test_reports_in_a_folder_that_is_read_may_be_written_again(inputs: Path) -> None:
    (inputs / "checkpoint" / "config.json").unlink()
    for _ in range(2):
        assert cli("verify", "a.onnx", *RUN, "--junit", "r.xml", "--markdown", "r.md").exit_code == 0
        assert cli("export", *BLOCK, "-o", "b.onnx").exit_code == 0


TWICE = (
    "verify a.onnx --junit r.txt --markdown linked/r.txt",
    "report result.json -o r.html --markdown linked/r.html",
    "tune {block} --scenario prefill:8 -o r.onnx --save linked/r.onnx.json",
)


@pytest.mark.parametrize("line", TWICE)
def test_two_outputs_of_one_name_are_refused_before_the_work(
    line: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "verify", None)
    monkeypatch.setattr(page, "make_page", None)
    monkeypatch.setattr(request.TuneRequest, "run", None)
    (inputs / "linked").symlink_to(inputs)
    refused(cli(*line.format(block=" ".join(BLOCK)).split()))
    assert not [path for path in inputs.iterdir() if path.name.startswith("r.")]


@pytest.mark.parametrize(
    ("caches", "said"),
    [
        ({"timing_cache": "p.plan"}, "two files would be written"),
        ({"timing_cache": "linked/p.plan.json"}, "two files would be written"),
        ({"timing_cache": "c.bin", "runtime_cache": "linked/c.bin"}, "two files would be written"),
        ({"timing_cache": "a.onnx.data"}, "is a file that this command reads"),
    ],
)
def test_caches_of_a_builder_are_files_of_their_own(
    caches: dict[str, str], said: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "compile_source", None)
    (inputs / "linked").symlink_to(inputs)
    with protected_inputs():
        protect(Path("a.onnx"))
        with pytest.raises(RequestError, match=said):
            compile.compile_plan(Path("a.onnx"), Path("p.plan"), BuildOptions(runtime="tensorrt-rtx", **caches))


def test_what_is_read_is_protected_as_long_as_the_command_runs(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    for file in (path, other):
        file.write_text("{}")
    with protected_inputs():
        with renewed():
            open_file(other).close()
        write_json(other, {})
        open_file(path).close()
        with pytest.raises(RequestError, match="is a file that this command reads"):
            write_json(path, {})
        with pytest.raises(RequestError, match="is a file that this command reads"), staged() as stage:
            stage.remove(path)
        with pytest.raises(RequestError, match="which this command reads"):
            write_folder(tmp_path, lambda folder: None)
    write_json(path, {"written": True})


def test_the_number_of_a_file_that_has_gone_protects_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, other = tmp_path / "gone.json", tmp_path / "other.json"
    gone.write_text("{}")
    with protected_inputs():
        protect(gone)
        gone.rename(other)  # as if the system reused the inode for a new file
        write_json(other, {"written": True})
    assert files.read_bytes(other, 100) == b'{\n  "written": true\n}\n'
