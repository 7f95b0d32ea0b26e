"""A sweep on the page: every job with what became of it, and those that failed or never ran in the boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from posexport.report.page.blocks import Cell, Section, Table, listed, number, plural
from posexport.report.page.results import Result
from posexport.report.page.summary import FAILED, NOT_RUN, REFUSED, Finding, Found

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
    refused = [each for result in results for each in result.data.get("refused") or ()]
    blocks: list[Table] = [table]
    if refused:
        lead += f" {plural(len(refused), 'combination')} refused, for which there is no job."
        blocks.append(_refused(refused))
    section = Section(id="sweep", title="Sweep", lead=lead, blocks=tuple(blocks))
    return section, Found(findings=(*_findings(jobs), *_of_refused(refused)))


def _refused(refused: Sequence[dict[str, Any]]) -> Table:
    """Every reason once, with the combinations that it befell."""
    rows = tuple(
        (Cell(text=why), number(f"{len(own):,}", len(own)), Cell(text=listed(own, 3), more=listed(own, 40)))
        for why, own in _by_reason(refused).items()
    )
    return Table(
        caption="Refused combinations", columns=("reason", "combinations", "which"), rows=rows, right=(1,),
        folded=f"What was refused, and why: {plural(len(rows), 'reason')}" if len(rows) > _OPEN else "",
    )  # fmt: skip


def _by_reason(refused: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in refused:
        name = " ".join(str(value) for key, value in each.items() if key not in ("reason", "told"))
        found.setdefault(each.get("reason") or "no reason was given", []).append(name)
    return found


def _of_refused(refused: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for why, own in _by_reason([each for each in refused if not each.get("told")]).items():
        yield Finding(state=REFUSED, who=listed(own, 3), reason=why, where="sweep", count=len(own))


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
