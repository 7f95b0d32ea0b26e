"""The report as Markdown for a job's summary: the boxes and the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from posexport.report.page.blocks import Block, Box, Chain, Figure, Page, Point, Prose, Table
from posexport.report.text import escaped, table_lines

MOST_ROWS = 60
"""Rows of one table. Job summaries are limited to a megabyte."""


def to_markdown(page: Page) -> str:
    """The page in words and tables."""
    lines = [f"## {escaped(page.title)}", "", escaped(page.subtitle), ""]
    for box in page.boxes:
        lines += [*_box(box), ""]
    lines += _block(page.glossary)
    for section in page.sections:
        lines += [f"### {escaped(section.title)}", "", escaped(section.lead), ""]
        for block in section.blocks:
            lines += _block(block)
    if page.left:
        lines += [f"Left out, for they hold no results: {', '.join(map(escaped, page.left))}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _box(box: Box) -> Iterator[str]:
    yield from (f"### {box.mark} {box.title}", "", escaped(box.verdict), "", *map(_point, box.points))
    if box.closed:
        closed = [*map(_point, box.closed[:MOST_ROWS]), *_more(len(box.closed))]
        yield from ("", f"<details><summary>{escaped(box.closed_title)}</summary>", "", *closed, "", "</details>")


def _point(point: Point) -> str:
    figure = f" **{escaped(point.figure)}**" if point.figure else ""
    label = f"{escaped(point.label)}: " if point.label else ""
    colon = ": " if point.details and point.head else " "
    return f"- {label}{escaped(point.head)}{figure}{colon}{escaped(point.details)}".rstrip()


def _block(block: Block) -> Iterable[str]:
    match block:
        case Table():
            return _folded(block.folded, _table(block))
        case Chain():
            steps = " → ".join(map("".join, block.steps))
            return (f"**{escaped(block.title)}.** {escaped(block.note)}", "", escaped(steps), "")
        case Figure(table=Table() as table):
            return _folded(f"{block.title}: {table.folded}", [*_table(table), *_note(block.note)])
        case Prose():
            return _note(f"{block.text} {block.note}".rstrip())
    return ()


def _note(text: str) -> list[str]:
    return [escaped(text), ""] if text else []


def _folded(summary: str, lines: list[str]) -> list[str]:
    return [f"<details><summary>{escaped(summary)}</summary>", "", *lines, "</details>", ""] if summary else lines


def _table(table: Table) -> list[str]:
    names = list(table.columns)
    if table.groups:
        owners = [name for name, span in table.groups for _ in range(span)]
        names = [f"{owner} {name}".strip() for owner, name in zip(owners, names, strict=True)]
    rows = ([cell.text for cell in row] for row in table.rows[:MOST_ROWS])
    lines = [f"**{escaped(table.caption)}**", "", *table_lines(names, rows, table.right)]
    return [*lines, *_more(len(table.rows)), "", *_note(table.note)]


def _more(count: int) -> Iterator[str]:
    if count > MOST_ROWS:
        yield from ("", f"{count - MOST_ROWS:,} more on the page.")
