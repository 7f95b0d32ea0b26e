"""Signatures of manifests: who made an artifact, and every way to fake it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import case, cli, exported, refused, tree
from manifest_data import plan_manifest, read_manifest_data, write_manifest_data
from trt_helpers import RTX, needs_rtx

from posexport.artifact.loaded import load_artifact
from posexport.artifact.manifest import PlanManifest, manifest_path, read_manifest, write_manifest
from posexport.artifact.onnx_artifact import write_onnx
from posexport.artifact.plan import check_plan
from posexport.artifact.signing import SIGNATURE, read_signing_key, read_trusted_keys
from posexport.errors import MismatchError, RequestError
from posexport.files import sha256_of
from posexport.jsondata import structure
from posexport.workflows.sweep.job_files import Hashes

pytestmark = pytest.mark.few_inputs

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


def make_keys(folder: Path, name: str, seed: int) -> tuple[Path, Path]:
    """Write a private and a public key in PEM. A seed always gives the same keys."""
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(PEM, PUBLIC))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """The keys of the builder and of somebody else, in a separate folder."""
    folder = tmp_path / "keys"
    folder.mkdir()
    files = {}
    for seed, name in enumerate(("builder", "other"), 1):
        files[name], files[f"{name}.pub"] = make_keys(folder, name, seed)
    return files


@pytest.fixture
def signed(tmp_path: Path, keys: dict[str, Path]) -> Path:
    """An ONNX file with weights beside it, signed by the builder."""
    return write_signed(tmp_path / "block.onnx", "rope", keys["builder"])


def write_signed(path: Path, name: str, key: Path | None) -> Path:
    write_onnx(exported(case(name)), path, external_from=0, key=None if key is None else read_signing_key(key))
    return path


def sig(path: Path) -> Path:
    return path.with_name(path.name + ".json.sig")


def trusted(*keys: Path) -> Any:
    return read_trusted_keys(keys)


def test_a_signed_artifact_is_trusted_and_says_by_whom(signed: Path, keys: dict[str, Path]) -> None:
    key = read_signing_key(keys["builder"])
    artifact = load_artifact(signed, trusted(keys["other.pub"], keys["builder.pub"]))
    assert artifact.signature is not None
    assert (artifact.signature.code, artifact.signature.text) == ("trusted", f"signed by {key.fingerprint}")
    assert read_manifest_data(signed)["signer"] == key.fingerprint
    unchecked = load_artifact(signed).signature
    assert unchecked is not None and unchecked.code == "unchecked"


def test_the_same_key_gives_the_same_bytes(signed: Path, keys: dict[str, Path], tmp_path: Path) -> None:
    before = tree(tmp_path)
    write_signed(signed, "rope", keys["builder"])
    assert tree(tmp_path) == before


def test_an_artifact_that_is_made_again_without_a_key_loses_its_signature(signed: Path) -> None:
    write_signed(signed, "rope", None)
    assert not sig(signed).exists()
    assert "signer" not in read_manifest_data(signed)


def test_a_folder_in_the_place_of_a_signature_keeps_every_file_as_it_was(tmp_path: Path) -> None:
    path = write_signed(tmp_path / "block.onnx", "rope", None)
    sig(path).mkdir()
    before = tree(tmp_path)
    with pytest.raises(RequestError, match="is a folder"):
        write_signed(path, "rope-half", None)
    assert tree(tmp_path) == before


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _edit(path: Path, **over: Any) -> None:
    """Change keys of the manifest and write it in the usual form."""
    write_manifest_data(path, {**read_manifest_data(path), **over})


def _fitting(path: Path) -> None:
    """Other weights with a manifest that fits them. Only the signature shows the change."""
    write_signed(path.with_name("faulty.onnx"), "rope-half", None)
    manifest = read_manifest_data(path.with_name("faulty.onnx"))
    shutil.move(path.with_name("faulty.onnx.data"), path.with_name("faulty.onnx.data.new"))
    data = path.with_name("faulty.onnx").read_bytes()
    path.write_bytes(data)
    shutil.move(path.with_name("faulty.onnx.data.new"), path.with_name("faulty.onnx.data"))
    signer = read_manifest_data(path)["signer"]
    write_manifest_data(path, {**manifest, "file": path.name, "signer": signer})


def _other_key(path: Path) -> None:
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path, manifest, read_signing_key(path.parent / "keys" / "other.pem"))


def _claims(path: Path) -> None:
    """Signed with another key, while the manifest names the builder as its signer."""
    signer = read_manifest_data(path)["signer"]
    _edit(path, signer=signer)
    key = read_signing_key(path.parent / "keys" / "other.pem")
    sig(path).write_bytes(key.sign(path.with_name(path.name + ".json").read_bytes()))


def _of_another_file(path: Path) -> None:
    write_signed(path.with_name("second.onnx"), "rope-half", path.parent / "keys" / "builder.pem")
    shutil.copy(sig(path.with_name("second.onnx")), sig(path))


def _renamed(path: Path) -> None:
    """Another complete artifact of the builder under the name of this one."""
    second = write_onnx(
        exported(case("rope-half")),
        path.with_name("second.onnx"),
        key=read_signing_key(path.parent / "keys" / "builder.pem"),
    )
    assert second.signer
    for ending in ("", ".json", ".json.sig"):
        shutil.move(f"{path.with_name('second.onnx')}{ending}", f"{path}{ending}")


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no signature": (lambda path: sig(path).unlink(), SIGNATURE),
    "no manifest": (lambda path: path.with_name("block.onnx.json").unlink(), SIGNATURE),
    "an empty signature": (lambda path: sig(path).write_bytes(b""), SIGNATURE),
    "a longer signature": (lambda path: sig(path).write_bytes(sig(path).read_bytes() + b"\n"), SIGNATURE),
    "a bit of the signature": (lambda path: _flip(sig(path), 7), SIGNATURE),
    "a signature of zeros": (lambda path: sig(path).write_bytes(bytes(64)), SIGNATURE),
    "a folder as signature": (
        lambda path: sig(path).rename(sig(path).with_suffix(".old")).with_suffix(".sig").mkdir(),
        SIGNATURE,
    ),
    "a bit of the graph": (lambda path: _flip(path, 40), "manifest"),
    "a bit of the weights": (lambda path: _flip(path.with_name("block.onnx.data"), 5000), "manifest"),
    "a space in the manifest": (
        lambda path: path.with_name("block.onnx.json").write_bytes(
            path.with_name("block.onnx.json").read_bytes() + b" "
        ),
        SIGNATURE,
    ),
    "weights and manifest": (_fitting, SIGNATURE),
    "another key": (_other_key, SIGNATURE),
    "another key under this one's name": (_claims, SIGNATURE),
    "the signature of another file": (_of_another_file, SIGNATURE),
    "another signed file under this name": (_renamed, SIGNATURE),
    "a manifest with another key of its own": (lambda path: _edit(path, more=1), SIGNATURE),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_the_builder_did_not_sign_is_refused(signed: Path, keys: dict[str, Path], name: str) -> None:
    attack, code = ATTACKS[name]
    attack(signed)
    with pytest.raises(MismatchError) as caught:
        load_artifact(signed, trusted(keys["builder.pub"]))
    assert caught.value.reason.code == code
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_the_attacks_are_none_where_nothing_is_attacked(signed: Path, keys: dict[str, Path]) -> None:
    load_artifact(signed, trusted(keys["builder.pub"]))


def test_a_plan_is_checked_before_it_is_opened(tmp_path: Path, keys: dict[str, Path]) -> None:
    plan, onnx = tmp_path / "block.plan", tmp_path / "block.onnx"
    plan.write_bytes(b"code" * 300)
    onnx.write_bytes(b"graph")
    manifest = structure(plan_manifest(plan, onnx), PlanManifest)
    write_manifest(plan, manifest, read_signing_key(keys["builder"]))
    keyring = trusted(keys["builder.pub"])
    assert check_plan(plan, keyring).sha256 == sha256_of(plan)
    assert cli("inspect", plan).exit_code == 0
    plan.write_bytes(b"evil" * 300)
    with pytest.raises(MismatchError, match="sha256 differ"):
        check_plan(plan, keyring)
    _edit(plan, sha256=sha256_of(plan))  # now plan and manifest fit each other
    check_plan(plan)
    with pytest.raises(MismatchError, match="was not made by a trusted key"):
        check_plan(plan, keyring)
    for command in ("verify", "bench"):
        result = cli(command, plan, "--trust", keys["builder.pub"])
        assert result.exit_code == (1 if command == "verify" else 2), result.output
        assert "trusted key" in " ".join(result.output.split())
    verdicts = json.loads(cli("verify", plan, "--trust", keys["builder.pub"], "--json").stdout)["verdicts"]
    assert [verdict["runtime"] for verdict in verdicts] == ["tensorrt", "tensorrt-rtx"]  # no other runtime opens plans


def test_verify_fails_what_is_not_signed_in_its_report(signed: Path, keys: dict[str, Path]) -> None:
    options = ("--runtime", "torch", "--runtime", "ort-cpu", "--trust", keys["other.pub"], "--json")
    result = cli("verify", signed, *options)
    assert (result.exit_code, result.stderr) == (1, "")
    for verdict in json.loads(result.stdout)["verdicts"]:
        assert (verdict["state"], verdict["reason_code"]) == ("failed", SIGNATURE)
        assert verdict["signature"] == {"code": "untrusted", "text": verdict["reason"]}
        assert verdict["weights"] is None
    result = cli("verify", signed, "--runtime", "torch", "--trust", keys["builder.pub"])
    assert result.exit_code == 0, result.output
    assert "signed by sha256:" in " ".join(result.stdout.split())


def test_compile_and_package_take_only_what_is_trusted(signed: Path, keys: dict[str, Path], tmp_path: Path) -> None:
    before = tree(tmp_path)
    package = ("package", signed, "--triton", "-o", tmp_path / "models")
    refused(cli(*package, "--trust", keys["other.pub"]), "not one of the trusted keys")
    refused(cli("compile", signed, "--runtime", "tensorrt-rtx", "--trust", keys["other.pub"]))
    refused(cli("bench", signed, "--trust", keys["other.pub"]), "not one of the trusted keys")
    assert tree(tmp_path) == before
    result = cli(*package, "--trust", keys["builder.pub"], "--sign", keys["other"])
    assert result.exit_code == 0, result.output
    packaged = tmp_path / "models" / "block" / "1" / "model.onnx"
    load_artifact(packaged, trusted(keys["other.pub"]))
    with pytest.raises(MismatchError):
        load_artifact(packaged, trusted(keys["builder.pub"]))
    assert cli(*package, "--force").exit_code == 0
    assert not sig(packaged).exists()


@pytest.mark.parametrize("kind", ["--triton", "--genai"])
def test_package_signs_no_file_that_has_no_manifest(
    kind: str, signed: Path, keys: dict[str, Path], tmp_path: Path
) -> None:
    manifest_path(signed).unlink()
    before = tree(tmp_path)
    refused(cli("package", signed, kind, "-o", tmp_path / "out", "--sign", keys["builder"]), "has no manifest to sign")
    assert tree(tmp_path) == before


@needs_rtx
def test_compile_signs_the_plan_of_what_it_trusts(tmp_path: Path, keys: dict[str, Path]) -> None:
    path = write_signed(tmp_path / "block.onnx", "rope", keys["builder"])
    plan = tmp_path / "block.plan"
    options = ("--runtime", RTX, "--profile", "seq=1:2:4", "--trust", keys["builder.pub"], "--sign", keys["other"])
    result = cli("compile", path, *options)
    assert result.exit_code == 0, result.output
    assert read_signing_key(keys["other"]).fingerprint in result.stdout
    artifact = load_artifact(plan, trusted(keys["other.pub"]))
    assert artifact.signature is not None and artifact.signature.code == "trusted"
    with pytest.raises(MismatchError, match="not one of the trusted keys"):
        load_artifact(plan, trusted(keys["builder.pub"]))
    write_signed(path, "rope-half", keys["builder"])
    with pytest.raises(MismatchError, match=r"block\.onnx beside it is not what it was built from"):
        load_artifact(plan, trusted(keys["other.pub"]))


def test_a_job_of_a_sweep_takes_the_signature_along(signed: Path) -> None:
    assert sig(signed) in {file.path for file in Hashes().artifact(signed)}


def test_export_signs_and_inspect_says_who(tmp_path: Path, keys: dict[str, Path]) -> None:
    path = tmp_path / "rope.onnx"
    sizes = ("--hidden-size", "32", "--num-heads", "4")
    result = cli("export", "--encoding", "rope", *sizes, "--sign", keys["builder"], "-o", path)
    assert result.exit_code == 0, result.output
    fingerprint = read_signing_key(keys["builder"]).fingerprint
    assert "signed by" in result.stdout and fingerprint in result.stdout
    load_artifact(path, trusted(keys["builder.pub"]))
    facts = json.loads(cli("inspect", path, "--json").stdout)
    assert facts["signature"] == f"not checked, its manifest names {fingerprint}"


def test_build_signs_and_makes_anew_what_this_key_did_not_sign(tmp_path: Path, keys: dict[str, Path]) -> None:
    project = tmp_path / "posexport.toml"
    project.write_text('[[artifact]]\nname = "one"\nencoding = "none"\nhidden-size = 32\nnum-heads = 4\n')

    def build(*options: str | Path) -> Any:
        return json.loads(cli("build", "--project", project, "--json", *options).stdout)["files"][0]

    path = tmp_path / "artifacts" / "one.onnx"
    assert build()["state"] == "made"
    unsigned = path.read_bytes()
    first = build("--sign", keys["builder"])
    assert (first["state"], first["reason"]) == ("made", "it is not signed")
    load_artifact(path, trusted(keys["builder.pub"]))
    assert path.read_bytes() == unsigned
    assert build("--sign", keys["builder"])["state"] == "up to date"
    assert build()["state"] == "up to date"
    assert build("--sign", keys["other"], "--check")["state"] == "out of date"
    checked = cli("verify", "--project", project, "--runtime", "torch", "--trust", keys["other.pub"], "--json")
    assert checked.exit_code == 1
    codes = {(verdict["runtime"], verdict["reason_code"]) for verdict in json.loads(checked.stdout)["verdicts"]}
    assert codes == {("project", None), ("torch", SIGNATURE)}


def _encrypted(path: Path) -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
    path.write_bytes(key.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"secret")))


def _of_a_curve(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(key.private_bytes(PEM, PKCS8, serialization.NoEncryption()))


def _public_of_a_curve(path: Path) -> None:
    path.write_bytes(ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(PEM, PUBLIC))


BAD_KEYS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "nothing": ("--sign", lambda path: None, "can't be read"),
    "text": ("--sign", lambda path: path.write_text("key"), "not a private key in PEM"),
    "empty": ("--sign", lambda path: path.write_bytes(b""), "not a private key in PEM"),
    "a passphrase": ("--sign", _encrypted, "has a passphrase, which is not supported"),
    "another kind": ("--sign", _of_a_curve, "another kind than Ed25519"),
    "a public key": ("--sign", lambda path: make_keys(path.parent, "k", 3)[1].rename(path), "not a private key in PEM"),
    "no trusted key": ("--trust", lambda path: None, "can't be read"),
    "trusted text": ("--trust", lambda path: path.write_text("key"), "not a public key in PEM"),
    "a folder": ("--trust", lambda path: path.mkdir(), "can't be read"),
    "a trusted private key": ("--trust", lambda path: make_keys(path.parent, "k", 3)[0].rename(path), "a private key"),
    "another kind of trusted key": ("--trust", _public_of_a_curve, "another kind than Ed25519"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_file_that_is_no_key_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    option, make, sentence = BAD_KEYS[name]
    key = tmp_path / "key"
    make(key)
    before = tree(tmp_path)
    command = (
        ("export", "--encoding", "none", "-o", tmp_path / "x.onnx") if option == "--sign" else ("verify", tmp_path)
    )
    refused(cli(*command, option, key), sentence)
    assert tree(tmp_path) == before


def test_keys_do_not_show_in_their_text(keys: dict[str, Path]) -> None:
    assert repr(read_signing_key(keys["builder"])) == "SigningKey()"
    with pytest.raises(RequestError):
        read_signing_key(keys["builder.pub"])


@needs_openssl
def test_openssl_makes_keys_and_reads_signatures(signed: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    def openssl(*arguments: object) -> bytes:
        return subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True).stdout

    manifest = signed.with_name("block.onnx.json")
    openssl(
        *("pkeyutl", "-verify", "-pubin", "-inkey", keys["builder.pub"]),
        *("-rawin", "-in", manifest, "-sigfile", sig(signed)),
    )
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    openssl("genpkey", "-algorithm", "ed25519", "-out", key)
    openssl("pkey", "-in", key, "-pubout", "-out", public)
    der = tmp_path / "key.der"
    openssl("pkey", "-pubin", "-in", public, "-outform", "DER", "-out", der)
    assert read_trusted_keys([public])[0].fingerprint == f"sha256:{sha256_of(der)}"
    write_signed(signed, "rope", key)
    load_artifact(signed, trusted(public))
    write_signed(signed, "rope", None)  # also a signature made by openssl, without posexport
    openssl("pkeyutl", "-sign", "-inkey", key, "-rawin", "-in", manifest, "-out", sig(signed))
    artifact = load_artifact(signed, trusted(public))
    assert artifact.signature is not None and artifact.signature.code == "trusted"
