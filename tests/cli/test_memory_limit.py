"""A memory limit that the user set: one sentence if it is too small, and no crash, hang or failed artifact."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import cli, refused

from posexport import machine, processes
from posexport.cli import main, memory_limit
from posexport.machine import Limit
from posexport.verify.judge import NO_REFERENCE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's"),
    pytest.mark.few_inputs,
]
MB = 2**20
SMALL_BLOCK = ("--hidden-size", "8", "--num-heads", "2")
SMALL = Limit(300 * MB, "ulimit -v")

LIMITED = """
import resource, sys
kind, size = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(kind, (size, size if sys.argv[3] == "hard" else resource.getrlimit(kind)[1]))
del sys.argv[1:4]
from posexport.cli import main
main()
"""


def limited(kind: str, size: int, *words: str | Path, which: str = "hard") -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has this limit from the start."""
    command = [sys.executable, "-P", "-c", LIMITED, kind, str(size * MB), which, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "size", "which"),
    [
        ("RLIMIT_DATA", 300, "hard"),
        ("RLIMIT_DATA", 100, "hard"),
        ("RLIMIT_DATA", 300, "soft"),
        ("RLIMIT_AS", 200, "hard"),
        ("RLIMIT_AS", 500, "hard"),
        ("RLIMIT_AS", 800, "hard"),
    ],
)
def test_a_limit_below_what_libraries_need_is_one_sentence(kind: str, size: int, which: str, tmp_path: Path) -> None:
    found = limited(kind, size, "verify", tmp_path / "block.onnx", "--runtime", "ort-cpu", which=which)
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    assert found.stderr.startswith("Error: there is not enough memory for posexport verify, the limit of ")
    assert f"ulimit {'-d' if kind == 'RLIMIT_DATA' else '-v'}" in found.stderr
    assert found.stderr.count("\n") == 1


def test_commands_without_libraries_and_with_enough_work_below_a_limit(tmp_path: Path) -> None:
    assert limited("RLIMIT_AS", 100, "list").returncode == 0
    assert limited("RLIMIT_AS", 100, "verify", "--help").returncode == 0
    found = limited("RLIMIT_AS", 4000, "positions", "--grid", "2x3", "-o", tmp_path / "p.npz")
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RLIMIT_DATA", "RLIMIT_AS"])
@pytest.mark.parametrize("size", [50, 100, 200, 260, 300, 400, 550, 600, 700, 800, 1000, 1100, 1300, 1600, 2000])
def test_commands_below_any_limit(kind: str, size: int, tmp_path: Path) -> None:
    block = tmp_path / "block.onnx"
    assert cli("export", "--encoding", "rope", *SMALL_BLOCK, "-o", block).exit_code == 0
    for words, codes in {
        ("verify", block, "--runtime", "ort-cpu"): (0, 2, 3),
        ("inspect", block): (0, 2),
        ("export", "--encoding", "alibi", *SMALL_BLOCK, "-o", tmp_path / "other.onnx"): (0, 2),
    }.items():
        found = limited(kind, size, *words)
        assert found.returncode in codes, (words, found.stderr)
        assert "Traceback" not in found.stderr
        assert found.returncode == 0 or found.stderr.startswith("Error: ")


def test_libraries_that_are_loaded_without_end_lack_memory_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(command: list[str], **settings: object) -> None:
        assert settings["timeout"] == 60.0
        raise subprocess.TimeoutExpired(command, 60.0)

    monkeypatch.setattr(memory_limit, "set_limit", lambda: SMALL)
    monkeypatch.setattr(subprocess, "run", waits)
    result = cli("inspect", "x.onnx")
    refused(
        result, "did not load its libraries (numpy, onnx) in 60 seconds", "the limit of 314.57 MB", "try again later"
    )
    assert "not enough memory" not in result.stderr


class Panic(BaseException):
    """Stands in for the exception that pyo3 raises when Rust code panics."""


@pytest.mark.parametrize("error", [SystemError("error return without exception set"), Panic("PyObject is null")])
def test_what_code_in_c_and_rust_raises_is_shortage_below_a_limit_only(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(**options: object) -> None:
        raise error

    monkeypatch.setattr(memory_limit, "check_limit", lambda command: None)
    monkeypatch.setattr("posexport.cli.list_command.list.callback", short)
    assert not machine.is_short(error)
    with pytest.raises(type(error)):
        CliRunner().invoke(main, ["list"], catch_exceptions=False)
    monkeypatch.setattr(machine, "set_limit", lambda: SMALL)
    refused(cli("list"), "there is not enough memory", str(error))


def test_shortage_has_the_code_of_the_system_and_names_of_python() -> None:
    assert machine.is_short(OSError(errno.ENOMEM, "was tun?"))
    assert not machine.is_short(OSError(errno.ENOSPC, "full"))
    assert machine.is_short(RuntimeError("can't start new thread"))
    assert machine.is_short(ImportError("libtorch_cpu.so: failed to map segment from shared object"))


def test_a_run_that_ends_below_a_limit_says_nothing_about_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.explain(MemoryError()).code == processes.MEMORY
    monkeypatch.setattr(machine, "set_limit", lambda: SMALL)
    reason = processes.explain(MemoryError())
    assert (reason.code, reason.text) == (
        processes.LIMITED, "the limit of 314.57 MB that ulimit -v sets is too small for it (MemoryError: )",
    )  # fmt: skip
    assert processes.explain(ValueError("no such axis")).code == processes.FAILED
    assert processes.explain(OSError(errno.ENOENT, "no such file")).code == processes.FAILED
    assert processes.LIMITED in processes.NOTHING_SHOWN
    assert processes.LIMITED in NO_REFERENCE


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO])
def test_what_the_system_has_no_more_of_says_nothing_of_a_file(number: int) -> None:
    """The system has no more file descriptors, or no space on the disk."""
    code = processes.explain(OSError(number, os.strerror(number))).code
    assert code in processes.NOTHING_SHOWN
    assert code in NO_REFERENCE


AT_LIMIT = """
from posexport import machine, processes

error = RuntimeError("could not create a primitive")  # as oneDNN calls an allocation that failed
print(processes.explain(error).code)
machine.limit_to_what_is_free(machine.available())
print(processes.explain(error).code)
held = []
try:
    while True:
        held.append(bytearray(2**20))
except MemoryError:
    del held[-len(held) // 8 :]  # what was asked for in vain was larger than what is left
print(processes.explain(error).code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there is there such a limit")
def test_any_error_at_the_limit_is_one_of_memory() -> None:
    found = subprocess.run([sys.executable, "-c", AT_LIMIT], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [processes.FAILED, processes.FAILED, processes.MEMORY]


def test_a_crash_below_a_limit_may_come_from_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text("import os\nprint('no memory', file=__import__('sys').stderr)\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for limit, code in ((None, processes.CRASHED), (SMALL, processes.LIMITED)):
        monkeypatch.setattr(machine, "set_limit", lambda limit=limit: limit)
        worker = processes.Worker("crashing")
        try:
            reply = worker.ask({}, 20)
        finally:
            worker.close()
        assert reply["code"] == code
        assert "was killed by SIGABRT (no memory)" in reply["error"]
        assert ("which the limit of 314.57 MB" in reply["error"]) == (limit is not None)


def test_a_lower_limit_of_the_user_stands() -> None:
    code = (
        "import resource\nfrom posexport import machine\nkind = resource.RLIMIT_DATA\n"
        f"resource.setrlimit(kind, ({300 * MB}, resource.getrlimit(kind)[1]))\nmachine.limit_to_what_is_free()\n"
        "print(resource.getrlimit(kind)[0], machine.set_limit())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{300 * MB} the limit of 314.57 MB that ulimit -d sets\n"


def test_a_limit_of_ours_is_none_of_the_user() -> None:
    code = (
        "import resource\nfrom posexport import machine\nmachine.available = lambda: 0\n"
        "machine.limit_to_what_is_free()\nassert resource.getrlimit(resource.RLIMIT_DATA)[0] < machine.PLENTY\n"
        "print(machine.set_limit())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
