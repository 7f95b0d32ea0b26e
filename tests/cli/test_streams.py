"""Commands whose standard streams are closed, full or not read: at most one sentence, and an exit code of the
contract."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posexport.cli import COMMANDS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")

ENDS = {
    "stdout closed": (">&-", 2),
    "stdout full": (">/dev/full", 2),
    "stdout only to be read": ("1</dev/null", 2),
    "stderr closed": ("2>&-", 0),
    "stderr full": ("2>/dev/full", 0),
    "stdin closed": ("<&-", 0),
    "both closed": (">&- 2>&-", 2),
    "both full": (">/dev/full 2>/dev/full", 2),
    "all closed": ("<&- >&- 2>&-", 2),
    "nobody reads": ("| true", 141),
    "nobody reads either": ("2>&1 | true", 141),
}
WRONG = {
    "stdout closed",
    "stderr closed",
    "stderr full",
    "both closed",
    "both full",
    "all closed",
    "nobody reads either",
}
"""States of the streams that are also tested with a wrong request."""


def shell(arguments: str, end: str, folder: Path) -> tuple[int, str]:
    """The exit code of a command whose streams are in the state `end`, and its stderr (empty if it is closed)."""
    line = f"{sys.executable} -P -m posexport {arguments} {ENDS[end][0]}"
    waits = 'trap "" PIPE; ' if "|" in line else ""
    script = f"{waits}{line}; exit ${{PIPESTATUS[0]}}"
    # output that exceeds the pipe's buffer, or comes after the reader has ended, can't be written
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def check(arguments: str, end: str, folder: Path, code: int) -> None:
    returned, stderr = shell(arguments, end, folder)
    allowed = {code, 0} if code == 141 else {code}  # 0 if everything fit into the pipe before the reader ended
    assert returned in allowed, (returned, stderr)
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr
    assert stderr.count("\n") <= 1, stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", ENDS)
def test_a_command_whose_streams_end(end: str, tmp_path: Path) -> None:
    check("list --json", end, tmp_path, ENDS[end][1])


@pytest.mark.parametrize("end", ["stdout closed", "stdout full", "nobody reads either"])
def test_help_whose_streams_end(end: str, tmp_path: Path) -> None:
    check("--help", end, tmp_path, ENDS[end][1])


@pytest.mark.parametrize("end", sorted(WRONG))
def test_an_error_that_nobody_can_read_keeps_its_code(end: str, tmp_path: Path) -> None:
    check("lost", end, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_whose_streams_end(command: str, end: str, tmp_path: Path) -> None:
    check(f"{command} --help", end, tmp_path, ENDS[end][1])
    check(f"{command} --no-such-option", end, tmp_path, 2)


def test_a_file_does_not_take_the_number_of_a_closed_stdout(tmp_path: Path) -> None:
    """Otherwise the output of an engine would be written into the file."""
    code = (
        "import os, sys\nfrom posexport.cli import main\nfrom posexport import files\n"
        "fill = files.HashingFile.write\n"
        "def write(file, data):\n"
        "    assert file._file.fileno() > 2, file._file.fileno()\n"
        "    fill(file, data)\n"
        "files.HashingFile.write = write\nmain()\n"
    )
    words = f"{sys.executable} -P -c '{code.replace(chr(39), chr(34))}' positions --grid 2x2 -o p.npz <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, env={**os.environ}, check=False, timeout=120)
    assert (tmp_path / "p.npz").exists(), done.returncode
    assert done.returncode == 2, "the file is there, what should have been printed is not"


@pytest.mark.parametrize(
    "arguments", ["inspect a.onnx", "inspect ../a.onnx", "verify /a.onnx", "export --encoding rope"]
)
def test_a_working_folder_that_was_removed_is_named(arguments: str, tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -P -m posexport {arguments}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "Error: the working folder no longer exists: change to another folder.\n"
