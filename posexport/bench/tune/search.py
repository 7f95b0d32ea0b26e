"""The tune stage: the fastest (or smallest) way to write a block for one runtime and one scenario, proved and written.

    programs ──▶ same graph? ──▶ race ──▶ opsets of the best ──▶ options of the best two ──▶ verify ──▶ artifact

Every form, target and dtype is exported once, in the lowest opset. Programs that the runtime turns into the same graph
are raced once. The race is successive halving (`halving`); then the other opsets of the winner are tried,
where they make another graph, and then the runtime's options, on the winner and the one next to it. The winner is
verified; where it fails, its graph is out and the rest is raced again. Without a GPU, TensorRT's plans are ranked by
their kernel tables (posexport.bench.tune.kernel_ranking).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.bench.scenarios import Scenario
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import MAX_ROUNDS
from posexport.bench.tune.measure import CandidateTimer
from posexport.bench.tune.programs import Block, PreparedProgram, Programs
from posexport.bench.tune.publish import make_winner, verified
from posexport.bench.tune.ranking import ByKernels, ByRace
from posexport.bench.tune.result import DROPPED, FAILED, RACED, REFUSED, TWIN, WON, Result, Row
from posexport.bench.tune.space import (
    Candidate,
    Limits,
    Program,
    check_objective,
    check_runtime,
    options_of,
    other_opsets,
    plain_options,
    programs,
)
from posexport.errors import RequestError, RuntimeMissingError
from posexport.machine import machine
from posexport.runtimes import RUNTIMES, TENSORRT, gpu_missing

__all__ = ["Block", "Limits", "Request", "Store", "tune"]

BEST = 2
"""Programs, and combinations of options, that reach the last race."""

FEW, FINAL = 8, 10
"""Rounds at most of the races before the last one, which only have to find out who takes part in that; and of that."""


@attrs.frozen(kw_only=True)
class Request:
    """What to tune for: a runtime of posexport.tune.space.RUNTIMES, one scenario, and latency, memory or size."""

    scenario: Scenario
    runtime: str = "ort-cpu"
    objective: str = "latency"
    limits: Limits = attrs.field(factory=Limits)
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        check_runtime(self.runtime)
        check_objective(self.objective)
        if self.scenario.swept:
            raise RequestError(
                f"scenario {self.scenario.kind!r} is a whole sweep: tune for one point of it, such as {self.scenario}."
            )


def check_there(name: str) -> bool:
    """Whether plans are ranked by kernel tables; RuntimeMissingError where the runtime can do neither here."""
    if RUNTIMES[name].module == TENSORRT:
        from posexport.runtimes.tensorrt import api

        api.choose(name)
        return gpu_missing() is not None
    missing = RUNTIMES[name].missing()
    if missing is not None:
        raise RuntimeMissingError(f"{name} can't be tuned for here, {missing}.")
    return False


def tune(
    block: Block,
    request: Request,
    output: Path,
    store: Store,
    progress: Callable[[str], object] = lambda step: None,
) -> Result:
    """Tune, and write the winner to `output` (.onnx, or .plan with its .onnx beside it) with its manifest.

    Where nothing verifies, nothing is written and the result has no winner. RequestError for what can't be tuned;
    RuntimeMissingError where the runtime isn't there.
    """
    start = time.perf_counter()
    with Tuning(block, request, store, progress) as tuning:
        order = tuning.search()
        won = tuning.settle(order)
        result = tuning.result(won, time.perf_counter() - start)
        if won is not None:
            progress(f"writing {output.name}")
            made = make_winner(tuning.shelf, store, won, request.runtime, tuning.fitted[won.candidate.program], output)
            if isinstance(made, str):
                won.state, won.reason, won.verified = FAILED, made, None
                result = tuning.result(None, time.perf_counter() - start)
            else:
                result = attrs.evolve(result, winner=made.publish(result))
    return result


class Tuning:
    """One tuning under way: rows of every candidate in the order in which they were thought of."""

    def __init__(self, block: Block, request: Request, store: Store, progress: Callable[[str], object]) -> None:
        self.request, self.block = request, block
        self.machine = machine()
        self._by_kernels = check_there(request.runtime)
        self.shelf = Programs(block, request.runtime, request.scenario, store, progress)
        self._store, self._progress = store, progress
        self.field = CandidateTimer(self.shelf, store, request.runtime, self.machine, request.seed, progress)
        self._picker = (
            ByKernels(self.shelf, request.objective)
            if self._by_kernels
            else ByRace(self.shelf, self.field, request.runtime, request.objective, request.seed)
        )
        self.rows: dict[str, Row] = {}
        self.fitted: dict[Program, PreparedProgram] = {}
        self._same: dict[str, Program] = {}  # the program that stands for an identity
        self._options: dict[Program, int] = {}  # how many distinct combinations of options a program was tried with
        self._wrong: dict[str, str] = {}  # programs that failed to verify, by name

    def __enter__(self) -> Tuning:
        return self

    def __exit__(self, *_: object) -> None:
        self.shelf.__exit__()

    def search(self) -> list[Row]:
        """The best candidates, the winner first; RequestError where there is none at all."""
        request = self.request
        first = self.distinct(programs(request.runtime, self.block.specs, request.limits))
        if not first:
            reasons = dict.fromkeys(row.reason for row in self.rows.values() if row.state in (REFUSED, FAILED))
            raise RequestError(f"nothing can be tuned for {request.runtime}: {next(iter(reasons))}.")
        return self._narrow(first)

    def settle(self, order: list[Row]) -> Row | None:
        """The first that verifies; where a winner doesn't, its graph is out and the others are raced again."""
        while order:
            row = order[0]
            program = row.candidate.program
            self._progress(f"verifying {row.candidate}")
            reason, runtime = verified(self.shelf, self._store, self.request.runtime, row.candidate, self._by_kernels)
            if reason is None:
                row.state, row.verified = WON, runtime
                return row
            self._wrong[str(program)] = f"did not verify on {runtime}: {reason}"
            for each in self.rows.values():
                if each.candidate.program == program and each.state in (RACED, DROPPED, WON):
                    each.state, each.reason = FAILED, self._wrong[str(program)]
            left = [each for each in self._same.values() if str(each) not in self._wrong]
            order = self._narrow(left) if left else []
        return None

    def distinct(self, wanted: Iterable[Program]) -> list[Program]:
        """Those that can be timed, once for each graph; every other gets a row that says why not."""
        found = []
        for program in wanted:
            row = self._row(program, plain_options(self.request.runtime))
            refused = self.shelf.refusal(program)
            fitted = None if refused is not None else self.shelf.fit(program)
            if not isinstance(fitted, PreparedProgram):
                row.state, row.reason = REFUSED, refused or str(fitted)
                continue
            if not self.request.runtime.startswith("tensorrt"):  # there the plan's counts, which is not built yet
                row.size = fitted.size
            identity, error = self.shelf.identity(program, fitted)
            if error is not None:
                row.state, row.reason = (REFUSED if "NOT_IMPLEMENTED" in error else FAILED), error
                continue
            self.fitted[program] = fitted
            other = self._same.setdefault(identity, program)
            if other != program:
                same = fitted.sha256 == self.fitted[other].sha256
                row.state, row.reason = DROPPED, f"the same {'file' if same else 'graph'} as {other}: {TWIN}"
                continue
            found.append(program)
        return found

    def _narrow(self, first: Sequence[Program]) -> list[Row]:
        """Race programs, then opsets of the best, then its options, and the one next to it under the best of those."""
        runtime, best = self.request.runtime, first[0]
        order: list[Row] = []
        if len(first) > 1:  # one alone is timed when its options are
            order = self._pick([(program, [plain_options(runtime)]) for program in first], FEW)
            if not order:
                return []
            best = order[0].candidate.program
        more = [each for each in self.distinct(other_opsets(best, self.request.limits)) if str(each) not in self._wrong]
        if more:
            order = self._pick([(program, [plain_options(runtime)]) for program in (best, *more)], FEW) + order
        leading = list(dict.fromkeys([*(row.candidate.program for row in order), best]))[:BEST]
        options = options_of(runtime, not self._by_kernels)
        order = self._pick([(leading[0], options)], MAX_ROUNDS if len(leading) == 1 else FEW) or order
        if len(leading) > 1:
            stand = [row.candidate.options for row in order[:BEST] if row.candidate.program == leading[0]]
            order = self._pick([(program, stand) for program in leading], FINAL) or order
        for row in self.rows.values():
            if row.state == RACED and row not in order:
                row.state = DROPPED
        return order

    def _pick(self, chosen: Sequence[tuple[Program, Sequence[tuple[tuple[str, Any], ...]]]], most: int) -> list[Row]:
        entries = []
        for program, options in chosen:
            levels: dict[str, str] = {}
            for each in options:
                row = self._row(program, each)
                level = dict(each).get("graph_level")
                identity, error = self.shelf.identity(program, self.fitted[program], level)
                first = levels.setdefault(identity, str(level or "all"))
                if error is not None:
                    row.state, row.reason = FAILED, error
                elif level is not None and first != level:
                    row.state, row.reason = DROPPED, f"the same graph as with graph_level={first}: {TWIN}"
                else:
                    entries.append((row, self.fitted[program]))
            tried = sum(row.candidate.program == program for row, _ in entries)
            self._options[program] = max(tried, self._options.get(program, 0))
        return self._picker.pick(entries, most)

    def _row(self, program: Program, options: tuple[tuple[str, Any], ...]) -> Row:
        candidate = Candidate(program=program, options=options)
        return self.rows.setdefault(str(candidate), Row(candidate=candidate))

    def result(self, won: Row | None, seconds: float) -> Result:
        """All of it as data."""
        rows, request = list(self.rows.values()), self.request
        if won is not None:
            self._picker.ratios(rows, str(won.candidate))
        spec = next(iter(self.block.specs.values()))
        every = len(self._same) * max(self._options.values(), default=0)
        return Result(
            encoding=spec.encoding.name,
            target=request.runtime,
            scenario=str(request.scenario),
            objective=request.objective,
            method=self._picker.method,
            winner=None if won is None else won.to_dict(),
            candidates=tuple(rows),
            seconds=seconds,
            runs=self.field.cost.runs,
            everything=self._picker.everything(every),
            known=self._store.found,
            machine_load=self.field.machine_load,
            machine=self.machine,
        )
