"""Text in documents: marks of states, characters that XML and UTF-8 can hold, and tables of Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PASSED

MARKS = {PASSED: "✓", FAILED: "✗", REFUSED: "–", NOT_RUN: "·"}
"""A mark for each state, so that nobody needs colours."""

_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|`*_["}})


def writable(text: str) -> str:
    """Text without the characters that XML 1.0 or UTF-8 can't hold, which an engine's message or a file's name may."""
    return _UNWRITABLE.sub("?", text)


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
