"""The tune stage: find, verify and write the fastest (or smallest) block for one runtime and one scenario.

    programs ──▶ same graph? ──▶ rank ──▶ opsets of the best ──▶ options of the best two ──▶ verify ──▶ artifact

Every form, target and dtype is exported once, in the lowest opset. Programs that the runtime turns into the same graph
are timed once. They are ranked by successive halving (`halving`). Then the other opsets of the winner are tried if they
make another graph. Then the runtime's options are tried on the winner and the second best. The winner is verified. If
that fails, its graph is excluded and the others are ranked again. Without a GPU, TensorRT's plans are ranked by kernel
tables (`ranking`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import MAX_ROUNDS
from posexport.bench.tune.measure import WARMUP, CandidateTimer
from posexport.bench.tune.programs import Tunable
from posexport.bench.tune.publish import publish, verified
from posexport.bench.tune.ranking import METHOD, TimeRanking, rank_by_kernels
from posexport.bench.tune.result import DROPPED, FAILED, RACED, REFUSED, SAME_GRAPH, WON, Cost, Result, Row
from posexport.bench.tune.space import Options, Program, Request, options_of, plain_options
from posexport.errors import RequestError, RuntimeMissingError
from posexport.machine import machine
from posexport.processes import REFUSED as REFUSED_BY_ENGINE
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES, TENSORRT, gpu_missing

BEST = 2
"""The number of programs, and of combinations of options, in the last ranking."""

FEW, FINAL = 8, 10
"""The most rounds of the earlier rankings, which only choose who takes part in the last one, and of the last one."""


def check_there(name: str) -> bool:
    """Whether plans are ranked by kernel tables. RuntimeMissingError if the runtime can't be tuned for here."""
    if RUNTIMES[name].module == TENSORRT:
        from posexport.runtimes.tensorrt import api

        api.choose(name)
        return gpu_missing() is not None
    if (missing := RUNTIMES[name].missing()) is not None:
        raise RuntimeMissingError(f"{name} can't be tuned for here, {missing}.")
    return False


def tune(block: Tunable, request: Request, output: Path, store: Store, progress: Progress = silent) -> Result:
    """Tune, and write the winner to `output` (.onnx, or .plan with its .onnx beside it) with its manifest.

    If nothing verifies, nothing is written and the result has no winner. RequestError for what can't be tuned.
    RuntimeMissingError if the runtime isn't available.
    """
    start = time.perf_counter()
    with Tuning(block, request, store, progress) as tuning:
        won = tuning.settle(tuning.search())
        result = tuning.result(won, time.perf_counter() - start)
        if won is None:
            return result
        progress(f"writing {output.name}")
        winner = publish(tuning.programs, won, output, result)
        if isinstance(winner, str):
            won.decide(FAILED, "not-verified", winner)
            won.verified = None
            return tuning.result(None, time.perf_counter() - start)
        return attrs.evolve(result, winner=winner)


class Tuning:
    """A tuning in progress. `rows` has all candidates in the order in which they came up."""

    def __init__(self, block: Tunable, request: Request, store: Store, progress: Progress) -> None:
        self.request, self.block = request, block
        self.machine = machine()
        self._by_kernels = check_there(request.runtime)
        self.programs = block.programs(request, store, progress)
        self.timer = CandidateTimer(self.programs, self.machine)
        self._ranking = TimeRanking(self.programs, self.timer)
        self.rows: dict[str, Row] = {}
        self._distinct: dict[str, Program] = {}  # the program that is timed, by identity
        self._options: dict[Program, int] = {}  # how many distinct combinations of options a program was tried with
        self._wrong: set[Program] = set()  # programs that failed to verify

    def __enter__(self) -> Tuning:
        return self

    def __exit__(self, *_: object) -> None:
        self.programs.__exit__()

    def search(self) -> list[Row]:
        """The best candidates, the winner first. RequestError if there are none."""
        request = self.request
        first = self.distinct(self.programs.candidates())
        if not first:
            reasons = [row.reason for row in self.rows.values() if row.state in (REFUSED, FAILED)]
            raise RequestError(f"nothing can be tuned for {request.runtime}: {reasons[0]}.")
        return self._narrow(first)

    def settle(self, order: list[Row]) -> Row | None:
        """The first that verifies. If a winner doesn't, its graph is excluded and the others are ranked again."""
        while order:
            row = order[0]
            program = row.program
            self.programs.progress(f"verifying {row.name}")
            reason, runtime = verified(self.programs, row, self._by_kernels)
            if reason is None:
                row.state, row.verified = WON, runtime
                return row
            self._wrong.add(program)
            for other in self.rows.values():
                if other.program == program and other.state in (RACED, DROPPED, WON):
                    other.decide(FAILED, "not-verified", f"did not verify on {runtime}: {reason}")
            left = [other for other in self._distinct.values() if other not in self._wrong]
            order = self._narrow(left) if left else []
        return None

    def distinct(self, candidates: Iterable[Program]) -> list[Program]:
        """The programs that can be timed, once for each graph. The others get a row that says why not."""
        timed = []
        for program in candidates:
            row = self._row(program, plain_options(self.request.runtime))
            prepared = self.programs.refusal(program) or self.programs.prepare(program)
            if isinstance(prepared, str):
                row.decide(REFUSED, "unsupported", prepared)
                continue
            if not self.request.runtime.startswith("tensorrt"):  # the size of a plan is not known yet
                row.size = prepared.size
            identity, error = self.programs.identity(program)
            if error is not None:
                refused = error.code == REFUSED_BY_ENGINE
                row.decide(*((REFUSED, "unsupported") if refused else (FAILED, "error")), error.text)
                continue
            other = self._distinct.setdefault(identity, program)
            if other != program:
                same = "file" if prepared.sha256 == self.programs.prepared[other].sha256 else "graph"
                row.decide(DROPPED, SAME_GRAPH, f"the same {same} as {other}: timed once")
                continue
            timed.append(program)
        return timed

    def _narrow(self, first: Sequence[Program]) -> list[Row]:
        """Rank programs, then opsets of the best, then its options, then the second best under the best of these."""
        runtime, best = self.request.runtime, first[0]
        plain = [plain_options(runtime)]
        order: list[Row] = []
        if len(first) > 1:  # a single program is timed with its options below
            order = self._rank([(program, plain) for program in first], FEW)
            if not order:
                return []
            best = order[0].program
        others = self.distinct(self.programs.others(best))
        opsets = [program for program in others if program not in self._wrong]
        if opsets:
            order = self._rank([(program, plain) for program in (best, *opsets)], FEW) + order
        leading = list(dict.fromkeys([*(row.program for row in order), best]))[:BEST]
        options = options_of(runtime, not self._by_kernels, allow=self.request.limits.allow)
        order = self._rank([(leading[0], options)], MAX_ROUNDS if len(leading) == 1 else FEW) or order
        if len(leading) > 1:
            best_options = [row.options for row in order[:BEST] if row.program == leading[0]]
            order = self._rank([(program, best_options) for program in leading], FINAL) or order
        for row in self.rows.values():
            if row.state == RACED and row not in order:
                row.state = DROPPED
        return order

    def _rank(self, chosen: Sequence[tuple[Program, Sequence[Options]]], most: int) -> list[Row]:
        rows = []
        for program, combinations in chosen:
            levels: dict[str, str] = {}
            for options in combinations:
                row = self._row(program, options)
                level = options.get("graph_level")
                identity, error = self.programs.identity(program, level)
                first = levels.setdefault(identity, str(level or "all"))
                if error is not None:
                    row.decide(FAILED, "error", error.text)
                elif level is not None and first != level:
                    row.decide(DROPPED, SAME_GRAPH, f"the same graph as with graph_level={first}: timed once")
                else:
                    rows.append(row)
            tried = sum(row.program == program for row in rows)
            self._options[program] = max(tried, self._options.get(program, 0))
        return rank_by_kernels(self.programs, rows) if self._by_kernels else self._ranking.rank(rows, most)

    def _row(self, program: Program, options: Options) -> Row:
        row = Row.of(program, options)
        return self.rows.setdefault(row.name, row)

    def result(self, won: Row | None, seconds: float) -> Result:
        """The whole result as data. `seconds` is how long the tuning took."""
        rows, request = list(self.rows.values()), self.request
        if won is not None:
            self._ranking.note_ratios(rows, won.name)
        distinct = len(self._distinct) * max(self._options.values(), default=0)
        return Result(
            encoding=self.block.title,
            target=request.runtime,
            scenario=str(request.scenario),
            objective=request.objective,
            method=METHOD if self._by_kernels else "raced on the runtime",
            winner=None if won is None else attrs.evolve(won),
            candidates=tuple(rows),
            cost=Cost(
                seconds=round(seconds, 3),
                timed_runs=self.timer.runs,
                everything_runs=0 if self._by_kernels else distinct * (WARMUP + MAX_ROUNDS * self.timer.turn),
                known_before=self.programs.store.reused,
            ),
            machine_load=round(self.timer.machine_load, 3),
            machine=self.machine,
        )
