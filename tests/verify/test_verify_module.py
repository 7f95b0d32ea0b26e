"""`posexport verify --module`: a file compared with the user's torch module in float64, within the module's rounding
errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import user_modules
from helpers import cli, refused

pytestmark = pytest.mark.few_inputs

FILE = Path(user_modules.__file__)

HERE = ("--runtime", "ort-cpu")

MODEL = """
import torch
from user_modules import Own

class Model(Own):
    scale = 1.0

    def forward(self, x, position_ids):
        return super().forward(x, position_ids) * self.scale

class Near(Model):
    scale = 1.001

class Other(Model):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids.flip(1))

class Short(Model):
    def forward(self, x, position_ids):
        if x.shape[1] > 64:
            raise ValueError("too long")
        return super().forward(x, position_ids)

class Broken(Model):
    def forward(self, x, position_ids):
        raise ValueError("no luck")

class Renamed(Model):
    def forward(self, q, position_ids):
        return super().forward(q, position_ids)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of `Own`, with its manifest."""
    path = tmp_path_factory.mktemp("exported") / "own.onnx"
    assert cli("export", "--module", f"{FILE}:Own", "-o", path, "--form", "native").exit_code == 0
    return path


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with slightly different modules, in the working folder of every command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FILE.parent))
    Path("model.py").write_text(MODEL)


def verdict(path: Path, name: str, *options: str) -> tuple[int, Any]:
    result = cli("verify", path, "--module", f"model.py:{name}", *HERE, *options, "--json")
    (only,) = json.loads(result.stdout)["verdicts"]
    return result.exit_code, only


def test_an_export_is_its_module(exported: Path) -> None:
    code, found = verdict(exported, "Model")
    assert (code, found["state"], found["reference"]) == (0, "passed", "model.py:Model")
    assert found["cases"] > 10
    assert 0 < found["worst"]["torch_error"] < 1e-5
    assert any(note.startswith("both in float64 differ by") for note in found["notes"])
    assert found["weights"]["code"] == "as-manifest"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Near", "Other"])
def test_another_module_is_another_function(name: str, exported: Path) -> None:
    """The modules differ by a thousandth, or count positions from the other end."""
    code, found = verdict(exported, name)
    assert (code, found["state"], found["reason_code"]) == (1, "failed", "over-limit")
    assert (
        found["where"]
        == "the file and the module are different functions in float64, so the graph is wrong, not the runtime"
    )


def test_a_changed_weight_is_found(exported: Path) -> None:
    model = onnx.load(exported)
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "out.bias")
    array = onnx.numpy_helper.to_array(weight).copy()
    array[3] += 1e-3
    weight.CopyFrom(onnx.numpy_helper.from_array(array, "out.bias"))
    onnx.save(model, "changed.onnx")
    code, found = verdict(Path("changed.onnx"), "Model")
    assert (code, found["state"]) == (1, "failed")


@pytest.mark.slow
def test_lengths_that_the_module_refuses_are_not_tried(exported: Path) -> None:
    code, found = verdict(exported, "Short")
    assert (code, found["state"]) == (0, "passed")
    notes = [note for note in found["notes"] if note.startswith("not tried: ")]
    assert notes
    assert all("ValueError: too long" in note or note.endswith("more of the kind") for note in notes)


def test_the_users_own_inputs(exported: Path) -> None:
    np.savez("mine.npz", x=np.ones((2, 7, 16), np.float32), position_ids=np.tile(np.arange(7), (2, 1)))
    code, found = verdict(exported, "Model", "--inputs", "mine.npz")
    assert (code, found["state"], found["cases"]) == (0, "passed", 1)


WRONG = {
    "an error of its own": (
        "Broken",
        "running 'model.py:Broken' failed at line 26 of 'model.py': ValueError: no luck.",
    ),
    "no such name": ("Nothing", "'model.py' has no 'Nothing': it has "),
    "other names": (
        "Renamed",
        "'model.py:Renamed' takes 'q', 'position_ids', and the file has the inputs 'x', 'position_ids': both must be",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_in_the_module_is_one_sentence(name: str, exported: Path) -> None:
    module, said = WRONG[name]
    result = cli("verify", exported, "--module", f"model.py:{module}", *HERE)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


REFUSED = {
    "no file": (["--module", "nothing.py:Model"], "module 'nothing.py:Model' can't be read, 'nothing.py' is not there"),
    "no reference": (["--module", "model.py"], "module is 'model.py': give a file and a name in it"),
    "two truths": (["--module", "model.py:Model", "--against", "x.onnx"], "both --against and --module were given"),
    "a module and a checkpoint": (["--module", "model.py:Model", "--from", "x"], "both --module and --from were given"),
    "a file and a checkpoint": (["--against", "x.onnx", "--from", "x"], "both --against and --from were given"),
    "a file and weights": (["--against", "x.onnx", "--weights", "x"], "both --against and --weights were given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, exported: Path) -> None:
    options, said = REFUSED[name]
    refused(cli("verify", exported, *HERE, *options), said)


def test_a_module_without_files() -> None:
    refused(cli("verify", "--module", "model.py:Model"), "--module was given without files")


def test_properties_need_a_spec(exported: Path) -> None:
    result = cli("verify", exported, "--module", "model.py:Model", "--properties")
    assert result.exit_code == 2
    assert "is verified without a spec, and --properties needs one" in result.stderr


def test_an_export_without_its_module_is_held_against_itself(exported: Path) -> None:
    result = cli("verify", exported, *HERE, "--json")
    (found,) = json.loads(result.stdout)["verdicts"]
    assert (result.exit_code, found["state"], found["reference"]) == (0, "passed", "the file itself")
