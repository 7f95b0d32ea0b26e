"""`posexport export --module`: the user's own torch module, from its file to an ONNX file with a manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import user_modules
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from helpers import cli, refused, tree

from posexport.artifact.signing import read_trusted_keys

pytestmark = pytest.mark.few_inputs

FILE = Path(user_modules.__file__)

MODEL = """
import torch
from torch import nn

print("said while loading")

class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, y):
        return x @ self.weight + y

class Heads(Scores):
    output_names = ["scores"]

    def example_inputs(self):
        return torch.ones(2, 3, 4), torch.ones(1)

class Broken(Heads):
    def forward(self, x, y):
        if x.sum() > 0:
            return y
        return x @ y
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with modules in the working folder of every command."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)


def test_a_module_of_posexports_operators() -> None:
    result = cli("export", "--module", f"{FILE}:Own", "-o", "own.onnx", "--form", "contrib", "--target", "ort")
    assert result.exit_code == 0, result.stderr
    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[1:] if not line.startswith("  input"))
    assert facts["attention"] == "1 by posexport's operators"
    assert facts["form"] == "contrib, opset 18"
    assert "input x             fp32 ['x_axis0', 'x_axis1', 16]" in result.stdout
    assert result.stderr == ""
    manifest = json.loads(Path("own.onnx.json").read_text())
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert manifest["module"] == {"name": "Own", "file": FILE.name, "sha256": digest}
    assert (manifest["form"], manifest["target"]) == ("contrib", "ort")
    assert "spec" not in manifest
    assert "GroupQueryAttention" in {node.op_type for node in onnx.load("own.onnx").graph.node}


def test_a_module_without_attention_is_written_and_it_is_said() -> None:
    result = cli("export", "--module", "model.py:Heads", "--form", "native")
    assert result.exit_code == 0
    assert "wrote Heads.onnx" in result.stdout
    assert "attention      none found" in result.stdout
    assert "said while loading\n" in result.stderr
    assert (
        "Warning: no attention was found in model.py:Heads: its graph is as torch's exporter writes it.\n"
        in result.stderr
    )
    assert (
        "Warning: y[0] can't vary, because the example has the size 1 there: give one with larger sizes"
        in result.stderr
    )
    assert [output.name for output in onnx.load("Heads.onnx").graph.output] == ["scores"]


def test_as_json_with_an_example_from_a_file_and_a_key() -> None:
    private = Ed25519PrivateKey.from_private_bytes(bytes(32))
    Path("key.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    Path("public.pem").write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    np.savez("example.npz", y=np.ones(4, np.float32), x=np.ones((2, 3, 4), np.float32))
    command = ("export", "--module", "model.py:Scores", "--example", "example.npz", "-o", "a.onnx", "--sign", "key.pem")
    result = cli(*command, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["attentions"], data["operators"]) == ([], 0)
    (key,) = read_trusted_keys([Path("public.pem")])
    assert data["signer"] == key.fingerprint
    assert {name for name in data if name not in ("attentions", "operators")} == {
        *json.loads(Path("a.onnx.json").read_text())
    }
    assert [tensor["name"] for tensor in data["inputs"]] == ["x", "y"]
    session = onnxruntime.InferenceSession("a.onnx")
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    weight = onnx.numpy_helper.to_array(onnx.load("a.onnx").graph.initializer[0])
    (made,) = session.run(None, {"x": x, "y": np.ones(4, np.float32)})
    np.testing.assert_allclose(made, x @ weight + 1, rtol=1e-6)


def test_the_same_command_gives_the_same_bytes() -> None:
    for name in ("one", "two"):
        Path(name).mkdir()
        assert cli("export", "--module", "model.py:Heads", "-o", f"{name}/same.onnx").exit_code == 0
    assert tree(Path("one")) == tree(Path("two"))


REFUSED = {
    "an option of a block": (
        ["--encoding", "rope"],
        "--encoding was given with --module: the module decides it, so drop it.",
    ),
    "a size": (["--hidden-size", "64"], "--hidden-size was given with --module"),
    "a fixed length": (["--seq", "4"], "--seq was given with --module"),
    "a parameter": (["--set", "theta=3"], "--set was given with --module"),
    "weights": (["--weights", "w.safetensors"], "--weights was given with --module"),
    "a checkpoint": (["--from", "folder"], "--from was given with --module"),
    "a config": (["--config", "c.toml"], "--config was given with --module"),
    "a preset": (["--preset", "bert-base"], "--preset was given with --module"),
    "a form": (["--form", "fast"], "unknown form 'fast'"),
    "an opset": (["--form", "native", "--opset", "18"], "--opset is 18: native is written in opsets 23 to 24."),
    "an opset that is no number": (["--opset", "x"], "--opset is 'x': it must be a whole number"),
    "another ending": (["-o", "out.plan"], ".onnx"),
    "an example that is not there": (["--example", "no.npz"], "--example 'no.npz' can't be read"),
    "an example that is none": (["--example", "model.py"], "--example 'model.py' are not a .npz file of plain arrays"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    options, said = REFUSED[name]
    before = tree(Path())
    result = cli("export", "--module", "model.py:Heads", *options)
    result.stderr_bytes = result.stderr_bytes.replace(b"said while loading\n", b"")  # type: ignore[union-attr]
    refused(result, said)
    assert tree(Path()) == before


MODULES = {
    "no example": ("Scores", "'model.py:Scores' has no example inputs: write a function example_inputs"),
    "no such name": ("Score", "'model.py' has no 'Score': it has Scores, Heads, Broken."),
    "a branch on values": (
        "Broken",
        "exporting 'model.py:Broken' failed at line 23 of 'model.py': the module branches on the values of a tensor",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_goes_wrong_in_a_module(name: str) -> None:
    module, said = MODULES[name]
    before = tree(Path())
    result = cli("export", "--module", f"model.py:{module}")
    result.stderr_bytes = result.stderr_bytes.replace(b"said while loading\n", b"")  # type: ignore[union-attr]
    refused(result, said)
    assert tree(Path()) == before


def test_an_example_that_does_not_fit() -> None:
    np.savez("example.npz", x=np.ones((2, 3, 4), np.float32), z=np.ones(4, np.float32))
    result = cli("export", "--module", "model.py:Scores", "--example", "example.npz")
    result.stderr_bytes = result.stderr_bytes.replace(b"said while loading\n", b"")  # type: ignore[union-attr]
    refused(result, "example inputs don't fit forward(x, y): ")


def test_an_example_without_a_module() -> None:
    refused(cli("export", "--encoding", "rope", "--example", "x.npz"), "--example was given without --module")


def test_nothing_runs_a_file_without_the_option() -> None:
    """The file makes a mark when it runs. Commands without the option must not make the mark."""
    Path("mark.py").write_text("open('mark', 'w').close()\n")
    for command in (
        ("export", "mark.py"),
        ("verify", "mark.py"),
        ("inspect", "mark.py"),
        ("export", "--from", "mark.py"),
    ):
        assert cli(*command).exit_code == 2
        assert not Path("mark").exists()
    cli("export", "--module", "mark.py:x")
    assert Path("mark").exists()
