"""Errors by position on the page: the measured errors of angles, and the charts of `posexport plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posexport.bench.results import Result
from posexport.report.page.blocks import Block, Figure, Prose, Section, Table, cells, number
from posexport.report.page.charts import draw_lines
from posexport.report.page.summary import Finding, Highlights
from posexport.report.plots.panels import Chart, Line, Plot
from posexport.report.text import plain_number, plural
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, AngleErrors

PARITY, EXACT = "parity", "exact"
_LEAD = (
    "The largest error of cosine and sine over all encodings and pairs, against float64. Angles named parity are "
    "fp32 products as models have them, so they drift with the position; exact ones don't."
)


def angles(results: Sequence[Result[AngleErrors]]) -> tuple[Section, Highlights]:
    """The section of measured errors of angles, and its highlights."""
    blocks: list[Block] = []
    for result in results:
        dtypes = dict.fromkeys(row.dtype for row in result.data.rows)
        blocks += [*(_figure(_worst(result.data, dtype)) for dtype in dtypes), _rows(result.data)]
    findings = (
        Finding(state=state, who=who, reason=reason, where="angles")
        for result in results
        for state, reasons in ((REFUSED, result.data.refused), (NOT_RUN, result.data.not_run))
        for who, reason in reasons.items()
    )
    section = Section(id="angles", title="Error against position", lead=_LEAD, blocks=blocks)
    return section, Highlights(findings=tuple(findings))


def _worst(data: AngleErrors, dtype: str) -> Chart:
    """A line for each kind of angles on each runtime: the largest error of all encodings."""
    worst: dict[tuple[str, str], tuple[float, ...]] = {}
    for row in (row for row in data.rows if row.dtype == dtype):
        line = row.angles, row.runtime
        worst[line] = tuple(map(max, worst.get(line, row.errors), row.errors))
    runtimes, kinds = (list(dict.fromkeys(line[at] for line in worst)) for at in (1, 0))
    lines = tuple(
        Line(label=f"{kind}, {runtime}", x=data.positions, y=errors, look=(runtimes.index(runtime), kinds.index(kind)))
        for (kind, runtime), errors in worst.items()
    )
    return Chart(
        title=f"Error of cosine and sine by position, {dtype}", note="", x="position", y="largest error", lines=lines,
        scales=(1.0, 1e-8), together=True,
    )  # fmt: skip


def _rows(data: AngleErrors) -> Table:
    return Table(
        caption="Errors of angles by position",
        columns=("encoding", "angles", "dtype", "runtime", *map(plain_number, data.positions)),
        rows=[
            cells(row.encoding, row.angles, row.dtype, row.runtime, *(number(y, "{:.1e}".format) for y in row.errors))
            for row in data.rows
        ],
        heads=4,
    ).fold("All errors by encoding and runtime")


def plots(results: Sequence[Result[Plot]]) -> tuple[Section, Highlights]:
    """The section of plots, and its highlights."""
    blocks: list[Block] = []
    for result in results:
        blocks += map(_figure, result.data.charts)
        if result.data.images:
            picture = result.data.file or "the file that it wrote"
            text = f"{plural(result.data.images, 'picture')} of {result.name}, no line chart: see {picture}."
            blocks.append(Prose(text=text))
    findings = dict.fromkeys(
        Finding(state=FAILED if absent.failed else NOT_RUN, who=absent.name, reason=absent.reason, where="plot")
        for result in results
        for chart in result.data.charts
        for absent in chart.absent
    )
    section = Section(id="plots", title="Plots", lead="What posexport plot measured.", blocks=blocks)
    return section, Highlights(findings=tuple(findings))


def _figure(chart: Chart) -> Figure:
    title = ": ".join(filter(None, (chart.title, chart.note.replace("\n", ", "))))
    note = f"Up: {chart.y}; across: {chart.x}.{_judged(chart)}"
    return Figure(title=title, svg=draw_lines(chart, plain_number), note=note, table=_numbers(chart))


def _judged(chart: Chart) -> str:
    """What lines above the mark mean. The mark is what exact angles promise."""
    limit = chart.marks[0].at if chart.marks else math.inf
    above = {line.angles for line in chart.lines if any(y is not None and y > limit for y in line.y)}
    text = ""
    if PARITY in above:
        text = " Parity above the line is expected: it follows torch's fp32 angles, which drift with the position."
        text += "" if EXACT in above else " Only exact angles promise to stay below, and they do."
    if EXACT in above:
        text += " Exact angles above the line are a fault: they promise to stay below."
    return text


def _numbers(chart: Chart) -> Table:
    """The drawn numbers, at about a dozen places of each line at most."""
    rows = [
        (line.label, number(x, plain_number), None if y is None or math.isnan(y) else number(y, "{:.3g}".format))
        for line in chart.lines
        for x, y in list(zip(line.x, line.y, strict=True))[:: max(1, len(line.x) // 12)]
    ]
    columns = ("line", chart.x, chart.y)
    return Table(caption=chart.title, columns=columns, rows=rows, folded="The numbers, some of each line")
