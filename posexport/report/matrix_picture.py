"""A matrix as a picture. A row is a mode and an encoding. A column is a form, a runtime and a dtype."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posexport.report.artists import Axes, Rectangle
from posexport.report.drawing import encode, figure
from posexport.report.text import MARKS
from posexport.verify.matrix.table import BUILD, REFUSED, Cell, Entry, Matrix, State, idle, judged
from posexport.verify.result import FAILED, NOT_RUN, PASSED

WIDTH, DPI = 10.0, 200
"""The width of a whole matrix in inches, and the pixels of an inch. A README shows half as many."""

_WIDE, _HIGH = 0.172, 0.165  # inches of a cell
_LEFT, _HEAD, _FOOT = 1.15, 0.85, 0.86  # inches beside, above and below the cells
_PALE, _DEEP = (0.86, 0.92, 0.97), (0.10, 0.37, 0.66)  # passed, from exact to _WORST times torch error
_WORST = 4.0  # the tolerance of parity is at least this multiple
# Colours that colour-blind people can tell apart (Okabe and Ito), each with its own mark.
FILL = {FAILED: "#d55e00", REFUSED: "#f0d848", NOT_RUN: "#ececec", "fused": "#009e73", "unfused": "#ffffff"}
_INK = {FAILED: "white", REFUSED: "#333333", NOT_RUN: "#999999", "fused": "white", "unfused": "#333333"}
_TEXT, _SMALL = 6.2, 5.0  # points

Key = tuple[str, ...]


def digest(matrix: Matrix) -> str:
    """What the picture records about its matrix: the sha256 of the matrix's JSON."""
    return hashlib.sha256(matrix.to_bytes()).hexdigest()


def draw(matrix: Matrix) -> bytes:
    """The picture as a PNG file.

    torch is the reference, so it has a column only if it failed. A runtime that judged nothing has no column.
    """
    cells = matrix.ordered()
    failed = any(cell.column == "torch" and cell.state == FAILED for cell in cells)
    shown = [name for name in judged(cells) if name != "torch" or failed]
    forms, dtypes = (dict.fromkeys(getattr(cell.entry, key) for cell in cells) for key in ("form", "dtype"))
    columns = _positions(itertools.product(forms, shown, dtypes), _LEFT, _WIDE, (0.145, 0.035))
    blocks = dict.fromkeys((cell.entry.mode, cell.entry.encoding) for cell in cells)
    rows = _positions(blocks, _HEAD, _HIGH, (0.13,))
    bottom = max(rows.values(), default=_HEAD) + _HIGH
    width, height = max(*columns.values(), _LEFT, WIDTH * 0.8 - 0.3) + 0.3, bottom + _FOOT
    with figure(width, height) as drawn:
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.axis("off")
        _headings(axes, columns, rows)
        for cell in cells:
            entry = cell.entry
            if (x := columns.get((entry.form, cell.column, entry.dtype))) is not None:
                _draw(axes, cell, x, rows[entry.mode, entry.encoding])
        _legend(axes, bottom + 0.19, list(idle(cells)))
        return encode(drawn, ".png", DPI, Source=digest(matrix))


def _positions(keys: Iterable[Key], start: float, size: float, gaps: Sequence[float]) -> dict[Key, float]:
    """The place of each key in inches, with a gap where its first part changes, or its second, and so on."""
    places: dict[Key, float] = {}
    at, last = start, Key()
    for key in keys:
        at += next((gap for gap, part, before in zip(gaps, key, last, strict=False) if part != before), 0.0)
        places[key], last = at, key
        at += size
    return places


def _spans(places: Mapping[Key, float], level: int, size: float) -> Iterator[tuple[str, float, float]]:
    """The name, the start and the end of each group of keys with the same first parts, up to `level`."""
    for key, group in itertools.groupby(places, key=lambda key: key[: level + 1]):
        inside = [places[member] for member in group]
        yield key[-1], inside[0], inside[-1] + size


def look(cell: Cell) -> tuple[Any, str, str]:
    """Fill, ink and text of a cell: the mark of a state, an error over torch error, or a plan's number of kernels."""
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
    fill, ink, text = look(cell)
    edge = "#bbbbbb" if fill == FILL["unfused"] else fill
    place, size = (x + 0.006, y + 0.006), (_WIDE - 0.012, _HIGH - 0.012)
    axes.add_patch(Rectangle(place, *size, facecolor=fill, edgecolor=edge, linewidth=0.4))
    axes.text(x + _WIDE / 2, y + _HIGH / 2 + 0.003, text, ha="center", va="center_baseline", fontsize=_SMALL, color=ink)


def _headings(axes: Axes, columns: Mapping[Key, float], rows: Mapping[Key, float]) -> None:
    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    for form, start, end in _spans(columns, 0, _WIDE):
        axes.text((start + end) / 2, 0.12, form, fontsize=8, weight="bold", **middle)
        axes.plot([start, end], [0.23, 0.23], color="#444444", linewidth=0.8)
    for name, start, end in _spans(columns, 1, _WIDE):
        label = "build:\nkernels" if name == BUILD else name.replace("-", "-\n", 1)
        axes.text((start + end) / 2, 0.38, label, fontsize=5.6, linespacing=0.95, **middle)
    style: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90, "color": "#555555"}
    for (_, _, dtype), x in columns.items():
        axes.text(x + _WIDE / 2, _HEAD - 0.05, dtype, fontsize=_SMALL, **style)
    for mode, start, end in _spans(rows, 0, _HIGH):
        axes.text(0.09, (start + end) / 2, mode, fontsize=7, weight="bold", rotation=90, **middle)
        axes.plot([0.19, 0.19], [start + 0.01, end - 0.01], color="#444444", linewidth=0.8)
    for (_, encoding), y in rows.items():
        axes.text(_LEFT - 0.07, y + _HIGH / 2, encoding, ha="right", va="center", fontsize=_TEXT + 0.5)


def _legend(axes: Axes, y: float, away: Sequence[str]) -> None:
    def example(state: State, column: str = "", **fields: Any) -> Cell:
        return Cell(entry=Entry(encoding="", form="", dtype="", mode=""), column=column, state=state, **fields)

    shades = [example(PASSED, ratio=ratio) for ratio in (0.3, 1.0, 2.0, 4.0)]
    fused, unfused = (example(PASSED, BUILD, kernels=6, fused=fused) for fused in (True, False))
    states: tuple[State, ...] = (FAILED, REFUSED, NOT_RUN)
    first = [(shades, "passed: error ÷ torch error, against float64"), *(([example(state)], state) for state in states)]
    second = [([fused], "kernels of the plan, attention fused"), ([unfused], "kernels, attention not fused")]
    left: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": _TEXT}
    for entries, top in ((first, y), (second, y + 0.24)):
        x = _LEFT
        for cells, label in entries:
            for cell in cells:
                _draw(axes, cell, x, top)
                x += _WIDE
            written = axes.text(x + 0.06, top + _HIGH / 2, label, **left)
            x += 0.06 + written.get_window_extent().transformed(axes.transData.inverted()).width + 0.25
    if away:
        axes.text(_LEFT, y + 0.57, "Not run at all: " + ", ".join(away), color="#666666", **left)
