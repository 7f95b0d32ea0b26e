"""Measures the matrix: child processes run in parallel, each with a batch of entries; finished cells are saved at once.

Everything that may crash runs in `matrix.worker`, so a crash fails only the cells that it concerns.
"""

from __future__ import annotations

import math
import os
import queue
import random
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic
from typing import Any

import attrs

from posexport import temporary
from posexport.machine import available, usable
from posexport.processes import Worker, failure_of
from posexport.verify.matrix.schedule import Column, Todo, spec_hash
from posexport.verify.matrix.table import BUILD, Cell, Entry, Matrix, State, cpu_facts
from posexport.verify.result import FAILED, NOT_RUN

WORKER = "posexport.verify.matrix.worker"
"""The module of the child processes."""

TIME_LIMIT = 300.0
"""Seconds for one export, for one build, and for one entry on one runtime."""

BATCH = 12
"""The entries of one call of verify, whose runtimes start once for all of them."""

LIMITED_BATCH = 2
"""The same if time is limited: a batch that has begun when the time is over is still finished."""

OUT_OF_TIME = "out of time, so run the same again"

_MEMORY = 3 * 10**9  # bytes that one job takes, about: a worker, torch, and a process for each runtime
_STEP = 0.25  # seconds between two looks at what is done, and for Ctrl-C

Batch = list[tuple[Entry, list[str]]]
Advance = Callable[[str, int], object]
"""Called with what was done last, and how many of all `steps` that was."""


def default_jobs() -> int:
    """As many jobs as there are cores, and as memory allows."""
    return max(1, min(usable(), available() // _MEMORY))


def steps(todo: Todo) -> int:
    """The steps of everything that is to do: two for each entry, to export it and to verify it."""
    return 2 * len(todo)


def measure(
    matrix: Matrix,
    todo: Todo,
    here: dict[str, Column],
    *,
    jobs: int,
    save: Callable[[Matrix], object],
    advance: Advance = lambda what, number: None,
    minutes: float | None = None,
) -> None:
    """Measure what is to do, into `matrix`. `save` is called after each batch, so an interrupt keeps finished batches.

    After `minutes` no more batches are started: the rest is "not run". The order of entries is then random, so that the
    measured entries are a sample of all.
    """
    done_steps: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    cpu = cpu_facts()
    end = math.inf if minutes is None else monotonic() + 60 * minutes
    batches = _batches(todo, jobs, drawn=minutes is not None)
    workers = [Worker(WORKER) for _ in range(min(jobs, len(batches)))]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(batch: Batch) -> list[Cell]:
        worker = idle.get()
        try:
            with temporary.folder() as folder:
                job = _Job(worker, folder, matrix.target, here, lambda *step: done_steps.put(step))
                return job.run(batch) if monotonic() < end else job.leave(batch)
        finally:
            idle.put(worker)

    executor = ThreadPoolExecutor(max_workers=max(1, len(workers)), thread_name_prefix="matrix")
    try:
        waiting: set[Future[list[Cell]]] = {executor.submit(run, batch) for batch in batches}
        while waiting:
            done, waiting = wait(waiting, timeout=_STEP, return_when=FIRST_COMPLETED)
            while not done_steps.empty():
                advance(*done_steps.get())
            for future in done:
                matrix.put(future.result())
                matrix.put_cpus([cpu])
            if done:
                save(matrix)
    finally:
        for worker in workers:  # first, so that a thread that waits gets its answer
            worker.close()
        executor.shutdown(wait=True, cancel_futures=True)


def _batches(todo: Todo, jobs: int, drawn: bool) -> list[Batch]:
    """Batches of neighbouring entries, small enough that every job gets some; or, if `drawn`, small random batches.

    The random order is the same each time.
    """
    items = random.Random(0).sample(list(todo.items()), len(todo)) if drawn else list(todo.items())
    size = max(1, min(LIMITED_BATCH if drawn else BATCH, -(-len(items) // jobs)))
    return [items[at : at + size] for at in range(0, len(items), size)]


@attrs.frozen
class _Job:
    """One batch in one child process."""

    worker: Worker
    folder: Path
    target: str
    here: dict[str, Column]
    tell: Advance

    def run(self, batch: Batch) -> list[Cell]:
        cells: list[Cell] = []
        exported: Batch = []
        for entry, columns in batch:
            spec, path = entry.spec().to_dict(), str(self._path(entry))
            answer = self._ask("export", spec=spec, form=entry.form, target=self.target, path=path)
            if isinstance(answer, str):
                cells += [self._cell(entry, column, FAILED, f"it can't be exported: {answer}") for column in columns]
                self.tell(f"exported {entry.name}", 2)
                continue
            if BUILD in columns:
                cells.append(self._build(entry))
            exported.append((entry, [column for column in columns if column != BUILD]))
            self.tell(f"made {entry.name}", 1)
        for runtimes in dict.fromkeys(tuple(columns) for _, columns in exported):
            group = [entry for entry, columns in exported if tuple(columns) == runtimes]
            cells += self._verify(group, runtimes)
            self.tell(f"verified {group[-1].name}", len(group))
        return cells

    def leave(self, batch: Batch) -> list[Cell]:
        """The cells of a batch that was not started in time."""
        self.tell(f"left {batch[-1][0].name}", 2 * len(batch))
        return [
            self._cell(entry, column, NOT_RUN, OUT_OF_TIME, lasting=False)
            for entry, columns in batch
            for column in columns
        ]

    def _build(self, entry: Entry) -> Cell:
        answer = self._ask("build", path=str(self._path(entry)), builder=self.here[BUILD].builder)
        fields = {"state": FAILED, "reason": answer} if isinstance(answer, str) else answer["cell"]
        return self._cell(entry, BUILD, **fields)

    def _verify(self, entries: Sequence[Entry], names: Sequence[str]) -> list[Cell]:
        if not names:
            return []
        files = {str(self._path(entry)): entry for entry in entries}
        limit = TIME_LIMIT * (1 + len(files)) * len(names)
        answer = self._ask("verify", limit, paths=list(files), runtimes=names, time_limit=TIME_LIMIT)
        if isinstance(answer, str) and len(entries) > 1:  # one of them ended the process: each by itself shows which
            return [cell for entry in entries for cell in self._verify([entry], names)]
        if isinstance(answer, str):
            return [self._cell(entries[0], name, FAILED, answer) for name in names]
        cells = {(files[path], name): self._cell(files[path], name, **fields) for path, name, fields in answer["cells"]}
        unreadable = {files[path]: reason for path, reason in answer["unreadable"]}
        return [
            cells.get((entry, name))
            or self._cell(
                entry, name, FAILED, unreadable.get(entry, "verify gave no verdict, which is a bug in posexport")
            )
            for entry in entries
            for name in names
        ]

    def _cell(
        self, entry: Entry, column: str, state: State, reason: str | None = None, lasting: bool = True, **numbers: Any
    ) -> Cell:
        """The cell of an entry. `lasting` is false if the reason may be gone when the matrix is next measured."""
        reason = None if reason is None else reason.replace(f"{self.folder}{os.sep}", "")
        version = self.here[column].version if lasting else None
        return Cell(
            entry=entry, column=column, state=state, reason=reason, spec=spec_hash(entry), version=version, **numbers
        )

    def _ask(self, what: str, limit: float = TIME_LIMIT, **request: Any) -> dict[str, Any] | str:
        """The worker's answer; or why it failed, shortened, since engines write errors of any length."""
        answer = self.worker.ask({"do": what, **request}, limit)
        reason = failure_of(answer)
        return answer if reason is None else reason.text[:350].rstrip(".")

    def _path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.name}.onnx"
