"""Benchmarks on the page: the fastest in each comparison, bars with intervals and lower bounds, curves over sizes.

A comparison is one block in one scenario. It includes all files of that block (other forms, dtypes, opsets).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from posexport.bench import comparisons
from posexport.bench.candidates import COMPILED, EAGER, EXPORTED, LOWER_BOUND, OPTIMIZED
from posexport.bench.comparisons import Comparison, Order, Row
from posexport.bench.evidence import Evidence
from posexport.bench.result import OUT_OF_DATE, Benchmark, ProjectBenchmark
from posexport.bench.results import Result
from posexport.report.page import charts, regressions
from posexport.report.page.blocks import Block, Cell, Figure, Point, Section, Table, cells, number, ratio_cells
from posexport.report.page.charts import Bar, Bars
from posexport.report.page.summary import NO_REASON, TONES, Finding, Highlights, busy_shares, busy_warning, confidence
from posexport.report.plots.panels import Chart, Line
from posexport.report.text import fact, listed, plural, seconds, span, times
from posexport.verify.result import FAILED, NOT_RUN, PASSED

ALTERNATIVES = {
    LOWER_BOUND: "lower bound: bare matrix products",
    EAGER: "torch eager",
    COMPILED: "torch.compile",
    EXPORTED: "torch.onnx.export",
    OPTIMIZED: "ORT's optimizer",
}
"""The names of other ways to run a block, by the role of ratios to them."""

_VERDICTS = {FAILED: "✗ but it failed verify", PASSED: "✓ verified"}
_LONG, _NAMED_FACTS = 32, 4
_SIZES = {"prefill": "new tokens at once", "decode": "tokens in the cache", "batch": "prompts side by side"}
_LEAD = (
    "Bars end at the median, whiskers span the middle 80 % of all runs, and the dashed line is the lower bound: the "
    "bare matrix products of the same block; › goes on beyond the drawing. Ratios are taken round by round against "
    "what ran beside it: a steady slowdown cancels out, a busy machine widens their intervals."
)
_CURVES = (
    "Both axes are logarithmic; lower is faster. Of an alternative that was timed beside several files, the fastest is "
    "drawn."
)


def section(results: Sequence[Result[Benchmark]], evidence: Evidence) -> tuple[Section, Highlights]:
    """The section, and its highlights."""
    compared, busy = comparisons.compare(results), busy_shares(results)
    curves = [group for group in comparisons.by_size(compared) if len(group) > 2]
    drawn = {id(comparison) for group in curves for comparison in group[:-1]}
    records = []
    for result in results:
        data = result.data
        facts = {"file": data.file, "sha256": data.sha256, "rounds": data.rounds, "threads": data.threads}
        records.append((result.name, {**facts, "machine load": f"{data.machine_load:.0%}", **data.machine}))
    blocks: list[Block] = [*busy_warning(busy), *map(_curve, curves)]
    blocks += [_bars(group, folded=id(group) in drawn or len(compared) > 12) for group in compared]
    blocks += [table for result in results for table in regressions.tables(result)]
    blocks += [_table(compared), *_absent(compared)]
    blocks.append(Table.of_facts("What it was measured on", "The machine, versions and settings of each run", records))
    return Section(id="latency", title="Latency", lead=_LEAD, blocks=blocks), Highlights(
        findings=tuple(_findings(results, compared)),
        fastest=tuple(_point(group, evidence) for group in compared if group.ranked),
        timed=sum(row.timed for group in compared for row in group.rows),
        machine_load=busy,
    )


def project_findings(results: Sequence[Result[ProjectBenchmark]]) -> Iterator[Finding]:
    """The files of projects that were not timed. One that is out of date fails its project, as the exit code says."""
    for file in (file for result in results for file in result.data.files if file.result is None):
        state = FAILED if file.state == OUT_OF_DATE else NOT_RUN
        yield Finding(state=state, who=PurePath(file.file).name, reason=file.reason or NO_REASON, where="bench")


def _title(compared: Comparison) -> str:
    """The size of the block, and what distinguishes it from others of that size."""
    encoding, size, layers = comparisons.block_of(compared.rows[0].benchmark)
    parts = [encoding, *([f"hidden {size}"] if size else []), *([f"{layers} layers"] if layers != 1 else [])]
    facts = [_fact(path, value) for path, value in compared.apart.items()]
    return ", ".join([*parts, *([listed(facts, _NAMED_FACTS)] if facts else [])])


def _fact(path: str, value: Any) -> str:
    text = fact(value)
    text = text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"
    if path == "machine.cpu":
        return f"on {text or 'an unknown CPU'}"
    unknown = "unknown" if path.startswith("machine.") else "none"
    return f"{path.rpartition('.')[2].replace('_', ' ')} {text or unknown}"


def _sizes(compared: Comparison) -> str:
    shape = compared.rows[0].shape
    past = shape.past_seq or 0
    others = ", ".join(f"{name} {size:,}" for name, size in shape.others.items())
    if shape.seq is None:
        return ", ".join(filter(None, (plural(shape.batch, "row"), others)))
    tokens = plural(shape.seq, "new token" if past else "token")
    text = f"{tokens} behind {past:,} in the cache" if past else f"{tokens} at once"
    text = text if shape.batch == 1 else f"{shape.batch:,} × {text}"
    return ", ".join(filter(None, (text, others)))


def _name(compared: Comparison, row: Row, with_file: bool = True) -> str:
    """The name of a candidate: its runtime, and what distinguishes its file from others of the block."""
    made, dtypes = row.benchmark, len({other.dtype for other in compared.benchmarks}) > 1
    dtype = [made.dtype] * dtypes
    if row.role in ALTERNATIVES:
        return " · ".join([ALTERNATIVES[row.role] + " on CUDA" * row.runtime.endswith("-cuda"), *dtype])
    alike = [other for other in compared.benchmarks if (other.form, other.dtype) == (made.form, made.dtype)]
    twins = [other for other in alike if other.opset == made.opset]
    parts = [row.runtime, made.form or made.file, *dtype, *[f"opset {made.opset}"] * (len(twins) < len(alike))]
    if with_file and len(twins) > 1:
        parts.append(made.file if len({other.file for other in twins}) == len(twins) else row.source)
    return " · ".join(parts)


def _point(compared: Comparison, evidence: Evidence) -> Point:
    """The fastest of a comparison, how certain that is, and its ratios."""
    first = compared.ranked[0]
    name = _name(compared, first)
    others = [row for row in comparisons.only_beside(first, compared.ranked) if _name(compared, row) != name]
    ties: dict[str, Row] = {}
    figures: dict[Order, dict[str, str]] = {}
    for row in others:
        other, compares = _name(compared, row), comparisons.order(first, row)
        figures.setdefault(compares, {}).setdefault(other, f"{other} ({_figure(first, row)})")
        if compares in ("tie", "inconclusive"):
            ties.setdefault(other, row)
    verdict = evidence.verdict(first)
    texts = []
    for role, words in ((EAGER, "of torch eager"), (LOWER_BOUND, "of the lower bound")):
        if (ratio := first.ratio(role)) is not None and first.role != role:
            texts.append(f"{times(ratio.median)} {words} ({span(ratio)})")
    behind = next((row for row in others if row.role != EAGER and _name(compared, row) not in ties), None)
    if behind is not None and not ties:
        texts.append(f"next {_name(compared, behind)} ({_figure(first, behind)})")
    if not first.role:
        texts.insert(len(texts) if verdict == PASSED else 0, _verdict(first, verdict))
    if evidence.is_stale(first.benchmark.file, first.benchmark.sha256):
        texts.insert(0, "⚠ stale: other bytes were timed than those of the file here")
    unlike = [row for row in ties.values() if not row.role and evidence.verdict(row) != verdict]
    texts += [f"{_name(compared, row)}: {_verdict(row, evidence.verdict(row))}" for row in unlike]
    certainty = confidence(
        {compares: list(texts.values()) for compares, texts in figures.items()},
        doubtful=any(row.benchmark.busy for row in compared.ranked),
        separate=any(row.benchmark is not first.benchmark for row in ties.values()),
    )
    return Point(
        label=f"{'⚠ ' * first.benchmark.busy}{_title(compared)}, {compared.scenario} ({_sizes(compared)})",
        head=name,
        figure=seconds(first.median),
        confidence=certainty if others else "nothing else was timed beside it",
        text="; ".join(texts),
    )


def _verdict(row: Row, verdict: str) -> str:
    return _VERDICTS.get(verdict, f"⚠ not verified on {row.runtime} here")


def _figure(first: Row, row: Row) -> str:
    """The time of another candidate, or across separate runs its ratio to torch."""
    ratio = row.ratio(EAGER)
    if row.benchmark is first.benchmark or ratio is None or row.gpu != first.gpu:
        return seconds(row.median)
    return f"{times(ratio.median)} of torch eager, {span(ratio)}, in its own run"


def _bars(compared: Comparison, folded: bool) -> Figure | Table:
    timed = sorted((row for row in compared.rows if row.timed), key=lambda row: row.median)
    best = next(iter(compared.ranked), None)
    title = f"{_title(compared)}: {compared.scenario} ({_sizes(compared)})"
    title = "⚠ busy machine: " * any(row.benchmark.busy for row in timed) + title
    if not timed:
        states = [(_name(compared, row), row.timing.state, row.timing.reason) for row in compared.rows]
        return Table(caption=title, columns=("candidate", "state", "reason"), rows=states)
    sources = list(dict.fromkeys(row.source for row in compared.rows if row.timed))
    several = len(sources) > 1
    groups = []
    for source in sources:
        rows = [row for row in timed if row.source == source]
        bound = next((row.median for row in rows if row.role == LOWER_BOUND), None)
        shown = [row for row in rows if row.role != LOWER_BOUND] or ([] if several else rows)
        bars = tuple(_bar(compared, row, row is best, with_file=not several) for row in shown)
        groups += [Bars(name=source if several else "", bars=bars, bound=bound)] if bars else []
    if not groups:
        groups = [Bars(name="", bars=tuple(_bar(compared, row, row is best, with_file=True) for row in timed))]
    bounds = dict.fromkeys(seconds(group.bound) for group in groups if group.bound is not None)
    note = f"Lower bound (dashed): {listed(list(bounds))}." if bounds else "No lower bound was timed."
    note += " Each file ran by itself, so files are compared by × torch, not by times." * several
    svg = charts.draw_bars(title, groups)
    return Figure(title=title, svg=svg, note=note, folded=f"Bars of {title}" if folded else "")


def _bar(compared: Comparison, row: Row, best: bool, with_file: bool) -> Bar:
    ratio = row.ratio(EAGER)
    return Bar(
        name="★ " * best + _name(compared, row, with_file),
        text=seconds(row.median) + (f" · {times(ratio.median)} torch" if ratio and row.role != EAGER else ""),
        value=row.median,
        low=row.seconds.p10,
        high=max(row.seconds.p90, row.median),
        look="best" if best else "alternative" if row.role else "ours",
    )


def _curve(group: Sequence[Comparison]) -> Figure:
    series: dict[str, dict[float, float]] = {}
    roles: dict[str, str] = {}
    for compared in group:
        for row in (row for row in compared.rows if row.timed):
            name, size = _name(compared, row), float(compared.size or 0)
            points = series.setdefault(name, {})
            points[size] = min(row.median, points.get(size, row.median))
            roles[name] = row.role
    sizes = sorted({size for points in series.values() for size in points})
    kind = group[0].kind
    lines = tuple(
        Line(label=name, x=tuple(series[name]), y=tuple(series[name].values()), look=(at, roles[name] == LOWER_BOUND))
        for at, name in enumerate(sorted(series, key=lambda name: bool(roles[name])))
    )
    title, scales = f"{_title(group[0])}: {kind} over a sweep", ("log" if min(sizes) > 0 else "linear", "log")
    chart = Chart(title=title, note="", x=_SIZES[kind], y="median time", lines=lines, scales=scales)
    svg = charts.draw_lines(chart, lambda value: seconds(value, "{:.3g}".format), sizes)
    return Figure(title=title, svg=svg, note=_CURVES)


_COLUMNS = (
    "comparison", "candidate", "state", "median", "p10", "p90", "p99", "× torch eager", "interval", "× lower bound",
    "interval", "tokens/s", "memory", "load", "build", "note",
)  # fmt: skip


def _table(compared: Sequence[Comparison]) -> Table:
    rows = []
    for group in compared:
        ran = [row for row in group.rows if row.timing.state != NOT_RUN]
        rows += [_row(group, row) for row in sorted(ran, key=lambda row: (not row.timed, row.median))]
    return Table(caption="Every timing", columns=_COLUMNS, rows=rows, heads=2).fold("Every timing").trimmed()


def _row(compared: Comparison, row: Row) -> tuple[Cell, ...]:
    timing, spread = row.timing, row.seconds
    quantiles = (spread.median, spread.p10, spread.p90, spread.p99)
    return cells(
        f"{_title(compared)}, {compared.scenario}",
        _name(compared, row),
        Cell(timing.state, tone=TONES.get(timing.state, "")),
        *(number(value if row.timed else None, seconds) for value in quantiles),
        *ratio_cells(row.ratio(EAGER)),
        *ratio_cells(row.ratio(LOWER_BOUND)),
        number(timing.tokens_per_second, "{:,.0f}".format),
        number(timing.memory, lambda size: f"{size / 1e6:,.1f} MB"),
        number(timing.load_seconds, seconds),
        number(timing.build_seconds, seconds),
        "; ".join(filter(None, (timing.reason, timing.note))),
    )


def _absent(compared: Sequence[Comparison]) -> Iterator[Table]:
    """Candidates that were not run, with each reason once."""
    away = ((group, row) for group in compared for row in group.rows if row.timing.state == NOT_RUN)
    counted = Counter((_name(group, row), row.timing.reason or NO_REASON) for group, row in away)
    rows = [(name, reason, number(count)) for (name, reason), count in counted.items()]
    if rows:
        table = Table(caption="Not timed", columns=("candidate", "reason", "times"), rows=rows)
        yield table.fold("What was not timed, and why")


def _findings(results: Sequence[Result[Benchmark]], compared: Sequence[Comparison]) -> Iterator[Finding]:
    for row in (row for group in compared for row in group.rows if not row.timed):
        who = "alternatives on CUDA" if row.role and row.runtime.endswith("-cuda") else row.runtime
        yield Finding(state=row.timing.state, who=who, reason=row.timing.reason or NO_REASON, where="bench")
    for result in results:
        yield from regressions.findings(result)
        for left in result.data.left_out:
            yield Finding(state=NOT_RUN, who=left.scenario, reason=left.reason, where="bench")
