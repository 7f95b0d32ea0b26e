"""How the candidates of one tuning are told apart: by a race, or by kernel tables; and by memory or size before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from posexport.bench.statistics import summarize
from posexport.bench.tune.halving import GROUP, MAX_ROUNDS, Race, Round, race
from posexport.bench.tune.kernel_ranking import METHOD, merit, planned, summary, unknown, words
from posexport.bench.tune.measure import WARMUP, CandidateTimer
from posexport.bench.tune.programs import PreparedProgram, Programs
from posexport.bench.tune.result import DROPPED, FAILED, RACED, Row
from posexport.bench.tune.space import NARROW, plainest

CLOSE = 0.02
"""Two programs take the same memory, or space, where they differ by less."""

Entries = Sequence[tuple[Row, PreparedProgram]]


class Picker(Protocol):
    """Chooses among entries and notes in their rows what became of each; the best come first, none where all failed."""

    method: str

    def pick(self, entries: Entries, most: int) -> list[Row]:
        """The winner, and those equal to it or next, in the order in which they would be taken; `most` rounds each."""
        ...

    def everything(self, candidates: int) -> int:
        """The runs that timing so many candidates at full rounds takes."""
        ...


class ByRace:
    """By the clock: successive halving on the runtime itself."""

    method = "raced on the runtime"

    def __init__(self, shelf: Programs, field: CandidateTimer, runtime: str, objective: str, seed: int) -> None:
        self._shelf, self._field, self._objective, self._seed = shelf, field, objective, seed
        self._plans = runtime.startswith("tensorrt")
        self.history: list[Round] = []

    def pick(self, entries: Entries, most: int) -> list[Row]:
        for row, fitted in entries:
            self._field.add(row.candidate, fitted)
            row.state, row.reason = RACED, ""
            if not self._plans:
                row.size = fitted.size
        entries = sorted(entries, key=lambda entry: entry[0].candidate.plainness)
        rows = {str(row.candidate): row for row, _ in entries}
        names = self._light(rows, {str(row.candidate): fitted for row, fitted in entries})
        found = race(names, self._field.play, most=most, seed=self._seed, known=self.history) if names else Race()
        self.history = [*self.history, *found.rounds[found.known :]]
        for name in names:
            self._note(rows[name], name, found)
        if not found.standing:
            return []
        equal = found.equals()
        winner = plainest([rows[name].candidate for name in equal])
        best = found.fastest(found.standing)
        for name in found.standing:
            if name == str(winner):
                rows[name].reason = self._least(rows[name]) + self._why(name, best, equal)
            elif name in equal:
                rows[name].reason = f"equal within the interval to {winner}, which is simpler"
            else:
                rows[name].reason = f"behind {best} in the median, though not by its interval"
        speeds = found.speeds(best)
        rest = sorted((name for name in found.standing if name != str(winner)), key=lambda name: speeds[name])
        return [rows[str(winner)], *(rows[name] for name in rest)]

    def everything(self, candidates: int) -> int:
        return candidates * (WARMUP + MAX_ROUNDS * self._field.cost.turn)

    def ratios(self, rows: Sequence[Row], winner: str) -> None:
        """Note the ratio of each to the winner, where they took part in the same rounds."""
        history = Race(rounds=self.history)
        for row in rows:
            row.ratio = history.ratio(str(row.candidate), winner)

    def _why(self, name: str, best: str, equal: Sequence[str]) -> str:
        if len(equal) == 1:
            return "the fastest: the intervals of all others lie above it, or their medians do"
        others = ", ".join(other for other in equal if other != name)
        return f"equal within the interval to {others}, and the simplest of them" + (
            "" if name == best else f" ({best} is the fastest in the median)"
        )

    def _note(self, row: Row, name: str, found: Race) -> None:
        seconds = found.seconds(name)
        row.rounds = len(seconds)
        row.seconds = summarize(seconds) if seconds else None
        row.memory = self._field.memory.get(name)
        if name in found.failed:
            row.state, row.reason = FAILED, found.failed[name]
        elif name in found.halved:
            other, times = found.halved[name]
            row.state, row.reason = DROPPED, f"{times:.2f}x of {other} in the median, in the slower half"
        elif name in found.dropped:
            other, ratio = found.dropped[name]
            row.state = DROPPED
            row.reason = (
                f"{ratio.median:.2f}x of {other} ({ratio.low:.2f} to {ratio.high:.2f}) after {row.rounds} rounds"
            )

    def _light(self, rows: dict[str, Row], fitted: dict[str, PreparedProgram]) -> list[str]:
        """Those that the objective leaves for the race."""
        names = list(rows)
        if self._objective == "latency" or not names:
            return names
        if self._objective == "memory":
            self._measure(rows)
        elif self._plans:
            self._build(rows, fitted)
        figures = {name: self._figure(row) for name, row in rows.items() if row.state != FAILED}
        if not figures:
            return []
        least = min(figures.values())
        for name, figure in figures.items():
            if figure > least * (1 + CLOSE):
                rows[name].state, rows[name].reason = DROPPED, f"takes {figure:,} bytes, the least is {least:,}"
        return [name for name in figures if rows[name].state != DROPPED]

    def _measure(self, rows: dict[str, Row]) -> None:
        """Note the memory of each, by one round."""
        names = list(rows)
        for start in range(0, len(names), GROUP):
            _, failed = self._field.play(names[start : start + GROUP], 1, self._seed)
            for name, why in failed.items():
                rows[name].state, rows[name].reason = FAILED, why
        for name, row in rows.items():
            row.memory = self._field.memory.get(name)

    def _build(self, rows: dict[str, Row], fitted: dict[str, PreparedProgram]) -> None:
        """Note the size of the plan of each."""
        for name, row in rows.items():
            fact = self._shelf.kernels(row.candidate.program, fitted[name], _profile(row, fitted[name]))
            if "error" in fact:
                row.state, row.reason = FAILED, str(fact["error"])
            else:
                row.size = fact["size"]

    def _figure(self, row: Row) -> int:
        """The bytes that the objective makes small."""
        found = row.memory if self._objective == "memory" else row.size
        assert found is not None  # only what was measured, or built, is asked about
        return found

    def _least(self, row: Row) -> str:
        """What the winner has by the objective, before why it is the one of those that have as little."""
        if self._objective == "latency":
            return ""
        return f"takes {self._figure(row):,} bytes; of those within {CLOSE:.0%} of the least, "


class ByKernels:
    """By what the builder chose: no GPU, so nothing is timed."""

    method = METHOD

    def __init__(self, shelf: Programs, objective: str) -> None:
        self._shelf, self._objective = shelf, objective

    def pick(self, entries: Entries, most: int) -> list[Row]:
        facts: dict[str, dict[str, Any]] = {}
        for row, fitted in entries:
            fact = self._shelf.kernels(row.candidate.program, fitted, _profile(row, fitted))
            wrong = unknown(fact)
            if wrong is not None:
                row.state, row.reason = FAILED, wrong
                continue
            row.state, row.kernels, row.size = RACED, summary(fact), fact["size"]
            row.memory = planned(fact)
            facts[str(row.candidate)] = fact

        def order(row: Row) -> tuple[tuple[float, ...], tuple[int, ...]]:
            return merit(facts[str(row.candidate)], self._objective), row.candidate.plainness

        ranked = sorted((row for row, _ in entries if row.state == RACED), key=order)
        if ranked:
            best = facts[str(ranked[0].candidate)]
            for row in ranked[1:]:
                row.state = DROPPED
                row.reason = f"{words(facts[str(row.candidate)], self._objective)}: behind {ranked[0].candidate}"
            ranked[0].reason = f"{self.method}: {words(best, self._objective)}"
        return ranked

    def everything(self, candidates: int) -> int:
        return 0

    def ratios(self, rows: Sequence[Row], winner: str) -> None:
        """Nothing was timed."""


def _profile(row: Row, fitted: PreparedProgram) -> tuple[str, ...]:
    """The requests for the profile that a candidate's plan is built with; none: the wide one."""
    return fitted.profile if dict(row.candidate.options).get("profile") == NARROW else ()
