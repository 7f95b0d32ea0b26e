"""The report page: everything that was read, as one HTML file.

The page loads nothing. Its style, script and drawings are inside, and its content security policy forbids everything
else. It is complete without the script. The same files give the same bytes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from posexport import __version__
from posexport.bench.evidence import Evidence
from posexport.bench.result import Benchmark, ProjectBenchmark
from posexport.bench.results import Sweep
from posexport.bench.tune.result import Result as Tuning
from posexport.jsondata import writable
from posexport.report.page import angles, artifacts, latency, matrix, sweep, tuning, verdicts
from posexport.report.page.blocks import Page, Section, Table
from posexport.report.page.sources import KINDS, read_sources
from posexport.report.page.summary import Highlights, boxes
from posexport.report.plots.panels import Plot
from posexport.report.text import plural
from posexport.verify.matrix.table import Matrix
from posexport.verify.result import AngleErrors, Report

_ABOUT = "Attention blocks with positional encodings, exported to ONNX: how fast they run, and whether they are right."
FOLDER = files("posexport.report.page").joinpath("template")

GLOSSARY = tomllib.loads(FOLDER.joinpath("glossary.toml").read_text(encoding="utf-8"))
"""The terms of the page, for a reader who received one."""


def make_page(paths: Sequence[Path], title: str = "", advance: Callable[[str], object] = lambda _: None) -> Page:
    """The page of results, artifacts and folders. `advance` gets file names. RequestError names what can't be used."""
    sources = read_sources(paths, advance)
    known = Evidence.of(sources.results, sources.sha256)
    summaries = known.artifacts()
    makers: list[tuple[Sequence[Any], Callable[[Any], tuple[Section, Highlights]]]] = [
        (summaries, artifacts.evidence_section),
        (sources.of(Sweep), sweep.section),
        (sources.of(Tuning), tuning.section),
        (sources.of(Benchmark), lambda results: latency.section(results, known)),
        (sources.of(Report), lambda results: verdicts.section(results, known)),
        (sources.of(Matrix), matrix.section),
        (sources.of(AngleErrors), angles.angles),
        (sources.of(Plot), angles.plots),
    ]
    made = [make(results) for results, make in makers if results]
    sentences = {summary.name: artifacts.sentence(summary) for summary in summaries}
    counted = [(len(sources.of(kind.schema)), f"{name} file") for name, kind in KINDS.items()]
    counted.append((len(sources.artifacts), "artifact"))
    origin = ", ".join(plural(count, noun) for count, noun in counted if count)
    commands = {kind.schema: kind.command for kind in KINDS.values()}
    read = [(result.name, commands[type(result.data)]) for result in sources.results]
    read += [(name, "artifact") for _, name in sources.artifacts]
    untimed = Highlights(findings=tuple(latency.project_findings(sources.of(ProjectBenchmark))))
    return Page(
        title=title or "posexport report",
        subtitle=f"{_ABOUT} Made from {origin} by posexport {__version__}.",
        boxes=boxes([untimed, *(highlights for _, highlights in made)]),
        sections=[*(section for section, _ in made), *artifacts.file_sections(sources.artifacts, sentences, advance)],
        glossary=Table(
            caption="The terms of this page",
            columns=("term", "meaning"),
            rows=GLOSSARY.items(),
            folded="What the terms mean",
        ),
        read=Table(caption="What this page was made from", columns=("file", "written by"), rows=read).fold(
            "What this page was made from", noun="file"
        ),
        left=sources.left,
    )


def to_html(page: Page) -> str:
    """The page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: FOLDER.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["kind"] = lambda block, name: type(block).__name__ == name
    return writable(environment.get_template("page.html.j2").render(page=page))
