"""Timing candidates in alternation. Every round calls each candidate once, in a new random order."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psutil

from posexport.errors import Reason, RequestError
from posexport.processes import Worker, failure_of

Timed = TypeVar("Timed")

PAUSE = 0.03
"""Seconds before each call. The thread pools of torch and ONNX Runtime spin for a shorter time."""

OPEN_LIMIT, RUN_LIMIT = 900.0, 300.0
"""Seconds allowed to load and compile for one shape, and for one turn."""


def interleave(
    calls: Mapping[str, Callable[[], Timed]],
    rounds: int,
    *,
    seed: int = 0,
    pause: float = PAUSE,
    done: Callable[[], object] = lambda: None,
) -> dict[str, list[Timed]]:
    """What each call returned, by round. `seed` fixes the random orders. `done` is called after each round."""
    if rounds < 1:
        raise RequestError(f"rounds is {rounds}: give at least 1.")
    series: dict[str, list[Timed]] = {name: [] for name in calls}
    shuffle = random.Random(seed)
    for _ in range(rounds):
        for name in shuffle.sample(list(calls), len(calls)):
            time.sleep(pause)
            series[name].append(calls[name]())
        done()
    return series


class TimingProcesses:
    """A child process of posexport.bench.worker for each candidate, by name. Its first request starts it.

    A process that fails is closed, and `failed` says why. A later request starts a new one.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self.failed: dict[str, Reason] = {}

    def __enter__(self) -> TimingProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._workers):
            self.close(name)

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def close(self, name: str) -> None:
        """End the process of a candidate."""
        self._workers.pop(name).close()

    def ask(self, name: str, do: str, *, limit: float = OPEN_LIMIT, **fields: Any) -> Mapping[str, Any] | None:
        """The answer to a request within `limit` seconds, or None if it failed."""
        if name not in self._workers:
            self._workers[name] = Worker("posexport.bench.worker")
            self.failed.pop(name, None)
        reply = self._workers[name].ask({"do": do, **fields}, limit)
        reason = failure_of(reply)
        if reason is None:
            return reply
        self.failed[name] = reason
        self.close(name)
        return None

    def interleave(
        self, bursts: Mapping[str, int], rounds: int, seed: int, done: Callable[[], object] = lambda: None, **more: Any
    ) -> tuple[dict[str, list[list[float]]], float]:
        """The seconds of each candidate's runs by round, and the load of the machine.

        `bursts` are the runs of each candidate in a round. A candidate that has failed has no runs.
        """

        def turn(name: str) -> list[float]:
            reply = self.ask(name, "time", limit=RUN_LIMIT, burst=bursts[name], **more) if name in self else None
            return [] if reply is None else list(reply["seconds"])

        load = MachineLoad([worker.pid for worker in self._workers.values() if worker.pid is not None])
        series = interleave({name: partial(turn, name) for name in bursts}, rounds, seed=seed, done=done)
        return series, load.share()


class MachineLoad:
    """The share of the machine's CPU that other work takes from now on. If it is large, times are not reliable."""

    def __init__(self, children: Sequence[int] = ()) -> None:
        """`children` are child processes that continue to run. Their work and that of ended ones counts as own work."""
        self._children = children
        self._start, self._all, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def share(self) -> float:
        """The share of other work in the time of all cores since then, 0 to 1."""
        seconds = time.perf_counter() - self._start
        others = (_busy_seconds() - self._all) - (self._own_seconds() - self._own)
        return min(max(others / (seconds * (psutil.cpu_count() or 1)), 0.0), 1.0)

    def _own_seconds(self) -> float:
        seconds = sum(os.times()[:4])
        for pid in self._children:
            with contextlib.suppress(psutil.Error):  # it ended just now
                times = psutil.Process(pid).cpu_times()
                seconds += times.user + times.system
        return seconds


def _busy_seconds() -> float:
    """Seconds that all cores have worked since the machine started."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")))
