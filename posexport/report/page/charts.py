"""The page's charts: horizontal bars with whiskers, and lines as `posexport plot` draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from posexport.report.artists import Axes, FixedLocator, FuncFormatter, Line2D, NullLocator, Patch
from posexport.report.drawing import ALTERNATIVE, BEST, BOUND, FAINT, GROUND, INK, OURS, figure, inline, plain
from posexport.report.plots.panels import Chart
from posexport.report.plots.picture import draw_chart

LOOKS = {
    "best": (BEST, "★ the fastest"),
    "ours": (OURS, "an artifact of posexport"),
    "alternative": (ALTERNATIVE, "an alternative"),
}
"""The colour and the name of each kind of bar."""

WIDTH = 11.0
_BAR, _HEAD = 0.42, 0.3  # inches
_WHISKER = 1.6  # a whisker is at most this many times the longest bar, so that one slow run doesn't flatten the others
_LONGEST = 12.0  # a bar is drawn up to this many times the shortest one
_ROOM = 0.94  # of the width
_DASHED = (0, (2.2, 1.1))


@attrs.frozen(kw_only=True)
class Bar:
    """A bar to `value` with a whisker from `low` to `high`. `look` is one of LOOKS."""

    name: str
    text: str
    value: float
    low: float
    high: float
    look: str


@attrs.frozen(kw_only=True)
class Bars:
    """Bars under one heading. `bound` is a dashed line across them."""

    name: str
    bars: tuple[Bar, ...]
    bound: float | None = None


def draw_bars(title: str, groups: Sequence[Bars]) -> str:
    """Horizontal bars, all groups on one scale from 0. Bars that continue beyond the drawing end in ›."""
    bars = [bar for group in groups for bar in group.bars]
    tallest = min(max(bar.value for bar in bars), _LONGEST * min(bar.value for bar in bars))
    longest = min(max(bar.high for bar in bars), _WHISKER * tallest)
    height = len(bars) * _BAR + sum(bool(group.name) for group in groups) * _HEAD + _HEAD
    with figure(WIDTH, height) as drawn:
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, longest / _ROOM)
        axes.set_ylim(height, 0)
        y = 0.0
        for group in groups:
            if group.name:
                _write(axes, 0, y + 0.2, group.name, weight="bold", color=FAINT)
                y += _HEAD
            for bar in group.bars:
                _draw_bar(axes, bar, y, longest)
                y += _BAR
                if group.bound is not None and group.bound <= longest:  # over the bar, with a rim to stand out
                    axes.vlines(group.bound, y - 0.24, y - 0.08, color=GROUND, linewidth=4.5)
                    axes.vlines(group.bound, y - 0.24, y - 0.08, color=BOUND, linewidth=1.8, linestyle=_DASHED)
        looks = [LOOKS[look] for look in LOOKS if any(bar.look == look for bar in bars)]
        handles: list[Patch | Line2D] = [Patch(color=colour, label=name) for colour, name in looks]
        if any(group.bound is not None for group in groups):
            handles.append(Line2D([], [], color=BOUND, linestyle=_DASHED, label="lower bound"))
        axes.legend(handles=handles, loc="lower left", ncols=4, borderaxespad=0, labelcolor=INK)
        return inline(drawn, title, "; ".join(f"{bar.name} {bar.text}" for bar in bars))


def _draw_bar(axes: Axes, bar: Bar, top: float, longest: float) -> None:
    weight = "bold" if bar.look == "best" else "normal"
    _write(axes, 0, top + 0.13, bar.name, weight=weight, color=INK)
    _write(axes, longest / _ROOM, top + 0.13, bar.text, ha="right", weight=weight, color=INK)
    middle, high = top + 0.26, min(bar.high, longest)
    axes.barh(middle, min(bar.value, longest), 0.14, color=LOOKS[bar.look][0], gid=f"bar {bar.look}")
    axes.hlines(middle, bar.low, high, color=INK, linewidth=1)
    ends = [end for end in (bar.low, bar.high) if end <= longest]
    axes.vlines(ends, middle - 0.04, middle + 0.04, color=INK, linewidth=1)
    if bar.high > longest:
        _write(axes, longest, middle, "›", va="center", weight="bold", color=INK)


def _write(axes: Axes, x: float, y: float, text: str, **style: str) -> None:
    axes.text(x, y, plain(text), **style)  # type: ignore[arg-type]


def draw_lines(chart: Chart, show: Callable[[float], str], sizes: Sequence[float] = ()) -> str:
    """A chart of lines. `show` writes the values of y for screen readers, and `sizes` are ticks of x."""
    with figure(WIDTH * 0.75, 3.6, layout="constrained") as drawn:
        axes = drawn.add_subplot()
        draw_chart(axes, chart)
        axes.set_xlabel(plain(chart.x, 40))
        axes.set_ylabel(plain(chart.y, 40))
        if sizes:
            axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.10g}"))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
        ends = []
        for line in chart.lines:
            known = [y for y in line.y if y is not None and y == y]
            ends += [f"{line.label} from {show(known[0])} to {show(known[-1])}"] if known else []
        return inline(drawn, chart.title, f"{chart.y} over {chart.x}: {'; '.join(ends)}")
