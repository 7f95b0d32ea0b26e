"""A matrix for people: the whole table as Markdown, made only from the data of matrix.json."""

from __future__ import annotations

import html
from collections.abc import Iterable

from posexport.machine import describe_cpu
from posexport.report.text import MARKS, table_lines
from posexport.verify.matrix.table import BUILD, MODES, Cell, Matrix, idle, judged, summary
from posexport.verify.result import PASSED

_HOW = """\
Each file was exported with {sizes} and seeded weights for the target `{target}`.
`posexport verify` compared it with the same block in float64. A cell has one of these states:

- {passed} **passed**: the largest error over all inputs and outputs, and torch's error in the same place.
- {failed} **failed**: the file gave wrong numbers or crashed; the number refers to the reason below.
- {refused} **refused**: the form can't express the block, so `posexport export` refuses it with the sentence below.
- {not_run} **not run**: the runtime can't run such a file, or it is not installed; the reason is below.

`build` is the plan that TensorRT builds from the file. Its cells show the number of kernels, and *fused* if attention
is one kernel. `tensorrt-import` is TensorRT's import of the file, evaluated in float64. It shows how the parser reads
the file, without the rounding of kernels. Blocks are causal, except encodings with positions on several axes without a
cache."""


def to_markdown(matrix: Matrix) -> str:
    """The page: how to read it, a table for each mode, and every reason once."""
    cells = matrix.ordered()
    columns, numbers = judged(cells), dict[str, int]()
    sizes = ", ".join(f"{name} {size}" for name, size in matrix.header()["sizes"].items())
    marks = {state.replace(" ", "_"): mark for state, mark in MARKS.items()}
    lines = ["# What works where", "", f"Measured and written by `posexport matrix`: {summary(cells)}.", ""]
    lines += [_HOW.format(sizes=sizes, target=matrix.target, **marks)]
    for mode in dict.fromkeys(cell.entry.mode for cell in cells):
        table = []
        for entry in dict.fromkeys(cell.entry for cell in cells if cell.entry.mode == mode):
            shown = (_shown(matrix.cells.get((entry, column)), numbers) for column in columns)
            table.append((entry.encoding, entry.form, entry.dtype, *shown))
        lines += ["", f"## {mode}: {MODES[mode].summary}", ""]
        lines += table_lines(("encoding", "form", "dtype", *columns), table, escape=str)
    if numbers:
        lines += ["", "## Reasons", "", *(f"{number}. {_text(reason)}" for reason, number in numbers.items())]
    if away := idle(cells):
        lines += ["", "## Not run at all", "", *(f"- {name}: {_text(reason)}" for name, reason in away.items())]
    return "\n".join([*lines, "", f"Made by {_versions(matrix, cells)}.", ""])


def _shown(cell: Cell | None, numbers: dict[str, int]) -> str:
    """One cell of the table. `numbers` has the number of each reason, in the order in which they occur."""
    if cell is None:
        return ""
    if cell.state != PASSED:
        number = numbers.setdefault(cell.reason or "no reason was given", len(numbers) + 1)
        return f"{MARKS[cell.state]} {cell.state} [{number}]"
    if cell.column == BUILD:
        return f"{MARKS[PASSED]} {cell.kernels}{', fused' if cell.fused else ''}"
    errors = ("?" if error is None else f"{error:.1e}" for error in (cell.error, cell.eager))
    return f"{MARKS[PASSED]} {' / '.join(errors)}"


def _text(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False)


def _versions(matrix: Matrix, cells: Iterable[Cell]) -> str:
    made = ", ".join(f"{name} {version}" for name, version in matrix.made_by.items())
    ran = dict.fromkeys(f"{cell.column} {cell.version}" for cell in cells if cell.version is not None)
    cpus = "; ".join(map(describe_cpu, matrix.cpus))
    return f"{made}; judged by {', '.join(ran)}" + (f"; measured on {cpus}" if cpus else "")
