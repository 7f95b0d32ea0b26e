"""Drawings as inline SVG: bars and lines, sized in percent across and pixels down, so that letters never shrink.

Colours are classes that the page's style sheet fills in, light and dark. Lines differ in colour, dashes and markers.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs

from posexport.report.page.scale import Scale, label, scale, shows

COLOURS, DASHES, MARKERS = 8, 4, 5
"""How many looks the style sheet has."""

_BAR, _HEAD, _WIDEST = 42, 30, 94.0
_STRETCH = 1.6  # a whisker may be so much longer than the longest bar; one slow run shall not flatten all the others
_MOST = 12.0  # a bar is drawn up to so many times the shortest, which shall still be seen
_HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 300, 18, 34, 12.0, 97.0
_SHAPES: tuple[tuple[str, dict[str, str]], ...] = (
    ("circle", {"r": "4"}),
    ("rect", {"x": "-3.5", "y": "-3.5", "width": "7", "height": "7"}),
    ("path", {"d": "M0-5L5 0L0 5L-5 0Z"}),
    ("path", {"d": "M0-4.5L4.5 4H-4.5Z"}),
    ("path", {"d": "M0 4.5L4.5-4H-4.5Z"}),
)


@attrs.frozen(kw_only=True)
class Bar:
    """A bar to `value` with a whisker from `low` to `high`; `look` is ours, best, peer or floor."""

    name: str
    text: str
    value: float
    low: float
    high: float
    look: str


@attrs.frozen(kw_only=True)
class Bars:
    """Bars under one heading; `floor` is a line across them."""

    name: str
    bars: tuple[Bar, ...]
    floor: float | None = None


@attrs.frozen(kw_only=True)
class Curve:
    """One line of a chart; y is None where there is no value. `look` are its colour and its dashes."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    look: tuple[int, int] = (0, 0)


@attrs.frozen(kw_only=True)
class Rule:
    """A straight line across a chart."""

    name: str
    at: float


def _add(parent: ElementTree.Element, tag: str, text: str = "", **attributes: str | float) -> ElementTree.Element:
    named = {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()}
    child = ElementTree.SubElement(parent, tag, named)
    child.text = text or None
    return child


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _percent(value: float) -> str:
    return f"{_text(value)}%"


def _drawing(name: str, description: str, height: float) -> ElementTree.Element:
    root = ElementTree.Element("svg", {"class": "chart", "role": "img", "width": "100%", "height": _text(height)})
    root.set("aria-label", f"{name}. {description}")
    _add(root, "title", name)
    _add(root, "desc", description)
    return root


def _markup(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")


def draw_bars(name: str, groups: Sequence[Bars]) -> str:
    """Horizontal bars, all groups on one scale from 0; what goes on beyond the drawing ends in ›."""
    values = [bar.value for group in groups for bar in group.bars]
    tallest = min(max(values), _MOST * min(values))
    longest = min(max(bar.high for group in groups for bar in group.bars), _STRETCH * tallest)

    def across(value: float) -> str:
        return _percent(min(value / longest, 1.0) * _WIDEST)

    headed = [group for group in groups if group.name]
    count = sum(len(group.bars) for group in groups)
    told = "; ".join(f"{bar.name} {bar.text}" for group in groups for bar in group.bars)
    root = _drawing(name, told, count * _BAR + len(headed) * _HEAD)
    y = 0
    for group in groups:
        if group.name:
            _add(root, "text", group.name, x="0", y=y + 20, class_="head")
            y += _HEAD
        for bar in group.bars:
            own = _add(root, "g", class_=f"bar {bar.look}")
            _add(own, "title", f"{bar.name}: {bar.text}")
            _add(own, "text", _short(bar.name, max(14, 44 - len(bar.text))), x="0", y=y + 13, class_="name")
            _add(own, "text", bar.text, x="100%", y=y + 13, class_="value")
            _add(own, "rect", x="0", y=y + 19, width=across(bar.value), height=14, rx=2)
            _add(own, "line", x1=across(bar.low), x2=across(bar.high), y1=y + 26, y2=y + 26, class_="whisker")
            for end in (bar.low, bar.high):
                if end <= longest:
                    _add(own, "line", x1=across(end), x2=across(end), y1=y + 22, y2=y + 30, class_="whisker")
            if bar.high > longest:
                _add(own, "text", "›", x=across(bar.high), y=y + 31, class_="beyond")
            y += _BAR
        if group.floor is not None and group.floor <= longest:
            at = across(group.floor)
            for row in range(len(group.bars)):  # only over the bars, so that no letters are crossed
                top = y - (len(group.bars) - row) * _BAR + 18
                for class_ in ("halo", "floor"):  # a rim in the colour of the ground, seen on every bar
                    _add(root, "line", x1=at, x2=at, y1=top, y2=top + 16, class_=class_)
    return _markup(root)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def draw_lines(
    name: str,
    curves: Sequence[Curve],
    *,
    axes: tuple[str, str],
    kinds: tuple[str | float, str | float],
    rules: Sequence[Rule] = (),
    show: Callable[[float], str] = label,
    marks: Sequence[float] = (),
) -> str:
    """Lines over one axis; `show` writes the numbers of y, `marks` are the ticks of x where they are given."""
    points = [
        [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None and shows(x, kinds[0])]
        for curve in curves
    ]
    points = [[(x, y) for x, y in each if shows(y, kinds[1])] for each in points]
    across = scale([x for each in points for x, _ in each], kinds[0])
    rules = [rule for rule in rules if shows(rule.at, kinds[1])]
    ups = [y for each in points for _, y in each] + [rule.at for rule in rules]
    up = scale(ups, kinds[1])
    told = f"{axes[1]} over {axes[0]}: " + "; ".join(
        f"{curve.name} from {show(each[0][1])} to {show(each[-1][1])}"
        for curve, each in zip(curves, points, strict=True)
        if each
    )
    root = _drawing(name, told, _HEIGHT)
    place = _Place(across, up)
    _grid(root, place, axes, show, marks)
    for rule in rules:
        y = place.down(rule.at)
        _add(root, "line", x1="0", x2="100%", y1=y, y2=y, class_="rule")
        _add(root, "text", rule.name, x="100%", y=y - 5, class_="value rule-name")
    for curve, each in zip(curves, points, strict=True):
        _curve(root, curve, each, place, show)
    return _markup(root)


@attrs.frozen
class _Place:
    """Where numbers stand in a chart: percent across, pixels down."""

    x: Scale
    y: Scale

    def across(self, value: float) -> str:
        return _percent(_LEFT + self.x.place(value) * (_RIGHT - _LEFT))

    def down(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - self.y.place(value) * (_HEIGHT - _BOTTOM - _TOP)


def _grid(
    root: ElementTree.Element,
    place: _Place,
    axes: tuple[str, str],
    show: Callable[[float], str],
    marks: Sequence[float],
) -> None:
    grid = _add(root, "g", class_="grid")
    for tick in place.y.ticks():
        y = place.down(tick)
        _add(grid, "line", x1="0", x2="100%", y1=y, y2=y)
        _add(grid, "text", show(tick), x="0", y=y - 4)
    base, last = _HEIGHT - _BOTTOM, -100.0
    for tick in marks or place.x.ticks():
        at = place.across(tick)
        if float(at[:-1]) - last < 11:  # on a phone, eleven percent is a number's width
            continue
        last = float(at[:-1])
        _add(grid, "line", x1=at, x2=at, y1=base, y2=base + 4)
        _add(grid, "text", label(tick), x=at, y=base + 16, class_="under")
    _add(grid, "text", axes[0], x="100%", y=_HEIGHT - 3, class_="value")


def _curve(
    root: ElementTree.Element,
    curve: Curve,
    points: list[tuple[float, float]],
    place: _Place,
    show: Callable[[float], str],
) -> None:
    own = _add(root, "g", class_=_look(curve.look))
    _add(own, "title", curve.name)
    for (x1, y1), (x2, y2) in pairwise(points):
        _add(own, "line", x1=place.across(x1), x2=place.across(x2), y1=place.down(y1), y2=place.down(y2))
    marked = points if len(points) <= 16 else [points[0], points[-1]]
    for x, y in marked:
        spot = _add(own, "svg", x=place.across(x), y=place.down(y), overflow="visible")
        _marker(spot, curve.look)
        _add(spot, "title", f"{curve.name}: {show(y)} at {label(x)}")


def _look(look: tuple[int, int]) -> str:
    return f"curve c{look[0] % COLOURS} d{look[1] % DASHES}"


def _marker(parent: ElementTree.Element, look: tuple[int, int]) -> None:
    tag, attributes = _SHAPES[look[0] % MARKERS]
    _add(parent, tag, **attributes)


def patch(look: str) -> str:
    """The look of a bar or of the floor, for a legend; hidden from screen readers, which read its name."""
    root = ElementTree.Element("svg", {"class": "swatch", "width": "18", "height": "14", "aria-hidden": "true"})
    if look == "floor":
        _add(root, "line", x1="9", x2="9", y1="0", y2="14", class_=look)
    else:
        _add(_add(root, "g", class_=look), "rect", width="18", height="14", rx="2")
    return _markup(root)


def swatch(look: tuple[int, int]) -> str:
    """The look of a line, for a legend; hidden from screen readers, which read its name."""
    root = ElementTree.Element("svg", {"class": "swatch", "width": "34", "height": "14", "aria-hidden": "true"})
    own = _add(root, "g", class_=_look(look))
    _add(own, "line", x1="1", x2="33", y1="7", y2="7")
    _marker(_add(own, "svg", x="17", y="7", overflow="visible"), look)
    return _markup(root)
