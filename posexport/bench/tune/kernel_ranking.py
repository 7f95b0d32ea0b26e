"""Ranking plans by what TensorRT's builder chose, where there is no GPU to time it on.

The order of merit is fused attention first, then the number of kernels and host steps, then planned memory, then the
size of the plan: each kernel reads and writes its tensors in full, and fused attention never writes the scores at all.
It says nothing of how fast each kernel is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posexport.bench.tune.programs import PreparedProgram, Programs
from posexport.bench.tune.result import DROPPED, FAILED, RACED, Row

METHOD = "by kernel table: no GPU"

_FIGURES = ("count", "fused_attention", "attention_kernels", "attention_layers", "host_steps")
"""What a report shows of a kernel table."""


class KernelRanking:
    """By what the builder chose; nothing is timed. It has the methods of `posexport.bench.tune.ranking.TimeRanking`."""

    method = METHOD

    def __init__(self, programs: Programs, objective: str) -> None:
        self._programs, self._objective = programs, objective

    def rank(self, entries: Sequence[tuple[Row, PreparedProgram]], most: int) -> list[Row]:
        facts: dict[str, dict[str, Any]] = {}
        for row, prepared in entries:
            fact = self._programs.kernels(row.candidate.program, prepared, prepared.profile_under(row.options))
            error = unknown(fact)
            if error is not None:
                row.decide(FAILED, "error", error)
                continue
            memory, table = planned(fact), fact["kernels"]
            row.state, row.size, row.memory = RACED, fact["size"], memory
            row.kernels = {**{name: table[name] for name in _FIGURES}, "planned_memory": memory}
            facts[row.name] = fact

        def order(row: Row) -> tuple[Any, ...]:
            return merit(facts[row.name], self._objective), row.candidate.plainness

        ranked = sorted((row for row, _ in entries if row.name in facts), key=order)
        for row in ranked:
            plan = _describe(facts[row.name], self._objective)
            if row is ranked[0]:
                row.decide(RACED, "by-kernels", f"{METHOD}: {plan}")
            else:
                row.decide(DROPPED, "by-kernels", f"{plan}: behind {ranked[0].name}")
        return ranked

    def full_runs(self, candidates: int) -> int:
        return 0

    def note_ratios(self, rows: Sequence[Row], winner: str) -> None:
        """Nothing was timed."""


def unknown(fact: Mapping[str, Any]) -> str | None:
    """Why a plan can't be ranked, or None."""
    reason = fact["error"] if "error" in fact else fact["kernels"].get("unknown")
    return None if reason is None else str(reason)


def merit(fact: Mapping[str, Any], objective: str) -> tuple[tuple[int, ...], ...]:
    """Smaller is better, the objective first; equal where the tables don't differ."""
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
