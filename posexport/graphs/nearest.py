"""What can be reached in a graph in a few steps, each thing once: the number of paths may be exponential."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Thing = TypeVar("Thing", bound=Hashable)


def nearest_first(start: Thing, onward: Callable[[Thing], Iterable[Thing]], levels: int) -> Iterator[Thing]:
    """The start, then what `onward` leads to from there, and so on, `levels` levels in all."""
    level, seen = [start], {start}
    for _ in range(levels):
        yield from level
        level = [thing for thing in dict.fromkeys(new for one in level for new in onward(one)) if thing not in seen]
        seen.update(level)
