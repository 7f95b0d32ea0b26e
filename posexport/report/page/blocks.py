"""What a report page is made of, as data: boxes on top, then sections of tables, figures, chains and words.

HTML and Markdown are both made of this, so neither can say what the other doesn't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

TONES = ("good", "bad", "refused", "away", "best", "h1", "h2", "h3", "h4", "h5")
"""Looks of a cell: what it means is always said by its text too. h1 to h5 are the steps of a heat-map."""


@attrs.frozen(kw_only=True)
class Cell:
    """One cell: `more` is told on hover, `tone` is one of TONES, `value` is what it is sorted by."""

    text: str
    more: str = ""
    tone: str = ""
    value: float | None = None


@attrs.frozen(kw_only=True)
class Table:
    """Rows under columns. The first `heads` cells of a row name it; `right` are the columns of numbers, by index.

    `groups` are names above so many columns each; `folded` is the line that opens it where it starts closed.
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
    """A drawing: `svg` is markup that posexport.page.svg made, `legend` a swatch of the same kind and its name each.

    `table` holds the drawn numbers.
    """

    title: str
    svg: str
    note: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    folded: str = ""


@attrs.frozen(kw_only=True)
class Step:
    """One operator of a chain, so many `times` one after the other; `mark` says why it stands out."""

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
    """A paragraph; `tone` is care where it is a warning, `note` follows in small print."""

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
    """One line of a box: `head` says what, `figure` the number that counts, `text` the rest; `label` stands above.

    `sure` says how sure it is, before the text. `tone` is care where the line is a warning.
    """

    head: str
    label: str = ""
    figure: str = ""
    sure: str = ""
    text: str = ""
    tone: str = ""

    @property
    def told(self) -> str:
        """How sure it is and the text, where both stand on one line."""
        return "; ".join(text for text in (self.sure, self.text) if text)


@attrs.frozen(kw_only=True)
class Box:
    """One of the three boxes on top: `verdict` says it in a sentence; `rest` are points that start closed.

    `tone` is good, bad, or nothing where neither is known.
    """

    id: str
    title: str
    mark: str
    tone: str
    verdict: str
    points: tuple[Point, ...] = ()
    rest: tuple[Point, ...] = ()
    rest_title: str = ""


@attrs.frozen(kw_only=True)
class Page:
    """The whole report: `read` says what it was made from, `left` which files of a folder hold no results.

    `words` are the terms that its readers may not know.
    """

    title: str
    subtitle: str
    boxes: tuple[Box, ...]
    sections: tuple[Section, ...]
    words: Table
    read: Table
    left: tuple[str, ...] = ()


def cells(*texts: str | Cell) -> tuple[Cell, ...]:
    """A row of cells, plain where they are text."""
    return tuple(text if isinstance(text, Cell) else Cell(text=text) for text in texts)


def trimmed(table: Table) -> Table:
    """The table without the columns that say nothing in any row."""
    kept = [at for at in range(len(table.columns)) if any(row[at].text not in ("", "–") for row in table.rows)]
    return attrs.evolve(
        table,
        columns=tuple(table.columns[at] for at in kept),
        rows=tuple(tuple(row[at] for at in kept) for row in table.rows),
        right=tuple(place for place, at in enumerate(kept) if at in table.right),
    )


def number(text: str, value: float | None) -> Cell:
    """A cell sorted by its value."""
    return Cell(text=text, value=value)


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


def seconds(value: float) -> str:
    """A duration for people, with three digits."""
    unit, size = next((each for each in _UNITS if value >= each[1]), _UNITS[-1])
    return f"{_digits(value / size)} {unit}"


def brief(value: float) -> str:
    """A round duration, for a tick."""
    unit, size = next((each for each in _UNITS if value >= each[1] * (1 - 1e-9)), _UNITS[-1])
    return f"{value / size:.3g} {unit}"


def _digits(value: float) -> str:
    sizes = ((99.5, ".0f"), (9.95, ".1f"), (0.0995, ".2f"))
    return format(value, next((digits for size, digits in sizes if value >= size), ".2g"))


def times(value: float) -> str:
    """A ratio for people."""
    return f"{_digits(value)}×"


def span(ratio: Mapping[str, float]) -> str:
    """The interval of a ratio for people."""
    return f"{_digits(ratio['low'])} to {_digits(ratio['high'])}"


def facts_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """A result's record of its machine, its memory in GiB."""
    facts = dict(data.get("machine") or {})
    if isinstance(size := facts.get("memory"), int):
        facts["memory"] = f"{size / 2**30:.1f} GiB"
    return facts


def fact(value: Any) -> str:
    """A value of a record for people; what isn't known is empty."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(map(fact, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
