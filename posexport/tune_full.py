"""Timing everything that a tuning chooses from, at full rounds: what `tune` is held against (scripts/benchmarks)."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from posexport import timing
from posexport.tune import Block, Request, Tuning
from posexport.tune_race import GROUP, MOST, Race
from posexport.tune_space import Candidate, options_of, other_opsets, plain_options, programs
from posexport.tune_store import Store


@attrs.frozen(kw_only=True)
class Full:
    """`ratios` holds every candidate's time over that of the one asked about; `best` is the smallest of them.

    `judged` is the time of the one asked about over the best's, in fresh rounds: the smallest of many noisy ratios says
    too much by itself. It is None where they are the same.
    """

    ratios: dict[str, timing.Ratio]
    best: str
    judged: timing.Ratio | None
    runs: int
    timing_seconds: float
    seconds: float
    busy: float

    @property
    def fine(self) -> bool:
        """Whether the one asked about is no slower than the best, within the interval."""
        return self.judged is None or self.judged.low <= 1


def full(
    block: Block,
    request: Request,
    winner: str,
    store: Store,
    *,
    rounds: int = MOST,
    progress: Callable[[str], object] = lambda step: None,
) -> Full:
    """Time every distinct program under every combination of options, all against `winner`, a candidate's name.

    Opsets are those of the first race and all of the winner's own form. `store` should be empty, or everything that it
    knows is not timed.
    """
    start = time.perf_counter()
    with Tuning(block, request, store, progress) as tuning:
        chosen = tuning.distinct(programs(request.runtime, block.specs, request.limits))
        own = next(each for each in chosen if winner.split()[0].split("/")[:2] == [each.form, each.dtype])
        chosen += tuning.distinct(other_opsets(own, request.limits))
        names = []
        for program in chosen:
            levels: set[str] = set()
            for options in (*options_of(request.runtime, gpu=True), plain_options(request.runtime)):
                level = dict(options).get("graph_level")
                identity, error = tuning.shelf.identity(program, tuning.fitted[program], level)
                name = str(candidate := Candidate(program=program, options=options))
                if error is None and name not in names and (level is None or identity not in levels):
                    tuning.field.add(candidate, tuning.fitted[program])
                    names.append(name)
                if level is None:
                    levels.add(identity)
        if winner not in names:
            raise ValueError(f"{winner} is none of {', '.join(names)}")
        found, rest = Race(), [name for name in names if name != winner]
        for at in range(0, len(rest), GROUP - 1):
            timed, failed = tuning.field.play([winner, *rest[at : at + GROUP - 1]], rounds, at)
            found.rounds += timed
            found.failed |= failed
        ratios = {name: ratio for name in names if (ratio := found.ratio(name, winner)) is not None}
        cost, seconds = attrs.evolve(tuning.field.cost), time.perf_counter() - start
        best, judged = min(ratios, key=lambda name: ratios[name].median), None
        if best != winner:
            fresh, _ = tuning.field.play([winner, best], rounds, len(names))
            judged = Race(rounds=fresh).ratio(winner, best)
        return Full(
            ratios=ratios,
            best=best,
            judged=judged,
            runs=cost.runs,
            timing_seconds=cost.seconds,
            seconds=seconds,
            busy=tuning.field.busy,
        )
