"""Drawings with matplotlib: one style, and figures as PNG or SVG files or as `<svg>` elements of the page.

The same figure gives the same bytes, because no version, time, path or random id is written. Colour-blind people can
tell the colours apart (Okabe and Ito, 2008), and lines also differ by their dashes.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from posexport.report.artists import Figure, FigureCanvasAgg, matplotlib_style, quiet, rc_context

FORMATS: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""The formats of a file by suffix, with the metadata to leave out: versions and times."""

DPI = 160
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("solid", (0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = "osD^v<"
INK, FAINT, GRID = "#222222", "#666666", "#e6e6e6"
BEST, OURS, ALTERNATIVE, BOUND, GROUND = "#0a7a55", "#3579bd", "#8a93a3", "#b3261e", "#ffffff"

VARIABLES = {
    **{colour: f"c{at}" for at, colour in enumerate(COLOURS)},
    **{INK: "ink", FAINT: "soft", GRID: "line", GROUND: "card"},
    **{BEST: "bar-best", OURS: "bar-ours", ALTERNATIVE: "bar-alternative", BOUND: "bound"},
}
"""The variable of the page's style sheet for each colour. Each variable has a light and a dark value."""

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.linewidth": 0.7,
    **dict.fromkeys(("axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "posexport",
}
_DATE = "SOURCE_DATE_EPOCH"  # matplotlib reads it for a date, which is not written here, and fails if it is not a date
_GENERATED = re.compile(r"[\w.]*_\d+|[a-z][0-9a-f]{10}")
_SVG, _HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


@contextmanager
def figure(width: float, height: float, **options: Any) -> Iterator[Figure]:
    """A white figure of this size in inches. Draw and encode it inside the context, which hides warnings.

    They are about odd labels and numbers, such as letters that the font lacks or values without a logarithm. The
    picture is drawn without these.
    """
    with matplotlib_style.context(["default", _STYLE]), warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        made = Figure(figsize=(width, height), facecolor="white", **options)
        FigureCanvasAgg(made)
        yield made


def plain(text: str, most: int = 80) -> str:
    """Text on one line of at most `most` letters, which matplotlib doesn't read as mathematics."""
    text = " ".join(text.split())
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def encode(made: Figure, suffix: str, dpi: int = DPI, **metadata: str) -> bytes:
    """The figure as a file in the format of `suffix`, one of FORMATS."""
    file = io.BytesIO()
    with _without(_DATE):
        made.savefig(file, format=suffix[1:], dpi=dpi, metadata={**FORMATS[suffix], **metadata})
    return file.getvalue()


@contextmanager
def _without(variable: str) -> Iterator[None]:
    """Remove this variable from the environment inside the block."""
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


def inline(made: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element: letters as text, colours of the page's style sheet, no ids.

    Screen readers read the name and the description. An artist's gid becomes its class.
    """
    with rc_context({"svg.fonttype": "none"}):
        root = ElementTree.fromstring(encode(made, ".svg"))
    drawn = _plain(root, {f"#{element.get('id')}": element for element in root.iter()})
    label = f"{name}. {description}"
    drawn.attrib = {"class": "chart", "role": "img", "viewBox": root.get("viewBox", ""), "aria-label": label}
    drawn[:0] = [_text("title", name), _text("desc", description)]
    markup = ElementTree.tostring(drawn, encoding="unicode").replace("'DejaVu Sans'", "system-ui, sans-serif")
    return re.sub("|".join(VARIABLES), lambda match: f"var(--{VARIABLES[match[0]]})", markup)


def _plain(element: ElementTree.Element, shapes: Mapping[str, ElementTree.Element]) -> ElementTree.Element:
    """A copy without namespaces, ids, definitions and references. Shapes are copied to where they are used."""
    attributes = {name: text for name, text in element.items() if name not in ("id", "clip-path")}
    if element.tag == f"{_SVG}use":
        place = {"transform": f"translate({element.get('x')} {element.get('y')})", "style": element.get("style", "")}
        element = shapes[element.get(_HREF, "")]
        attributes = {"d": element.get("d", ""), **place}
    elif not _GENERATED.fullmatch(element.get("id", "_1")):
        attributes["class"] = element.get("id", "")
    made = _text(element.tag.removeprefix(_SVG), (element.text or "").strip(), attributes)
    made.extend(_plain(child, shapes) for child in element if child.tag not in (f"{_SVG}defs", f"{_SVG}metadata"))
    return made


def _text(tag: str, text: str, attributes: Mapping[str, str] | None = None) -> ElementTree.Element:
    element = ElementTree.Element(tag, dict(attributes or {}))
    element.text = text or None
    return element
