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
        where, text = f"{result.name}, {change.shape}", _change(change)
        if change.state == SLOWER and gate:
            reason = f"{text} than before, limit {gate.limit:.0%}"
            yield Finding(state=SLOWER, who=change.runtime, reason=reason, where=where)
        elif change.state == INCONCLUSIVE:
            reason = f"inconclusive whether it got slower than before: {change.reason or text}"
            yield Finding(state=CARE, who=f"{change.runtime} ({where})", reason=reason, where=where)
        elif change.state == NOT_RUN:
            yield Finding(state=NOT_RUN, who=change.runtime, reason=change.reason or NO_REASON, where="gate")
    for limit in result.data.limits:
        where, text = f"{file}, {limit.scenario}", f"limit {limit.limit:g}×"
        if limit.state == SLOWER:
            reason = f"{_ratio(limit).text} of {limit.reference}, {text}"
            yield Finding(state=SLOWER, who=limit.runtime, reason=reason, where=where)
        elif limit.state == INCONCLUSIVE:
            reason = f"inconclusive whether it is within its {text} of {limit.reference}"
            yield Finding(state=CARE, who=f"{limit.runtime} ({where})", reason=reason, where=where)
        elif limit.state == NOT_RUN:
            state, at = (FAILED, where) if limit.there else (NOT_RUN, "budget")
            yield Finding(state=state, who=limit.runtime, reason=limit.reason or NO_REASON, where=at)


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
    gate = result.data.gate
    if gate:
        rows = tuple(
            (
                *_head(change, change.shape),
                EMPTY if change.change is None else Cell(text=_change(change), value=change.change),
                *cells(change.reference or "–", change.reason),
            )
            for change in gate.changes
        )
        yield Table(
            caption=f"Since the baseline, limit {gate.limit:.0%}: {result.name}", rows=rows, heads=2, right=(3,),
            columns=("scenario", "runtime", "state", "change", "measured by", "reason"), note=" ".join(gate.notes),
        )  # fmt: skip
    if result.data.limits:
        rows = tuple(
            (
                *_head(limit, limit.scenario),
                _ratio(limit),
                *cells(f"{limit.limit:g}× {limit.reference}", limit.reason),
            )
            for limit in result.data.limits
        )
        yield Table(
            caption=f"Limits on time: {PurePath(result.data.file).name}", rows=rows, heads=2, right=(3,),
            columns=("scenario", "runtime", "state", "ratio", "limit", "reason"),
        )  # fmt: skip


def _head(row: Change | LimitResult, scenario: str) -> tuple[Cell, ...]:
    return (*cells(scenario, row.runtime), Cell(text=row.state, tone=_TONES.get(row.state, "")))
