"""One child process that answers requests, one JSON object a line, and both ends of that conversation.

The parent has a `Worker`, and the child calls `serve`. A reply is `{"ok": true, ...}` with the fields of the answer, or
`{"ok": false, "error": text, "code": code}` with one of the codes below. A crash of the child is a reply too. Before
its reply, the child may say what it does: `{"step": text}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import getpass
import json
import os
import queue
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from posexport import machine, temporary
from posexport.errors import NotFiniteError, PosexportError, Reason, RuntimeMissingError
from posexport.progress import Progress, silent

# codes of failures: how the process ended ...
KILLED = "killed"  # by SIGKILL, as the kernel does if memory runs out
CRASHED = "crashed"  # by another signal, or it no longer answers
EXITED = "exited"  # with an exit code
TIMED_OUT = "timeout"  # there was no answer within the time limit
STOPPED = "stopped"  # the pool was closed before there was an answer
# ... and what the work raised
MEMORY = "memory"  # an error that says that memory ran out
LIMITED = "memory-limit"  # the same, or a crash, under a memory limit that the user set
EXHAUSTED = "resources"  # the system has no more space, open files or processes for it
REFUSED = "refused"  # the engine says that it can't run this
MISSING = "runtime-missing"  # RuntimeMissingError
NOT_FINITE = "not-finite"  # NotFiniteError
INVALID = "invalid-request"  # another error that posexport raises
FAILED = "failed"  # any other error

_CODES = {RuntimeMissingError: MISSING, NotFiniteError: NOT_FINITE}

NOTHING_SHOWN = (MISSING, TIMED_OUT, LIMITED, EXHAUSTED)
"""The codes of failures that say nothing about the work, because it was not finished."""

_OF_SYSTEM = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN)
"""Errors of the system: no more open files or processes, no space on the disk, or a failure."""

POLL_SECONDS = 0.25
"""Seconds between two checks whether a silent process still lives, and for Ctrl-C."""

_STDERR_TAIL = 4096  # bytes at the end of a worker's stderr that are read; an engine may have written millions
_DRAIN_SECONDS = 1.0  # for output to arrive after its process has ended


def failure(code: str, text: str) -> dict[str, Any]:
    """The reply of a request that failed."""
    return {"ok": False, "error": text, "code": code}


def failure_of(reply: Mapping[str, Any]) -> Reason | None:
    """Why a request failed, on one line. None if it succeeded."""
    return None if reply["ok"] else Reason(reply["code"], " ".join(str(reply["error"]).split()))


def explain(error: Exception) -> Reason:
    """The code and the text of an error that a request's work raised."""
    if isinstance(error, PosexportError):
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), INVALID)
        return Reason(code, str(error))
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _OF_SYSTEM:
        return Reason(EXHAUSTED, text)
    if not machine.is_short(error):
        return Reason(FAILED, text)
    limit = machine.set_limit()
    return Reason(MEMORY, text) if limit is None else Reason(LIMITED, f"{limit} is too small for it ({text})")


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Worker:
    """One child process of `module` with these arguments. A request starts it if none is running.

    `environment` has variables for it, unless the user's environment has them.
    """

    def __init__(
        self,
        module: str = "posexport.runtimes.worker",
        *arguments: str,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._folder: temporary.Temporary | None = None
        self._errors: IO[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._requests = 0
        self._closed = False
        self._guard = threading.Lock()
        self._running = temporary.Running(self.close)

    @property
    def pid(self) -> int | None:
        """The id of the process. None if none is running."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process if none is running."""
        with self._guard:
            if self._closed:
                raise RuntimeError("the pool of workers is closed")
            if self._process is not None and self._process.poll() is None:
                return
            self._release()
            with contextlib.ExitStack() as opened:
                self._folder = temporary.folder()
                folder = opened.enter_context(self._folder)
                self._errors = opened.enter_context((folder / "stderr").open("w+b"))
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    encoding="utf-8",
                    env={**self._environment, **child_environment(folder)},
                    cwd=usable_folder(folder),
                )
                opened.pop_all()  # it lives as long as the process
            self._lines = queue.SimpleQueue()
            self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
            self._reader.start()

    def ask(self, request: dict[str, Any], time_limit: float, progress: Progress = silent) -> dict[str, Any]:
        """The worker's reply. If none comes within `time_limit` seconds, a failure that says how it ended.

        `progress` gets the steps that the worker reports. The time starts anew with each.
        """
        self.start()
        process, lines = self._process, self._lines
        assert process is not None and process.stdin is not None
        self._requests += 1
        request = {**request, "id": self._requests}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            while (line := _next(lines, process, time_limit)) is not None and (step := json.loads(line).get("step")):
                progress(step)
        except queue.Empty:
            self.stop()
            return failure(TIMED_OUT, f"no answer within {time_limit:g} s")
        except (OSError, ValueError):  # it died, or the pool was closed, before it could read
            line = None
        if line is None:
            ending = self._ending(process)
            self.stop()
            return ending
        reply: dict[str, Any] = json.loads(line)  # complete: a line that a crash cut short is dropped
        if reply.pop("id") != self._requests:
            raise AssertionError(f"the worker answered another request than number {self._requests}")
        return reply

    def _ending(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The reply that says how the process ended."""
        if self._closed:
            return failure(STOPPED, "stopped")
        try:
            status = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return failure(CRASHED, "crashed: the process answers no more")
        code, how = EXITED, f"ended with exit code {status}"
        if status < 0:
            code, how = KILLED if -status == signal.SIGKILL else CRASHED, f"was killed by {signal_name(-status)}"
        text = f"crashed: the process {how}{self._last_line()}"
        limit = machine.set_limit()
        if limit is None:
            return failure(code, text)
        return failure(LIMITED, f"{text}, which {limit} may be the cause of")

    def _last_line(self) -> str:
        """The last line that the process wrote to stderr, in brackets."""
        if self._errors is None:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _STDERR_TAIL))
        text = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return f" ({lines[-1][:200]})" if lines else ""

    def stop(self) -> None:
        """Kill the process. The next request starts a new one."""
        with self._guard:
            self._release()

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None and self._reader is not None
        self._reader.join(timeout=_DRAIN_SECONDS)  # it continues if a child of the engine still has the pipe open
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self._errors is not None:
            self._errors.close()
        if self._folder is not None:
            self._folder.remove()

    def close(self) -> None:
        """Kill the process, and start no other."""
        self._closed = True
        self.stop()
        self._running.ended()


def _next(lines: queue.SimpleQueue[str | None], process: subprocess.Popen[str], time_limit: float) -> str | None:
    """The next line. None if the process has ended, even if a child of it still has the pipe open."""
    until = time.monotonic() + time_limit
    while True:
        try:
            return lines.get(timeout=max(0.0, min(POLL_SECONDS, until - time.monotonic())))
        except queue.Empty:
            if process.poll() is not None:
                with contextlib.suppress(queue.Empty):
                    return lines.get(timeout=_DRAIN_SECONDS)
                return None
            if time.monotonic() >= until:
                raise


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None
    try:
        with stream, contextlib.suppress(MemoryError):
            for line in stream:
                if line.endswith("\n"):
                    lines.put(line)
    finally:
        lines.put(None)


def usable_folder(folder: Path) -> Path | None:
    """`folder` if this process's working folder was removed, because libraries then end the process. Otherwise None."""
    try:
        os.getcwd()  # noqa: PTH109 (no path is wanted)
    except FileNotFoundError:
        return folder
    return None


def child_environment(folder: Path) -> dict[str, str]:
    """The environment of a child process whose temporary files are in `folder`, which its parent removes.

    A child that is killed, and the engines in it, then leave nothing behind.
    """
    kept = _compiler_cache()
    caches = {} if kept is None else {"TORCHINDUCTOR_CACHE_DIR": str(kept)}
    return {**caches, **os.environ, "TMPDIR": str(folder), _PARENT: str(os.getpid())}


def _compiler_cache() -> Path | None:
    """The folder in which torch.compile keeps what it has compiled, so that later runs are faster.

    None if it doesn't exist, or is another user's, whose code would be run.
    """
    try:
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        status = cache.lstat()
    except (OSError, KeyError, ImportError):  # the last two for a user without a name
        return None
    return cache if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() else None


_PARENT = "POSEXPORT_PARENT"  # the id of the process that started this one as its child
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ctrl-C and SIGQUIT are the parent's to handle; on Linux the kernel kills this process when the parent is gone."""
    for name in ("SIGINT", "SIGQUIT"):  # Windows lacks the second
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it was gone before the kernel was asked
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported; it leaves no core file behind
        resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)  # the parent's
    with contextlib.suppress(OSError):  # if memory runs out anyway, Linux ends this process and no other
        Path("/proc/self/oom_score_adj").write_text("1000")


_steps: list[Callable[[str], object]] = []
"""The functions that send a step to the parent, in a process that serves."""


def report(step: str) -> None:
    """Tell the parent what is done next. It may be called from any thread."""
    for send in _steps:
        send(step)


def serve(
    answer: Callable[[dict[str, Any]], Mapping[str, Any]],
    explain: Callable[[Exception], Reason] = explain,
    *,
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Answer requests until the input ends. The fields of an answer are JSON, and `explain` describes what is raised.

    `prepare` is called once, before the first request arrives. If it fails, the request meets the same fault. Engines
    may write to stdout, so file descriptor 1 becomes stderr, and replies go through a copy of the old one.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    _steps[:] = [lambda step: answers.write(json.dumps({"step": step}) + "\n")]
    with contextlib.suppress(Exception):
        prepare()
    while True:
        request = json.loads(waiting.get())
        number = request.pop("id")
        try:
            line = json.dumps({"id": number, "ok": True, **answer(request)})
        except Exception as error:
            reason = explain(error)
            line = json.dumps({"id": number, **failure(reason.code, reason.text)})
        answers.write(line + "\n")
