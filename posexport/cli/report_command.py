"""`posexport report`: writes results as one page for people, and as Markdown for the summary of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from posexport.cli import console
from posexport.cli.options import report_file
from posexport.files import check_writable
from posexport.report.paths import check_paths

if TYPE_CHECKING:
    from posexport.report.page.blocks import Box

_WIDE = 160  # the most characters of a line about a point
_TAKEN = (".onnx", ".plan", ".json", ".npz", ".data", ".safetensors")


@click.command()
@click.argument("results", metavar="RESULTS...", nargs=-1, required=True)
@click.option("--output", "-o", metavar="FILE", default="report.html", help="the page to write  [default: report.html]")
@click.option(
    "--markdown", metavar="FILE", help="also write the page as Markdown, for example for the summary of a CI job"
)
@click.option("--title", metavar="TEXT", default="", help="the page's title  [default: posexport report]")
@click.option("--json", "as_json", is_flag=True, help="print the contents of the three boxes as JSON")
def report(results: tuple[str, ...], output: str, markdown: str | None, title: str, as_json: bool) -> None:
    """Write one self-contained page of results: what is fastest, what is wrong, and what was not run.

    RESULTS are JSON files from verify --json, bench --save, tune, matrix and plot --json, artifacts (.onnx, .plan), or
    folders that contain these, such as the folder of a sweep.
    """
    paths = [Path(text) for text in results]
    page_file = report_file("--output", output, _TAKEN, (".html", ".htm"))
    summary_file = None if markdown is None else report_file("--markdown", markdown, _TAKEN)
    check_paths(paths)
    check_writable(page_file, summary_file)
    with console.steps("reading results") as progress:
        from posexport.files import staged
        from posexport.report.page.markdown import to_markdown
        from posexport.report.page.page import make_page, to_html

        page = make_page(paths, title, lambda name: progress.update(f"reading {name}"))
        progress.update("writing")
        with staged() as files:
            files.write(page_file, lambda file: file.write(to_html(page).encode()))
            if summary_file is not None:
                files.write(summary_file, lambda file: file.write(to_markdown(page).encode()))
    written = [str(page_file), *([str(summary_file)] if summary_file else [])]
    for name in page.left:
        console.say(f"left out: {name} (it holds no results of posexport)")
    if as_json:
        console.show_json({"written": written, "boxes": [_plain(box) for box in page.boxes], "left": list(page.left)})
        return
    console.show_facts(f"wrote {' and '.join(written)}", [fact for box in page.boxes for fact in _facts(box)])


def _facts(box: Box) -> Iterator[tuple[str, str]]:
    """The box as lines under its title, as many as the page shows at once."""
    yield box.title, box.verdict
    for point in box.points:
        text = " ".join(filter(None, (point.head, point.figure)))
        text = f"{point.label}: {text}; {point.details}" if point.label else f"{text}: {point.details}"
        line = " ".join(text.split())
        yield "", line if len(line) <= _WIDE else f"{line[: _WIDE - 1]}…"
    if box.closed:
        yield "", box.closed_title


def _plain(box: Box) -> dict[str, object]:
    points = [
        {"label": point.label, "head": point.head, "figure": point.figure, "text": point.details}
        for point in (*box.points, *box.closed)
    ]
    return {"id": box.id, "title": box.title, "verdict": box.verdict, "points": points}
