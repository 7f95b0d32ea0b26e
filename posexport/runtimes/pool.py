"""Child processes for engines: long-lived, one per runtime, started again after a crash, never the end of posexport.

`Pool.submit` answers with a future: what the engine said, or why there is no answer (it crashed by a signal, it ended,
or the time limit passed). At most `busy` of them work at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import attrs

from posexport.errors import RequestError
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.transport import load_arrays, save_arrays


@attrs.frozen(kw_only=True)
class Answer:
    """What one runtime made of one artifact: outputs for each of the inputs, or the reason why there are none.

    `kind` names the class of the error where it is one of posexport's own.
    """

    outputs: tuple[Arrays, ...] = ()
    error: str | None = None
    kind: str | None = None
    describe: Mapping[str, str] = attrs.field(factory=dict)


def result(future: Future[Answer]) -> Answer:
    """Wait for an answer in short steps: the kernel may hand Ctrl-C to any thread, and a main thread that waits without
    end would then sleep on."""
    while not wait((future,), timeout=_STEP).done:
        pass
    return future.result()


_LAST_WORDS = 4096  # bytes at the end of what a worker wrote to stderr; an engine may have written millions
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
        """The worker's answer; where none comes, {ok: false, error} with how the process ended."""
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
            return {"ok": False, "error": f"no answer within {time_limit:g} s"}
        except (OSError, ValueError):  # it died, or the pool was closed, before it could read
            line = None
        if line is None:
            ended = self._how_it_ended(process)
            self.stop()
            return {"ok": False, "error": ended}
        found: dict[str, Any] = json.loads(line)  # whole: an answer cut short by a crash has no end of line
        if found["id"] != request["id"]:
            raise AssertionError(f"worker answered request {found['id']}, asked was {request['id']}")
        return found

    def _how_it_ended(self, process: subprocess.Popen[str]) -> str:
        if self._closed:
            return "stopped"
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "crashed: the process answers no more"
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            return f"crashed: the process was killed by {name}{self._last_words()}"
        return f"crashed: the process ended with exit code {code}{self._last_words()}"

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LAST_WORDS))
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:200]})" if said else ""

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


class Pool:
    """Workers by name of runtime; requests to one runtime run in order, those to several side by side."""

    def __init__(self, time_limit: float, busy: int | None = None) -> None:
        self.time_limit = time_limit
        self._slots = threading.BoundedSemaphore(busy or os.cpu_count() or 1)
        self._workers: dict[str, tuple[Worker, ThreadPoolExecutor]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="posexport-", ignore_cleanup_errors=True)
        self._jobs = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker, _ in self._workers.values():  # first: a waiting executor thread then gets its answer
            worker.close()
        for _, executor in self._workers.values():
            executor.shutdown(wait=True, cancel_futures=True)
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """A private folder that goes away with the pool."""
        return Path(self._folder.name)

    def start(self, key: str) -> None:
        """Start the worker `key` ahead of its first request."""
        self._get(key)[0].start()

    def submit(
        self,
        runtime: Runtime,
        path: Path,
        inputs: Sequence[Arrays],
        options: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Future[Answer]:
        """Run every entry of `inputs` through the artifact at `path`; `key` names the worker (default: the runtime)."""
        worker, executor = self._get(key or runtime.name)
        self._jobs += 1
        folder = self.folder / f"job{self._jobs}"
        request = {
            "module": runtime.home if "." in runtime.home else f"posexport.runtimes.{runtime.home}",
            "path": str(path.absolute()),
            "options": {**runtime.options, **(options or {})},
            "inputs": [str(folder / f"in{index}.tensors") for index in range(len(inputs))],
            "outputs": [str(folder / f"out{index}.tensors") for index in range(len(inputs))],
        }
        return executor.submit(self._run, worker, request, folder, list(inputs))

    def _get(self, key: str) -> tuple[Worker, ThreadPoolExecutor]:
        if key not in self._workers:
            self._workers[key] = (Worker(), ThreadPoolExecutor(max_workers=1))
        return self._workers[key]

    def _run(self, worker: Worker, request: dict[str, Any], folder: Path, inputs: list[Arrays]) -> Answer:
        try:
            folder.mkdir()
            for path, arrays in zip(request["inputs"], inputs, strict=True):
                save_arrays(Path(path), arrays)
            with self._slots:
                found = worker.ask(request, self.time_limit)
            if not found["ok"]:
                return Answer(error=" ".join(found["error"].split()), kind=found.get("kind"))
            outputs = tuple(load_arrays(Path(path)) for path in request["outputs"])
            return Answer(outputs=outputs, describe=found["describe"])
        except OSError as error:
            raise RequestError(
                f"can't run engines, with files in {str(self.folder)!r} ({error.strerror}): free some space."
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
