"""The report page: everything that was read, as one self-contained HTML file or as Markdown for a job's summary.

The page loads nothing: its style, its script and its drawings are inside, and its own policy forbids the rest. It is
complete without the script. The same files give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from posexport import __version__
from posexport.report.page import angles, artifacts, latency, matrix, project, subjects, sweep, tuning, verdicts, words
from posexport.report.page.blocks import Page, Section, Table, cells, plural
from posexport.report.page.results import Result
from posexport.report.page.sources import COMMANDS, Sources, clean, read_sources
from posexport.report.page.summary import Found, boxes

FOLDER = files("posexport.report.page").joinpath("template")

ABOUT = "Attention blocks with positional encodings, exported to ONNX: how fast they run, and whether they are right."
"""What every page is about, for somebody who was sent one."""

SECTIONS: tuple[tuple[str, Callable[[Sequence[Result]], tuple[Section | None, Found]]], ...] = (
    ("sweep", sweep.section),
    ("tune", tuning.section),
    ("bench", latency.section),
    ("bench-project", project.section),
    ("verify", verdicts.section),
    ("matrix", matrix.section),
    ("angles", angles.angles),
    ("plot", angles.plots),
)
"""What makes a section of each kind of result, in the order of the page."""


def make_page(paths: Sequence[Path], title: str = "", advance: Callable[[str], object] = lambda _: None) -> Page:
    """The page of result files, artifacts and folders of them; RequestError names what can't be used.

    `advance` is called with the name of each file as it is read.
    """
    sources = read_sources(paths, advance)
    about = subjects.subjects(sources.results, sources.sha256)
    made = [subjects.section(about), *(make(sources.of(kind)) for kind, make in SECTIONS)]
    sections = [section for section, _ in made if section is not None]
    sections += artifacts.sections(sources.artifacts, {each.name: each.words for each in about}, advance)
    told = [plural(len(sources.of(kind)), f"{kind} file") for kind, _ in SECTIONS if sources.of(kind)]
    told += [plural(len(sources.artifacts), "artifact")] if sources.artifacts else []
    return Page(
        title=clean(title) or "posexport report",
        subtitle=f"{ABOUT} Made from {', '.join(told)} by posexport {__version__}.",
        boxes=boxes([found for _, found in made]),
        sections=tuple(sections),
        words=words.table(),
        read=_read(sources),
        left=tuple(sources.left),
    )


def _read(sources: Sources) -> Table:
    rows = [cells(result.name, COMMANDS[result.kind]) for result in sources.results]
    rows += [cells(name, "artifact") for _, name in sources.artifacts]
    return Table(
        caption="What this page was made from", columns=("file", "written by"), rows=tuple(rows),
        folded=f"What this page was made from: {plural(len(rows), 'file')}",
    )  # fmt: skip


def to_html(page: Page) -> str:
    """The page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_load),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = {name: FOLDER.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    kinds = {"Table": "table", "Figure": "figure", "Chain": "chain", "Prose": "prose"}
    environment.tests["kind"] = lambda block, name: kinds[type(block).__name__] == name
    return environment.get_template("page.html.j2").render(page=page, **parts)


def _load(name: str) -> str:
    return FOLDER.joinpath(name).read_text(encoding="utf-8")
