"""Successive halving: few rounds for all candidates, more only for those that may still be the fastest.

A step times a group of candidates in interleaved rounds, each in a new process (`posexport.bench.session` says why). It
drops those whose interval of ratios to the group's fastest lies completely above 1 (clearly above 1 after few rounds).
The slower half of the others is dropped too. A noisy machine then makes the result less sharp, but the search takes no
longer. The rest is timed again until one is left, until all that are left are equal, or until each had all its rounds.
A step has at most `GROUP` processes. More candidates are timed in groups that share the fastest so far. No engine is
imported here.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import attrs

from posexport.bench import statistics
from posexport.bench.statistics import CONFIDENCE

GROUP = 6
"""The number of processes that are open side by side."""

FIRST, MAX_ROUNDS = 4, 20
"""Rounds of the first step, and of all steps together."""

LAST = 2
"""The number of candidates that are never halved."""

EQUAL = 0.03
"""Two candidates are equal if the interval of their ratio lies within 1 +- this."""

NEAR = 0.01
"""Among the remaining candidates, a simpler one is preferred if its median is slower by at most this."""

Round = Mapping[str, float]
"""Seconds of one round by candidate."""

TimeRounds = Callable[[Sequence[str], int, int], tuple[list[Round], Mapping[str, str]]]
"""(names, rounds, seed) -> the rounds, and the reasons of candidates that failed."""


@attrs.define(kw_only=True)
class Halving:
    """The state of one search.

    `dropped` maps a name to (the candidate that was faster, the ratio to it). `halved` maps a name that its interval
    did not drop to (the fastest, how many times slower it was in the median).
    """

    rounds: list[Round] = attrs.field(factory=list)
    dropped: dict[str, tuple[str, statistics.Ratio]] = attrs.field(factory=dict)
    halved: dict[str, tuple[str, float]] = attrs.field(factory=dict)
    failed: dict[str, str] = attrs.field(factory=dict)
    remaining: list[str] = attrs.field(factory=list)
    known: int = 0
    """The number of rounds that come from earlier searches."""

    def ratio(self, name: str, other: str) -> statistics.Ratio | None:
        """The ratio of one to the other, in the rounds that have both. None if there are none."""
        both = [seconds for seconds in self.rounds if name in seconds and other in seconds]
        if not both:
            return None
        return statistics.ratio([seconds[name] for seconds in both], [seconds[other] for seconds in both])

    def seconds(self, name: str) -> list[float]:
        """Its time in every round that it took part in."""
        return [seconds[name] for seconds in self.rounds if name in seconds]

    def fastest(self, names: Sequence[str]) -> str:
        """The fastest of some, by the rounds that all of them share, otherwise by `speeds`."""
        shared = [seconds for seconds in self.rounds if all(name in seconds for name in names)]
        if shared:
            return min(names, key=lambda name: median(seconds[name] for seconds in shared))
        speeds = self.speeds()
        return min(names, key=lambda name: speeds.get(name, math.inf))

    def speeds(self, start: str | None = None) -> dict[str, float]:
        """Median times relative to `start` (or to the candidate with the most rounds).

        A candidate that shares no round with it is compared through one that shares rounds with both, such as the
        fastest that two groups had in common. Seconds of different minutes count only if nothing connects the two.
        """
        count = Counter(name for seconds in self.rounds for name in seconds)
        if not count:
            return {}
        start = start or count.most_common(1)[0][0]
        speeds, reached = {start: 1.0}, [start]
        for other in reached:  # grows while it is read: the shortest path to each
            for name in count:
                if name not in speeds and (ratio := self.ratio(name, other)) is not None:
                    speeds[name] = speeds[other] * ratio.median
                    reached.append(name)
        base = self.seconds(start)
        return {name: median(self.seconds(name)) / median(base) for name in count if base} | speeds

    def equals(self) -> list[str]:
        """The remaining candidates that are at most `NEAR` slower than the fastest in the median."""
        best = self.fastest(self.remaining)
        ratios = {name: self.ratio(name, best) for name in self.remaining}
        return [name for name, ratio in ratios.items() if name == best or (ratio and ratio.median <= 1 + NEAR)]


def successive_halving(
    names: Sequence[str],
    time_rounds: TimeRounds,
    *,
    first: int = FIRST,
    most: int = MAX_ROUNDS,
    seed: int = 0,
    known: Sequence[Round] = (),
) -> Halving:
    """Search the named candidates for the fastest. Of equal ones, the first in `names` is preferred.

    What is left at the end is in `remaining`, which is empty only if all failed. `known` contains rounds of earlier
    searches. They count as evidence, but not towards `most`.
    """
    before = [{name: seconds[name] for name in names if name in seconds} for seconds in known]
    search = Halving(remaining=list(names), rounds=[seconds for seconds in before if len(seconds) > 1])
    search.known = len(search.rounds)
    done, step = 0, min(first, most)
    while search.remaining and done < most and (done == 0 or len(search.remaining) > 1):
        _step(search, time_rounds, step, seed + done)
        done += step
        if _settled(search) or done >= most:
            break
        _halve(search)
        step = min(done, most - done)
    return search


def _step(search: Halving, time_rounds: TimeRounds, rounds: int, seed: int) -> None:
    """Run one step for all that remain, in groups that share the fastest so far."""
    waiting = list(search.remaining)
    random.Random(seed).shuffle(waiting)
    leader = search.fastest(waiting) if search.rounds else waiting[0]
    waiting.remove(leader)
    while True:
        group = [leader, *waiting[: GROUP - 1]]
        del waiting[: GROUP - 1]
        timed, failed = time_rounds(group, rounds, seed)
        search.rounds += timed
        search.failed |= failed
        ran = [name for name in group if name not in search.failed]
        search.remaining = [name for name in search.remaining if name not in search.failed]
        if ran:
            leader = search.fastest(ran)
            _drop(search, ran, leader)
        if not waiting:
            return
        if not ran:  # all failed: the next one leads, and is timed even if it is alone
            leader = waiting.pop(0)


def _drop(search: Halving, group: Sequence[str], leader: str) -> None:
    """Drop what is slower by its interval, or by more than `EQUAL` if few rounds make the interval uncertain."""
    for name in group:
        ratio = None if name == leader else search.ratio(name, leader)
        if ratio is not None and ratio.low > (1 if ratio.confidence >= CONFIDENCE else 1 + EQUAL):
            search.dropped[name] = (leader, ratio)
            search.remaining.remove(name)


def _halve(search: Halving) -> None:
    """Drop the slower half. Of those that are equal in the median, the preferred ones stay."""
    best = search.fastest(search.remaining)
    speeds = search.speeds(best)
    behind = {name: speeds.get(name, math.inf) for name in search.remaining}
    order = sorted(search.remaining, key=lambda name: max(behind[name], 1 + EQUAL))
    for name in order[max(LAST, math.ceil(len(order) / 2)) :]:
        if name != best:
            search.halved[name] = (best, behind[name])
            search.remaining.remove(name)


def _settled(search: Halving) -> bool:
    """Whether all that remain are known to be equal."""
    if len(search.remaining) < 2:
        return True
    best = search.fastest(search.remaining)
    ratios = [search.ratio(name, best) for name in search.remaining if name != best]
    return all(ratio is not None and ratio.high <= 1 + EQUAL and ratio.low >= 1 - EQUAL for ratio in ratios)
