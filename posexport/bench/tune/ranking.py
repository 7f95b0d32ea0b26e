"""How the candidates of one tuning are ranked: by time or by kernel tables, and before that by memory or size.

If there is no GPU to time plans on, they are ranked by what TensorRT's builder chose. Fused attention comes first, then
the number of kernels and host steps, then planned memory, then the size of the plan. Each kernel reads and writes its
tensors in full, and fused attention never writes the scores. The speed of each kernel is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posexport.bench.statistics import summarize
from posexport.bench.tune.halving import GROUP, Halving, Round, successive_halving
from posexport.bench.tune.measure import CandidateTimer
from posexport.bench.tune.programs import Programs
from posexport.bench.tune.result import DROPPED, FAILED, RACED, SLOWER_HALF, Row

METHOD = "by kernel table: no GPU"

_FIGURES = ("count", "fused_attention", "attention_kernels", "attention_layers", "host_steps")
"""The entries of a kernel table that reports show."""

CLOSE = 0.02
"""Two programs take the same memory or space if they differ by less than this share."""


class TimeRanking:
    """Ranking by time: successive halving on the runtime itself."""

    def __init__(self, programs: Programs, timer: CandidateTimer) -> None:
        self._programs, self._timer = programs, timer
        self._objective, self._seed = programs.request.objective, programs.request.seed
        self._plans = programs.request.runtime.startswith("tensorrt")
        self._history: list[Round] = []

    def rank(self, candidates: Sequence[Row], most: int) -> list[Row]:
        """The winner, then the others that remain, fastest first. Empty if all failed.

        Each has at most `most` rounds. Rows say what happened to each.
        """
        rows = {row.name: row for row in sorted(candidates, key=lambda row: row.plainness)}
        for name, row in rows.items():
            self._timer.candidates[name] = row
            row.decide(RACED, "", "")
            if not self._plans:
                row.size = self._programs.prepared[row.program].size
        names = self._smallest(rows)
        if not names:
            return []
        search = successive_halving(names, self._timer.time_rounds, most=most, seed=self._seed, known=self._history)
        self._history = [*self._history, *search.rounds[search.known :]]
        for name in names:
            self._note(rows[name], search)
        if not search.remaining:
            return []
        equal = search.equals()
        winner = min(equal, key=lambda name: rows[name].plainness)
        best = search.fastest(search.remaining)
        for name in search.remaining:
            if name == winner:
                self._note_winner(rows[name], best, equal)
            elif name in equal:
                rows[name].decide(RACED, "equal", f"equal within the interval to {winner}, which is simpler")
            else:
                rows[name].decide(RACED, "behind", f"behind {best} in the median, though not by its interval")
        speeds = search.speeds(best)
        others = sorted((name for name in search.remaining if name != winner), key=lambda name: speeds[name])
        return [rows[name] for name in (winner, *others)]

    def note_ratios(self, rows: Sequence[Row], winner: str) -> None:
        """Note the ratio of each row to the winner, if they took part in the same rounds."""
        history = Halving(rounds=self._history)
        for row in rows:
            row.ratio = history.ratio(row.name, winner)

    def _note_winner(self, row: Row, best: str, equal: Sequence[str]) -> None:
        least = "".join(
            f"takes {size:,} bytes; of those within {CLOSE:.0%} of the least, "
            for size in self._figures({row.name: row}).values()
        )
        if len(equal) == 1:
            reason = "the fastest: the intervals of all others lie above it, or their medians do"
            row.decide(RACED, "fastest", least + reason)
            return
        others = ", ".join(name for name in equal if name != row.name)
        fastest = "" if row.name == best else f" ({best} is the fastest in the median)"
        reason = f"equal within the interval to {others}, and the simplest of them{fastest}"
        row.decide(RACED, "simplest", least + reason)

    def _note(self, row: Row, search: Halving) -> None:
        name = row.name
        seconds = search.seconds(name)
        row.rounds = len(seconds)
        row.seconds = summarize(seconds) if seconds else None
        row.memory = self._timer.memory.get(name)
        if name in search.failed:
            row.decide(FAILED, "error", search.failed[name])
        elif name in search.halved:
            other, times = search.halved[name]
            row.decide(DROPPED, SLOWER_HALF, f"{times:.2f}x of {other} in the median, in the slower half")
        elif name in search.dropped:
            other, ratio = search.dropped[name]
            interval = f"{ratio.median:.2f}x of {other} ({ratio.low:.2f} to {ratio.high:.2f})"
            row.decide(DROPPED, "slower", f"{interval} after {row.rounds} rounds")

    def _smallest(self, rows: dict[str, Row]) -> list[str]:
        """The candidates that the objective leaves to be timed.

        One round shows the memory, and building shows the size of a plan.
        """
        names = list(rows)
        if self._objective == "memory":
            for start in range(0, len(names), GROUP):
                _, failed = self._timer.time_rounds(names[start : start + GROUP], 1, self._seed)
                for name, reason in failed.items():
                    rows[name].decide(FAILED, "error", reason)
            for name, row in rows.items():
                row.memory = self._timer.memory.get(name)
        elif self._objective == "size" and self._plans:
            for row in rows.values():
                fact = self._programs.kernels(row)
                if "error" in fact:
                    row.decide(FAILED, "error", str(fact["error"]))
                else:
                    row.size = fact["size"]
        figures = self._figures(rows)
        least = min(figures.values(), default=0)
        for name, figure in figures.items():
            if figure > least * (1 + CLOSE):
                rows[name].decide(DROPPED, "larger", f"takes {figure:,} bytes, the least is {least:,}")
        return [name for name, row in rows.items() if row.state == RACED]

    def _figures(self, rows: Mapping[str, Row]) -> dict[str, int]:
        """The bytes that the objective makes small, for candidates that did not fail. Empty for latency."""
        if self._objective == "latency":
            return {}
        sizes = {name: row.memory if self._objective == "memory" else row.size for name, row in rows.items()}
        return {name: size for name, size in sizes.items() if size is not None and rows[name].state != FAILED}


def rank_by_kernels(programs: Programs, candidates: Sequence[Row]) -> list[Row]:
    """Rank by what the builder chose, the winner first. Nothing is timed."""
    facts: dict[str, dict[str, Any]] = {}
    for row in candidates:
        fact = programs.kernels(row)
        if (error := unknown(fact)) is not None:
            row.decide(FAILED, "error", error)
            continue
        memory, table = planned(fact), fact["kernels"]
        row.state, row.size, row.memory = RACED, fact["size"], memory
        row.kernels = {**{name: table[name] for name in _FIGURES}, "planned_memory": memory}
        facts[row.name] = fact
    objective = programs.request.objective
    built = [row for row in candidates if row.name in facts]
    ranked = sorted(built, key=lambda row: (merit(facts[row.name], objective), row.plainness))
    for row in ranked:
        plan = _describe(facts[row.name], objective)
        if row is ranked[0]:
            row.decide(RACED, "by-kernels", f"{METHOD}: {plan}")
        else:
            row.decide(DROPPED, "by-kernels", f"{plan}: behind {ranked[0].name}")
    return ranked


def unknown(fact: Mapping[str, Any]) -> str | None:
    """Why a plan can't be ranked, or None."""
    reason = fact["error"] if "error" in fact else fact["kernels"].get("unknown")
    return None if reason is None else str(reason)


def merit(fact: Mapping[str, Any], objective: str) -> tuple[tuple[int, ...], ...]:
    """The sort key of a plan, the objective first. Smaller is better. It is equal if the tables don't differ."""
    kernels = fact["kernels"]
    speed = (kernels["fused_attention"] is not True, kernels["count"] + (kernels["host_steps"] or 0))
    figures: dict[str, tuple[int, ...]] = {"latency": speed, "memory": (planned(fact),), "size": (fact["size"],)}
    return figures.pop(objective), *figures.values()


def planned(fact: Mapping[str, Any]) -> int:
    """Bytes of scratch, activations and weights that the builder plans for."""
    return sum(size or 0 for size in fact["memory"].values())


def _describe(fact: Mapping[str, Any], objective: str) -> str:
    """One plan in a few words, the objective first."""
    kernels = fact["kernels"]
    fused = "fused attention" if kernels["fused_attention"] else "attention not fused"
    figures = {
        "latency": f"{fused}, {kernels['count']} kernels and {kernels['host_steps']} host steps",
        "memory": f"{planned(fact):,} bytes planned",
        "size": f"a plan of {fact['size']:,} bytes",
    }
    return ", ".join([figures.pop(objective), *figures.values()])
