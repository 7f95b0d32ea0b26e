"""Several calculations with the same weights, in turns: each weight is read and converted once for all of them.

A calculation that needs a weight that is not loaded waits until the others need a weight too. Only one calculates at a
time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
from torch import Tensor

from posexport.machine import give_freed_memory_back, share_one_heap
from posexport.processes import report

Result = TypeVar("Result")

MakeWeight = Callable[[], Tensor]
"""Reads and converts a weight."""

GetWeight = Callable[[Hashable, MakeWeight], Tensor]
"""Gives the weight of a key; makes it if it is not kept."""

ROOM = 2**28
"""Bytes of weights after which memory that was freed goes back to the system: the C library keeps it in pieces, which
for weights of several sizes are a multiple of what is needed at a time."""


def make_each(key: Hashable, make: MakeWeight) -> Tensor:
    """A GetWeight that holds nothing, for one calculation."""
    return _counted(make())


class _Room:
    """Bytes of weights that were made since memory went back."""

    made = 0


def _counted(weight: Tensor) -> Tensor:
    """A weight that was just made; from time to time, freed memory goes back before it is used."""
    _Room.made += weight.nbytes
    if _Room.made > ROOM:
        _Room.made = 0
        give_freed_memory_back()
    return weight


class _Stopped(BaseException):
    """Ends a calculation whose result nobody waits for."""


@attrs.frozen
class _Ended:
    """The end of a calculation, with its result or its error."""

    number: int
    result: Any = None
    error: BaseException | None = None


def in_lockstep(calculations: Sequence[Callable[[GetWeight], Result]]) -> Iterator[tuple[int, Result]]:
    """The number and the result of each calculation as it ends, before another continues; raises the first error.

    Each calculation runs in its own thread, and gets its weights from the function that it is given.
    """
    yield from _Lockstep(calculations).run()


class _Lockstep:
    """The turns of calculations, and the weights that are kept for this round of turns."""

    def __init__(self, calculations: Sequence[Callable[[GetWeight], Result]]) -> None:
        self._turns = [threading.Semaphore(0) for _ in calculations]
        self._going = [*range(len(calculations))]
        self._held: dict[Hashable, Tensor] = {}
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._calculate, args=(number, calculate), daemon=True)
            for number, calculate in enumerate(calculations)
        ]

    def run(self) -> Iterator[tuple[int, Any]]:
        share_one_heap()
        for thread in self._threads:
            thread.start()
        self._give_turn_after(-1)
        try:
            while self._going:
                ended = self._ended.get()
                if ended.error is not None:
                    raise ended.error
                yield ended.number, ended.result
                self._going.remove(ended.number)
                self._give_turn_after(ended.number)
        finally:
            self._stopped = True
            for turn in self._turns:
                turn.release()
            for thread in self._threads:
                thread.join()
            give_freed_memory_back()

    def _calculate(self, number: int, calculate: Callable[[GetWeight], Any]) -> None:
        try:
            self._wait(number)
            self._ended.put(_Ended(number, calculate(partial(self._weight, number))))
        except _Stopped:
            pass
        except BaseException as error:  # the thread that waits for results raises it
            self._ended.put(_Ended(number, error=error))

    def _weight(self, number: int, key: Hashable, make: MakeWeight) -> Tensor:
        if key not in self._held:
            self._give_turn_after(number)
            self._wait(number)
        if key not in self._held:
            self._held[key] = _counted(make())
        return self._held[key]

    def _give_turn_after(self, number: int) -> None:
        """Give the turn to the next calculation that has not ended; after the last one, begin a new round."""
        following = next((other for other in self._going if other > number), None)
        if following is None:
            self._held.clear()
            report("next weights")  # restarts the time limit of an answer
            following = next(iter(self._going), None)
        if following is not None:
            self._turns[following].release()

    def _wait(self, number: int) -> None:
        self._turns[number].acquire()
        if self._stopped:
            raise _Stopped
