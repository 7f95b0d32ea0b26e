"""Text in documents: marks of states, and tables of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from posexport.jsondata import writable
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PASSED

MARKS = {PASSED: "✓", FAILED: "✗", REFUSED: "–", NOT_RUN: "·"}
"""A mark for each state, so that nobody needs colours."""

_MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|`*_["}})


def escaped(text: str) -> str:
    """Text on one line, its marks of Markdown escaped, whatever a file or an engine says."""
    return " ".join(writable(text).split()).translate(_MARKS)


def table_lines(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Iterable[int] = (),
    escape: Callable[[str], str] = escaped,
) -> list[str]:
    """A table of Markdown, a line per row; `right` are the numbers of right-aligned columns."""
    rules = ["---:" if at in right else "---" for at in range(len(columns))]
    return [f"| {' | '.join(cells)} |" for cells in (map(escape, columns), rules, *(map(escape, row) for row in rows))]
