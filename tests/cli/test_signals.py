"""A command that gets a signal ends with 128 + its number. Every file is complete or absent, and nothing else is left.

SIGKILL is the exception: the next run of the same command removes what it leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import psutil
import pytest
from helpers import cli, tree

from posexport.temporary import ENDING_SIGNALS

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"), pytest.mark.few_inputs]

SCRIPT = Path(__file__).parents[1] / "support" / "signalled.py"
HERE = (Path(__file__).parents[2] / "docs" / "results" / "angles.json").read_bytes()
SIZES = ("--hidden-size", "8", "--num-heads", "2")
PROJECT = '[[artifact]]\nname = "one"\nencoding = "rope"\nhidden-size = 8\nnum-heads = 2\n'
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

WRITING = {
    "a file has its name": ("posexport.temporary", "_named", 2, "after"),
    "a file is made": ("posexport.temporary", "Temporary.lock", 2, "before"),
    "a file is locked": ("posexport.temporary", "Temporary.lock", 2, "after"),
    "half of a file is written": ("posexport.files", "HashingFile.write", 1, "after"),
    "all files are written": ("os", "fsync", 1, "after"),
    "a file is renamed": ("pathlib", "Path.replace", 1, "after"),
    "a file is kept": ("posexport.temporary", "Temporary.keep", 2, "before"),
    "everything is done": ("posexport.cli", "remove_since", 1, "before"),
}
"""Moments of a command that writes files: module, function, number of the call, and before or after it. The first file
of a command only tests whether its output can be written."""

WORKING = {
    "a process starts": ("posexport.processes", "child_environment", 1, "after"),
    "a process is asked": ("posexport.processes", "Worker.ask", 1, "before"),
    "the first answer": ("posexport.processes", "Worker.ask", 1, "after"),
    "a process is ended": ("posexport.processes", "Worker._release", 2, "before"),
}
"""Moments of a command with engines in child processes."""


class Place:
    """A working folder and a folder for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.work, self.temporary = folder / "work", folder / "temporary"
        self.work.mkdir()
        self.temporary.mkdir()

    def run(self, words: Sequence[str | Path], new_group: bool = False) -> subprocess.Popen[bytes]:
        """Start a Python process in the working folder."""
        return subprocess.Popen(
            [sys.executable, "-P", *map(str, words)],
            cwd=self.work,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=new_group,
        )

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Wait until the process and all its children have ended. Return its exit code and its stderr."""
        stderr = process.communicate(timeout=300)[1].decode()
        until = time.monotonic() + 60
        while (living := self.processes()) and time.monotonic() < until:
            psutil.wait_procs(living, timeout=1)
        assert not self.processes()
        return process.returncode, stderr

    def processes(self) -> list[psutil.Process]:
        """Every process that uses this folder for temporary files, except zombies."""
        found = []
        for process in psutil.process_iter():
            try:
                folder = process.environ().get("TMPDIR", "")
                ended = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if not ended and Path(folder).is_relative_to(self.temporary):
                found.append(process)
        return found

    def left(self) -> list[str]:
        """Temporary files and files with temporary names that are left."""
        hidden = [path for path in self.work.rglob("*") if path.name.endswith(".tmp") or "programs-" in path.name]
        return sorted(map(str, [*self.temporary.iterdir(), *hidden]))


def check(
    place: Place,
    moment: tuple[str, str, int, str],
    number: signal.Signals,
    command: Sequence[str | Path],
    whole: Mapping[str, bytes] | None,
    allowed: Sequence[int] = (0,),
) -> None:
    """Run a command that gets a signal, then run it again without one.

    The second run may end with one of the codes in `allowed`. Its files must be `whole`, byte for byte (None: any
    content).
    """
    before = tree(place.work)
    module, name, call, when = moment
    code, stderr = place.finish(place.run([SCRIPT, module, name, str(call), str(int(number)), when, "--", *command]))
    assert "Traceback" not in stderr, stderr
    assert code == (-number if number == signal.SIGKILL else 128 + number), stderr
    if number != signal.SIGKILL:
        assert place.left() == []
    files = {name: data for name, data in tree(place.work).items() if name not in before}
    if whole is not None:
        assert {name: data for name, data in files.items() if not name.endswith(".tmp")}.items() <= whole.items()
    code, stderr = place.finish(place.run(["-m", "posexport", *command]))
    assert code in allowed, stderr
    assert place.left() == []
    if whole is not None:
        assert {name: data for name, data in tree(place.work).items() if name not in before} == whole


POSITIONS = ("positions", "--grid", "2x3", "-o", "p.npz")


@pytest.fixture(scope="module")
def positions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("positions")
    assert cli(*POSITIONS[:-1], folder / "p.npz").exit_code == 0
    return tree(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", WRITING)
def test_a_signal_while_a_file_is_written(moment: str, tmp_path: Path, positions: dict[str, bytes]) -> None:
    at = list(WRITING).index(moment)
    check(Place(tmp_path), WRITING[moment], SIGNALS[at % 4], POSITIONS, positions)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [number for number in ENDING_SIGNALS if number not in SIGNALS])
def test_a_signal_from_outside_is_named(number: signal.Signals, tmp_path: Path) -> None:
    """The signals of timers count too. They are not reported as Ctrl-C."""
    place, (module, name, call, when) = Place(tmp_path), next(iter(WRITING.values()))
    code, stderr = place.finish(place.run([SCRIPT, module, name, str(call), str(int(number)), when, "--", *POSITIONS]))
    assert code == 128 + number
    assert stderr.strip() == f"Error: ended by {number.name}: no file is half-written; files written before are kept."
    assert place.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", WRITING)
def test_every_signal_while_a_file_is_written(
    moment: str, number: signal.Signals, tmp_path: Path, positions: dict[str, bytes]
) -> None:
    check(Place(tmp_path), WRITING[moment], number, POSITIONS, positions)


VERIFY = ("verify", "block.onnx", "--runtime", "ort-cpu", "--junit", "r.xml")


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("block") / "block.onnx"
    assert cli("export", "--encoding", "rope", *SIZES, "-o", path).exit_code == 0
    return path


def copied(block: Path, folder: Path) -> Place:
    """A place with a copy of an artifact."""
    place = Place(folder)
    for path in (block, block.with_name(f"{block.name}.json")):
        shutil.copy(path, place.work)
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"), [("a process is asked", signal.SIGTERM), ("the first answer", signal.SIGKILL)]
)
def test_a_signal_while_engines_work(moment: str, number: signal.Signals, tmp_path: Path, block: Path) -> None:
    check(copied(block, tmp_path), WORKING[moment], number, VERIFY, None)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", WORKING)
def test_every_signal_while_engines_work(moment: str, number: signal.Signals, tmp_path: Path, block: Path) -> None:
    check(copied(block, tmp_path), WORKING[moment], number, VERIFY, None)


ROPE = ("--encoding", "rope", *SIZES)
COMMANDS: dict[str, tuple[str, ...]] = {
    "export": ("export", *ROPE, "-o", "new.onnx"),
    "build": ("build", "--project", "posexport.toml"),
    "matrix": (
        *("matrix", "--encoding", "rope", "--form", "native", "--dtype", "fp32", "--mode", "prefill"),
        *("--runtime", "ort-cpu", "--no-picture", "-o", "m"),
    ),
    "bench": (
        *("bench", "block.onnx", "--runtime", "ort-cpu", "--shape", "seq=4", "--rounds", "3", "--warmup", "1"),
        *("--processes", "1", "--seconds", "1"),
    ),
    "tune": (
        *("tune", *ROPE, "--for", "ort-cpu", "--scenario", "prefill:4", "--form", "native", "-o", "t.onnx"),
        *("--save", "t.json"),
    ),
    "plot": ("plot", "rope", "-o", "p.png"),
    "report": ("report", "here.json", "-o", "r.html"),
    "package": ("package", "block.onnx", "--triton", "-o", "repository"),
    "sweep": ("sweep", "--job", "verify artifact=block.onnx runtime=ort-cpu", "-o", "s"),
}
"""The lines of further commands that get signals. Some may exit with 1 or 3, which does not matter here."""

MOMENTS = {
    "a temporary folder": ("posexport.temporary", "folder", 1, "after"),
    "a second process": ("posexport.processes", "child_environment", 2, "after"),
    "the second answer": ("posexport.processes", "Worker.ask", 2, "after"),
    "a job ends": ("posexport.workflows.sweep.local_jobs", "_judge", 1, "before"),
    "a file is written": ("posexport.files", "HashingFile.write", 1, "after"),
    "the last renames": ("posexport.files", "_move", 1, "before"),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_while_a_command_works(
    command: str, moment: str, number: signal.Signals, tmp_path: Path, block: Path
) -> None:
    """A command that never reaches the moment ends normally."""
    place = copied(block, tmp_path)
    (place.work / "here.json").write_bytes(HERE)
    (place.work / "posexport.toml").write_text(PROJECT)
    module, name, call, when = MOMENTS[moment]
    words: tuple[str | Path, ...] = (SCRIPT, module, name, str(call), str(int(number)), when, "--", *COMMANDS[command])
    code, stderr = place.finish(place.run(words))
    assert "Traceback" not in stderr
    assert code in (0, 1, 3, -number, 128 + number), stderr
    if code == -signal.SIGKILL:
        code, stderr = place.finish(place.run(["-m", "posexport", *COMMANDS[command]]))
        assert code in (0, 1, 3), stderr
    assert place.left() == []
    for path in place.work.rglob("*.json"):
        json.loads(path.read_bytes())
    for path in place.work.rglob("*.onnx"):
        onnx.checker.check_model(onnx.load(path))


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_whole_group_while_workers_of_workers_work(
    number: signal.Signals, tmp_path: Path, block: Path
) -> None:
    """A terminal, or a CI that ends a job, sends the signal to the group. The workers of the matrix have workers
    themselves."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and commands keep it ignored")
    place = copied(block, tmp_path)
    process = place.run(["-m", "posexport", *COMMANDS["matrix"]], new_group=True)
    while not list(place.temporary.glob("posexport-*/posexport-*/stderr")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, number)
    code, stderr = place.finish(process)
    assert "Traceback" not in stderr
    assert code == (-number if number == signal.SIGKILL else 128 + number), stderr
    if number == signal.SIGKILL:
        assert place.finish(place.run(["-m", "posexport", *COMMANDS["matrix"]]))[0] == 0
    assert place.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("second", SIGNALS[:3])
def test_a_second_signal_while_the_first_is_handled(second: signal.Signals, tmp_path: Path, block: Path) -> None:
    place = copied(block, tmp_path)
    process = place.run(["-m", "posexport", *VERIFY])
    while not list(place.temporary.glob("posexport-*/stderr")):
        assert process.poll() is None
        time.sleep(0.01)
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        process.send_signal(second)
    code, stderr = place.finish(process)
    assert "Traceback" not in stderr
    assert code in (128 + signal.SIGTERM, 128 + second), stderr
    assert place.left() == []


AGAIN = {
    "before anything is removed": ("posexport.cli", "remove_since", 1, "before"),
    "while the first of them is removed": ("posexport.temporary", "_remove", 2, "before"),
    "while processes are ended": ("posexport.processes", "Worker._release", 3, "before"),
    "after everything is removed": ("posexport.cli", "remove_since", 1, "after"),
    "while the error is written": ("posexport.cli", "fail", 1, "before"),
    "at the very end": ("posexport.cli", "drop_output", 1, "after"),
}
"""Moments at which the command gets further signals while it ends because of a first one."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", AGAIN)
def test_further_signals_while_the_first_is_handled(moment: str, tmp_path: Path, block: Path) -> None:
    place, (module, name, call, when) = copied(block, tmp_path), AGAIN[moment]
    first = ("posexport.processes", "Worker.start", 2, str(int(signal.SIGTERM)), "after")
    further = [(module, name, str(call), str(int(number)), when) for number in (signal.SIGINT, signal.SIGHUP)]
    words = [word for each in (first, *further) for word in each]
    code, stderr = place.finish(place.run([SCRIPT, *map(str, words), "--", *VERIFY]))
    assert "Traceback" not in stderr, stderr
    assert stderr.count("no file is half-written") == 1
    assert code == 128 + signal.SIGTERM
    assert place.left() == []


INTERRUPTED_IMPORT = """
import sys, time
from posexport.cli.surroundings import Interrupts
sys.path.insert(0, ".")
interrupts = Interrupts()
interrupts.begin()
try:
    import signalled_import
    for _ in range(500):
        time.sleep(0.01)
    print("went on")
except KeyboardInterrupt:
    print(sys.modules["signalled_import"].whole, interrupts.received)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_signal_waits_for_the_end_of_an_import(number: signal.Signals, tmp_path: Path) -> None:
    lines = ("import os", f"os.kill(os.getpid(), {number:d})", "[len('a') for _ in range(9)]", "whole = True")
    (tmp_path / "signalled_import.py").write_text("\n".join(lines))
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == (f"True [{number:d}]\n", "")


DROPPED = """
import os, signal, time
from posexport.cli.surroundings import Interrupts

class Freed:
    def __del__(self):
        if freed:
            raise ValueError("an error of another kind")
        os.kill(os.getpid(), {number})
        [len("a") for _ in range(9)]

freed = []
interrupts = Interrupts()
interrupts.begin()
try:
    Freed()
    freed.append(True)
    Freed()
    for _ in range(500):
        time.sleep(0.01)
    print("went on")
except KeyboardInterrupt:
    interrupts.held = True
    print(freed, interrupts.received)
"""


@pytest.mark.slow
def test_a_signal_that_is_lost_where_an_object_is_freed_is_reported() -> None:
    """posexport's alarm that would repeat the signal can't be used, because somebody else handles SIGALRM."""
    code = DROPPED.replace("interrupts = ", "signal.signal(signal.SIGALRM, lambda *args: None)\ninterrupts = ")
    command = [sys.executable, "-c", code.format(number=int(signal.SIGINT))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "went on\n"
    assert "KeyboardInterrupt" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_that_comes_while_an_object_is_freed_is_not_lost(number: signal.Signals) -> None:
    command = [sys.executable, "-c", DROPPED.format(number=int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == f"[True] [{number:d}]\n"
    assert "KeyboardInterrupt" not in ended.stderr
    assert "an error of another kind" in ended.stderr
