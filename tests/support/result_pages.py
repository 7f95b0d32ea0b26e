"""Pages of docs/results whose figures are between two comments."""

from __future__ import annotations

from pathlib import Path


def figures_of(page: Path) -> str:
    """The figures of a page."""
    text = page.read_text(encoding="utf-8")
    return text.partition("<!-- figures -->\n")[2].partition("<!-- end of figures -->")[0]
