"""How much one result file may show. A page draws all of it, and a small file may name a million lines."""

from __future__ import annotations

from collections.abc import Sequence

from posexport.bench.result import Benchmark, ProjectBenchmark
from posexport.bench.results import Sweep
from posexport.bench.tune.result import Result as Tuning
from posexport.report.plots.panels import Plot
from posexport.verify.matrix.table import Matrix
from posexport.verify.result import AngleErrors, Report

MOST = {
    "charts": 500,
    "lines": 5_000,
    "points": 1_000_000,
    "shapes": 2_000,
    "timings": 10_000,
    "rows": 50_000,
    "cells": 1_000_000,
}
"""The most of each that a page shows of one file: many times what a command writes, drawn in a minute or two.

Cells are those of a table that is as wide as a file has runtimes, or as high as it has facts. The cells of a matrix
have known names, so there are never more than `posexport matrix` measures.
"""


def beyond(data: object) -> str | None:
    """What a result has too much of, as a clause. None if it may be shown."""
    for name, count in _counts(data).items():
        if count > MOST[name]:
            return f"it has {count:,} {name}, and at most {MOST[name]:,} of one file are shown"
    return None


def _counts(data: object) -> dict[str, int]:
    """How much a page would show of a result."""
    match data:
        case Plot(charts=charts):
            lines = [line for chart in charts for line in chart.lines]
            return {
                "charts": len(charts),
                "lines": len(lines) + sum(len(chart.marks) for chart in charts),
                "points": sum(len(line.x) for line in lines),
                "rows": sum(len(chart.absent) for chart in charts),
            }
        case AngleErrors(rows=rows):
            return {
                "charts": len({row.dtype for row in rows}),
                "lines": len({(row.dtype, row.angles, row.runtime) for row in rows}),
                "points": sum(len(row.errors) for row in rows),
                "rows": len(rows) + len(data.refused) + len(data.not_run),
            }
        case Benchmark():
            return _benchmarks([data])
        case ProjectBenchmark(files=files):
            counts = _benchmarks([file.result for file in files if file.result is not None])
            counts["rows"] += sum(1 + len(file.limits) for file in files)
            return counts
        case Report(verdicts=verdicts):
            artifacts, runtimes = ({getattr(row, key) for row in verdicts} for key in ("artifact", "runtime"))
            return {"rows": len(verdicts) + len(data.unreadable), "cells": len(artifacts) * len(runtimes)}
        case Tuning():
            return {"rows": len(data.candidates) + len(data.machine)}
        case Sweep():
            return {"rows": len(data.jobs) + len(data.refused) + len(data.notes) + len(data.matrices)}
        case Matrix():
            return {"rows": len(data.made_by) + len(data.cpus)}
    return {}


def _benchmarks(results: Sequence[Benchmark]) -> dict[str, int]:
    counts = dict.fromkeys(("shapes", "timings", "rows"), 0)
    counts["cells"] = len(results) * len({name for result in results for name in result.machine})
    for result in results:
        counts["shapes"] += sum(len((shape, *shape.also)) for shape in result.shapes)
        counts["timings"] += sum(len(shape.results) * len((shape, *shape.also)) for shape in result.shapes)
        counts["rows"] += len(result.left_out) + len(result.limits) + len(result.machine)
        counts["rows"] += len(result.gate.changes) if result.gate else 0
    return counts
