"""A sweep on the page: every job with what became of it, and those that failed or never ran in the boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from posexport.page.blocks import Cell, Section, Table, plural
from posexport.page.boxes import FAILED, NOT_RUN, Finding, Found
from posexport.page.links import Result

PASSED = "passed"
_TONES = {PASSED: "good", FAILED: "bad", NOT_RUN: "away"}
_OPEN = 12
"""Jobs up to which their table stands open."""


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section, and what the boxes learn from it: what a job's own result says isn't said again."""
    if not results:
        return None, Found()
    jobs = [job for result in results for job in result.data["jobs"]]
    counted = Counter(_state(job) for job in jobs)
    order = list(reversed(_TONES))
    rows = tuple(
        (
            Cell(text=job.get("label") or job["id"]),
            Cell(text=job["kind"]),
            Cell(text=_state(job), tone=_TONES[_state(job)]),
            Cell(text=_reason(job)),
        )
        for job in sorted(jobs, key=lambda job: order.index(_state(job)))
    )
    table = Table(
        caption="Jobs", columns=("job", "command", "state", "reason"), rows=rows,
        note=" ".join(note for result in results for note in result.data.get("notes") or ()),
        folded=f"Every job: {plural(len(rows), 'row')}" if len(rows) > _OPEN else "",
    )  # fmt: skip
    lead = f"{plural(len(jobs), 'job')}: {', '.join(f'{counted[state]:,} {state}' for state in _TONES)}."
    section = Section(id="sweep", title="Sweep", lead=lead, blocks=(table,))
    return section, Found(findings=tuple(_findings(jobs)))


def _state(job: dict[str, Any]) -> str:
    """A job that has no state yet, or one unknown here, has not run."""
    return job["state"] if job.get("state") in _TONES else NOT_RUN


def _reason(job: dict[str, Any]) -> str:
    if _state(job) == PASSED:
        return ""
    return job.get("reason") or ("no reason was given" if job.get("state") else "the sweep ended before it")


def _findings(jobs: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for job in jobs:
        if _state(job) != PASSED and not job.get("told"):
            who = job.get("label") or job["id"]
            yield Finding(state=_state(job), who=who, reason=_reason(job), where="sweep")
