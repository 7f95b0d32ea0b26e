"""Timing everything that a tuning chooses from: what `tune` is held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs

from posexport.bench import statistics
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import GROUP, MAX_ROUNDS, Halving
from posexport.bench.tune.measure import WARMUP
from posexport.bench.tune.search import Block, Request, Tuning
from posexport.bench.tune.space import Candidate, Program, options_of, other_opsets, plain_options, programs

FRESH, TURNS = 7, 3
"""Pairs of fresh processes that judge a pick, and the rounds of each."""

SURE = 0.998
"""Confidence of that judgement: 24 of them hold together with 95 %."""


@attrs.frozen(kw_only=True)
class Full:
    """`ratios` holds every candidate's time over that of the one asked about; `best` is the smallest of them.

    `judged` is the time of the one asked about over the best's, timed anew in `FRESH` pairs of processes: the smallest
    of many noisy ratios says too much by itself. It is None where they are the same. `runs` and `timing_seconds` are
    what timing each candidate once at full rounds takes, and `seconds` that with exports and opening: that the one
    asked about is timed again beside every group is no cost of theirs.
    """

    ratios: dict[str, statistics.Ratio]
    best: str
    judged: statistics.Ratio | None
    runs: int
    timing_seconds: float
    seconds: float
    machine_load: float

    @property
    def fine(self) -> bool:
        """Whether the one asked about is no slower than the best, within the interval."""
        return self.judged is None or self.judged.low <= 1


def own_program(winner: str, chosen: Sequence[Program]) -> Program:
    """That of the winner's form, dtype and target."""
    form, dtype, _, *rest = winner.split()[0].split("/")
    target = rest[0] if rest else "portable"
    return next(each for each in chosen if (each.form, each.dtype, each.target) == (form, dtype, target))


def full(
    block: Block,
    request: Request,
    winner: str,
    store: Store,
    *,
    rounds: int = MAX_ROUNDS,
    progress: Callable[[str], object] = lambda step: None,
) -> Full:
    """Time every distinct program under every combination of options, all against `winner`, a candidate's name.

    Opsets are those of the first race and all of the winner's own form and target. `rounds` may be fewer than the full
    ones. `store` should be empty, or everything that it knows is not timed.
    """
    start = time.perf_counter()
    with Tuning(block, request, store, progress) as tuning:
        chosen = tuning.distinct(programs(request.runtime, block.specs, request.limits))
        own = own_program(winner, chosen)
        chosen += tuning.distinct(other_opsets(own, request.limits))
        names: list[str] = []
        for program in chosen:
            levels: dict[str, str | None] = {}  # the first level that makes a graph
            for options in (*options_of(request.runtime, gpu=True), plain_options(request.runtime)):
                level = dict(options).get("graph_level")
                identity, error = tuning.programs.identity(program, tuning.prepared[program], level)
                name = str(candidate := Candidate(program=program, options=options))
                if error is None and levels.setdefault(identity, level) == level and name not in names:
                    tuning.timer.add(candidate, tuning.prepared[program])
                    names.append(name)
        if winner not in names:
            raise ValueError(f"{winner} is none of {', '.join(names)}")
        found, rest = Halving(), [name for name in names if name != winner]
        cost, runs, timing_seconds = tuning.timer.cost, 0.0, 0.0
        for at in range(0, max(len(rest), 1), GROUP - 1):
            group = [winner, *rest[at : at + GROUP - 1]]
            before = attrs.evolve(cost)
            timed, failed = tuning.timer.time_rounds(group, rounds, at)
            found.rounds += timed
            found.failed |= failed
            counted = len(group) - (at > 0)  # the winner's part counts once
            warmups = WARMUP * len(group)
            runs += (warmups + (cost.runs - before.runs - warmups) * MAX_ROUNDS / rounds) * counted / len(group)
            timing_seconds += (cost.seconds - before.seconds) * counted / len(group)
        ratios = {name: ratio for name in names if (ratio := found.ratio(name, winner)) is not None}
        seconds = time.perf_counter() - start - cost.seconds + timing_seconds * MAX_ROUNDS / rounds
        best, judged = min(ratios, key=lambda name: ratios[name].median), None
        if best != winner:
            judged = _judged(tuning, winner, best, len(names))
        return Full(
            ratios=ratios,
            best=best,
            judged=judged,
            runs=round(runs),
            timing_seconds=timing_seconds * MAX_ROUNDS / rounds,
            seconds=seconds,
            machine_load=tuning.timer.machine_load,
        )


def _judged(tuning: Tuning, winner: str, best: str, seed: int) -> statistics.Ratio:
    """The ratio of the two with its interval over processes."""
    plays = [tuning.timer.time_rounds([winner, best], TURNS, seed + number)[0] for number in range(FRESH)]
    if not all(len(one) == 2 for play in plays for one in play):
        raise RuntimeError(f"{winner} or {best} failed when they were timed again")
    ours, theirs = ([[one[name] for one in play] for play in plays] for name in (winner, best))
    return statistics.ratio_of_processes(ours, theirs, SURE)[0]
