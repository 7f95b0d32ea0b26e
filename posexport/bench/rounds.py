"""Timing candidates in alternation: every round calls each candidate once, in an order of its own."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import psutil

from posexport.errors import RequestError

Timed = TypeVar("Timed")


PAUSE = 0.03
"""Seconds before each call: longer than the thread pools of torch and ONNX Runtime spin."""


def orders(names: Sequence[str], rounds: int, seed: int = 0) -> Iterator[list[str]]:
    """For each round the names in a new random order, the same for the same seed."""
    shuffle = random.Random(seed)
    for _ in range(rounds):
        yield shuffle.sample(names, len(names))


def interleave(
    calls: Mapping[str, Callable[[], Timed]],
    rounds: int,
    *,
    seed: int = 0,
    pause: float = PAUSE,
    done: Callable[[], object] = lambda: None,
) -> dict[str, list[Timed]]:
    """What each call returned, by round. `done` is called after each round."""
    if rounds < 1:
        raise RequestError(f"rounds is {rounds}: give at least 1.")
    series: dict[str, list[Timed]] = {name: [] for name in calls}
    for order in orders(list(calls), rounds, seed):
        for name in order:
            time.sleep(pause)
            series[name].append(calls[name]())
        done()
    return series


class MachineLoad:
    """How much of the machine's CPU other work takes from now on: times beside much of it mean little."""

    def __init__(self, children: Sequence[int] = ()) -> None:
        """`children` are processes of its own that run on; those that have ended count as its own too."""
        self._children = children
        self._start, self._all, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def share(self) -> float:
        """Its part of all cores' time since then, 0 to 1."""
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
