"""A project's budget of time on the page: every limit, those that are broken, and the files that were not timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from posexport.page.blocks import Cell, Section, Table, cells, number, times
from posexport.page.boxes import CARE, FAILED, NOT_RUN, SLOWER, Finding, Found
from posexport.page.links import Result

STALE = "out of date"


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """What the boxes learn of the files that were not timed; those that were stand as benchmarks of their own.

    A file that is out of date fails its project's benchmark, as its exit code does.
    """
    findings = tuple(
        Finding(
            state=FAILED if file.get("state") == STALE else NOT_RUN,
            who=PurePath(file["file"]).name,
            reason=file.get("reason") or "no reason was given",
            where="bench",
        )
        for result in results
        for file in result.data["files"]
        if not file.get("result")
    )
    return None, Found(findings=findings)


def over(result: Result) -> Iterator[Finding]:
    """The limits that are broken, can't be told, or were not run, which fails where their runtime is there."""
    for each in result.data.get("limits") or ():
        where = f"{PurePath(result.data['file']).name}, {each['scenario']}"
        if each["state"] == "slower":
            said = f"{times(each['ratio'])} of {each['peer']}, the budget allows {each['limit']:g}×"
            yield Finding(state=SLOWER, who=each["runtime"], reason=said, where=where)
        elif each["state"] == "can't tell":
            said = f"whether it keeps the budget of {each['limit']:g}× of {each['peer']} can't be told"
            yield Finding(state=CARE, who=f"{each['runtime']} ({where})", reason=said, where=where)
        elif each["state"] == "not run":
            reason = each.get("reason") or "no reason was given"
            state, at = (FAILED, where) if each.get("there") else (NOT_RUN, "budget")
            yield Finding(state=state, who=each["runtime"], reason=reason, where=at)


def limits(result: Result) -> Table:
    """Every limit."""
    tones = {"slower": "bad", "not run": "away", "fine": "good"}
    rows = tuple(
        (
            *cells(each["scenario"], each["runtime"]),
            Cell(text=each["state"], tone=tones.get(each["state"], "")),
            Cell(text="–") if each.get("ratio") is None else number(times(each["ratio"]), each["ratio"]),
            *cells(f"{each['limit']:g}× {each['peer']}", each.get("reason") or ""),
        )
        for each in result.data["limits"]
    )
    return Table(
        caption=f"Budget of time: {PurePath(result.data['file']).name}",
        columns=("scenario", "runtime", "state", "ratio", "allowed", "reason"), rows=rows, heads=2, right=(3,),
    )  # fmt: skip
