"""Drawn command lines: each ends with an exit code of the contract, one sentence if refused, and complete files."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import pytest
from fuzz_lines import WORKING, fill, lines
from helpers import cli, small_spec, tree, weights_for

from posexport import files
from posexport.artifact.onnx_artifact import write_onnx
from posexport.cli import positions_command
from posexport.errors import RequestError, RuntimeMissingError
from posexport.export import exporter
from posexport.models import weights
from posexport.processes import FAILED, Worker, failure
from posexport.spec.spec import Spec
from posexport.workflows.sweep import local_jobs, ray

SECONDS = 120
"""The time limit of one line. A line that takes longer counts as a hang."""

LARGEST = 10**6
"""The most weights of a block that is made here."""

RESULTS = (Path(__file__).parents[2] / "docs" / "results" / "angles.json").read_bytes()

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="paths and signals of POSIX"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.few_inputs,
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of all kinds. Engines, other machines and large blocks are replaced by refusals."""
    spec = small_spec("rope", hidden_size=8, num_heads=2)
    fill(tmp_path, lambda path: write_onnx(exporter.export(spec, weights_for(spec)), path), RESULTS)
    seeded = weights.seeded

    def small(spec: Spec, seed: int) -> Any:
        if spec.hidden_size * max(spec.hidden_size, spec.vocab_size or 0) * spec.layers > LARGEST:
            raise RequestError("this block is too large for a test.")
        return seeded(spec, seed)

    def no_machine(*_: object, **__: object) -> Any:
        raise RuntimeMissingError("no other machine is there in a test.")

    def no_network(*_: object, **__: object) -> Any:
        raise OSError(1, "no network is there in a test")

    monkeypatch.setattr(weights, "seeded", small)
    monkeypatch.setattr(Worker, "start", lambda worker: None)
    monkeypatch.setattr(Worker, "ask", lambda *_: failure(FAILED, "no engine runs in this test"))
    monkeypatch.setattr(local_jobs.JobRunner, "_execute", lambda *_: local_jobs._End(code=2, error="no job runs here"))
    monkeypatch.setattr(ray, "connect", no_machine)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise AssertionError if the block takes longer than `seconds`."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault(words: Sequence[str]) -> str | None:
    """Run a command line. Return what is wrong with its end, or None."""
    before = tree(Path.cwd())
    with limited(SECONDS):
        result = cli(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {str(result.exception)[:200]}"
    if result.exit_code not in (0, 1, 2, 3):
        return f"exit code {result.exit_code}"
    if "Traceback" in result.output:
        return "a traceback"
    lines = result.stderr.splitlines()
    if result.exit_code == 2:
        sentences = [line for line in lines if not line.startswith(("Warning: ", "still running"))]
        named = sentences if words[0] in ("verify", "report") else sentences[-1:]  # these have a sentence for each file
        if not named or not all(line.startswith("Error: ") and line.endswith((".", "?")) for line in named):
            return f"no sentence: {result.stderr[:300]!r}"
    return _broken_file(before)


def _broken_file(before: dict[str, bytes]) -> str | None:
    """A new or changed file that is incomplete or has a temporary name, or None."""
    for name, data in tree(Path.cwd()).items():
        if before.get(name) == data:
            continue
        path = Path(name)
        try:
            if path.suffix == ".tmp":
                return f"{name} is left"
            if path.suffix == ".onnx":
                onnx.checker.check_model(onnx.load(path))
            if path.suffix == ".json":
                json.loads(data)
            if path.suffix == ".npz":
                zipfile.ZipFile(path).testzip()
        except Exception as error:
            return f"{name} is not whole ({type(error).__name__})"
    return None


def faults(drawn: Iterator[list[str]]) -> list[str]:
    """The lines with a fault, and their faults. After each line, the folder is restored."""
    found, before = [], tree(Path.cwd())
    for words in drawn:
        why = fault(words)
        if why is not None:
            found.append(f"{words!r}: {why}")
        for name, data in tree(Path.cwd()).items():
            if name not in before:
                Path(name).unlink()
            elif data != before[name]:
                Path(name).write_bytes(before[name])
    return found


@pytest.mark.slow
def test_the_lines_that_are_changed_work(place: Path) -> None:
    """These lines must work, so that a drawn line fails only because of its own change."""
    for name, words in WORKING.items():
        result = cli(name, *words)
        stopped = "no engine runs in this test" in result.output
        assert result.exit_code in (0, 1, 3) or stopped, (name, result.output)


def test_a_few_drawn_lines(place: Path) -> None:
    assert faults(lines(70, seed=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_drawn_lines(place: Path, seed: int) -> None:
    """Ten times 140 lines. `POSEXPORT_FUZZ_SEED` selects other seeds."""
    assert faults(lines(140, seed=seed + 1000 * int(os.environ.get("POSEXPORT_FUZZ_SEED", "0")))) == []


def raises() -> None:
    raise ValueError("embedded null byte")


def leaves_a_file() -> None:
    Path(".p.npz.0123.tmp").write_bytes(b"half")


def writes_half() -> None:
    Path("half.json").write_text('{"a": ')


def ends_with_another_code() -> None:
    raise SystemExit(70)


def says_two_sentences() -> None:
    sys.stderr.write("Error: one\nand another\n")
    raise SystemExit(2)


@pytest.mark.parametrize("wrong", [raises, leaves_a_file, writes_half, ends_with_another_code, says_two_sentences])
def test_a_planted_fault_is_found(wrong: Callable[[], None], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = files.check_output

    def check(*arguments: Any) -> None:
        checked(*arguments)
        wrong()

    monkeypatch.setattr(positions_command, "check_output", check)
    drawn = [words for words in lines(70, seed=1) if words[0] == "positions"]
    assert faults(iter([*drawn, ["positions", *WORKING["positions"]]]))


def test_a_line_that_hangs_is_a_fault() -> None:
    def hang() -> None:
        while True:
            pass

    with pytest.raises(AssertionError, match="longer than 1 s"), limited(1):
        hang()
