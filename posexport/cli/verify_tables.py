"""What `posexport verify` prints: the table of verdicts, and sentences on what was not verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from posexport.cli import console
from posexport.errors import RequestError
from posexport.files import check_writable
from posexport.verify.result import NOT_RUN, PARITY, PROJECT, Report


def show_report(report: Report, title: str) -> None:
    """The table of verdicts and their counts; a runtime that ran nothing, for one reason, is a line below it."""
    from posexport.report.verdicts import COLUMNS, rows, summary

    idle = _idle_runtimes(report)
    table = rows([verdict for verdict in report.verdicts if verdict.check != PARITY or verdict.runtime not in idle])
    if table:
        properties = any(verdict.check != PARITY and verdict.runtime != PROJECT for verdict in report.verdicts)
        title += ", and properties" if properties else ""
        console.show_table(title, COLUMNS, table, right=("error", "torch error", "limit"))
    for name, reason in idle.items():
        click.echo(f"not run: {name} ({reason})")
    click.echo(summary(report))


def show_warnings(report: Report, code: int) -> None:
    """Manifests that contradict their files, and artifacts that could not be read."""
    unreadable = {file.artifact for file in report.unreadable}
    for artifact, warning in report.manifest_warnings:
        if artifact not in unreadable:  # whose error says enough
            console.warn(f"{artifact}: {warning}.")
    for file in report.unreadable:
        console.fail(file.error, code)


def missing_sentence(report: Report, required: Sequence[str]) -> str:
    """Which required runtime was not run and why, or why nothing was."""
    parity = [verdict for verdict in report.verdicts if verdict.check == PARITY]
    for verdict in parity:
        if verdict.runtime in required and verdict.state == NOT_RUN:
            return f"required runtime {verdict.runtime} was not run: {verdict.reason}."
    missing = [name for name in required if all(verdict.runtime != name for verdict in report.verdicts)]
    if missing:
        return f"required runtime {missing[0]} was not run: no artifact here is for it."
    reasons = list(dict.fromkeys(f"{verdict.runtime} was not run: {verdict.reason}" for verdict in report.verdicts))
    return f"nothing was verified: {reasons[0] if len(reasons) == 1 else 'no runtime was run, see their reasons'}."


def _idle_runtimes(report: Report) -> dict[str, str]:
    """The runtimes on which no artifact was run, all for the same reason, with that reason."""
    idle = {}
    parity = [verdict for verdict in report.verdicts if verdict.check == PARITY]
    for name in dict.fromkeys(verdict.runtime for verdict in parity):
        outcomes = {(verdict.state, verdict.reason or "") for verdict in parity if verdict.runtime == name}
        state, reason = next(iter(outcomes))
        if len(outcomes) == 1 and state == NOT_RUN:
            idle[name] = reason
    return idle


def report_path(name: str, text: str | None) -> Path | None:
    """The path of a report to write, or None where none was given; RequestError where it can't be written."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix in (".onnx", ".plan", ".npz", ".data"):
        raise RequestError(
            f"{name} {text!r} has the name of an artifact or of inputs: give another, not {path.suffix}."
        )
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"{name} {text!r} can't be written: give the name of a file in a folder that is there.")
    check_writable(path)
    return path
