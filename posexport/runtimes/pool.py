"""Child processes for engines: one per runtime, long-lived, and restarted after a crash, which never ends posexport.

`Pool.submit` returns a future with the engine's answer, or why there is none: it crashed by a signal, it ended, or the
time limit passed. At most `busy` workers work at a time.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import attrs

from posexport import temporary
from posexport.errors import Reason, system_error
from posexport.processes import POLL_SECONDS, TIMED_OUT, Worker, failure_of
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays


@attrs.frozen(kw_only=True)
class Answer:
    """One runtime's outputs for each set of inputs, or why there are none, with a code of posexport.processes."""

    outputs: tuple[Arrays, ...] = ()
    failure: Reason | None = None
    describe: Mapping[str, str] = attrs.field(factory=dict)


Answered = TypeVar("Answered")


def result(future: Future[Answered]) -> Answered:
    """Wait for an answer in short steps.

    The kernel may give Ctrl-C to any thread. A main thread that waits without a limit would then continue to sleep.
    """
    while not wait((future,), timeout=POLL_SECONDS).done:
        pass
    return future.result()


_TUNABLES = {"hugetlb": 1, "mmap_threshold": 2**29, "trim_threshold": 2**30}

ALLOCATION = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _TUNABLES.items())}
"""Has a worker keep memory that it frees, up to 1 GiB, and ask for large pages: engines that take inputs of many sizes
in turn free and take tens of megabytes at each operator, which the kernel fills with zeros, page by page, each time.
That is a sixth to a quarter of the time of onnx's evaluator and of TensorRT's import. The largest values, which are
kept too, are logits of 2,200 keys in float64, 465 MB for 12 heads. Only the GNU C library reads it."""

LATE = 3
"""After this many runs of a file in a row that take too long, a worker doesn't run it again."""


_OPEN_FAST = ("torch", "onnxruntime")
"""Packages of runtimes whose processes open a file again within seconds."""


class Pool:
    """Workers by name of runtime. Requests to one runtime run in order, requests to several run in parallel."""

    def __init__(self, time_limit: float, busy: int | None = None) -> None:
        self.time_limit = time_limit
        self._slots = threading.BoundedSemaphore(busy or os.cpu_count() or 1)
        self._workers: dict[str, tuple[Worker, ThreadPoolExecutor]] = {}
        self._alone = False
        self._light: set[Worker] = set()
        self._folder = temporary.folder()
        self._jobs = 0
        self._late: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker, _ in self._workers.values():  # first: a waiting executor thread then gets its answer
            worker.close()
        for _, executor in self._workers.values():
            executor.shutdown(wait=True, cancel_futures=True)
        self._folder.remove()

    @property
    def folder(self) -> Path:
        """A private folder that is removed with the pool."""
        return self._folder.path

    def one_at_a_time(self) -> None:
        """From now on, only one worker works at a time, and only one lives on the CPU.

        Several workers that each load a large file would take several times its size.
        """
        self._slots, self._alone = threading.BoundedSemaphore(1), True

    def start(self, runtime: Runtime) -> None:
        """Start a runtime's worker, which loads its engine, before the first request."""
        self._get(runtime)[0].start()

    def submit(
        self,
        runtime: Runtime,
        path: Path,
        inputs: Sequence[Arrays],
        options: Mapping[str, Any] | None = None,
        key: str | None = None,
        wide: Mapping[str, int] | None = None,
    ) -> Future[Answer]:
        """Run each entry of `inputs` through the artifact at `path`. `key` names the worker (default: the runtime).

        Only some columns are kept of outputs that are `wide` (posexport.runtimes.wide_outputs).
        """
        worker, executor = self._get(runtime, key)
        self._jobs += 1
        folder = self.folder / f"job{self._jobs}"
        request = {
            "module": runtime.module,
            "path": str(path.absolute()),
            "options": {**runtime.options, **(options or {})},
            "inputs": [str(folder / f"in{index}.tensors") for index in range(len(inputs))],
            "outputs": [str(folder / f"out{index}.tensors") for index in range(len(inputs))],
            "limited": not runtime.needs_gpu,  # CUDA maps far more memory than it uses
            "wide": dict(wide or {}),
        }
        return executor.submit(self._run, worker, request, folder, list(inputs))

    def _get(self, runtime: Runtime, key: str | None = None) -> tuple[Worker, ThreadPoolExecutor]:
        key = key or runtime.name
        if key not in self._workers:
            environment = {**ALLOCATION, **runtime.environment}
            worker = Worker("posexport.runtimes.worker", runtime.module, environment=environment)
            self._workers[key] = (worker, ThreadPoolExecutor(max_workers=1))
            if not runtime.needs_gpu and runtime.package in _OPEN_FAST:
                self._light.add(worker)
        return self._workers[key]

    def _end_others(self, worker: Worker) -> None:
        """End the processes that may have the same file loaded. Those with a GPU stay: they may have built a plan."""
        for other, _ in [*self._workers.values()] if self._alone else ():
            if other is not worker and other in self._light:
                other.stop()

    def _run(self, worker: Worker, request: dict[str, Any], folder: Path, inputs: list[Arrays]) -> Answer:
        from posexport.runtimes.tensors import forget_pages, load_arrays, save_arrays  # once workers load their engines

        file = request["module"], request["path"]
        if self._late[file] >= LATE:
            text = f"not tried, as {LATE} runs before gave no answer within {self.time_limit:g} s each"
            return Answer(failure=Reason(TIMED_OUT, text))
        try:
            with system_error(f"can't run engines, with files in {str(self.folder)!r}", "set TMPDIR to another folder"):
                folder.mkdir()
                for path, arrays in zip(request["inputs"], inputs, strict=True):
                    save_arrays(Path(path), arrays)
                if self._alone:
                    forget_pages()
                with self._slots:
                    self._end_others(worker)
                    reply = worker.ask(request, self.time_limit)
                failure = failure_of(reply)
                self._late[file] = self._late[file] + 1 if failure is not None and failure.code == TIMED_OUT else 0
                if failure is not None:
                    return Answer(failure=failure)
                outputs = tuple(load_arrays(Path(path)) for path in request["outputs"])
                return Answer(outputs=outputs, describe=reply["describe"])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
