"""Doing one job where it is: the command runs in a process of its own, in a folder of its own.

Whatever becomes of that process is said as an Outcome; a crash never ends who asked for it. What the process starts is
in its group, so that nothing outlives a job that is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import PosexportError
from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, PASSED, Job, Outcome
from posexport.workflows.sweep.kinds import KINDS

TIME_LIMIT = 3600.0
"""Seconds that one job may take."""

_LONGEST = 400  # characters of a reason
_SLOWER = "slower"  # what a gate says of a change


CHILD = "posexport.workflows.sweep.child"
"""The module that a job's process runs."""


@attrs.frozen(kw_only=True)
class JobCommand:
    """What whoever does a job must know: the words after Python's own name, its time in seconds, the runtimes that it
    was asked for, what its environment has beside that of who does it, and whether the files that it writes are wanted.
    """

    words: tuple[str, ...]
    time_limit: float
    asked: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    writes: bool = False

    @classmethod
    def of(cls, job: Job, time_limit: float) -> JobCommand:
        """The order to do a job."""
        kind = KINDS[job.kind]
        return cls(
            words=("-P", "-m", CHILD, job.kind, *job.arguments, *kind.always),
            time_limit=time_limit,
            asked=tuple(value for word, value in pairwise(job.arguments) if word == "--runtime"),
            environment={} if job.needs.cpus is None else {"OMP_NUM_THREADS": str(job.needs.cpus)},
            writes=kind.writes,
        )


class JobRunner:
    """Does one job at a time; `stop` ends it, and all jobs to come."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._guard = threading.Lock()
        self._stopped = False

    def work(self, order: JobCommand, stage_files: Callable[[Path], object]) -> Outcome:
        """Do a job in a new folder, into which `stage_files` puts its files."""
        try:
            found = self._work(order, stage_files)
        except PosexportError as error:
            found = Outcome(state=FAILED, reason=str(error).rstrip("."))
        except (OSError, ValueError) as error:  # of the machine, such as a full disk: another may do better
            found = Outcome(state=LOST, reason=f"the machine can't do it ({error})")
        return attrs.evolve(found, where=socket.gethostname())

    def _work(self, order: JobCommand, stage_files: Callable[[Path], object]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="posexport-sweep-", ignore_cleanup_errors=True) as name:
            folder, start = Path(name), time.perf_counter()
            stage_files(folder)
            given = set(folder.iterdir())
            code, said, errors = self._run(order, folder)
            found = _judge(code, said, errors, order)
            outputs = _outputs(folder, given) if order.writes and found.result is not None else {}
            seconds = round(time.perf_counter() - start, 3)
            return attrs.evolve(found, seconds=seconds, outputs=outputs)

    def _run(self, order: JobCommand, folder: Path) -> tuple[int | None, str, str]:
        """Exit code (None where the time ended it), stdout and stderr of the command."""
        with self._guard:
            if self._stopped:
                return -signal.SIGTERM, "", ""
            process = self._process = subprocess.Popen(
                [sys.executable, *order.words],
                cwd=folder,
                env={**os.environ, **order.environment, "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        try:
            said, errors = process.communicate(timeout=order.time_limit)
            return process.returncode, said, errors
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            self._kill()

    def _kill(self) -> None:
        with self._guard:
            process, self._process = self._process, None
            if process is None:
                return
            _end_group(process)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def stop(self) -> None:
        """End the job under way, from another thread."""
        with self._guard:
            self._stopped = True
            if self._process is not None:
                _end_group(self._process)


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers so for a group that has ended
        os.killpg(process.pid, signal.SIGKILL)


def _outputs(folder: Path, given: Container[Path]) -> dict[str, bytes]:
    """The files that a command wrote; caches, which it keeps under hidden names, stay behind."""
    new = [path for path in sorted(folder.iterdir()) if path not in given and path.is_file()]
    return {path.name: path.read_bytes() for path in new if not path.name.startswith(".")}


def _judge(code: int | None, said: str, errors: str, order: JobCommand) -> Outcome:
    """What an exit code of the contract means, with the reason; any other end is a crash, so the attempt is lost.

    A job that was asked for a runtime which was not there is not run, though the command was content: elsewhere it can.
    """
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    words = last.removeprefix("Error: ").rstrip(".")[:_LONGEST]
    if code is None:
        return Outcome(state=FAILED, reason=f"no end within {order.time_limit:g} s")
    if code < 0:
        return Outcome(state=LOST, reason=f"the process was killed by {_signal(-code)}{_in_brackets(words)}")
    if code not in (0, 1, 2, 3):
        return Outcome(state=LOST, reason=f"the process ended with exit code {code}{_in_brackets(words)}")
    try:
        read = json.loads(said) if said.strip() else None
    except (ValueError, RecursionError):
        read = None
    result: dict[str, Any] | None = read if isinstance(read, dict) else None
    if code == 2:
        return Outcome(state=FAILED, reason=words or "the request is wrong", result=result)
    if code == 3:
        return Outcome(
            state=NOT_RUN, reason=words or _first(result, NOT_RUN) or "a runtime is not there", result=result
        )
    if result is None and not (code == 1 and last.startswith("Error: ")):
        return Outcome(state=LOST, reason=f"the process printed no result{_in_brackets(words)}")
    if code == 1:
        why = _first(result, FAILED) or _first(result, _SLOWER) or words or "it failed"
        return Outcome(state=FAILED, reason=why, result=result)
    missing = _missing(result, order.asked)
    return Outcome(state=PASSED if missing is None else NOT_RUN, reason=missing, result=result)


def _missing(result: Any, asked: Sequence[str]) -> str | None:
    """The first runtime that was asked for and is "not run" wherever the result names it, and why; None where all ran.

    A cell of the matrix that has a version was judged for good: the runtime is there, and doesn't take such a graph.
    """
    rows = list(_rows(result))
    for name in asked:
        own = [row for row in rows if name in (row.get("runtime"), row.get("column"))]
        if own and all(row["state"] == NOT_RUN and not row.get("version") for row in own):
            return f"{name}: {own[0].get('reason') or NOT_RUN}"[:_LONGEST]
    return None


def _rows(data: Any) -> Iterator[Mapping[str, Any]]:
    """All that has a state, anywhere in a result."""
    if isinstance(data, Mapping):
        if "state" in data:
            yield data
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for each in data:
            yield from _rows(each)


def _in_brackets(words: str) -> str:
    return f" ({words})" if words else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first(data: Any, state: str) -> str | None:
    """Who is first said to be in a state, anywhere in a result, and why."""
    for row in _rows(data):
        if row["state"] == state:
            who = next((str(row[key]) for key in ("runtime", "column", "name") if row.get(key)), None)
            why = str(row.get("reason") or state)
            return (f"{who}: {why}" if who else why)[:_LONGEST]
    return None
