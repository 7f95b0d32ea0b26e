"""The parts of a report page as data: boxes on top, then sections of tables, figures, chains and paragraphs.

HTML and Markdown are both made from these, so they say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from posexport.bench.statistics import Ratio


@attrs.frozen(kw_only=True)
class Cell:
    """One cell: `more` shows on hover, and tables sort by `value`.

    `tone` is its look (good, bad, refused, away, best, or h1 to h5 in a heat-map); the text always says the same.
    """

    text: str
    more: str = ""
    tone: str = ""
    value: float | None = None


@attrs.frozen(kw_only=True)
class Table:
    """Rows under columns. The first `heads` cells of a row name it; `right` are the indices of columns of numbers.

    `groups` are names over so many columns each; `folded` is the line that opens a table that starts closed.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    heads: int = 1
    right: tuple[int, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    heat: bool = False
    note: str = ""
    folded: str = ""
    key: tuple[Cell, ...] = ()


@attrs.frozen(kw_only=True)
class Figure:
    """A drawing: `svg` is markup from `drawing.inline`; `table` holds the drawn numbers."""

    title: str
    svg: str
    note: str = ""
    table: Table | None = None
    folded: str = ""


@attrs.frozen(kw_only=True)
class Step:
    """One operator of a chain, repeated so many `times`; `mark` says why it stands out."""

    text: str
    times: int = 1
    mark: str = ""


@attrs.frozen(kw_only=True)
class Chain:
    """Operators from a graph's input to its output."""

    title: str
    note: str
    steps: tuple[Step, ...]


@attrs.frozen(kw_only=True)
class Prose:
    """A paragraph; `tone` is care for a warning, `note` follows in small print."""

    text: str
    tone: str = ""
    note: str = ""


Block = Table | Figure | Chain | Prose


@attrs.frozen(kw_only=True)
class Section:
    """One part of the page; `id` is its anchor."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]


@attrs.frozen(kw_only=True)
class Point:
    """One line of a box: `head` names the thing, `figure` is its number, `label` stands above and `text` below.

    `confidence` says how certain a ranking is. `tone` is care for a warning.
    """

    head: str
    label: str = ""
    figure: str = ""
    confidence: str = ""
    text: str = ""
    tone: str = ""

    @property
    def details(self) -> str:
        """The confidence and the text on one line."""
        return "; ".join(filter(None, (self.confidence, self.text)))


@attrs.frozen(kw_only=True)
class Box:
    """One of the three boxes on top: a sentence, points, and further points that start closed.

    `tone` is good or bad, or empty where neither is known.
    """

    id: str
    title: str
    mark: str
    tone: str
    verdict: str
    points: tuple[Point, ...] = ()
    closed: tuple[Point, ...] = ()
    closed_title: str = ""


@attrs.frozen(kw_only=True)
class Page:
    """The whole report: `read` lists its sources, `left` the files of a folder that hold no results."""

    title: str
    subtitle: str
    boxes: tuple[Box, ...]
    sections: tuple[Section, ...]
    glossary: Table
    read: Table
    left: tuple[str, ...] = ()


def cells(*texts: str | Cell) -> tuple[Cell, ...]:
    """A row of cells, plain where they are text."""
    return tuple(text if isinstance(text, Cell) else Cell(text=text) for text in texts)


def trimmed(table: Table) -> Table:
    """The table without the columns that are empty in every row."""
    kept = [at for at in range(len(table.columns)) if any(row[at].text not in ("", "–") for row in table.rows)]
    return attrs.evolve(
        table,
        columns=tuple(table.columns[at] for at in kept),
        rows=tuple(tuple(row[at] for at in kept) for row in table.rows),
        right=tuple(place for place, at in enumerate(kept) if at in table.right),
    )


EMPTY = Cell(text="–")


def number(value: float | None, show: Callable[[float], str] = "{:,}".format) -> Cell:
    """A cell with a number, sorted by it; empty without one."""
    return EMPTY if value is None else Cell(text=show(value), value=value)


def plain_number(value: float) -> str:
    """A number without a unit, as short as can be."""
    return f"{value:,.6g}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names in a sentence, the first `most` of them."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def seconds(value: float, digits: Callable[[float], str] | None = None) -> str:
    """A duration for people, with three digits."""
    unit, size = next((pair for pair in _UNITS if value >= pair[1] * (1 - 1e-9)), _UNITS[-1])
    return f"{(digits or _digits)(value / size)} {unit}"


def brief(value: float) -> str:
    """A round duration, for a tick."""
    return seconds(value, "{:.3g}".format)


def _digits(value: float) -> str:
    sizes = ((99.5, ".0f"), (9.95, ".1f"), (0.0995, ".2f"))
    return format(value, next((digits for size, digits in sizes if value >= size), ".2g"))


def times(value: float) -> str:
    """A ratio for people."""
    return f"{_digits(value)}×"


def span(ratio: Ratio) -> str:
    """The interval of a ratio for people."""
    return f"{_digits(ratio.low)} to {_digits(ratio.high)}"


def megabytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / 1e6:,.2f} MB"


def facts_of(machine: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a machine with its memory in GiB."""
    memory = machine.get("memory")
    return {**machine, "memory": f"{memory / 2**30:.1f} GiB"} if isinstance(memory, int) else dict(machine)


def fact(value: Any) -> str:
    """A value of a record for people; unknown values are empty."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fact(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
