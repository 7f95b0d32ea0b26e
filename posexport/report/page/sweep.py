"""A sweep on the page: every job with its state, and those that failed or never ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from posexport.report.page.blocks import Cell, Section, Table, cells, listed, number, plural
from posexport.report.page.results import Job, Result, Sweep
from posexport.report.page.summary import NO_REASON, Finding, Highlights
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PASSED

_TONES = {NOT_RUN: "away", FAILED: "bad", PASSED: "good"}
_MOST_OPEN = 12  # rows of a table that starts open


def section(results: Sequence[Result[Sweep]]) -> tuple[Section, Highlights]:
    """The section, and its highlights: what a job's own result on the page says is not said again."""
    jobs = [job for result in results for job in result.data.jobs]
    refused = [row for result in results for row in result.data.refused]
    unlisted = [row for result in results for row in result.data.refused if not _is_listed(row, result.data)]
    counted, order = Counter(map(_state, jobs)), list(_TONES)
    rows = tuple(
        (*cells(job.label or job.id, job.kind), Cell(text=_state(job), tone=_TONES[_state(job)]), *cells(_reason(job)))
        for job in sorted(jobs, key=lambda job: order.index(_state(job)))
    )
    table = Table(
        caption="Jobs", columns=("job", "command", "state", "reason"), rows=rows,
        note=" ".join(note for result in results for note in result.data.notes),
        folded=f"Every job: {plural(len(rows), 'row')}" if len(rows) > _MOST_OPEN else "",
    )  # fmt: skip
    lead = f"{plural(len(jobs), 'job')}: {', '.join(f'{counted[state]:,} {state}' for state in reversed(order))}."
    if refused:
        lead += f" {plural(len(refused), 'combination')} refused, for which there is no job."
    blocks = (table, _refused(refused)) if refused else (table,)
    return Section(id="sweep", title="Sweep", lead=lead, blocks=blocks), Highlights(
        findings=(*_findings(jobs), *_of_refused(unlisted))
    )


def _is_listed(row: Mapping[str, str], sweep: Sweep) -> bool:
    return row.get("target", "portable") in sweep.matrices


def _refused(refused: Sequence[Mapping[str, str]]) -> Table:
    """Every reason once, with its combinations."""
    rows = tuple(
        (Cell(text=reason), number(len(names)), Cell(text=listed(names, 3), more=listed(names, 40)))
        for reason, names in _by_reason(refused).items()
    )
    return Table(
        caption="Refused combinations", columns=("reason", "combinations", "which"), rows=rows, right=(1,),
        folded=f"What was refused, and why: {plural(len(rows), 'reason')}" if len(rows) > _MOST_OPEN else "",
    )  # fmt: skip


def _by_reason(refused: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for row in refused:
        name = " ".join(value for key, value in row.items() if key != "reason")
        names.setdefault(row.get("reason") or NO_REASON, []).append(name)
    return names


def _of_refused(refused: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    for reason, names in _by_reason(refused).items():
        yield Finding(state=REFUSED, who=listed(names, 3), reason=reason, where="sweep", count=len(names))


def _state(job: Job) -> str:
    """A job without a state, or with an unknown one, has not run."""
    return job.state if job.state in _TONES else NOT_RUN


def _reason(job: Job) -> str:
    if job.state == PASSED:
        return ""
    return job.reason or (NO_REASON if job.state else "the sweep ended before it")


def _findings(jobs: Sequence[Job]) -> Iterator[Finding]:
    for job in jobs:
        if job.state != PASSED and not job.shown:
            yield Finding(state=_state(job), who=job.label or job.id, reason=_reason(job), where="sweep")
