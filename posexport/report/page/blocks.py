"""The parts of a report page as data: boxes at the top, then sections of tables, figures, chains and paragraphs.

HTML and Markdown are both made from these parts, so they say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from posexport.bench.statistics import Ratio
from posexport.report.text import fact, plural, span, times


@attrs.frozen
class Cell:
    """One cell. `more` shows on hover, and tables sort by `value`.

    `tone` is its look (good, bad, refused, away, best, or h1 to h5 in a heat-map). The text always says the same.
    """

    text: str
    more: str = attrs.field(default="", kw_only=True)
    tone: str = attrs.field(default="", kw_only=True)
    value: float | None = attrs.field(default=None, kw_only=True)


EMPTY = Cell("–")


def cells(*texts: str | Cell | None) -> tuple[Cell, ...]:
    """A row of cells. Text makes a plain cell, None an empty one."""
    return tuple(EMPTY if text is None else Cell(text) if isinstance(text, str) else text for text in texts)


def _rows(rows: Iterable[Iterable[str | Cell | None]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(cells(*row) for row in rows)


@attrs.frozen(kw_only=True)
class Table:
    """Rows under columns, in the form that `cells` takes. The first `heads` cells of a row name it.

    `groups` are names, each over this number of columns. With `folded`, the table starts closed under this line. `heat`
    is set for a heat-map, and `key` is its legend.
    """

    caption: str
    columns: Sequence[str]
    rows: tuple[tuple[Cell, ...], ...] = attrs.field(converter=_rows)
    heads: int = 1
    groups: tuple[tuple[str, int], ...] = ()
    heat: bool = False
    note: str = ""
    folded: str = ""
    key: tuple[Cell, ...] = ()

    @classmethod
    def of_facts(cls, caption: str, folded: str, records: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
        """The facts of named records side by side. Facts that no record has are left out. Memory is in GiB."""
        rows = []
        for name in dict.fromkeys(name for _, facts in records for name in facts):
            values = [facts.get(name) for _, facts in records]
            if name == "memory":
                values = [f"{value / 2**30:.1f} GiB" if isinstance(value, int) else value for value in values]
            rows.append((name.replace("_", " "), *map(fact, values)))
        columns = ("", *(name for name, _ in records))
        return cls(caption=caption, columns=columns, rows=[row for row in rows if any(row[1:])], folded=folded)

    @property
    def right(self) -> set[int]:
        """The columns of numbers, which are right-aligned. A heat-map has none."""
        return {at for row in self.rows for at, cell in enumerate(row) if cell.value is not None and not self.heat}

    def trimmed(self) -> Table:
        """The table without the columns that are empty in every row."""
        kept = sorted({at for row in self.rows for at, cell in enumerate(row) if cell.text not in ("", "–")})
        rows = [[row[at] for at in kept] for row in self.rows]
        return attrs.evolve(self, columns=tuple(self.columns[at] for at in kept), rows=rows)

    def fold(self, title: str, beyond: int = 0, noun: str = "row") -> Table:
        """The table, closed under its title and number of rows if it has more than `beyond`."""
        folded = f"{title}: {plural(len(self.rows), noun)}" if len(self.rows) > beyond else ""
        return attrs.evolve(self, folded=folded)


@attrs.frozen(kw_only=True)
class Figure:
    """A drawing. `svg` is markup from `drawing.inline`, and `table` has the drawn numbers."""

    title: str
    svg: str
    note: str = ""
    table: Table | None = None
    folded: str = ""


@attrs.frozen(kw_only=True)
class Chain:
    """Operators from a graph's input to its output, each after a mark, which says why an operator stands out."""

    title: str
    note: str
    steps: Sequence[tuple[str, str]]


@attrs.frozen(kw_only=True)
class Prose:
    """A paragraph. `tone` is care for a warning, and `note` follows in small print."""

    text: str
    tone: str = ""
    note: str = ""


Block = Table | Figure | Chain | Prose


@attrs.frozen(kw_only=True)
class Section:
    """One part of the page. `id` is its anchor."""

    id: str
    title: str
    lead: str
    blocks: Sequence[Block]


@attrs.frozen(kw_only=True)
class Point:
    """One line of a box. `head` names the thing, `figure` is its number, `label` is above and `text` is below.

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
    """One of the three boxes at the top: a sentence, points, and points that start closed.

    `tone` is good, bad or empty.
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
    """The whole report. `read` lists its sources, `left` the files of folders that are not results."""

    title: str
    subtitle: str
    boxes: Sequence[Box]
    sections: Sequence[Section]
    glossary: Table
    read: Table
    left: Sequence[str] = ()


def number(value: float | None, show: Callable[[float], str] = "{:,}".format) -> Cell:
    """A cell with a number, sorted by it. Empty without a number."""
    return EMPTY if value is None else Cell(show(value), value=value)


def ratio_cells(ratio: Ratio | None) -> tuple[Cell | None, Cell | None]:
    """A ratio and its interval."""
    if ratio is None:
        return None, None
    return number(ratio.median, times), Cell(span(ratio), value=ratio.median)
