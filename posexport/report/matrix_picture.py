"""A matrix as a picture: a row per mode and encoding, columns per form, runtime and dtype."""

from __future__ import annotations

import hashlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from posexport.report.drawing import encode, figure
from posexport.report.matrix_markdown import MARKS, idle, judged
from posexport.verify.matrix.table import BUILD, REFUSED, Cell, Entry, Matrix
from posexport.verify.result import FAILED, NOT_RUN, PASSED

WIDTH, DPI = 10.0, 200
"""The inches of a whole matrix and the pixels of an inch; a README shows half as many."""

_CELL, _HIGH = 0.172, 0.165  # inches of a cell
_LEFT, _HEAD, _FOOT = 1.15, 0.85, 0.86  # inches beside, above and below the cells
_GAPS = {"runtime": 0.035, "form": 0.11, "mode": 0.13}  # inches between groups
_PALE, _DEEP = (0.86, 0.92, 0.97), (0.10, 0.37, 0.66)  # passed, from exact to _WORST times eager's error
_WORST = 4.0  # the tolerance of parity is at least this multiple
# Colours that differ for the colour-blind too (Okabe and Ito), each with a mark of its own.
FILL = {FAILED: "#d55e00", REFUSED: "#f0d848", NOT_RUN: "#ececec", "fused": "#009e73", "unfused": "#ffffff"}
_INK = {FAILED: "white", REFUSED: "#333333", NOT_RUN: "#999999", "fused": "white", "unfused": "#333333"}
_TEXT, _SMALL = 6.2, 5.0  # points


def digest(matrix: Matrix) -> str:
    """What the picture keeps of the matrix that it was drawn from: the sha256 of its JSON."""
    return hashlib.sha256(matrix.to_bytes()).hexdigest()


def draw(matrix: Matrix) -> bytes:
    """The picture as a PNG file.

    torch eager is the measure, so it has no column unless it failed; a runtime that judged nothing has none either.
    """
    cells = {(cell.entry, cell.column): cell for cell in matrix.ordered()}
    plan = _Plan(list(cells.values()))
    with figure(plan.width, plan.height) as drawn:
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, plan.width)
        axes.set_ylim(plan.height, 0)
        axes.axis("off")
        _headings(axes, plan)
        for (mode, encoding), y in plan.rows.items():
            for (form, column, dtype), x in plan.columns.items():
                cell = cells.get((Entry(encoding=encoding, form=form, dtype=dtype, mode=mode), column))
                if cell is not None:
                    _draw(axes, cell, x, y)
        _legend(axes, plan, idle(cells.values()))
        return encode(drawn, ".png", DPI, Source=digest(matrix))


class _Plan:
    """Where everything stands, in inches from the upper left."""

    def __init__(self, cells: list[Cell]) -> None:
        shown = [name for name in judged(cells) if name != "torch" or any(_failed_torch(cell) for cell in cells)]
        forms = list(dict.fromkeys(cell.entry.form for cell in cells))
        dtypes = list(dict.fromkeys(cell.entry.dtype for cell in cells))
        self.columns: dict[tuple[str, str, str], float] = {}
        self.spans: list[tuple[str, str, float, float]] = []
        x = _LEFT
        for form in forms:
            start = x
            for column in shown:
                first = x
                for dtype in dtypes:
                    self.columns[form, column, dtype] = x
                    x += _CELL
                self.spans.append(("runtime", column, first, x))
                x += _GAPS["runtime"]
            self.spans.append(("form", form, start, x - _GAPS["runtime"]))
            x += _GAPS["form"]
        self.rows: dict[tuple[str, str], float] = {}
        self.modes: list[tuple[str, float, float]] = []
        y = _HEAD
        for mode in dict.fromkeys(cell.entry.mode for cell in cells):
            start = y
            for encoding in dict.fromkeys(cell.entry.encoding for cell in cells if cell.entry.mode == mode):
                self.rows[mode, encoding] = y
                y += _HIGH
            self.modes.append((mode, start, y))
            y += _GAPS["mode"]
        self.bottom = y
        self.width, self.height = max(x, WIDTH * 0.8), y + _FOOT


def _failed_torch(cell: Cell) -> bool:
    return cell.column == "torch" and cell.state == FAILED


def look(cell: Cell) -> tuple[Any, str, str]:
    """Fill, ink and text of a cell: a state its mark, an error its quotient with eager's, a plan its kernels."""
    if cell.state != PASSED:
        return FILL[cell.state], _INK[cell.state], MARKS[cell.state]
    if cell.column == BUILD:
        kind = "fused" if cell.fused else "unfused"
        return FILL[kind], _INK[kind], str(cell.kernels)
    part = min((cell.ratio or 0.0) / _WORST, 1.0)
    fill = tuple(pale + part * (deep - pale) for pale, deep in zip(_PALE, _DEEP, strict=True))
    ratio = "" if cell.ratio is None else f"{cell.ratio:.1f}" if cell.ratio < 9.95 else f"{cell.ratio:.0f}"
    return fill, "white" if part > 0.55 else "#16324f", ratio


def _draw(axes: Axes, cell: Cell, x: float, y: float) -> None:
    _box(axes, x, y, *look(cell))


def _box(axes: Axes, x: float, y: float, fill: Any, ink: str, text: str) -> None:
    edge = "#bbbbbb" if fill == FILL["unfused"] else fill
    axes.add_patch(
        Rectangle((x + 0.006, y + 0.006), _CELL - 0.012, _HIGH - 0.012, facecolor=fill, edgecolor=edge, linewidth=0.4)
    )
    axes.text(x + _CELL / 2, y + _HIGH / 2 + 0.003, text, ha="center", va="center_baseline", fontsize=_SMALL, color=ink)


def _headings(axes: Axes, plan: _Plan) -> None:
    for kind, name, start, end in plan.spans:
        middle = (start + end) / 2
        if kind == "form":
            axes.text(middle, 0.12, name, ha="center", va="center", fontsize=8, weight="bold")
            axes.plot([start, end], [0.23, 0.23], color="#444444", linewidth=0.8)
        else:
            label = "build:\nkernels" if name == BUILD else name.replace("-", "-\n", 1)
            axes.text(middle, 0.38, label, ha="center", va="center", fontsize=5.6, linespacing=0.95)
    for (_, _, dtype), x in plan.columns.items():
        axes.text(x + _CELL / 2, _HEAD - 0.05, dtype, ha="center", va="bottom", fontsize=_SMALL, rotation=90,
                  color="#555555")  # fmt: skip
    for mode, start, end in plan.modes:
        axes.text(0.09, (start + end) / 2, mode, ha="center", va="center", fontsize=7, weight="bold", rotation=90)
        axes.plot([0.19, 0.19], [start + 0.01, end - 0.01], color="#444444", linewidth=0.8)
    for (_, encoding), y in plan.rows.items():
        axes.text(_LEFT - 0.07, y + _HIGH / 2, encoding, ha="right", va="center", fontsize=_TEXT + 0.5)


def _legend(axes: Axes, plan: _Plan, away: dict[str, str]) -> None:
    y = plan.bottom + 0.06
    entry = Entry(encoding="", form="", dtype="", mode="")
    shades = [Cell(entry=entry, column="", state=PASSED, ratio=ratio) for ratio in (0.3, 1.0, 2.0, 4.0)]
    builds = [Cell(entry=entry, column=BUILD, state=PASSED, kernels=6, fused=fused) for fused in (True, False)]
    others = [Cell(entry=entry, column="", state=state) for state in (FAILED, REFUSED, NOT_RUN)]
    first = [(shades, "passed: error ÷ torch eager's own, against float64"), *(([cell], cell.state) for cell in others)]
    second = [([builds[0]], "kernels of the plan, attention fused"), ([builds[1]], "kernels, attention not fused")]
    for entries, top in ((first, y), (second, y + 0.24)):
        x = _LEFT
        for cells, label in entries:
            for cell in cells:
                _draw(axes, cell, x, top)
                x += _CELL
            said = axes.text(x + 0.06, top + _HIGH / 2, label, ha="left", va="center", fontsize=_TEXT)
            width = said.get_window_extent().transformed(axes.transData.inverted()).width
            x += 0.06 + width + 0.25
    if away:
        text = "Not run at all: " + ", ".join(away)
        axes.text(_LEFT, y + 0.57, text, ha="left", va="center", fontsize=_TEXT, color="#666666")
