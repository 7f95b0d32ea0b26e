"""How the candidates of one tuning are ranked: by time, or by kernel tables; and by memory or size before that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posexport.bench.statistics import summarize
from posexport.bench.tune import result as states
from posexport.bench.tune.halving import GROUP, MAX_ROUNDS, Halving, Round, successive_halving
from posexport.bench.tune.kernel_ranking import METHOD, describe_plan, merit, planned, summary, unknown
from posexport.bench.tune.measure import WARMUP, CandidateTimer
from posexport.bench.tune.programs import PreparedProgram, Programs
from posexport.bench.tune.result import DROPPED, FAILED, RACED, Row
from posexport.bench.tune.space import NARROW, plainest

CLOSE = 0.02
"""Two programs take the same memory, or space, where they differ by less."""

Entries = Sequence[tuple[Row, PreparedProgram]]


class Ranking(Protocol):
    """Ranks entries and notes in their rows what became of each."""

    method: str

    def rank(self, entries: Entries, most: int) -> list[Row]:
        """The winner, then those equal to it or next; none where all failed. `most` rounds each."""
        ...

    def full_runs(self, candidates: int) -> int:
        """The runs that timing so many candidates at full rounds takes."""
        ...

    def note_ratios(self, rows: Sequence[Row], winner: str) -> None:
        """Note the ratio of each row to the winner, where they took part in the same rounds."""
        ...


class TimeRanking:
    """By time: successive halving on the runtime itself."""

    method = "raced on the runtime"

    def __init__(self, programs: Programs, timer: CandidateTimer, runtime: str, objective: str, seed: int) -> None:
        self._programs, self._timer, self._objective, self._seed = programs, timer, objective, seed
        self._plans = runtime.startswith("tensorrt")
        self.history: list[Round] = []

    def rank(self, entries: Entries, most: int) -> list[Row]:
        for row, prepared in entries:
            self._timer.add(row.candidate, prepared)
            row.decide(RACED, "", "")
            if not self._plans:
                row.size = prepared.size
        entries = sorted(entries, key=lambda entry: entry[0].candidate.plainness)
        rows = {row.name: row for row, _ in entries}
        names = self._smallest(rows, {row.name: prepared for row, prepared in entries})
        if not names:
            return []
        search = successive_halving(names, self._timer.time_rounds, most=most, seed=self._seed, known=self.history)
        self.history = [*self.history, *search.rounds[search.known :]]
        for name in names:
            self._note(rows[name], search)
        if not search.remaining:
            return []
        equal = search.equals()
        winner = str(plainest([rows[name].candidate for name in equal]))
        best = search.fastest(search.remaining)
        for name in search.remaining:
            if name == winner:
                self._note_winner(rows[name], best, equal)
            elif name in equal:
                reason = f"equal within the interval to {winner}, which is simpler"
                rows[name].decide(RACED, states.EQUAL, reason)
            else:
                rows[name].decide(RACED, states.BEHIND, f"behind {best} in the median, though not by its interval")
        speeds = search.speeds(best)
        others = sorted((name for name in search.remaining if name != winner), key=lambda name: speeds[name])
        return [rows[name] for name in (winner, *others)]

    def full_runs(self, candidates: int) -> int:
        return candidates * (WARMUP + MAX_ROUNDS * self._timer.cost.turn)

    def note_ratios(self, rows: Sequence[Row], winner: str) -> None:
        history = Halving(rounds=self.history)
        for row in rows:
            row.ratio = history.ratio(row.name, winner)

    def _note_winner(self, row: Row, best: str, equal: Sequence[str]) -> None:
        figures = self._figures({row.name: row})
        least = "".join(
            f"takes {size:,} bytes; of those within {CLOSE:.0%} of the least, " for size in figures.values()
        )
        if len(equal) == 1:
            reason = "the fastest: the intervals of all others lie above it, or their medians do"
            row.decide(RACED, states.FASTEST, least + reason)
            return
        others = ", ".join(name for name in equal if name != row.name)
        fastest = "" if row.name == best else f" ({best} is the fastest in the median)"
        reason = f"equal within the interval to {others}, and the simplest of them{fastest}"
        row.decide(RACED, states.SIMPLEST, least + reason)

    def _note(self, row: Row, search: Halving) -> None:
        name = row.name
        seconds = search.seconds(name)
        row.rounds = len(seconds)
        row.seconds = summarize(seconds) if seconds else None
        row.memory = self._timer.memory.get(name)
        if name in search.failed:
            row.decide(FAILED, states.ERROR, search.failed[name])
        elif name in search.halved:
            other, times = search.halved[name]
            row.decide(DROPPED, states.SLOWER_HALF, f"{times:.2f}x of {other} in the median, in the slower half")
        elif name in search.dropped:
            other, ratio = search.dropped[name]
            interval = f"{ratio.median:.2f}x of {other} ({ratio.low:.2f} to {ratio.high:.2f})"
            row.decide(DROPPED, states.SLOWER, f"{interval} after {row.rounds} rounds")

    def _smallest(self, rows: dict[str, Row], prepared: Mapping[str, PreparedProgram]) -> list[str]:
        """The candidates that the objective leaves to be timed."""
        if self._objective == "memory":
            self._measure(rows)
        elif self._objective == "size" and self._plans:
            self._build(rows, prepared)
        figures = self._figures(rows)
        for name, figure in figures.items():
            least = min(figures.values())
            if figure > least * (1 + CLOSE):
                rows[name].decide(DROPPED, states.LARGER, f"takes {figure:,} bytes, the least is {least:,}")
        return [name for name, row in rows.items() if row.state == RACED]

    def _measure(self, rows: dict[str, Row]) -> None:
        """Note the memory of each, by one round."""
        names = list(rows)
        for start in range(0, len(names), GROUP):
            _, failed = self._timer.time_rounds(names[start : start + GROUP], 1, self._seed)
            for name, reason in failed.items():
                rows[name].decide(FAILED, states.ERROR, reason)
        for name, row in rows.items():
            row.memory = self._timer.memory.get(name)

    def _build(self, rows: dict[str, Row], prepared: Mapping[str, PreparedProgram]) -> None:
        """Note the size of the plan of each."""
        for name, row in rows.items():
            fact = self._programs.kernels(row.candidate.program, prepared[name], _profile(row, prepared[name]))
            if "error" in fact:
                row.decide(FAILED, states.ERROR, str(fact["error"]))
            else:
                row.size = fact["size"]

    def _figures(self, rows: Mapping[str, Row]) -> dict[str, int]:
        """The bytes that the objective makes small, of those that did not fail; none for latency."""
        if self._objective == "latency":
            return {}
        sizes = {name: row.memory if self._objective == "memory" else row.size for name, row in rows.items()}
        return {name: size for name, size in sizes.items() if size is not None and rows[name].state != FAILED}


class KernelRanking:
    """By what the builder chose: there is no GPU, so nothing is timed."""

    method = METHOD

    def __init__(self, programs: Programs, objective: str) -> None:
        self._programs, self._objective = programs, objective

    def rank(self, entries: Entries, most: int) -> list[Row]:
        facts: dict[str, dict[str, Any]] = {}
        for row, prepared in entries:
            fact = self._programs.kernels(row.candidate.program, prepared, _profile(row, prepared))
            error = unknown(fact)
            if error is not None:
                row.decide(FAILED, states.ERROR, error)
                continue
            row.state, row.kernels, row.size, row.memory = RACED, summary(fact), fact["size"], planned(fact)
            facts[row.name] = fact

        def order(row: Row) -> tuple[tuple[float, ...], tuple[int, ...]]:
            return merit(facts[row.name], self._objective), row.candidate.plainness

        ranked = sorted((row for row, _ in entries if row.name in facts), key=order)
        for row in ranked[1:]:
            plan = describe_plan(facts[row.name], self._objective)
            row.decide(DROPPED, states.BY_KERNELS, f"{plan}: behind {ranked[0].name}")
        for row in ranked[:1]:
            row.decide(RACED, states.BY_KERNELS, f"{self.method}: {describe_plan(facts[row.name], self._objective)}")
        return ranked

    def full_runs(self, candidates: int) -> int:
        return 0

    def note_ratios(self, rows: Sequence[Row], winner: str) -> None:
        """Nothing was timed."""


def _profile(row: Row, prepared: PreparedProgram) -> tuple[str, ...]:
    """The requests for the profile that a candidate's plan is built with; none: the wide one."""
    return prepared.profile if row.options.get("profile") == NARROW else ()
