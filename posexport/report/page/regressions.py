"""How a benchmark is judged, on the page: by the baseline before it, and by the limits of its project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from posexport.bench.result import FINE, INCONCLUSIVE, NOT_RUN, SLOWER, Benchmark, Change, LimitResult
from posexport.bench.results import Result
from posexport.report.page.blocks import Cell, Table, number
from posexport.report.page.summary import CARE, NO_REASON, Finding
from posexport.report.text import times
from posexport.verify.result import FAILED

_TONES = {SLOWER: "bad", NOT_RUN: "away", FINE: "good"}


def findings(result: Result[Benchmark]) -> Iterator[Finding]:
    """Everything that is not fine: slower, over its limit, inconclusive or not run.

    A limit that was not measured fails if its runtime is available.
    """
    gate, file = result.data.gate, PurePath(result.data.file).name
    if gate:
        for change in gate.changes:
            text, where = _change(change), f"{result.name}, {change.shape}"
            doubt = f"whether it got slower than before: {change.reason or text}"
            yield from _finding(change, where, f"{text} than before, limit {gate.limit:.0%}", doubt, (NOT_RUN, "gate"))
    for limit in result.data.limits:
        where = f"{file}, {limit.scenario}"
        worse = f"{number(limit.ratio, times).text} of {limit.reference}, limit {limit.limit:g}×"
        doubt = f"whether it is within its limit of {limit.limit:g}× of {limit.reference}"
        yield from _finding(limit, where, worse, doubt, (FAILED, where) if limit.there else (NOT_RUN, "budget"))


def _finding(
    row: Change | LimitResult, where: str, worse: str, doubt: str, absent: tuple[str, str]
) -> Iterator[Finding]:
    if row.state == SLOWER:
        yield Finding(state=SLOWER, who=row.runtime, reason=worse, where=where)
    elif row.state == INCONCLUSIVE:
        yield Finding(state=CARE, who=f"{row.runtime} ({where})", reason=f"inconclusive {doubt}", where=where)
    elif row.state == NOT_RUN:
        yield Finding(state=absent[0], who=row.runtime, reason=row.reason or NO_REASON, where=absent[1])


def _change(change: Change) -> str:
    if change.change is None:
        return "an unknown change"
    share = change.change - 1
    text = f"{abs(share):.1%} {'slower' if share >= 0 else 'faster'}"
    if change.low is None or change.high is None:
        return text
    return f"{text} ({change.low - 1:+.1%} to {change.high - 1:+.1%})"


def tables(result: Result[Benchmark]) -> Iterator[Table]:
    """Every change since the baseline, and every limit."""
    gate, limits = result.data.gate, result.data.limits
    if gate:
        yield Table(
            caption=f"Since the baseline, limit {gate.limit:.0%}: {result.name}",
            columns=("scenario", "runtime", "state", "change", "measured by", "reason"),
            rows=[
                (row.shape, *_state(row), change, row.reference or "–", row.reason)
                for row in gate.changes
                for change in [Cell(_change(row), value=row.change) if row.change else None]
            ],
            heads=2,
            note=" ".join(gate.notes),
        )
    if limits:
        yield Table(
            caption=f"Limits on time: {PurePath(result.data.file).name}",
            columns=("scenario", "runtime", "state", "ratio", "limit", "reason"),
            rows=[
                (row.scenario, *_state(row), number(row.ratio, times), f"{row.limit:g}× {row.reference}", row.reason)
                for row in limits
            ],
            heads=2,
        )


def _state(row: Change | LimitResult) -> tuple[str, Cell]:
    return row.runtime, Cell(row.state, tone=_TONES.get(row.state, ""))
