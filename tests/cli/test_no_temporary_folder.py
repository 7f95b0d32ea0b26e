"""There is no usable folder for temporary files. Commands that need one say so in one sentence; the others work."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import cli

from posexport import temporary
from posexport.errors import RequestError

pytestmark = pytest.mark.few_inputs

BLOCK = ("--encoding", "rope", "--hidden-size", "8", "--num-heads", "2")
SAID = ("No usable temporary directory found in ['/no/such/folder']", "set TMPDIR to a folder with free space.")
COMMANDS: dict[str, tuple[str, ...]] = {
    "export": ("export", *BLOCK, "-o", "new.onnx"),
    "build": ("build", "--project", "posexport.toml"),
    "verify": ("verify", "block.onnx", "--runtime", "ort-cpu"),
    "matrix": ("matrix", "--encoding", "rope", "--runtime", "ort-cpu", "--no-picture", "-o", "m"),
    "bench": ("bench", "block.onnx", "--runtime", "ort-cpu", "--shape", "seq=4"),
    "tune": ("tune", *BLOCK, "--for", "ort-cpu", "--scenario", "prefill:4", "--form", "native", "-o", "t.onnx"),
    "sweep": ("sweep", "--job", "verify artifact=block.onnx runtime=ort-cpu", "-o", "s"),
}


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("block") / "block.onnx"
    assert cli("export", *BLOCK, "-o", path).exit_code == 0
    return path


@pytest.fixture
def nowhere(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside an artifact in a process that finds no folder for temporary files."""
    monkeypatch.chdir(block.parent)
    Path("posexport.toml").write_text('[[artifact]]\nname = "one"\nencoding = "rope"\nhidden-size = 8\nnum-heads = 2\n')
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such/folder"])


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_needs_one_says_so(command: str) -> None:
    result = cli(*COMMANDS[command])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    for part in SAID:
        assert part in result.stderr


@pytest.mark.usefixtures("nowhere")
def test_others_work_without() -> None:
    assert cli("inspect", "block.onnx").exit_code == 0
    assert cli("list").exit_code == 0
    assert cli("positions", "--grid", "2x3", "-o", "p.npz").exit_code == 0


@pytest.mark.usefixtures("nowhere")
def test_from_python_too() -> None:
    for make in (temporary.usual_parent, temporary.folder):
        with pytest.raises(RequestError, match="set TMPDIR"):
            make()


@pytest.mark.slow
def test_before_torch_asks_for_one(tmp_path: Path) -> None:
    """This runs in a new process, because in this one torch may have asked for the folder already."""
    code = (
        "import sys, tempfile\ntempfile._candidate_tempdir_list = lambda: ['/no/such/folder']\n"
        "from posexport.cli import main\nmain()\n"
    )
    command = [sys.executable, "-P", "-c", code, *COMMANDS["export"]]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert found.stderr == f"Error: {SAID[0]}: {SAID[1]}\n"
    assert list(tmp_path.iterdir()) == []
