"""Panels of numbers as a PNG or SVG picture. The same panels give the same bytes."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from posexport.report.artists import (
    Axes,
    ConstrainedLayoutEngine,
    ListedColormap,
    MaxNLocator,
    Patch,
    ScaledTranslation,
)
from posexport.report.drawing import COLOURS, DASHES, FAINT, GRID, INK, MARKERS, encode, figure, plain
from posexport.report.plots.panels import Chart, Image, Panel

WIDTH, HEIGHT, SQUARE = 4.9, 3.5, 3.9
"""The inches of one panel, and the width of a square image."""

_LETTERS_PER_INCH = 13.8
_HIDDEN = "#d9d9d9"
_THICKER = 10  # the most steps of line widths
_LEAST = 1e-100  # values nearer to 0 are drawn as 0, because matplotlib's ticks can't tell them from 0


def draw(rows: list[list[Panel]], suffix: str) -> bytes:
    """Draw each of `rows` as a row of panels. Returns a file of the format `suffix`."""
    widths = [max(map(_width, column)) for column in itertools.zip_longest(*rows)]
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
    with figure(sum(widths), len(rows) * HEIGHT, layout=layout) as drawn:
        grid = drawn.add_gridspec(len(rows), len(widths), width_ratios=widths)
        for at, row in enumerate(rows):
            for column, panel in enumerate(row):
                axes = drawn.add_subplot(grid[at, column])
                _title(axes, panel, int(_LETTERS_PER_INCH * widths[column]))
                if isinstance(panel, Image):
                    _draw_image(axes, panel)
                else:
                    draw_chart(axes, panel)
        return encode(drawn, suffix)


def _width(panel: Panel | None) -> float:
    """The inches that a panel takes. A square image needs less."""
    return SQUARE if panel is None or (isinstance(panel, Image) and panel.square) else WIDTH


def _title(axes: Axes, panel: Panel, letters: int) -> None:
    """Write the encoding in bold, and below it what is shown, `letters` to a line.

    The name of a single line is added there, because it has no legend.
    """
    only = panel.lines[0].label if isinstance(panel, Chart) and len(panel.lines) == 1 else ""
    note = "\n".join(textwrap.fill(line, letters) for line in ", ".join(filter(None, (panel.note, only))).split("\n"))
    axes.set_title(plain(panel.title), loc="left", weight="bold", color=INK, pad=8 + 11 * (note.count("\n") + 1))
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(note.replace("$", r"\$"), (0, 1), (0, 5), color=FAINT, **place)
    axes.set_xlabel(plain(panel.x))
    axes.set_ylabel(plain(panel.y))


def _draw_image(axes: Axes, panel: Image) -> None:
    values = np.array(panel.rows)
    (left, top), (high, wide) = panel.first, values.shape
    extent = (left - 0.5, left + wide - 0.5, top + high - 0.5, top - 0.5)
    common: dict[str, Any] = {"extent": extent, "aspect": "equal" if panel.square else "auto"}
    axes.set_anchor("NW")
    axes.set_facecolor(_HIDDEN)
    named = {} if panel.names is None else dict(zip(panel.names, (_HIDDEN, COLOURS[0]), strict=True))
    if named:
        axes.imshow(values, cmap=ListedColormap([*named.values()]), vmin=0, vmax=1, **common)
    else:
        shown = axes.imshow(values, **common, **_scale(values))
        bar = axes.figure.colorbar(shown, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
        bar.set_label(plain(panel.value))
        bar.outline.set_linewidth(0.5)
        named = {"hidden key": _HIDDEN} if np.isnan(values).any() else {}
    patches = [Patch(facecolor=colour, edgecolor=FAINT, linewidth=0.5, label=name) for name, colour in named.items()]
    if patches:
        axes.legend(handles=patches, ncols=len(patches), **_below(axes))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=7, integer=True))


def _scale(values: Any) -> dict[str, Any]:
    """Blue to red around zero if there are both signs, otherwise dark to light."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if low < 0 < high:
        reach = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach}
    return {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1}


def draw_chart(axes: Axes, panel: Chart) -> None:
    """Draw lines, marks, axes and a legend. The caller adds the title and the names of the axes."""
    looks = [line.look or (index, index) for index, line in enumerate(panel.lines)]
    highest = max(looks, default=(0, 0))[0]
    drawn = []
    for line, (colour, dash) in zip(panel.lines, looks, strict=True):
        style: dict[str, Any] = {"color": COLOURS[colour % len(COLOURS)]}
        wider = min(highest - colour, _THICKER) if panel.together else 0  # so that all lines show even if they coincide
        if panel.dots:
            style |= {"marker": MARKERS[colour % len(MARKERS)], "markersize": 3 + 1.8 * wider, "linewidth": 0}
        else:
            style |= {"linestyle": DASHES[dash % len(DASHES)], "linewidth": 1.3 + 0.9 * wider}
            style |= {"marker": MARKERS[colour % len(MARKERS)], "markersize": 4} if len(line.x) == 1 else {}
        drawn += axes.plot(_numbers(line.x), _numbers(line.y), **style)
    for name, scale in zip("xy", panel.scales, strict=True):
        if not isinstance(scale, str):
            _from_zero(axes, name, float(scale))
        elif math.isfinite(getattr(axes.dataLim, f"minpos{name}")):  # otherwise no number has a logarithm
            getattr(axes, f"set_{name}scale")(scale)
    for mark, at in zip(panel.marks, _numbers([mark.at for mark in panel.marks]), strict=True):
        axes.axhline(at, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)))
        x, shift = (0.0, 3) if mark.end == "left" else (1.0, -3)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(plain(mark.label), (x, at), (shift, 3), ha=mark.end, fontsize=8, color=INK, **place)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(panel.lines) > 1:
        columns = len({dash for _, dash in looks})
        legend: dict[str, Any] = {"loc": "upper left"} if panel.rising else {**_below(axes), "ncols": min(columns, 4)}
        labels = [plain(line.label) for line in panel.lines]
        shown = [f" {label}" if label.startswith("_") else label for label in labels]  # or matplotlib leaves it out
        axes.legend(drawn, shown, handlelength=2.8, **legend)


def _numbers(values: Sequence[float | None]) -> Any:
    """Values as an array: NaN for missing ones, 0 for tiny ones."""
    numbers = np.array(values, dtype=float)
    return np.where(abs(numbers) < _LEAST, 0.0, numbers)


def _below(axes: Axes) -> dict[str, Any]:
    """The place of a legend below the label of the x axis, whatever the height of the axes."""
    lower = axes.transAxes + ScaledTranslation(0, -29 / 72, axes.figure.dpi_scale_trans)
    return {"loc": "upper left", "bbox_to_anchor": (-0.02, 0.0), "bbox_transform": lower, "columnspacing": 1.2}


def _from_zero(axes: Axes, name: str, start: float) -> None:
    """A logarithmic axis that includes 0. It is linear up to `start`, and has room between its ticks."""
    getattr(axes, f"set_{name}scale")("symlog", linthresh=start, linscale=0.6)
    lowest, highest = (getattr(axes.dataLim, f"{name}{end}") for end in "01")  # inf and -inf if nothing is drawn
    lowest, highest = min(lowest, -0.1 * start), max(highest, start)
    getattr(axes, f"set_{name}lim")(2 * lowest, 2 * highest)
    ticks = 10.0 ** np.arange(round(math.log10(start)), math.log10(highest), 2)
    getattr(axes, f"set_{name}ticks")([0, *ticks])
