"""ONNX Runtime's telemetry is off in every process of posexport. It writes nothing below TMPDIR and the home folder.

The link at $TMPDIR/.ses is the attack: with telemetry, ONNX Runtime writes through it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import numpy as np, onnx
from onnx import helper
value = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), "relu.onnx")
"""
BY_POSEXPORT = f"""{MODEL}
from pathlib import Path
from posexport.runtimes import ort
ort.load(Path("relu.onnx"), {{}}).run({{"x": np.ones(1, "float32")}})
"""
WITHOUT_POSEXPORT = f"""{MODEL}
import onnxruntime
onnxruntime.InferenceSession("relu.onnx").run(None, {{"x": np.ones(1, "float32")}})
"""


class Place:
    """A home and a TMPDIR with a link planted in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.temporary = folder, folder / "home", folder / "tmp"
        self.target = folder / "target"
        self.target.write_text("kept")
        for made in (self.home, self.temporary):
            made.mkdir()
        (self.temporary / ".ses").symlink_to(self.target)

    def run(self, *arguments: str) -> None:
        """Run Python with these arguments to its end."""
        silencers = ("ORT_", "CI", "GITHUB_ACTIONS", "TF_BUILD", "XDG_")  # telemetry is off in a CI as well
        environment = {name: value for name, value in os.environ.items() if not name.startswith(silencers)}
        environment |= {"HOME": str(self.home), "TMPDIR": str(self.temporary)}
        subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, check=True, timeout=300, capture_output=True
        )

    def traces(self) -> list[str]:
        """The traces of telemetry: a changed target, or files of ONNX Runtime below the home folder."""
        written = [str(path.relative_to(self.folder)) for path in self.home.rglob("*") if "Microsoft" in path.parts]
        return written + (["target"] if self.target.read_text() != "kept" else [])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_session_of_posexport_leaves_no_trace(place: Place) -> None:
    place.run("-c", BY_POSEXPORT)
    assert place.traces() == []
    assert list(place.home.iterdir()) == []


def test_without_posexport_the_same_session_leaves_traces(place: Place) -> None:
    place.run("-c", WITHOUT_POSEXPORT)
    if not place.traces():
        pytest.skip("this build of ONNX Runtime collects nothing")
    assert "target" in place.traces()


@pytest.mark.slow
def test_workers_of_verify_leave_no_trace(place: Place) -> None:
    place.run("-m", "posexport", "export", "--encoding", "rope", "--hidden-size", "16", "--num-heads", "2")
    place.run("-m", "posexport", "verify", "rope.onnx", "--runtime", "ort-cpu", "--reach", "seq=16")
    assert place.traces() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "bench rope.onnx --runtime ort-cpu --shape batch=1,seq=8",
        "tune --encoding rope --hidden-size 16 --num-heads 2 --for ort-cpu --scenario prefill:8 -o tuned.onnx",
        "matrix --encoding rope --form native --dtype fp32 --runtime ort-cpu --output matrix",
    ],
)
def test_workers_of_other_commands_leave_no_trace(command: str, place: Place) -> None:
    place.run("-m", "posexport", "export", "--encoding", "rope", "--hidden-size", "16", "--num-heads", "2")
    place.run("-m", "posexport", *command.split())
    assert place.traces() == []
