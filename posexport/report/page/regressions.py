"""What a benchmark is judged by, on the page: the baseline before it, and the limits of its project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from posexport.bench.result import FINE, INCONCLUSIVE, NOT_RUN, SLOWER, Benchmark, Change, LimitResult
from posexport.report.page.blocks import EMPTY, Cell, Table, cells, number, times
from posexport.report.page.results import Result
from posexport.report.page.summary import CARE, NO_REASON, Finding
from posexport.verify.result import FAILED

_TONES = {SLOWER: "bad", NOT_RUN: "away", FINE: "good"}


def findings(result: Result[Benchmark]) -> Iterator[Finding]:
    """Whatever is not fine: slower, over its limit, inconclusive or not run.

    A limit that was not measured fails where its runtime is there.
    """
    gate, file = result.data.gate, PurePath(result.data.file).name
    for change in gate.changes if gate else ():
        text = _change(change)
        worse = f"{text} than before, limit {gate.limit:.0%}" if gate else ""
        doubt = f"inconclusive whether it got slower than before: {change.reason or text}"
        yield from _finding(change, f"{result.name}, {change.shape}", worse, doubt, (NOT_RUN, "gate"))
    for limit in result.data.limits:
        where = f"{file}, {limit.scenario}"
        worse = f"{_ratio(limit).text} of {limit.reference}, limit {limit.limit:g}×"
        doubt = f"inconclusive whether it is within its limit of {limit.limit:g}× of {limit.reference}"
        yield from _finding(limit, where, worse, doubt, (FAILED, where) if limit.there else (NOT_RUN, "budget"))


def _finding(
    row: Change | LimitResult, where: str, worse: str, doubt: str, absent: tuple[str, str]
) -> Iterator[Finding]:
    if row.state == SLOWER:
        yield Finding(state=SLOWER, who=row.runtime, reason=worse, where=where)
    elif row.state == INCONCLUSIVE:
        yield Finding(state=CARE, who=f"{row.runtime} ({where})", reason=doubt, where=where)
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


def _ratio(limit: LimitResult) -> Cell:
    return number(limit.ratio, times)


def tables(result: Result[Benchmark]) -> Iterator[Table]:
    """Every change since the baseline, and every limit."""
    gate, file = result.data.gate, PurePath(result.data.file).name
    if gate:
        changes = [Cell(text=_change(row), value=row.change) if row.change else EMPTY for row in gate.changes]
        rows = [
            (*_head(row, row.shape), change, *cells(row.reference or "–", row.reason))
            for row, change in zip(gate.changes, changes, strict=True)
        ]
        yield Table(
            caption=f"Since the baseline, limit {gate.limit:.0%}: {result.name}", rows=tuple(rows), heads=2, right=(3,),
            columns=("scenario", "runtime", "state", "change", "measured by", "reason"), note=" ".join(gate.notes),
        )  # fmt: skip
    if result.data.limits:
        rows = [
            (*_head(row, row.scenario), _ratio(row), *cells(f"{row.limit:g}× {row.reference}", row.reason))
            for row in result.data.limits
        ]
        yield Table(
            caption=f"Limits on time: {file}", rows=tuple(rows), heads=2, right=(3,),
            columns=("scenario", "runtime", "state", "ratio", "limit", "reason"),
        )  # fmt: skip


def _head(row: Change | LimitResult, scenario: str) -> tuple[Cell, ...]:
    return (*cells(scenario, row.runtime), Cell(text=row.state, tone=_TONES.get(row.state, "")))
