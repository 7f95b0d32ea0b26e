"""What people see: tables on stdout, progress on stderr. rich loads here only, when something is shown."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from posexport.progress import Progress

_LAYER = re.compile(r"\.(\d+)(?=\.|$)")

STATE_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


def show_json(data: Any) -> None:
    """One JSON document on stdout, for machines."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout; `right` names the columns of numbers. Nothing is cut off where the output is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in row))
    width = None if sys.stdout.isatty() else 160
    Console(file=sys.stdout, width=width, highlight=False).print(table)


def show_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    facts = list(facts)
    width = max((len(name) for name, _ in facts), default=0)
    click.echo(click.style(title, bold=True))
    for name, value in facts:
        click.echo(f"  {name:<{width}}  {value}")


def warn(sentence: str) -> None:
    """One line on stderr that ends nothing."""
    click.echo(f"Warning: {sentence}", err=True)


def runs(facts: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """`facts`, but what is the same of layer after layer is one of them: `past_key.0 ... past_key.31`."""
    rows: list[tuple[list[str], Any]] = []
    last: dict[str, tuple[int, int]] = {}  # a name without its number: its last row, and the number there
    for name, value in facts:
        found = _LAYER.search(name)
        if found:
            bare, number = _LAYER.sub("", name, count=1), int(found[1])
            row, before = last.get(bare, (len(rows), number))
            if number == before + 1 and rows[row][1] == value:
                rows[row][0].append(name[: found.end()])
                last[bare] = (row, number)
                continue
            last[bare] = (len(rows), number)
        rows.append(([name], value))
    return [(names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}", value) for names, value in rows]


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[tuple[Bar, Any]]:
    """A progress bar on stderr, shown on a terminal only; yields (bar, task) to advance."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24)]
    if total is not None:
        columns.append(MofNCompleteColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(description, total=total)
    if not console.is_terminal:  # some versions of rich end even a disabled bar with an empty line
        yield bar, task
        return
    with bar:
        yield bar, task


@contextmanager
def steps(description: str) -> Iterator[Progress]:
    """Show the steps of one long piece of work: yields what it calls with each step that begins."""
    with progress(description) as (bar, task):
        yield lambda step: bar.update(task, description=step)


def megabytes(size: int) -> str:
    """A size in MB (10^6 bytes) for people."""
    return f"{size / 1e6:.2f} MB"
