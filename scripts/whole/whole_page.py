"""The figures of docs/results/models.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from results import cell_text, made_on, table
from whole_data import CACHES, DTYPES, FORMS, Cell, Results
from whole_rows import ROWS

KINDS = {
    "Decoders": ("decoder", "bare", "causal"),
    "Encoder-decoders": ("seq2seq",),
    "Encoders of text": ("tokens",),
    "Encoders of images and sound": ("image", "audio", "frames", "features"),
}
"""The tables of the page, with the kinds of architectures in each."""


def figures(results: Results) -> list[str]:
    """The lines between the two comments of the page."""
    if not results.cells:
        return []
    states = Counter(one.state for one in results.cells)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    names = {one.architecture for one in results.cells}
    lines = [f"{len(names)} architectures, {len(results.cells)} cells: {counts}.", ""]
    notes = _numbered(results.cells)
    for title, kinds in KINDS.items():
        lines += _table(title, [one for one in results.cells if ROWS[one.architecture].kind in kinds], notes)
    lines += ["## Reasons", "", *(f"{at}. {text}" for text, at in notes.items()), ""]
    return [*lines, made_on(results.machine, "Run on: ")]


def _numbered(cells: Sequence[Cell]) -> dict[str, int]:
    """All reasons, numbered in order of appearance."""
    notes: dict[str, int] = {}
    for one in cells:
        for text in _reasons(one):
            notes.setdefault(text, len(notes) + 1)
    return notes


def _reasons(one: Cell) -> list[str]:
    texts = [one.reason] if one.state != "equal" else []
    texts += [f"Left as it was: {text}" for text in one.kept]
    return [f"{cell_text(text).rstrip('.')}." for text in texts]


def _table(title: str, cells: Sequence[Cell], notes: dict[str, int]) -> list[str]:
    if not cells:
        return []
    by_row: dict[str, dict[str, Cell]] = defaultdict(dict)
    for one in cells:
        by_row[one.architecture][one.column] = one
    columns = [
        (form, dtype, caches)
        for form in FORMS
        for dtype in DTYPES
        for caches in (CACHES if any(one.caches for one in cells) else {"": ""})
    ]
    heads = [" ".join(filter(None, (form, dtype, CACHES.get(caches, "")))) for form, dtype, caches in columns]
    keys = ["/".join(filter(None, column)) for column in columns]
    rows = [(name, *(_text(by_row[name].get(key), notes) for key in keys)) for name in ROWS if name in by_row]
    return [f"## {title}", "", *table(("architecture", *heads), rows, heads), ""]


def _text(one: Cell | None, notes: dict[str, int]) -> str:
    """The text of a table cell: `0.31, 4/4` if the file computes the model."""
    if one is None:
        return ""
    marks = "".join(f" [{notes[text]}]" for text in _reasons(one))
    counts = f"{one.in_form}/{one.attentions}"
    return f"{one.of_limit or 0:.2f}, {counts}{marks}" if one.state == "equal" else f"{one.state}{marks}"
