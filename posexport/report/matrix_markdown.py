"""A matrix for people: the whole table as Markdown, made from the data of matrix.json alone, and its summary."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence

from posexport.machine import describe_cpu
from posexport.verify.matrix.table import BUILD, COLUMNS, MODES, REFUSED, STATES, Cell, Entry, Matrix
from posexport.verify.result import FAILED, NOT_RUN, PASSED

MARKS = {PASSED: "✓", FAILED: "✗", REFUSED: "–", NOT_RUN: "·"}
"""A mark for each state, so that nobody needs colours."""

_HOW = """\
Each file was exported with {sizes} and seeded weights for the target `{target}`, and held against the same block in
float64 by `posexport verify`. A cell says:

- {passed} **passed**: the largest error, and torch error in the same place (the worst of all inputs and outputs).
- {failed} **failed**: wrong, or it crashed; the number leads to the reason below.
- {refused} **refused**: the form can't carry the block, so `posexport export` refuses it with the sentence below.
- {not_run} **not run**: the runtime can't take the file by its nature, or isn't there; the reason is below.

`build` is the plan that TensorRT builds from the file: how many kernels it has, and *fused* where attention is one of
them. `tensorrt-import` is TensorRT's import of the file, evaluated in float64: it shows what the parser makes of it,
not what kernels round. Blocks are causal, but for encodings of positions on several axes without a cache."""


def counts(cells: Iterable[Cell]) -> dict[str, int]:
    """How many cells are in each state."""
    number: Counter[str] = Counter(cell.state for cell in cells)
    return {state: number[state] for state in STATES}


def summary(cells: Iterable[Cell]) -> str:
    """The same in words."""
    return ", ".join(f"{number} {state}" for state, number in counts(cells).items())


def judged(cells: Iterable[Cell]) -> list[str]:
    """The columns that judged anything, in order."""
    columns = {cell.column for cell in cells if cell.state in (PASSED, FAILED)}
    return [name for name in COLUMNS if name in columns]


def idle(cells: Iterable[Cell]) -> dict[str, str]:
    """The columns in which nothing ran, with the reasons."""
    cells = list(cells)
    ran, reasons = judged(cells), dict[str, dict[str, None]]()
    for cell in cells:
        if cell.column not in ran and cell.state == NOT_RUN:
            reasons.setdefault(cell.column, {})[cell.reason or ""] = None
    return {name: "; ".join(reasons[name]) for name in COLUMNS if name in reasons}


ROWS = ("runtime", *STATES, "worst to torch error", "fused")
"""The columns of `rows`."""


def rows(cells: Iterable[Cell]) -> list[tuple[str, ...]]:
    """A row of text per column of the matrix in which anything ran, under `ROWS`."""
    cells = list(cells)
    table = []
    for name in judged(cells):
        column = [cell for cell in cells if cell.column == name]
        worst = max((cell.ratio for cell in column if cell.ratio is not None), default=None)
        fused = [cell.fused for cell in column if cell.fused is not None]
        numbers = ("-" if worst is None else f"{worst:g}x", f"{sum(fused)} of {len(fused)}" if fused else "-")
        table.append((name, *(str(number) for number in counts(column).values()), *numbers))
    return table


def to_markdown(matrix: Matrix) -> str:
    """The page: how to read it, a table per mode, and every reason once."""
    cells = matrix.ordered()
    columns, notes = judged(cells), _Notes()
    sizes = ", ".join(f"{name} {size}" for name, size in matrix.header()["sizes"].items())
    marks = {state.replace(" ", "_"): mark for state, mark in MARKS.items()}
    lines = ["# What works where", "", f"Measured and written by `posexport matrix`: {summary(cells)}.", ""]
    lines += [_HOW.format(sizes=sizes, target=matrix.target, **marks)]
    for mode in dict.fromkeys(cell.entry.mode for cell in cells):
        by_entry: dict[Entry, dict[str, Cell]] = {}
        for cell in cells:
            if cell.entry.mode == mode:
                by_entry.setdefault(cell.entry, {})[cell.column] = cell
        lines += ["", f"## {mode}: {MODES[mode].summary}", "", _line(("encoding", "form", "dtype", *columns))]
        lines += [_line(["---"] * (3 + len(columns)))]
        for entry, by_column in by_entry.items():
            shown = [notes.shown(by_column.get(column)) for column in columns]
            lines.append(_line((entry.encoding, entry.form, entry.dtype, *shown)))
    lines += ["", "## Reasons", "", *notes.lines()] if notes.numbers else []
    away = idle(cells)
    lines += ["", "## Not run at all", "", *(f"- {name}: {_text(why)}" for name, why in away.items())] if away else []
    return "\n".join([*lines, "", f"Made by {_versions(matrix, cells)}.", ""])


class _Notes:
    """Reasons by number, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def shown(self, cell: Cell | None) -> str:
        """One cell of the table."""
        if cell is None:
            return ""
        if cell.state == PASSED and cell.column == BUILD:
            return f"{MARKS[PASSED]} {cell.kernels}{', fused' if cell.fused else ''}"
        if cell.state == PASSED:
            numbers = ("?" if number is None else f"{number:.1e}" for number in (cell.error, cell.eager))
            return f"{MARKS[PASSED]} {' / '.join(numbers)}"
        number = self.numbers.setdefault(cell.reason or "no reason was given", len(self.numbers) + 1)
        return f"{MARKS[cell.state]} {cell.state} [{number}]"

    def lines(self) -> list[str]:
        return [f"{number}. {_text(reason)}" for reason, number in self.numbers.items()]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False)


def _versions(matrix: Matrix, cells: Iterable[Cell]) -> str:
    made = [f"{name} {version}" for name, version in matrix.made_by.items()]
    ran = dict.fromkeys((cell.column, cell.version) for cell in cells if cell.version is not None)
    cpus = [describe_cpu(cpu) for cpu in matrix.cpus]
    judged = ", ".join(f"{column} {version}" for column, version in ran)
    return f"{', '.join(made)}; judged by {judged}" + (f"; measured on {'; '.join(cpus)}" if cpus else "")
