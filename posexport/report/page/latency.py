"""Benchmarks on the page: who is fastest in each comparison, bars with intervals and lower bounds, curves over sizes.

A comparison is one block in one scenario; files of the same block (other forms, dtypes, opsets) stand in it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from posexport.bench.result import OUT_OF_DATE, Benchmark, ProjectBenchmark
from posexport.report.page import charts, machine_load, regressions
from posexport.report.page.blocks import (
    EMPTY,
    Block,
    Cell,
    Figure,
    Point,
    Section,
    Table,
    brief,
    cells,
    fact,
    facts_of,
    listed,
    number,
    plural,
    seconds,
    span,
    times,
    trimmed,
)
from posexport.report.page.charts import Bar, Bars
from posexport.report.page.evidence import Evidence
from posexport.report.page.latency_rows import (
    LOWER_BOUND,
    TORCH,
    Comparison,
    Order,
    Row,
    comparisons,
    confidence,
    order,
)
from posexport.report.page.results import Result
from posexport.report.page.summary import NO_REASON, TONES, Finding, Highlights
from posexport.report.plots.panels import Chart, Line
from posexport.verify.result import FAILED, NOT_RUN, PASSED

_VERDICTS = {FAILED: "✗ but it failed verify", PASSED: "✓ verified"}
_MOST_DIGITS = 15  # of a size in a scenario's name
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
    compared, busy = comparisons(results), machine_load.shares(results)
    curves = [group for group in _by_size(compared).values() if len(group) > 2]
    drawn = {id(comparison) for group in curves for comparison in group[:-1]}
    blocks: list[Block] = [*machine_load.warning(busy), *map(_curve, curves)]
    blocks += [_bars(each, folded=id(each) in drawn or len(compared) > 12) for each in compared]
    blocks += [table for result in results for table in regressions.tables(result)]
    blocks += [_table(compared), *_absent(compared), _machines(results)]
    return Section(id="latency", title="Latency", lead=_LEAD, blocks=tuple(blocks)), Highlights(
        findings=tuple(_findings(results, compared)),
        fastest=tuple(point for each in compared if (point := _point(each, evidence)) is not None),
        timed=sum(row.timed for each in compared for row in each.rows),
        machine_load=busy,
    )


def project_findings(results: Sequence[Result[ProjectBenchmark]]) -> Highlights:
    """The files of projects that were not timed; one that is out of date fails its project, as the exit code says."""
    return Highlights(
        findings=tuple(
            Finding(
                state=FAILED if file.state == OUT_OF_DATE else NOT_RUN, who=PurePath(file.file).name,
                reason=file.reason or NO_REASON, where="bench",
            )
            for result in results for file in result.data.files if file.result is None
        )
    )  # fmt: skip


def _point(compared: Comparison, evidence: Evidence) -> Point | None:
    """The fastest of a comparison, with how certain that is and its ratios."""
    ranked = compared.ranked
    if not ranked:
        return None
    first = ranked[0]
    name = compared.name(first)
    beside = {row.runtime for row in ranked if row.benchmark is first.benchmark}
    others = [
        row
        for row in ranked[1:]
        # an alternative that ran beside the winner counts by those rounds, not by those of another file
        if compared.name(row) != name
        and (row.benchmark is first.benchmark or not row.role or row.runtime not in beside)
    ]
    ties: dict[str, Row] = {}
    figures: dict[Order, dict[str, str]] = {}
    for row in others:
        other, compares = compared.name(row), order(first, row)
        figures.setdefault(compares, {}).setdefault(other, f"{other} ({_figure(first, row)})")
        if compares in ("tie", "inconclusive"):
            ties.setdefault(other, row)
    text = []
    if first.benchmark.sha256 and evidence.is_stale(first.benchmark.file, first.benchmark.sha256):
        text.append("⚠ stale: other bytes were timed than those of the file here")
    verdict = evidence.verdict(first)
    ratios = [(TORCH, "of torch eager"), (LOWER_BOUND, "of the lower bound")]
    texts = [
        f"{times(ratio.median)} {words} ({span(ratio)})"
        for role, words in ratios
        if (ratio := first.ratio(role)) is not None and first.role != role
    ]
    behind = next((row for row in others if row.role != TORCH and compared.name(row) not in ties), None)
    if behind is not None and not ties:
        texts.append(f"next {compared.name(behind)} ({_figure(first, behind)})")
    if not first.role:
        texts.insert(len(texts) if verdict == PASSED else 0, _verdict(first, verdict))
    unlike = [row for row in ties.values() if not row.role and evidence.verdict(row) != verdict]
    texts += [f"{compared.name(row)}: {_verdict(row, evidence.verdict(row))}" for row in unlike]
    certainty = confidence(
        {compares: list(texts.values()) for compares, texts in figures.items()},
        doubtful=any(machine_load.is_high(row.benchmark) for row in ranked),
        separate=any(row.benchmark is not first.benchmark for row in ties.values()),
    )
    return Point(
        label=f"{machine_load.sign(first.benchmark)}{compared.block}, {compared.scenario} ({compared.sizes})",
        head=name, figure=seconds(first.median),
        confidence=certainty if others else "nothing else was timed beside it", text="; ".join([*text, *texts]),
    )  # fmt: skip


def _verdict(row: Row, verdict: str) -> str:
    return _VERDICTS.get(verdict, f"⚠ not verified on {row.runtime} here")


def _figure(first: Row, row: Row) -> str:
    """The time of another candidate, or across separate runs its ratio to torch."""
    ratio = row.ratio(TORCH)
    if row.benchmark is first.benchmark or ratio is None or row.gpu != first.gpu:
        return seconds(row.median)
    return f"{times(ratio.median)} of torch eager, {span(ratio)}, in its own run"


def _bars(compared: Comparison, folded: bool) -> Figure | Table:
    timed = sorted((row for row in compared.rows if row.timed), key=lambda row: row.median)
    title = f"{compared.block}: {compared.scenario} ({compared.sizes})"
    title = machine_load.title([row.benchmark for row in timed], title)
    if not timed:
        rows = tuple(cells(compared.name(row), row.timing.state, row.timing.reason) for row in compared.rows)
        return Table(caption=title, columns=("candidate", "state", "reason"), rows=rows)
    best, sources = compared.ranked[:1], dict.fromkeys(row.source for row in compared.rows if row.timed)
    groups = []
    for source in sources:
        rows_here = [row for row in timed if row.source == source]
        bound = next((row.median for row in rows_here if row.role == LOWER_BOUND), None)
        shown = [row for row in rows_here if row.role != LOWER_BOUND] or ([] if len(sources) > 1 else rows_here)
        bars = tuple(_bar(compared, row, row in best, len(sources) == 1) for row in shown)
        groups += [Bars(name=source if len(sources) > 1 else "", bars=bars, bound=bound)] if bars else []
    if not groups:
        groups = [Bars(name="", bars=tuple(_bar(compared, row, False, True) for row in timed))]
    bounds = dict.fromkeys(seconds(group.bound) for group in groups if group.bound is not None)
    note = f"Lower bound (dashed): {listed(list(bounds))}." if bounds else "No lower bound was timed."
    note += " Each file ran by itself, so files are compared by × torch, not by times." * (len(sources) > 1)
    return Figure(
        title=title, svg=charts.draw_bars(title, groups), note=note, folded=f"Bars of {title}" if folded else ""
    )


def _bar(compared: Comparison, row: Row, best: bool, with_file: bool) -> Bar:
    ratio = row.ratio(TORCH)
    text = seconds(row.median) + (f" · {times(ratio.median)} torch" if ratio and row.role != TORCH else "")
    return Bar(
        name=("★ " if best else "") + compared.name(row, with_file), text=text, value=row.median, low=row.seconds.p10,
        high=max(row.seconds.p90, row.median), look="best" if best else "alternative" if row.role else "ours",
    )  # fmt: skip


def _by_size(compared: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """The scenarios of one kind by block, such as prefill at several lengths, in the order of their sizes."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in compared:
        kind, _, size = each.scenario.partition(":")
        if kind in _SIZES and size.isdecimal() and len(size) <= _MOST_DIGITS:
            groups.setdefault((each.key, kind), []).append(each)
    return {key: sorted(group, key=_size) for key, group in groups.items()}


def _size(compared: Comparison) -> int:
    return int(compared.scenario.partition(":")[2])


def _curve(group: Sequence[Comparison]) -> Figure:
    series: dict[str, dict[float, float]] = {}
    roles: dict[str, str] = {}
    for each in group:
        for row in (row for row in each.rows if row.timed):
            name, size = each.name(row), float(_size(each))
            points = series.setdefault(name, {})
            points[size] = min(row.median, points.get(size, row.median))
            roles[name] = row.role
    names = sorted(series, key=lambda name: bool(roles[name]))
    sizes = sorted({size for points in series.values() for size in points})
    kind = group[0].scenario.partition(":")[0]
    title = f"{group[0].block}: {kind} over a sweep"
    lines = [
        Line(label=name, x=tuple(series[name]), y=tuple(series[name].values()), look=(at, roles[name] == LOWER_BOUND))
        for at, name in enumerate(names)
    ]
    chart = Chart(
        title=title, note="", x=_SIZES[kind], y="median time", lines=tuple(lines),
        scales=("log" if min(sizes) > 0 else "linear", "log"),
    )  # fmt: skip
    return Figure(title=title, svg=charts.draw_lines(chart, brief, sizes), note=_CURVES)


_COLUMNS = (
    "comparison", "candidate", "state", "median", "p10", "p90", "p99", "× torch eager", "interval", "× lower bound",
    "interval", "tokens/s", "memory", "load", "build", "note",
)  # fmt: skip


def _table(compared: Sequence[Comparison]) -> Table:
    ran = [(each, row) for each in compared for row in each.rows if row.timing.state != NOT_RUN]
    places = {id(each): at for at, each in enumerate(compared)}
    ran.sort(key=lambda pair: (places[id(pair[0])], not pair[1].timed, pair[1].median))
    return trimmed(
        Table(
            caption="Every timing", columns=_COLUMNS, rows=tuple(_row(*pair) for pair in ran), heads=2,
            right=tuple(range(3, 15)), folded=f"Every timing: {plural(len(ran), 'row')}",
        )
    )  # fmt: skip


def _absent(compared: Sequence[Comparison]) -> Iterator[Table]:
    """Candidates that were not run, with each reason once."""
    counted = Counter(
        (each.name(row), row.timing.reason or NO_REASON)
        for each in compared
        for row in each.rows
        if row.timing.state == NOT_RUN
    )
    rows = tuple((*cells(name, reason), number(count)) for (name, reason), count in counted.items())
    if rows:
        yield Table(
            caption="Not timed", columns=("candidate", "reason", "times"), rows=rows, right=(2,),
            folded=f"What was not timed, and why: {plural(len(rows), 'row')}",
        )  # fmt: skip


def _row(compared: Comparison, row: Row) -> tuple[Cell, ...]:
    timing, spread = row.timing, row.seconds
    quantiles = (spread.median, spread.p10, spread.p90, spread.p99)
    figures = [number(value, seconds) if row.timed else EMPTY for value in quantiles]
    for role in (TORCH, LOWER_BOUND):
        ratio = row.ratio(role)
        figures += [number(ratio.median, times), Cell(text=span(ratio))] if ratio else [EMPTY, EMPTY]
    return (
        *cells(f"{compared.block}, {compared.scenario}", compared.name(row)),
        Cell(text=timing.state, tone=TONES.get(timing.state, "")), *figures,
        number(timing.tokens_per_second, "{:,.0f}".format),
        number(timing.memory, lambda size: f"{size / 1e6:,.1f} MB"),
        number(timing.load_seconds, seconds), number(timing.build_seconds, seconds),
        Cell(text="; ".join(filter(None, (timing.reason, timing.note)))),
    )  # fmt: skip


def _findings(results: Sequence[Result[Benchmark]], compared: Sequence[Comparison]) -> Iterator[Finding]:
    for row in (row for each in compared for row in each.rows if not row.timed):
        who = "alternatives on CUDA" if row.role and row.runtime.endswith("-cuda") else row.runtime
        yield Finding(state=row.timing.state, who=who, reason=row.timing.reason or NO_REASON, where="bench")
    for result in results:
        yield from regressions.findings(result)
        for left in result.data.left_out:
            yield Finding(state=NOT_RUN, who=left.scenario, reason=left.reason, where="bench")


def _machines(results: Sequence[Result[Benchmark]]) -> Table:
    """The known facts of the machine, versions and settings of each file."""
    facts: dict[str, list[str]] = {}
    for at, result in enumerate(results):
        data = result.data
        known = {"file": data.file, "sha256": data.sha256, "rounds": data.rounds, "threads": data.threads}
        known |= {"machine load": f"{data.machine_load:.0%}", **facts_of(data.machine)}
        for name, value in known.items():
            facts.setdefault(name, [""] * len(results))[at] = fact(value)
    rows = tuple(cells(name.replace("_", " "), *values) for name, values in facts.items() if any(values))
    return Table(
        caption="What it was measured on", columns=("", *(result.name for result in results)), rows=rows,
        folded="The machine, versions and settings of each run",
    )  # fmt: skip
