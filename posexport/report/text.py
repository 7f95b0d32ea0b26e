"""Text in documents: words and numbers for people, marks of states, and tables of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posexport.bench.statistics import Ratio
from posexport.jsondata import writable
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PASSED

MARKS = {PASSED: "✓", FAILED: "✗", REFUSED: "–", NOT_RUN: "·"}
"""A mark for each state, so that nobody needs to see colours."""

_MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|`*_["}})


def escaped(text: str) -> str:
    """Any text on one line, with the marks of Markdown escaped."""
    return " ".join(writable(text).split()).translate(_MARKS)


def table_lines(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Iterable[int] = (),
    escape: Callable[[str], str] = escaped,
) -> list[str]:
    """A table of Markdown, a line for each row. `right` are the numbers of right-aligned columns."""
    rules = ["---:" if at in right else "---" for at in range(len(columns))]
    return [f"| {' | '.join(cells)} |" for cells in (map(escape, columns), rules, *(map(escape, row) for row in rows))]


def plain_number(value: float) -> str:
    """A number without a unit, as short as possible."""
    return f"{value:,.6g}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first `most` names as part of a sentence."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def seconds(value: float, digits: Callable[[float], str] | None = None) -> str:
    """A duration for people, with three digits or in the format of `digits`."""
    unit, size = next((pair for pair in _UNITS if value >= pair[1] * (1 - 1e-9)), _UNITS[-1])
    return f"{(digits or _digits)(value / size)} {unit}"


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


def fact(value: Any) -> str:
    """A value of a record for people. Unknown values are empty."""
    match value:
        case Mapping():
            return ", ".join(f"{key} {fact(item)}" for key, item in value.items() if item is not None)
        case list() | tuple():
            return ", ".join(map(fact, value))
        case bool():
            return "yes" if value else "no"
    return "" if value is None else str(value)
