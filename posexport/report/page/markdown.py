"""The report as Markdown for a job's summary: the boxes and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posexport.report.page.blocks import Block, Box, Chain, Figure, Page, Point, Prose, Table
from posexport.report.page.sources import writable

MOST_ROWS = 60
"""Rows of one table; job summaries end at a megabyte."""


def to_markdown(page: Page) -> str:
    """The page in words and tables."""
    lines = [f"## {_text(page.title)}", "", _text(page.subtitle), ""]
    for box in page.boxes:
        lines += [*_box(box), ""]
    lines += _block(page.glossary)
    for section in page.sections:
        lines += [f"### {_text(section.title)}", "", _text(section.lead), ""]
        for block in section.blocks:
            lines += _block(block)
    if page.left:
        lines += [f"Left out, for they hold no results: {', '.join(map(_text, page.left))}.", ""]
    return writable("\n".join(lines).rstrip() + "\n")


def _box(box: Box) -> Iterator[str]:
    yield f"### {box.mark} {box.title}"
    yield ""
    yield _text(box.verdict)
    yield ""
    yield from map(_point, box.points)
    if box.closed:
        yield from ("", f"<details><summary>{_text(box.closed_title)}</summary>", "")
        yield from map(_point, box.closed[:MOST_ROWS])
        yield from _more(len(box.closed))
        yield from ("", "</details>")


def _point(point: Point) -> str:
    figure = f" **{_text(point.figure)}**" if point.figure else ""
    label = f"{_text(point.label)}: " if point.label else ""
    colon = ": " if point.details and point.head else " "
    return f"- {label}{_text(point.head)}{figure}{colon}{_text(point.details)}".rstrip()


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _folded(block.folded, _table(block))
    elif isinstance(block, Chain):
        steps = (f"{step.mark}{step.text}" + (f" ×{step.times}" if step.times > 1 else "") for step in block.steps)
        yield from (f"**{_text(block.title)}.** {_text(block.note)}", "", _text(" → ".join(steps)), "")
    elif isinstance(block, Figure):
        if block.table is not None:
            lines = [*_table(block.table), *([_text(block.note), ""] if block.note else [])]
            yield from _folded(f"{block.title}: {block.table.folded}", lines)
    elif isinstance(block, Prose):
        yield from (_text(f"{block.text} {block.note}".rstrip()), "")


def _folded(summary: str, lines: Sequence[str]) -> Iterator[str]:
    if not summary:
        yield from lines
        return
    yield from (f"<details><summary>{_text(summary)}</summary>", "", *lines, "</details>", "")


def _table(table: Table) -> list[str]:
    names = list(table.columns)
    if table.groups:
        owners = [name for name, span in table.groups for _ in range(span)]
        names = [f"{owner} {name}".strip() for owner, name in zip(owners, names, strict=True)]
    rules = ["---:" if at in table.right else "---" for at in range(len(names))]
    lines = [f"**{_text(table.caption)}**", "", _line(names), _line(rules)]
    lines += [_line([cell.text for cell in row]) for row in table.rows[:MOST_ROWS]]
    lines += [*_more(len(table.rows)), ""]
    return [*lines, _text(table.note), ""] if table.note else lines


def _more(count: int) -> Iterator[str]:
    if count > MOST_ROWS:
        yield from ("", f"{count - MOST_ROWS:,} more on the page.")


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(_text(text) for text in texts)} |"


def _text(text: str) -> str:
    """Text on one line, its marks escaped, whatever a file or an engine says."""
    line = " ".join(text.split())
    for mark, written in (("&", "&amp;"), ("<", "&lt;"), ("\\", "\\\\"), ("|", "\\|"), ("`", "\\`"), ("*", "\\*"),
                          ("_", "\\_"), ("[", "\\[")):  # fmt: skip
        line = line.replace(mark, written)
    return line
