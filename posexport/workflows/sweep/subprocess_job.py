"""Running one job on this machine: the command runs in a process of its own, in a folder of its own.

Every end of that process becomes an Outcome; a crash never ends the sweep. Processes that the command starts are in its
group, so none outlives a job that is stopped.
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
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import ERROR_FILE, PosexportError
from posexport.processes import signal_name
from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, PASSED, Job, Outcome
from posexport.workflows.sweep.kinds import KINDS

CHILD = "posexport.workflows.sweep.child"
"""The module that a job's process runs."""

_LONGEST = 400  # characters of a reason
_SLOWER = "slower"  # the state of a change in a gate
_ERROR = ".error.json"  # the command writes its error into this file; hidden, so it is no output


@attrs.frozen(kw_only=True)
class JobCommand:
    """All that a machine must know to run a job: the arguments of Python, the seconds it may take, the runtimes that it
    names, additional variables of its environment, and whether the files that it writes are results (`writes`)."""

    words: tuple[str, ...]
    time_limit: float
    asked: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    writes: bool = False

    @classmethod
    def of(cls, job: Job, time_limit: float) -> JobCommand:
        """The command of a job."""
        kind = KINDS[job.kind]
        return cls(
            words=("-P", "-m", CHILD, job.kind, *job.arguments, *kind.always),
            time_limit=time_limit,
            asked=tuple(job.values_of("--runtime")),
            environment={} if job.needs.cpus is None else {"OMP_NUM_THREADS": str(job.needs.cpus)},
            writes=kind.writes,
        )


@attrs.frozen(kw_only=True)
class _End:
    """How a command ended: its exit code (None where the time limit ended it), stdout, the error that it reported as
    data (None where it reported none), and the last line of stderr, which people are shown after a crash."""

    code: int | None
    stdout: str = ""
    error: str | None = None
    last_line: str = ""


class JobRunner:
    """Runs one job at a time; `stop` ends it, and all later ones."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._guard = threading.Lock()
        self._stopped = False

    def run(self, command: JobCommand, stage: Callable[[Path], object]) -> Outcome:
        """Run a job in a new folder, into which `stage` puts its files."""
        try:
            with tempfile.TemporaryDirectory(prefix="posexport-sweep-", ignore_cleanup_errors=True) as name:
                folder, start = Path(name), time.perf_counter()
                stage(folder)
                staged = set(folder.iterdir())
                outcome = _judge(self._execute(command, folder), command)
                outputs = _outputs(folder, staged) if command.writes and outcome.result is not None else {}
                seconds = round(time.perf_counter() - start, 3)
                outcome = attrs.evolve(outcome, seconds=seconds, outputs=outputs)
        except PosexportError as error:
            outcome = Outcome(state=FAILED, reason=str(error).rstrip("."))
        except (OSError, ValueError) as error:  # of this machine, such as a full disk: another may succeed
            outcome = Outcome(state=LOST, reason=f"the machine can't do it ({error})")
        return attrs.evolve(outcome, where=socket.gethostname())

    def _execute(self, command: JobCommand, folder: Path) -> _End:
        error_file = folder / _ERROR
        with self._guard:
            if self._stopped:
                return _End(code=-signal.SIGTERM)
            process = self._process = subprocess.Popen(
                [sys.executable, *command.words],
                cwd=folder,
                env={**os.environ, **command.environment, "PYTHONUTF8": "1", ERROR_FILE: str(error_file)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        try:
            stdout, stderr = process.communicate(timeout=command.time_limit)
            last_line = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
            return _End(
                code=process.returncode,
                stdout=stdout,
                error=_reported(error_file),
                last_line=last_line[:_LONGEST].rstrip("."),
            )
        except subprocess.TimeoutExpired:
            return _End(code=None)
        finally:
            with self._guard, process:  # which waits for its end and closes its pipes
                self._process = None
                _end_group(process)

    def stop(self) -> None:
        """End the job that runs, from another thread."""
        with self._guard:
            self._stopped = True
            if self._process is not None:
                _end_group(self._process)


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS for a group that has ended
        os.killpg(process.pid, signal.SIGKILL)


def _reported(path: Path) -> str | None:
    """The error that a command wrote into its error file, without its full stop; None where there is none."""
    try:
        return str(json.loads(path.read_text())["error"]).rstrip(".")[:_LONGEST]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _outputs(folder: Path, staged: Container[Path]) -> dict[str, bytes]:
    """The files that a command wrote, without its caches, which have hidden names."""
    new = [path for path in sorted(folder.iterdir()) if path not in staged and path.is_file()]
    return {path.name: path.read_bytes() for path in new if not path.name.startswith(".")}


def _judge(end: _End, command: JobCommand) -> Outcome:
    """The outcome by the exit code of the contract, with the reason; any other end is a crash: the attempt is lost.

    A job that names a runtime that was not there is not run, though its command succeeded: another machine may have it.
    """
    code, error = end.code, end.error
    details = error or end.last_line
    details = f" ({details})" if details else ""
    if code is None:
        return Outcome(state=FAILED, reason=f"no end within {command.time_limit:g} s")
    if code < 0:
        return Outcome(state=LOST, reason=f"the process was killed by {signal_name(-code)}{details}")
    if code not in (0, 1, 2, 3):
        return Outcome(state=LOST, reason=f"the process ended with exit code {code}{details}")
    result: dict[str, Any] | None = None
    with contextlib.suppress(ValueError, RecursionError):
        result = data if isinstance(data := json.loads(end.stdout), dict) else None
    if code == 2:
        return Outcome(state=FAILED, reason=error or "the request is wrong", result=result)
    if code == 3:
        reason = error or _first(result, NOT_RUN) or "a runtime is not there"
        return Outcome(state=NOT_RUN, reason=reason, result=result)
    if result is None and not (code == 1 and error is not None):
        return Outcome(state=LOST, reason=f"the process printed no result{details}")
    if code == 1:
        reason = _first(result, FAILED) or _first(result, _SLOWER) or error or "it failed"
        return Outcome(state=FAILED, reason=reason, result=result)
    missing = _missing(result, command.asked)
    return Outcome(state=PASSED if missing is None else NOT_RUN, reason=missing, result=result)


def _missing(result: Any, asked: Sequence[str]) -> str | None:
    """The first of the named runtimes that is "not run" wherever the result mentions it, with the reason; None where
    all ran.

    A cell of the matrix that has a version is final: the runtime is there, and doesn't take such a graph.
    """
    rows = list(_rows(result))
    for name in asked:
        of_it = [row for row in rows if name in (row.get("runtime"), row.get("column"))]
        if of_it and all(row["state"] == NOT_RUN and not row.get("version") for row in of_it):
            return f"{name}: {of_it[0].get('reason') or NOT_RUN}"[:_LONGEST]
    return None


def _rows(data: Any) -> Iterator[Mapping[str, Any]]:
    """All objects with a state, anywhere in a result."""
    if isinstance(data, Mapping):
        if "state" in data:
            yield data
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for item in data:
            yield from _rows(item)


def _first(data: Any, state: str) -> str | None:
    """The first row of a result in a state: its name and its reason."""
    for row in _rows(data):
        if row["state"] == state:
            name = next((str(row[key]) for key in ("runtime", "column", "name") if row.get(key)), None)
            reason = str(row.get("reason") or state)
            return (f"{name}: {reason}" if name else reason)[:_LONGEST]
    return None
