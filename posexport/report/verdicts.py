"""Verdicts as rows of a table and as Markdown for a job's summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posexport.files import staged
from posexport.report.text import escaped, table_lines
from posexport.verify.junit import to_junit
from posexport.verify.result import INCONCLUSIVE_STATE, Report, Verdict

COLUMNS = ("artifact", "runtime", "state", "case", "error", "torch error", "limit", "cases", "reach", "note")
"""The columns of `rows`."""


def summary(report: Report) -> str:
    """The number of verdicts in each state, in words. Unreadable files are counted too."""
    texts = [f"{number} {state}" for state, number in report.counts().items()]
    if report.inconclusive:
        texts[0] += f" ({report.inconclusive} of them inconclusive)"
    return ", ".join(texts + ([f"{len(report.unreadable)} unreadable"] if report.unreadable else []))


def rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Rows of text under `COLUMNS`, one for each verdict, with the case that is nearest to its limit, or beyond it.

    If that case has positions beyond the usual range, a second row has the worst case within that range.
    """
    table: list[tuple[str, ...]] = []
    for verdict in verdicts:
        numbers = verdict.worst.texts() if verdict.worst else ("-", "-", "-", "-")
        state = INCONCLUSIVE_STATE if verdict.inconclusive else verdict.state
        reach = str(verdict.reach or "")
        head = (verdict.artifact, verdict.label, state)
        table.append((*head, *numbers, str(verdict.cases or "-"), reach, verdict.note))
        if verdict.worst is not None and verdict.worst.far_out and verdict.worst_usual is not None:
            table.append(("", "", "usual range", *verdict.worst_usual.texts(), "", "", ""))
    return table


def to_markdown(report: Report) -> str:
    """A table for a job's summary, followed by what could not be read."""
    lines = [f"### posexport verify: {summary(report)}", "", *table_lines(COLUMNS, rows(report.verdicts))]
    lines += [f"\n**Unreadable:** {escaped(file.error)}" for file in report.unreadable]
    return "\n".join(lines) + "\n"


def write_reports(report: Report, junit: Path | None, markdown: Path | None) -> None:
    """Write the reports that have a path, all or none. RequestError if one can't be written."""
    with staged() as files:
        if junit is not None:
            files.write(junit, lambda file: file.write(to_junit(report)))
        if markdown is not None:
            files.write(markdown, lambda file: file.write(to_markdown(report).encode()))
