"""Errors against positions on the page: the measured errors of angles, and whatever `posexport plot` drew as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from posexport.report.page.blocks import Block, Cell, Figure, Prose, Section, Table, cells, listed, number, plural
from posexport.report.page.charts import COLOURS, Curve, Rule, draw_lines, swatch
from posexport.report.page.results import Result
from posexport.report.page.scale import label
from posexport.report.page.summary import FAILED, NOT_RUN, REFUSED, Finding, Found

_FROM = (1.0, 1e-8)
"""Position and error up to which the logarithms are linear, so that position 0 and an error of 0 have a place."""


_NOTE = (
    "Both axes are logarithmic, and linear next to 0. Runtimes within a factor of two share a line, drawn at "
    "the larger error."
)


def angles(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section of measured errors of angles, and what the boxes learn from it."""
    if not results:
        return None, Found()
    blocks: list[Block] = []
    for result in results:
        data = result.data
        for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
            own = [row for row in data["rows"] if row["dtype"] == dtype]
            blocks.append(_worst(data["positions"], own, dtype))
        blocks.append(_rows(data))
    lead = (
        "The largest error of cosine and sine over all encodings and pairs, against float64. Angles named parity are "
        "fp32 products as models have them, so they drift with the position; exact ones don't."
    )
    section = Section(id="angles", title="Error against position", lead=lead, blocks=tuple(blocks))
    return section, Found(findings=tuple(_of_angles(results)))


def _worst(positions: Sequence[int], rows: Sequence[dict[str, Any]], dtype: str) -> Figure:
    """A line for each kind of angle and each group of runtimes that agree."""
    curves: list[Curve] = []
    looks: dict[str, tuple[int, int]] = {}
    for kind in dict.fromkeys(row["angles"] for row in rows):
        worst: dict[str, tuple[float, ...]] = {}
        for runtime in dict.fromkeys(row["runtime"] for row in rows if row["angles"] == kind):
            series = [row["errors"] for row in rows if row["angles"] == kind and row["runtime"] == runtime]
            worst[runtime] = tuple(map(max, *series)) if len(series) > 1 else tuple(series[0])
        for names in _alike(worst):
            name = f"{kind}: {listed(names, 8)}"
            looks[name] = (len(looks), len(looks))
            highest = [max(worst[each][at] for each in names) for at in range(len(positions))]
            curves.append(Curve(name=name, x=positions, y=highest, look=looks[name]))
    title = f"Error of cosine and sine by position, {dtype}"
    svg = draw_lines(title, curves, axes=("position", "largest error"), kinds=_FROM)
    legend = tuple((swatch(look), name) for name, look in looks.items())
    return Figure(title=title, svg=svg, legend=legend, note=_NOTE)


def _alike(worst: dict[str, tuple[float, ...]]) -> list[list[str]]:
    """Runtimes whose lines would cover each other (within a factor of two everywhere), together."""
    groups: list[list[str]] = []
    for name, errors in worst.items():
        for group in groups:
            pairs = zip(worst[group[0]], errors, strict=True)
            if all(abs(one - other) <= 0.5 * max(one, other) for one, other in pairs):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _rows(data: dict[str, Any]) -> Table:
    rows = tuple(
        (
            *cells(row["encoding"], row["angles"], row["dtype"], row["runtime"]),
            *(number(f"{error:.1e}", error) for error in row["errors"]),
        )
        for row in data["rows"]
    )
    positions = tuple(label(position) for position in data["positions"])
    return Table(
        caption="Errors of angles by position", columns=("encoding", "angles", "dtype", "runtime", *positions),
        rows=rows, heads=4, right=tuple(range(4, 4 + len(positions))),
        folded=f"All errors by encoding and runtime: {plural(len(rows), 'row')}",
    )  # fmt: skip


def _of_angles(results: Sequence[Result]) -> Iterator[Finding]:
    for result in results:
        for state, key in ((REFUSED, "refused"), (NOT_RUN, "not_run")):
            for who, reason in (result.data.get(key) or {}).items():
                yield Finding(state=state, who=who, reason=reason, where="angles")


def plots(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section of what was plotted, and what the boxes learn from it."""
    if not results:
        return None, Found()
    blocks: list[Block] = []
    findings = []
    for result in results:
        panels = [panel for row in result.data["rows"] for panel in row]
        charts = [panel for panel in panels if panel["kind"] == "chart"]
        blocks += [_chart(panel) for panel in charts]
        other = len(panels) - len(charts)
        if other:
            picture = result.data.get("file") or "the file that it wrote"
            blocks.append(Prose(text=f"{plural(other, 'picture')} of {result.name}, no line chart: see {picture}."))
        for panel in charts:
            for each in panel["absent"]:
                state = FAILED if each["failed"] else NOT_RUN
                findings.append(Finding(state=state, who=each["name"], reason=each["reason"], where="plot"))
    section = Section(id="plots", title="Plots", lead="What posexport plot measured.", blocks=tuple(blocks))
    return section, Found(findings=tuple(dict.fromkeys(findings)))


def _chart(panel: dict[str, Any]) -> Figure:
    looks = [tuple(line.get("look") or (at, at // COLOURS)) for at, line in enumerate(panel["lines"])]
    curves = [
        Curve(name=line["label"] or panel["title"], x=line["x"], y=line["y"], look=(look[0], look[1]))
        for line, look in zip(panel["lines"], looks, strict=True)
    ]
    rules = [Rule(name=mark["label"], at=mark["at"]) for mark in panel["marks"]]
    scales = panel["scales"]
    svg = draw_lines(panel["title"], curves, axes=(panel["x"], panel["y"]), kinds=(scales[0], scales[1]), rules=rules)
    legend = tuple((swatch((look[0], look[1])), curve.name) for curve, look in zip(curves, looks, strict=True))
    title = ": ".join(part for part in (panel["title"], panel["note"].replace("\n", ", ")) if part)
    note = f"Up: {panel['y']}; across: {panel['x']}.{_expected(panel)}"
    return Figure(title=title, svg=svg, legend=legend if len(curves) > 1 else (), note=note, table=_points(panel))


_PARITY, _EXACT = "parity", "exact"


def _expected(panel: dict[str, Any]) -> str:
    """Whether it is as it should be that lines climb above what exact angles promise."""
    limit = min((mark["at"] for mark in panel["marks"] if _EXACT in mark["label"]), default=None)
    if limit is None:
        return ""
    above = {
        kind for kind in (_PARITY, _EXACT) for line in panel["lines"]
        if line["label"].startswith(kind) and any(y is not None and y > limit for y in line["y"])
    }  # fmt: skip
    said = ""
    if _PARITY in above:
        said = " Parity above the line is expected: it follows torch's fp32 angles, which drift with the position."
        said += "" if _EXACT in above else " Only exact angles promise to stay below, and they do."
    if _EXACT in above:
        said += " Exact above it is not: only exact angles promise to stay below."
    return said


def _points(panel: dict[str, Any]) -> Table:
    """The drawn numbers, at no more than a dozen places of each line."""
    rows: list[tuple[Cell, ...]] = []
    for line in panel["lines"]:
        step = max(1, len(line["x"]) // 12)
        for x, y in list(zip(line["x"], line["y"], strict=True))[::step]:
            rows.append(
                (Cell(text=line["label"]), number(label(x), x), Cell(text="–") if y is None else number(f"{y:.3g}", y))
            )
    return Table(
        caption=panel["title"], columns=("line", panel["x"], panel["y"]), rows=tuple(rows), right=(1, 2),
        folded="The numbers, some of each line",
    )  # fmt: skip
