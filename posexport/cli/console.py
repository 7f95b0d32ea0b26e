"""The output of commands: tables on stdout, progress and errors on stderr. rich is imported only when it is used."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.errors import ERROR_FILE, plain
from posexport.spec.contract import split_layer

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Clock = Callable[[], float]
"""Returns the seconds since some moment in the past."""

MINUTE = 60.0
_STARTED = "posexport.cli.started"  # the key in click's context for the time at which the command began

_CELL, _LINE = 400, 2_000  # the most characters of a name of a fact or a step, and of a line in a table cell

_STATE_STYLES: dict[str, dict[str, Any]] = {
    "passed": {"fg": "green"},
    "failed": {"fg": "red", "bold": True},
    "not run": {"fg": "yellow"},
}


def write_part(text: str) -> None:
    """Write a part of a line to stdout, and show it at once."""
    click.echo(plain(text, kept="\n"), nl=False)


def write(line: str = "", err: bool = False) -> None:
    """Write one line on stdout or stderr. Names from files may contain anything, but can't control the terminal
    here."""
    click.echo(plain(line, kept=""), err=err)


def show_json(data: Any) -> None:
    """Write one JSON document on stdout, for programs. Invisible characters are escaped as in JSON."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    hidden = {character for character in {*text} if not character.isprintable() and character != "\n"}
    click.echo(text.translate({ord(character): _escaped(character) for character in hidden}))


def _escaped(character: str) -> str:
    """A character as JSON writes it in ASCII."""
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Write a table on stdout, folded if it is wider than the terminal, or than 180 characters elsewhere.

    The columns in `right` are right-aligned. If the table is too wide, empty columns are left out, and words and names
    are folded, but never numbers. This is not a table of rich, whose import would make `list` slow.
    """
    table = [
        [[plain(line, _LINE, "") for line in cell.splitlines()] or [""] for cell in row] for row in (columns, *rows)
    ]
    limit = 180
    if sys.stdout.isatty():
        import shutil

        limit = shutil.get_terminal_size().columns

    def width_of(widths: Sequence[int]) -> int:
        return sum(widths) + 3 * len(widths) - 1

    widths = [max(len(line) for cell in column for line in cell) for column in zip(*table, strict=True)]
    if width_of(widths) > limit:
        shown = [at for at in range(len(columns)) if len(table) == 1 or any(row[at] != [""] for row in table[1:])]
        columns = [columns[at] for at in shown]
        table = [[row[at] for at in shown] for row in table]
        widths = [widths[at] for at in shown]
        least = [_least_width(column) for column in zip(*table, strict=True)]
        while width_of(widths) > limit and (above := [at for at in range(len(widths)) if widths[at] > least[at]]):
            widths[max(above, key=widths.__getitem__)] -= 1
    rule = "─" if (sys.stdout.encoding or "ascii").lower().startswith("utf") else "-"
    lines = [click.style(plain(title, kept=""), bold=True), ""]
    for row in table:
        header = row is table[0]
        cells = [
            [part for line in cell for part in (textwrap.wrap(line, width, break_on_hyphens=False) or [""])]
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            line = " "
            for column, part, width in zip(columns, parts, widths, strict=True):
                style = {"bold": True} if header else _STATE_STYLES.get(part)
                text, padding = click.style(part, **style) if style and part else part, " " * (width - len(part))
                line += (padding + text if column in right else text + padding) + "   "
            lines.append(line.rstrip())
        if header:
            lines.append(" " + rule * (width_of(widths) - 2))
    click.echo("\n".join(lines) + "\n")


def _least_width(column: Sequence[Sequence[str]]) -> int:
    """The smallest width in which each word of the header, and each number, fits."""
    (header,), cells = column[0], column[1:]
    numbers = (line for cell in cells for line in cell if line[:1].isdigit() and " " not in line)
    return max([6, *map(len, header.split()), *map(len, numbers)])


def show_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Write names and values, one pair on each line."""
    facts = [(plain(name, _CELL, ""), value) for name, value in facts]
    width = max((len(name) for name, _ in facts), default=0)
    click.echo(click.style(plain(title, kept=""), bold=True))
    for name, value in facts:
        write(f"  {name:<{width}}  {value}")


def manifest_facts(path: object, signer: str | None) -> list[tuple[str, str]]:
    """Where the manifest of a file is, and who signed it."""
    return [("manifest", f"{path}.json"), *([("signed by", signer)] if signer else [])]


def say(text: str) -> None:
    """Write text on stderr. If that isn't possible, it is dropped: the exit code remains."""
    with suppress(OSError, ValueError):
        write(text, err=True)


def warn(sentence: str) -> None:
    """Write one line on stderr; the command continues."""
    say(f"Warning: {' '.join(sentence.split())}")


def fail(sentence: str, code: int) -> int:
    """Print the error that ends the command; returns the exit code.

    The error is also written as JSON into a file, if a parent process gives its name in the variable ERROR_FILE.
    """
    text = plain(" ".join(sentence.split()))
    say(f"Error: {text}")
    if path := os.environ.get(ERROR_FILE):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"error": text}), encoding="utf-8")
    return code


def runs(facts: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """`facts` with equal values of consecutive layers in one row: `past_key.0 ... past_key.31`.

    If other names lie between them, the row is `past.0.key, past.1.key ... past.31.key`.
    """
    rows: list[tuple[dict[int, str], Any]] = []  # names by their places
    last: dict[tuple[str, str], tuple[int, int]] = {}  # a name without its number: its last row, and the number there
    for place, (name, value) in enumerate(facts):
        found = split_layer(name)
        if found:
            stem, number, ending = found
            row, before = last.get((stem, ending), (len(rows), number))
            if number == before + 1 and rows[row][1] == value:
                rows[row][0][place] = name
                last[stem, ending] = (row, number)
                continue
            last[stem, ending] = (len(rows), number)
        rows.append(({place: name}, value))
    return [(_run(names), value) for names, value in rows]


def _run(names: Mapping[int, str]) -> str:
    """The first name and the last; also the second if the names don't end in their numbers and others lie between
    them."""
    shown, places = [*names.values()], [*names]
    if len(shown) < 3:
        return ", ".join(shown)
    is_plain = places[-1] - places[0] < len(shown) or shown[0].rpartition(".")[2].isdecimal()
    return f"{shown[0]} ... {shown[-1]}" if is_plain else f"{shown[0]}, {shown[1]} ... {shown[-1]}"


class Steps:
    """What a command is doing now. It is called with each step that begins, like a `posexport.progress.Progress`."""

    def __init__(self, step: str, total: int | None = None, bar: Bar | None = None) -> None:
        self.step, self.total, self.completed = step, total, 0
        self._bar = bar
        self._task = None if bar is None else bar.add_task(plain(step, _CELL, ""), total=total)

    def __call__(self, step: str) -> None:
        self.update(step)

    def update(
        self, step: str | None = None, *, advance: int = 0, completed: int | None = None, total: int | None = None
    ) -> None:
        """Change the step, and how many parts of the `total` are complete; None leaves a value unchanged."""
        self.step = self.step if step is None else step
        self.total = self.total if total is None else total
        self.completed = (self.completed if completed is None else completed) + advance
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, description=plain(str(self), _CELL, ""), total=self.total, completed=self.completed
            )

    def __str__(self) -> str:
        return self.step if self.total is None else f"{self.step} ({self.completed} of {self.total} done)"


@contextmanager
def steps(step: str, total: int | None = None, clock: Clock = time.monotonic) -> Iterator[Steps]:
    """Show on stderr what a long piece of work does; yields a callable for the steps that begin.

    A terminal gets a bar, which counts parts if `total` is given. Elsewhere, for example in a CI, each full minute
    since the command began gets one line: "still running, 3 min: timing batch=1,seq=128".
    """
    if not sys.stderr.isatty():
        current, ended = Steps(step, total), threading.Event()
        context = click.get_current_context(silent=True)
        start = clock() if context is None else context.find_root().meta.setdefault(_STARTED, clock())
        lines = threading.Thread(target=write_lines, args=(current, start, clock, ended.wait), daemon=True)
        lines.start()
        try:
            yield current
        finally:
            ended.set()
            lines.join()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    described = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), described, BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Steps(step, total, bar)


def write_lines(current: Steps, start: float, clock: Clock, wait: Callable[[float], bool]) -> None:
    """Write a line on stderr at each full minute after `start`, until `wait`, called with seconds, returns True."""
    while not wait(MINUTE - (clock() - start) % MINUTE):
        say(f"still running, {round((clock() - start) / MINUTE)} min: {current}")
