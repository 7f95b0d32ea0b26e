"""A sweep on the page: every job with its state, and the jobs that failed or never ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from posexport.bench.results import Job, Result, Sweep
from posexport.report.page.blocks import Cell, Section, Table, number
from posexport.report.page.summary import NO_REASON, Finding, Highlights
from posexport.report.text import listed, plural
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PASSED

_TONES = {NOT_RUN: "away", FAILED: "bad", PASSED: "good"}
_MOST_OPEN = 12  # rows of a table that starts open


def section(results: Sequence[Result[Sweep]]) -> tuple[Section, Highlights]:
    """The section, and its highlights. What a job's own result on the page says is not repeated."""
    jobs = [job for result in results for job in result.data.jobs]
    states = list(_TONES)
    counted = Counter(map(_state, jobs))
    table = Table(
        caption="Jobs",
        columns=("job", "command", "state", "reason"),
        rows=[
            (job.label or job.id, job.kind, Cell(_state(job), tone=_TONES[_state(job)]), _reason(job))
            for job in sorted(jobs, key=lambda job: states.index(_state(job)))
        ],
        note=" ".join(note for result in results for note in result.data.notes),
    )
    lead = f"{plural(len(jobs), 'job')}: {', '.join(f'{counted[state]:,} {state}' for state in reversed(states))}."
    blocks = [table.fold("Every job", _MOST_OPEN)]
    if refused := [row for result in results for row in result.data.refused]:
        lead += f" {plural(len(refused), 'combination')} refused, for which there is no job."
        table = Table(
            caption="Refused combinations",
            columns=("reason", "combinations", "which"),
            rows=[
                (reason, number(len(names)), Cell(listed(names, 3), more=listed(names, 40)))
                for reason, names in _by_reason(refused).items()
            ],
        )
        blocks.append(table.fold("What was refused, and why", _MOST_OPEN, "reason"))
    findings = tuple(finding for result in results for finding in _findings(result.data))
    return Section(id="sweep", title="Sweep", lead=lead, blocks=blocks), Highlights(findings=findings)


def _by_reason(refused: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for row in refused:
        name = " ".join(value for key, value in row.items() if key != "reason")
        names.setdefault(row.get("reason") or NO_REASON, []).append(name)
    return names


def _state(job: Job) -> str:
    """The state of a job. Without a known state, it has not run."""
    return job.state if job.state in _TONES else NOT_RUN


def _reason(job: Job) -> str:
    if job.state == PASSED:
        return ""
    return job.reason or (NO_REASON if job.state else "the sweep ended before it")


def _findings(sweep: Sweep) -> Iterator[Finding]:
    """Jobs that failed or never ran, and combinations that were refused, unless another result on the page says so."""
    for job in sweep.jobs:
        if job.state != PASSED and not job.shown:
            yield Finding(state=_state(job), who=job.label or job.id, reason=_reason(job), where="sweep")
    unlisted = [row for row in sweep.refused if row.get("target", "portable") not in sweep.matrices]
    for reason, names in _by_reason(unlisted).items():
        yield Finding(state=REFUSED, who=listed(names, 3), reason=reason, where="sweep", count=len(names))
