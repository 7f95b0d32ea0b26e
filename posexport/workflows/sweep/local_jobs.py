"""Jobs on this machine, several at a time. Each is a command in its own process and folder. Needs no Ray.

Every end of that process becomes an Outcome, so a crash never ends the sweep. Processes that the command starts are in
its process group, so none outlives a job that is stopped. A job that shares the machine is bound to the CPUs that it
takes, if the system can do that. Engines start a thread for each CPU that they see, so jobs side by side would slow
each other down.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs

from posexport import temporary
from posexport.errors import ERROR_FILE, PosexportError, RequestError
from posexport.files import TEXT_LIMIT, read_bytes
from posexport.machine import available, numbers
from posexport.processes import child_environment, signal_name
from posexport.runtimes import cuda
from posexport.workflows.sweep.job_files import stage_files
from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, PASSED, Job, JobResources, Outcome
from posexport.workflows.sweep.kinds import KINDS

CHILD = "posexport.workflows.sweep.child"
"""The module that a job's process runs."""

_LONGEST = 400  # characters of a reason
_SLOWER = "slower"  # the state of a change in a gate
_WAIT_SECONDS = 3600.0  # of one wait for a process: the system takes no timeout of more than 24 days


@attrs.frozen(kw_only=True)
class JobCommand:
    """Everything that a machine must know to run a job.

    `words` are the arguments of Python, and `time_limit` is the seconds that it may take. `asked` are the runtimes that
    it names. `environment` has additional variables. `writes` is whether the files that it writes are results.
    """

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
    """How a command ended.

    `code` is its exit code (None if the time limit ended it). `error` is the error that it reported as data, or None.
    `last_line` is the last line of stderr, which people see after a crash.
    """

    code: int | None
    stdout: str = ""
    error: str | None = None
    last_line: str = ""


class JobRunner:
    """Runs jobs, each in the thread that asks for it. `stop` ends them, and all later ones."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[str]] = set()
        self._guard = threading.Lock()
        self._stopped = False
        temporary.Running(self._end)

    def run(self, command: JobCommand, stage: Callable[[Path], object]) -> Outcome:
        """Run a job in a new folder. `stage` puts its files there."""
        try:
            made_here = temporary.folder()
        except (RequestError, OSError) as error:
            return Outcome(state=LOST, reason=f"the machine can't do it ({error})", where=socket.gethostname())
        try:
            with made_here as home:
                folder, start = home / "job", time.perf_counter()
                for made in (folder, home / "tmp"):
                    made.mkdir()
                stage(folder)
                staged = set(folder.iterdir())
                outcome = _judge(self._execute(command, folder), command)
                outputs = _outputs(folder, staged) if command.writes and outcome.result is not None else {}
                seconds = round(time.perf_counter() - start, 3)
                outcome = attrs.evolve(outcome, seconds=seconds, outputs=outputs)
        except PosexportError as error:
            outcome = Outcome(state=FAILED, reason=str(error).rstrip("."))
        except (OSError, ValueError) as error:  # a fault of this machine, such as a full disk: another may succeed
            outcome = Outcome(state=LOST, reason=f"the machine can't do it ({error})")
        return attrs.evolve(outcome, where=socket.gethostname())

    def _execute(self, command: JobCommand, folder: Path) -> _End:
        error_file = folder.with_name("error.json")  # apart from the inputs, which may be links to a person's files
        with self._guard:
            if self._stopped:
                return _End(code=-signal.SIGTERM)
            process = subprocess.Popen(
                [sys.executable, *command.words],
                cwd=folder,
                env={
                    **child_environment(folder.with_name("tmp")),
                    **command.environment,
                    "PYTHONUTF8": "1",
                    ERROR_FILE: str(error_file),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            stdout, stderr = _output(process, command.time_limit)
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
            with process:  # which waits for its end and closes its pipes
                with self._guard:
                    self._processes.remove(process)
                _end_group(process)

    def _end(self) -> None:
        self.stop()
        for process in list(self._processes):
            process.wait()

    def stop(self) -> None:
        """End the jobs that run. It is called from another thread."""
        with self._guard:
            self._stopped = True
            for process in self._processes:
                _end_group(process)


def _output(process: subprocess.Popen[str], time_limit: float) -> tuple[str, str]:
    """What a process wrote to stdout and stderr until its end. subprocess.TimeoutExpired after the time limit."""
    until = time.monotonic() + time_limit
    while True:
        try:
            return process.communicate(timeout=max(0.0, min(_WAIT_SECONDS, until - time.monotonic())))
        except subprocess.TimeoutExpired:  # nothing that was read is lost
            if time.monotonic() >= until:
                raise


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS for a group that has ended
        os.killpg(process.pid, signal.SIGKILL)


def _reported(path: Path) -> str | None:
    """The error that a command wrote into its error file, without its full stop. None if there is none."""
    try:
        return str(json.loads(read_bytes(path, TEXT_LIMIT))["error"]).rstrip(".")[:_LONGEST]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _outputs(folder: Path, staged: Container[Path]) -> dict[str, bytes]:
    """The files that a command wrote. Its caches have hidden names and are left out."""
    new = [path for path in sorted(folder.iterdir()) if path not in staged and path.is_file()]
    return {path.name: read_bytes(path, available()) for path in new if not path.name.startswith(".")}


def _judge(end: _End, command: JobCommand) -> Outcome:
    """The outcome by the exit code of the contract, with the reason. Any other end is a crash, so the attempt is lost.

    If a job names a runtime that was not available, it is not run, although its command succeeded. Another machine may
    have the runtime.
    """
    code, error = end.code, end.error
    details = f" ({text})" if (text := error or end.last_line) else ""
    if code is None:
        return Outcome(state=FAILED, reason=f"no end within {command.time_limit:g} s")
    if code < 0:
        return Outcome(state=LOST, reason=f"the process was killed by {signal_name(-code)}{details}")
    if code not in (0, 1, 2, 3):
        return Outcome(state=LOST, reason=f"the process ended with exit code {code}{details}")
    result: dict[str, Any] | None = None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(end.stdout)
        result = data if isinstance(data, dict) else None
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
    """The first named runtime that is "not run" wherever the result mentions it, with the reason. None if all ran.

    A cell of the matrix that has a version is final: the runtime is available, but doesn't take such a graph.
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


class Local:
    """Runs at most `workers` jobs side by side. A job that takes the whole machine runs alone.

    Together, they take no more CPUs than there are, or than `workers` if that is more.
    """

    def __init__(self, workers: int, time_limit: float = 3600.0) -> None:
        self._workers, self._time_limit = workers, time_limit
        self._cpus = numbers()
        self._runner = JobRunner()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="sweep")
        self._running: dict[Future[Outcome], tuple[Job, Sequence[int]]] = {}

    def refusal(self, needs: JobResources) -> str | None:
        cpus = len(self._cpus)
        if needs.cpus is not None and needs.cpus > cpus:
            return f"it needs {needs.cpus} CPUs, and this machine has {cpus}"
        if needs.gpu is None:
            return None
        try:
            gpu, count = cuda.device()[0], cuda.device_count()
        except OSError:
            return f"it needs a GPU {needs.gpu}, and this machine has none"
        if needs.gpu.lower() not in gpu.lower():
            return f"it needs a GPU {needs.gpu}, and this machine has {gpu}"
        return None if needs.gpus <= count else f"it needs {needs.gpus} GPUs {needs.gpu}, and this machine has {count}"

    def room(self, needs: JobResources) -> bool:
        """Whether a worker and enough CPUs are free. For a job that takes the whole machine, whether nothing runs."""
        taken = [job.needs for job, _ in self._running.values()]
        if needs.alone:
            return not taken
        if needs.gpu is not None and any(other.gpu for other in taken):
            return False  # runtimes here use only the first GPU
        cpus = sum(other.cpus or 0 for other in taken)
        return len(taken) < self._workers and cpus + (needs.cpus or 0) <= max(self._workers, len(self._cpus))

    def submit(self, job: Job) -> None:
        """Give a job to a free worker, with the CPUs that the fewest other jobs have."""
        used = Counter(cpu for _, cpus in self._running.values() for cpu in cpus)
        cpus = sorted(self._cpus, key=lambda cpu: used[cpu])[: job.needs.cpus]
        self._running[self._threads.submit(self._run, job, cpus)] = (job, cpus)

    def _run(self, job: Job, cpus: Sequence[int]) -> Outcome:
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # if this is not permitted, the job runs on all CPUs
                os.sched_setaffinity(0, cpus)  # of this thread, and so of the process that it starts
        return self._runner.run(JobCommand.of(job, self._time_limit), lambda folder: stage_files(job.files, folder))

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        done = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED).done
        return [(self._running.pop(future)[0], future.result()) for future in done]

    def close(self) -> None:
        self._runner.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
