"""Verdicts as rows of a table, as JUnit XML for a CI, and as Markdown for a job's summary.

"Not run" is a state of its own: JUnit has it as skipped with its reason, never among the passed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from posexport.errors import RequestError
from posexport.files import staged
from posexport.report.text import escaped, table_lines, writable
from posexport.verify.result import FAILED, NOT_RUN, Comparison, Report, Verdict

COLUMNS = ("artifact", "runtime", "state", "case", "error", "torch error", "limit", "cases", "note")
"""The columns of `rows`."""


def summary(report: Report) -> str:
    """How many verdicts are in each state, in words; what could not be read is counted too."""
    texts = [f"{number} {state}" for state, number in report.counts().items()]
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
    notes = [verdict.reason or measured(verdict), verdict.where, *verdict.notes]
    numbers, note = _numbers(verdict.worst), "; ".join(filter(None, notes))
    return (verdict.artifact, verdict.label, verdict.state, *numbers, str(verdict.cases or "-"), note)


def measured(verdict: Verdict) -> str:
    """The value of a check that compares no outputs, and its limit; empty for another."""
    return f"{verdict.measured}, limit {verdict.limit_text}" if verdict.measured else ""


def _numbers(comparison: Comparison | None) -> tuple[str, str, str, str]:
    """The case, the error, the torch error and the limit of a comparison."""
    if comparison is None:
        return "-", "-", "-", "-"
    numbers = (comparison.max_error, comparison.torch_error, comparison.limit)
    error, torch_error, limit = ("-" if number is None else f"{number:.2e}" for number in numbers)
    return comparison.case, error, torch_error, limit


def to_markdown(report: Report) -> str:
    """A table for a job's summary, with what could not be read below it."""
    lines = [f"### posexport verify: {summary(report)}", "", *table_lines(COLUMNS, rows(report.verdicts))]
    lines += [f"\n**Unreadable:** {escaped(file.error)}" for file in report.unreadable]
    return "\n".join(lines) + "\n"


def to_junit(report: Report) -> bytes:
    """JUnit XML: a suite per run, a test per artifact and runtime, an error per artifact that can't be read."""
    counts, unreadable = report.counts(), len(report.unreadable)
    suite = ElementTree.Element("testsuite", name="posexport verify", tests=str(len(report.verdicts) + unreadable))
    suite.attrib |= {"failures": str(counts[FAILED]), "errors": str(unreadable), "skipped": str(counts[NOT_RUN])}

    def test(artifact: str, name: str) -> ElementTree.Element:
        return ElementTree.SubElement(suite, "testcase", classname=writable(artifact), name=name)

    for verdict in report.verdicts:
        case = test(verdict.artifact, verdict.label)
        if verdict.state == FAILED:
            failure = ElementTree.SubElement(case, "failure", message=writable(verdict.reason or "failed"))
            failure.text = writable(_row(verdict)[-1])
        elif verdict.state == NOT_RUN:
            ElementTree.SubElement(case, "skipped", message=writable(verdict.reason or "not run"))
        ElementTree.SubElement(case, "system-out").text = measured(verdict) or _junit_numbers(verdict)
    for file in report.unreadable:
        ElementTree.SubElement(test(file.artifact, "read"), "error", message=writable(file.error))
    ElementTree.indent(suite)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _junit_numbers(verdict: Verdict) -> str:
    case, error, torch_error, limit = _numbers(verdict.worst)
    text = f"error {error}, torch error {torch_error}, limit {limit}, sets of inputs {verdict.cases or '-'}"
    if verdict.worst is not None:
        text += f", worst case {case}"
        if verdict.worst.far_out and verdict.worst_usual is not None:
            case, error, torch_error, limit = _numbers(verdict.worst_usual)
            text += f"; in the usual range: error {error}, torch error {torch_error}, limit {limit}, worst case {case}"
    return text


def write_reports(report: Report, junit: Path | None, markdown: Path | None) -> None:
    """Write the reports with a path, both or none; RequestError where one can't be written."""
    if junit is not None and markdown is not None and junit.resolve() == markdown.resolve():
        raise RequestError(f"{str(junit)!r} can't hold both the JUnit and the Markdown report: name two files.")
    with staged() as files:
        if junit is not None:
            files.write(junit, lambda file: file.write(to_junit(report)))
        if markdown is not None:
            files.write(markdown, lambda file: file.write(to_markdown(report).encode()))
