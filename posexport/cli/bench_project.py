"""What people see of the benchmarks of a project."""

from __future__ import annotations

from pathlib import PurePath

import click

from posexport.bench.result import OUT_OF_DATE, LimitResult, ProjectBenchmark
from posexport.cli import console
from posexport.cli.bench_tables import show_benchmark, show_gate
from posexport.jsondata import unstructure

_COLUMNS = ("file", "runtime", "at", "times", "of", "95 % interval", "limit", "state")


def show_project(result: ProjectBenchmark, alternatives: bool, as_json: bool) -> None:
    """Every file with its gate and its limits, or why none is timed."""
    if as_json:
        console.show_json(unstructure(result))
    elif any(file.state == OUT_OF_DATE for file in result.files):
        rows = [(file.file, file.state, file.reason) for file in result.files]
        console.show_table(f"Files of {result.project}", ("file", "state", "why"), rows)
    else:
        _show_files(result, alternatives)
    for file in result.files:
        for warning in file.result.manifest_warnings if file.result is not None else ():
            console.warn(f"{warning}.")


def _show_files(result: ProjectBenchmark, alternatives: bool) -> None:
    for file in result.files:
        if file.result is not None:
            show_benchmark(file.result, alternatives)
            if file.result.gate is not None:
                show_gate(file.result.gate)
    rows = [_row(PurePath(file.file).name, limit) for file in result.files for limit in file.limits]
    if rows:
        console.show_table(f"Budget of {result.project}", _COLUMNS, rows, right=("times", "limit"))
    for file in result.files:
        name = PurePath(file.file).name
        for limit in file.limits:
            if limit.reason and limit.reason != file.reason:
                click.echo(f"{name}, {limit.scenario} on {limit.runtime}: {limit.reason}")
        if file.reason:
            click.echo(f"not run: {name} ({file.reason})")


def _row(file: str, limit: LimitResult) -> tuple[str, ...]:
    known = limit.ratio is not None
    interval = f"{limit.low:.2f} to {limit.high:.2f}" if known else "-"
    ratio = f"{limit.ratio:.2f}" if known else "-"
    return (file, limit.runtime, limit.scenario, ratio, limit.reference, interval, f"{limit.limit:g}", limit.state)
