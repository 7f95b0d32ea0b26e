"""One child process that answers requests, one JSON object a line, and both ends of that conversation.

The parent holds a `Worker`; the child calls `serve`. A crash of the child is an answer that says how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any, Final

from posexport.errors import Reason

TIMEOUT: Final = "timeout"
KILLED: Final = "killed"
CRASHED: Final = "crashed"
EXITED: Final = "exit"
STOPPED: Final = "stopped"
REFUSED: Final = "refused"
MEMORY: Final = "memory"
FAILED: Final = "failed"
"""Codes of answers that are none. Of how the process ended: it gave no answer in time; SIGKILL ended it, as the kernel
does where memory is short; another signal did; it ended by itself; the parent stopped it. Of what a child answers: the
engine can't run this; memory did not suffice; anything else."""

_TAIL = 4096  # bytes at the end of what a worker wrote to stderr; an engine may have written millions

_LOOK = 1.0  # seconds for what a process wrote to arrive once it has ended

_STEP = 0.25  # seconds between two looks at whether a silent process still lives, and for Ctrl-C (see `result`)


class Worker:
    """One child process of `module`; started by the first request, and again after it is gone."""

    def __init__(self, module: str = "posexport.runtimes.worker") -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: IO[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._requests = 0
        self._closed = False
        self._guard = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process, None where none runs."""
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
                self._errors = opened.enter_context(tempfile.TemporaryFile())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    encoding="utf-8",
                )
                opened.pop_all()  # it lives as long as the process
            self._lines = queue.SimpleQueue()
            self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
            self._reader.start()

    def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        """The worker's answer; where none comes, {ok: false, error, code} with how the process ended."""
        self.start()
        process, lines = self._process, self._lines
        assert process is not None and process.stdin is not None
        self._requests += 1
        request = {**request, "id": self._requests}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = _next(lines, process, time_limit)
        except queue.Empty:
            self.stop()
            return {"ok": False, "error": f"no answer within {time_limit:g} s", "code": TIMEOUT}
        except (OSError, ValueError):  # it died, or the pool was closed, before it could read
            line = None
        if line is None:
            ended = self._how_it_ended(process)
            self.stop()
            return {"ok": False, "error": ended.text, "code": ended.code}
        answer: dict[str, Any] = json.loads(line)  # whole: an answer cut short by a crash has no end of line
        if answer["id"] != request["id"]:
            raise AssertionError(f"worker answered request {answer['id']}, asked was {request['id']}")
        return answer

    def _how_it_ended(self, process: subprocess.Popen[str]) -> Reason:
        if self._closed:
            return Reason(STOPPED, "stopped")
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return Reason(CRASHED, "crashed: the process answers no more")
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            ended_by = KILLED if name == "SIGKILL" else CRASHED
            return Reason(ended_by, f"crashed: the process was killed by {name}{self._last_line()}")
        return Reason(EXITED, f"crashed: the process ended with exit code {code}{self._last_line()}")

    def _last_line(self) -> str:
        assert self._errors is not None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _TAIL))
        lines = self._errors.read().decode(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        return f" ({lines[-1][:200]})" if lines else ""

    def stop(self) -> None:
        """Kill the process; the next request starts a new one."""
        with self._guard:
            self._release()

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None and self._reader is not None
        self._reader.join(timeout=_LOOK)  # it reads on where a child of the engine's own still holds the pipe
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self._errors is not None:
            self._errors.close()

    def close(self) -> None:
        """Kill the process for good."""
        self._closed = True
        self.stop()


def _next(lines: queue.SimpleQueue[str | None], process: subprocess.Popen[str], time_limit: float) -> str | None:
    """The next line, or None where the process has ended, even if a child of its own still holds the pipe open."""
    until = time.monotonic() + time_limit
    while True:
        try:
            return lines.get(timeout=max(0.0, min(_STEP, until - time.monotonic())))
        except queue.Empty:
            if process.poll() is not None:
                with contextlib.suppress(queue.Empty):
                    return lines.get(timeout=_LOOK)
                return None
            if time.monotonic() >= until:
                raise


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            if line.endswith("\n"):
                lines.put(line)
    lines.put(None)


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ctrl-C is the parent's to handle; on Linux the kernel kills this process when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported; it leaves no core file behind


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input ends."""
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
    while True:
        answers.write(json.dumps(answer(json.loads(waiting.get()))) + "\n")
