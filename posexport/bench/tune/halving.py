"""Successive halving: few rounds for all, and more only for those that are still equal to the best. Imports no engine.

A step times a group of candidates in interleaved rounds, each in a fresh process (`rounds` says why), and drops
those whose interval of ratios to the group's fastest lies wholly above 1 (clearly so, where it is one of few rounds);
of those that stand then, the slower half is dropped too, so that a noisy machine makes a race less sharp, not long.
What stands is timed again, until one stands, until all that stand are equal, or until each had all its rounds. A step
never holds more than `GROUP` processes: larger fields are timed in groups, and the fastest so far is in each of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import attrs

from posexport.bench import statistics

GROUP = 6
"""Processes that live side by side."""

FIRST, MAX_ROUNDS = 4, 20
"""Rounds of the first step, and of all steps together."""

LAST = 2
"""So many are never halved."""

EQUAL = 0.03
"""Two candidates are equal where the interval of their ratio lies within 1 +- this."""

NEAR = 0.01
"""Of those that stand, a simpler one is preferred where its median is no further behind."""

SURE = 0.95
"""An interval of less confidence (one of few rounds) only drops what it puts further behind than `EQUAL`."""

Round = Mapping[str, float]
"""Seconds of one round by candidate."""

Play = Callable[[Sequence[str], int, int], tuple[list[Round], Mapping[str, str]]]
"""(names, rounds, seed) -> the rounds, and the reasons of those that failed."""


@attrs.define(kw_only=True)
class Race:
    """What is known so far. `dropped` maps a name to (the one it was slower than, the ratio to it), `halved` to how
    many times slower it was in the median, where its interval alone did not drop it."""

    rounds: list[Round] = attrs.field(factory=list)
    dropped: dict[str, tuple[str, statistics.Ratio]] = attrs.field(factory=dict)
    halved: dict[str, tuple[str, float]] = attrs.field(factory=dict)
    failed: dict[str, str] = attrs.field(factory=dict)
    standing: list[str] = attrs.field(factory=list)
    known: int = 0
    """How many of the rounds are those of earlier races."""

    def ratio(self, name: str, other: str) -> statistics.Ratio | None:
        """One over the other, in the rounds that hold both; None where none does."""
        both = [each for each in self.rounds if name in each and other in each]
        if not both:
            return None
        return statistics.ratio([each[name] for each in both], [each[other] for each in both])

    def seconds(self, name: str) -> list[float]:
        """Its time in every round that it took part in."""
        return [each[name] for each in self.rounds if name in each]

    def fastest(self, names: Sequence[str]) -> str:
        """The fastest of some by the rounds that all of them share, or else by `speeds`."""
        shared = [each for each in self.rounds if all(name in each for name in names)]
        if shared:
            return min(names, key=lambda name: median(each[name] for each in shared))
        speeds = self.speeds()
        return min(names, key=lambda name: speeds.get(name, math.inf))

    def speeds(self, start: str | None = None) -> dict[str, float]:
        """Median times relative to `start` (or to the one with most rounds), of all that rounds connect with it.

        Those that share no round with it are compared through one that shares rounds with both, such as the leader
        that two groups had in common: seconds of different minutes say little, and count only where nothing connects.
        """
        count = Counter(name for each in self.rounds for name in each)
        if not count:
            return {}
        start = start or count.most_common(1)[0][0]
        found, reached = {start: 1.0}, [start]
        for one in reached:  # grows as it goes: the shortest way to each
            for name in count:
                if name not in found and (ratio := self.ratio(name, one)) is not None:
                    found[name] = found[one] * ratio.median
                    reached.append(name)
        zero = self.seconds(start)
        return {name: median(self.seconds(name)) / median(zero) for name in count if zero} | found

    def behind(self, name: str, best: str) -> float:
        """How many times the best's its time is, as `speeds` has it."""
        return self.speeds(best).get(name, math.inf)

    def equals(self, behind: float = NEAR) -> list[str]:
        """Those that stand and are at most `behind` slower than the fastest in the median."""
        best = self.fastest(self.standing)
        found = []
        for name in self.standing:
            ratio = self.ratio(name, best)
            if name == best or (ratio is not None and ratio.median <= 1 + behind):
                found.append(name)
        return found


def race(
    names: Sequence[str],
    play: Play,
    *,
    first: int = FIRST,
    most: int = MAX_ROUNDS,
    seed: int = 0,
    known: Sequence[Round] = (),
) -> Race:
    """Race the named candidates, the preferred among equals first.

    What stands at the end is in `standing`, which is empty only where all failed. `known` holds rounds of earlier
    races: they count as evidence, but not towards `most`.
    """
    before = [{name: each[name] for name in names if name in each} for each in known]
    found = Race(standing=list(names), rounds=[each for each in before if len(each) > 1])
    found.known = len(found.rounds)
    done, step = 0, min(first, most)
    while found.standing and done < most and (done == 0 or len(found.standing) > 1):
        _step(found, play, step, seed + done)
        done += step
        if _settled(found) or done >= most:
            break
        _halve(found)
        step = min(done, most - done)
    return found


def _step(found: Race, play: Play, rounds: int, seed: int) -> None:
    """One step for all that stand, in groups that share the fastest so far."""
    waiting = list(found.standing)
    random.Random(seed).shuffle(waiting)
    leader = found.fastest(waiting) if found.rounds else waiting[0]
    waiting.remove(leader)
    while True:
        group = [leader, *waiting[: GROUP - 1]]
        del waiting[: GROUP - 1]
        timed, failed = play(group, rounds, seed)
        found.rounds += timed
        found.failed |= failed
        left = [name for name in group if name not in found.failed]
        found.standing = [name for name in found.standing if name not in found.failed]
        if left:
            leader = found.fastest(left)
            _drop(found, left, leader)
            if not waiting:
                return
        elif not waiting:
            return
        else:  # all failed: the next one leads, and is timed even where it is alone
            leader = waiting.pop(0)


def _drop(found: Race, group: Sequence[str], leader: str) -> None:
    for name in group:
        ratio = None if name == leader else found.ratio(name, leader)
        if ratio is not None and ratio.low > (1 if ratio.confidence >= SURE else 1 + EQUAL):
            found.dropped[name] = (leader, ratio)
            found.standing.remove(name)


def _halve(found: Race) -> None:
    """Drop the slower half of many that stand; of those that are equal in the median, the preferred ones stay."""
    best = found.fastest(found.standing)
    speeds = found.speeds(best)
    behind = {name: speeds.get(name, math.inf) for name in found.standing}
    order = sorted(found.standing, key=lambda name: max(behind[name], 1 + EQUAL))
    for name in order[max(LAST, math.ceil(len(order) / 2)) :]:
        if name != best:
            found.halved[name] = (best, behind[name])
            found.standing.remove(name)


def _settled(found: Race) -> bool:
    """Whether all that stand are known to be equal."""
    if len(found.standing) < 2:
        return True
    best = found.fastest(found.standing)
    ratios = [found.ratio(name, best) for name in found.standing if name != best]
    return all(each is not None and each.high <= 1 + EQUAL and each.low >= 1 - EQUAL for each in ratios)
