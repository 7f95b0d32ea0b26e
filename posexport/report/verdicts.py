"""Verdicts as JSON for machines, JUnit XML for a CI, and Markdown for a job's summary.

"Not run" is a state of its own: JUnit has it as skipped with its reason, never among the passed.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posexport.errors import RequestError
from posexport.files import staged
from posexport.jsondata import unstructure
from posexport.verify.result import FAILED, NOT_RUN, PASSED, Comparison, Report, Verdict

COLUMNS = ("artifact", "runtime", "state", "case", "error", "torch error", "limit", "cases", "note")
"""The columns of `rows`."""

VERSION = 1
"""Of the JSON that `to_dict` gives."""

_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def to_dict(report: Report, required: Sequence[str] = ()) -> dict[str, Any]:
    """The report as plain data; errors are absolute, in the unit of the output."""
    return {
        "kind": "verify",
        "version": VERSION,
        "exit_code": report.exit_code(required),
        "seed": report.seed,
        "counts": counts(report),
        "verdicts": unstructure(report.verdicts),
        "unreadable": unstructure(report.unreadable),
    }


def counts(report: Report) -> dict[str, int]:
    """How many verdicts are in each state."""
    return {state: sum(verdict.state == state for verdict in report.verdicts) for state in (PASSED, FAILED, NOT_RUN)}


def summary(report: Report) -> str:
    """How many verdicts are in each state, in words; what could not be read is counted too."""
    texts = [f"{number} {state}" for state, number in counts(report).items()]
    return ", ".join(texts + ([f"{len(report.unreadable)} unreadable"] if report.unreadable else []))


def rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Rows of text under `COLUMNS`: one for each verdict, with the case that came nearest to its limit, or beyond it.

    Where that case has positions beyond the usual range, a second row has the worst case within that range.
    """
    table = []
    for verdict in verdicts:
        table.append(_row(verdict))
        if verdict.worst is not None and verdict.worst.far_out and verdict.worst_usual is not None:
            table.append(("", "", "usual range", *_numbers(verdict.worst_usual), "", ""))
    return table


def _row(verdict: Verdict) -> tuple[str, ...]:
    measured = f"{verdict.measured}, limit {verdict.limit_text}" if verdict.measured and not verdict.reason else None
    notes = [text for text in (verdict.reason, measured, verdict.where, *verdict.notes) if text]
    numbers = _numbers(verdict.worst)
    return (verdict.artifact, verdict.label, verdict.state, *numbers, str(verdict.cases or "-"), "; ".join(notes))


def _numbers(comparison: Comparison | None) -> tuple[str, str, str, str]:
    """The case, the error, the torch error and the limit of a comparison."""
    if comparison is None:
        return "-", "-", "-", "-"
    numbers = (comparison.max_error, comparison.torch_error, comparison.limit)
    error, torch_error, limit = ("-" if number is None else f"{number:.2e}" for number in numbers)
    return comparison.case, error, torch_error, limit


def to_markdown(report: Report) -> str:
    """A table for a job's summary, with what could not be read below it."""
    lines = [f"### posexport verify: {summary(report)}", ""]
    lines += [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(row) for row in rows(report.verdicts)]
    lines += [f"\n**Unreadable:** {_escaped(file.error)}" for file in report.unreadable]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Text as one cell: on one line, whatever its characters (str.splitlines knows ten that end one)."""
    line = " ".join(_text(text).splitlines())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")


def to_junit(report: Report) -> bytes:
    """JUnit XML: a suite per run, a test per artifact and runtime, an error per artifact that can't be read."""
    number = counts(report)
    suite = ElementTree.Element(
        "testsuite",
        name="posexport verify",
        tests=str(len(report.verdicts) + len(report.unreadable)),
        failures=str(number[FAILED]),
        errors=str(len(report.unreadable)),
        skipped=str(number[NOT_RUN]),
    )
    for verdict in report.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname=_text(verdict.artifact), name=verdict.label)
        cases, note = _row(verdict)[-2:]
        if verdict.state == FAILED:
            ElementTree.SubElement(case, "failure", message=_text(verdict.reason or "failed")).text = _text(note)
        elif verdict.state == NOT_RUN:
            ElementTree.SubElement(case, "skipped", message=_text(verdict.reason or "not run"))
        ElementTree.SubElement(case, "system-out").text = _junit_numbers(verdict, cases)
    for file in report.unreadable:
        case = ElementTree.SubElement(suite, "testcase", classname=_text(file.artifact), name="read")
        ElementTree.SubElement(case, "error", message=_text(file.error))
    ElementTree.indent(suite)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _junit_numbers(verdict: Verdict, cases: str) -> str:
    if verdict.measured is not None:
        return f"{verdict.measured}, limit {verdict.limit_text}"
    _, error, torch_error, limit = _numbers(verdict.worst)
    text = f"error {error}, torch error {torch_error}, limit {limit}, sets of inputs {cases}"
    if verdict.worst is not None:
        text += f", worst case {verdict.worst.case}"
    if verdict.worst is not None and verdict.worst.far_out and verdict.worst_usual is not None:
        case, error, torch_error, limit = _numbers(verdict.worst_usual)
        text += f"; in the usual range: error {error}, torch error {torch_error}, limit {limit}, worst case {case}"
    return text


def _text(text: str) -> str:
    """Text without the characters that XML 1.0 or UTF-8 can't hold, which an engine's message or a file's name may."""
    return _UNWRITABLE.sub("?", text)


def write_reports(report: Report, junit: Path | None, markdown: Path | None) -> None:
    """Write the reports with a path, both or none; RequestError where one can't be written."""
    if junit is not None and markdown is not None and junit.resolve() == markdown.resolve():
        raise RequestError(f"{str(junit)!r} can't hold both the JUnit and the Markdown report: name two files.")
    with staged() as files:
        if junit is not None:
            files.write(junit, lambda file: file.write(to_junit(report)))
        if markdown is not None:
            files.write(markdown, lambda file: file.write(to_markdown(report).encode()))
