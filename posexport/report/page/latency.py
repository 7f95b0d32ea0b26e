"""Benchmarks on the page: who is fastest in each comparison, bars with intervals and floors, curves over a sweep.

A comparison is one block in one scenario; files of the same block (other forms, dtypes, opsets) stand in it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from posexport.report.page import machine_load, regressions, sure
from posexport.report.page.blocks import (
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
from posexport.report.page.charts import Bar, Bars, Curve, draw_bars, draw_lines, patch, swatch
from posexport.report.page.evidence import PASSED
from posexport.report.page.latency_rows import Comparison, Row, comparisons, rows_of
from posexport.report.page.results import Result
from posexport.report.page.scale import LINEAR, LOG
from posexport.report.page.summary import FAILED, NOT_RUN, Finding, Found

_VERDICTS = {"failed": "✗ but it failed verify", "passed": "✓ verified"}
_DIGITS = 16
_UNITS = {"prefill": "new tokens at once", "decode": "tokens in the cache", "batch": "prompts side by side"}


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section, and what the boxes learn from it."""
    if not results:
        return None, Found()
    found = comparisons(results)
    blocks: list[Block] = [*machine_load.warning(results), *_curves(found)]
    swept = [each for group in _sweeps(found).values() if len(group) > 2 for each in group[:-1]]
    blocks += [_bars(each, folded=each in swept or len(found) > 12) for each in found]
    blocks += [table for result in results for table in regressions.tables(result)]
    blocks += [_table(found), *_absent(found), *_machines(results)]
    rows = list(rows_of(results))
    lead = (
        "Bars end at the median, whiskers span the middle 80 % of all runs, and the dashed line is the lower bound: "
        "the bare matrix products of the same block; › goes on beyond the drawing. Ratios are taken round by round "
        "against what ran beside it: a steady slowdown cancels out, a busy machine widens their intervals."
    )
    return Section(id="latency", title="Latency", lead=lead, blocks=tuple(blocks)), Found(
        findings=tuple(_findings(results, found)),
        fastest=tuple(point for each in found if (point := _point(each)) is not None),
        timed=sum(row.timed for row in rows),
        machine_load=machine_load.shares(results),
    )


def _point(each: Comparison) -> Point | None:
    ranked = each.ranked
    if not ranked:
        return None
    first = ranked[0]
    said = []
    for peer, words in (("torch", "of torch eager"), ("lower_bound", "of the lower bound")):
        ratio = first.ratio(peer)
        if ratio is not None and first.role != peer:
            said.append(f"{times(ratio['median'])} {words} ({span(ratio)})")
    name = each.name(first)
    beside = {row.runtime for row in ranked if row.head is first.head}
    others = [
        row
        for row in ranked[1:]
        # a peer that ran beside the winner counts by those rounds, not by those of another file
        if each.name(row) != name and (row.head is first.head or not row.role or row.runtime not in beside)
    ]
    alike: dict[str, Row] = {}
    for row in others:
        if not sure.apart(first, row):
            alike.setdefault(each.name(row), row)
    ties = [f"{other} ({_beside(first, row)})" for other, row in alike.items()]
    separate = any(row.head is not first.head for row in alike.values())
    unsure = any(machine_load.is_busy(row.head) for row in ranked)
    behind = next((row for row in others if row.role != "torch" and each.name(row) not in alike), None)
    if behind is not None and not ties:
        said.append(f"next {each.name(behind)} ({_beside(first, behind)})")
    if not first.role:
        said.insert(len(said) if first.verdict == PASSED else 0, _verdict(first))
    otherwise = [row for row in alike.values() if not row.role and row.verdict != first.verdict]
    said += [f"{each.name(row)}: {_verdict(row)}" for row in otherwise]
    if first.stale:
        said.insert(0, "⚠ stale: other bytes were timed than those of the file here")
    return Point(
        label=f"{machine_load.sign(first.head)}{each.block}, {each.where} ({each.words})",
        head=name,
        figure=seconds(first.median),
        sure=sure.told(ties, unsure, separate) if others else "nothing else was timed beside it",
        text="; ".join(said),
    )


def _verdict(row: Row) -> str:
    return _VERDICTS.get(row.verdict, f"⚠ not verified on {row.runtime} here")


def _beside(first: Row, row: Row) -> str:
    """What another took beside the winner: its time, or across runs of their own its ratio to torch."""
    ratio = row.ratio("torch")
    if row.head is first.head or ratio is None or row.gpu != first.gpu:
        return seconds(row.median)
    return f"{times(ratio['median'])} of torch eager, {span(ratio)}, in its own run"


def _bars(each: Comparison, folded: bool) -> Figure | Table:
    timed = [row for row in each.rows if row.timed]
    title = machine_load.title([row.head for row in timed], f"{each.block}: {each.where} ({each.words})")
    if not timed:
        rows = tuple(cells(each.name(row), row.result["state"], row.result.get("reason") or "") for row in each.rows)
        return Table(caption=title, columns=("candidate", "state", "reason"), rows=rows)
    best = each.ranked[:1]
    groups = []
    files = list(dict.fromkeys(row.file for row in timed))
    several = len(files) > 1  # the file's name stands above its bars then
    for file in files:
        own = sorted((row for row in timed if row.file == file), key=lambda row: row.median)
        floor = next((row.median for row in own if row.role == "lower_bound"), None)
        bars = tuple(_bar(each, row, row in best, not several) for row in own if row.role != "lower_bound")
        if bars:
            groups.append(Bars(name=file, bars=bars, floor=floor))
    if not groups:
        groups = [Bars(name="", bars=tuple(_bar(each, row, False, True) for row in timed))]
    if len(groups) == 1:
        groups = [attrs.evolve(groups[0], name="")]
    floors = [seconds(group.floor) for group in groups if group.floor is not None]
    note = f"Lower bound (dashed): {listed(list(dict.fromkeys(floors)))}." if floors else "No lower bound was timed."
    note += " Each file ran by itself, so files are compared by × torch, not by times." * several
    drawn = {bar.look for group in groups for bar in group.bars} | ({"floor"} if floors else set())
    legend = tuple((patch(look), name) for look, name in _LOOKS.items() if look in drawn)
    return Figure(
        title=title, svg=draw_bars(title, groups), legend=legend, note=note,
        folded=f"Bars of {title}" if folded else "",
    )  # fmt: skip


_LOOKS = {
    "best": "★ the fastest",
    "ours": "an artifact of posexport",
    "peer": "a peer (others' way)",
    "floor": "lower bound",
}


def _bar(each: Comparison, row: Row, best: bool, with_file: bool) -> Bar:
    spread, ratio = row.result["seconds"], row.ratio("torch")
    text = seconds(row.median) + (f" · {times(ratio['median'])} torch" if ratio and row.role != "torch" else "")
    look = "best" if best else "peer" if row.role else "ours"
    return Bar(
        name=("★ " if best else "") + each.name(row, with_file), text=text, value=row.median, low=spread["p10"],
        high=max(spread["p90"], row.median), look=look,
    )  # fmt: skip


def _sweep_of(each: Comparison) -> tuple[str, str]:
    return each.key, each.where.split(":")[0]


def _sweeps(found: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """The scenarios of one kind, by block: prefill at several lengths and the like."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in found:
        kind, _, size = each.where.partition(":")
        if kind in _UNITS and size.isdecimal() and len(size) < _DIGITS:
            groups.setdefault(_sweep_of(each), []).append(each)
    return groups


_CURVES = (
    "Both axes are logarithmic; lower is faster. Of a peer that was timed beside several files, the fastest is drawn."
)


def _curves(found: Sequence[Comparison]) -> Iterator[Figure]:
    for (_, kind), group in _sweeps(found).items():
        if len(group) < 3:
            continue
        block = group[0].block
        series: dict[str, dict[float, float]] = {}
        roles: dict[str, str] = {}
        for each in sorted(group, key=lambda each: int(each.where.split(":")[1])):
            for row in (row for row in each.rows if row.timed):
                own, at = series.setdefault(each.name(row), {}), float(each.where.split(":")[1])
                own[at] = min(row.median, own.get(at, row.median))
                roles[each.name(row)] = row.role
        names = sorted(series, key=lambda name: bool(roles[name]))
        looks = {name: (at, 1 if roles[name] == "lower_bound" else 0) for at, name in enumerate(names)}
        curves = [
            Curve(name=name, x=tuple(own), y=tuple(own.values()), look=looks[name])
            for name in names
            if (own := series[name])
        ]
        title = f"{block}: {kind} over a sweep"
        sizes = sorted({x for own in series.values() for x in own})
        svg = draw_lines(
            title, curves, axes=(_UNITS[kind], "median time"), kinds=(LOG if min(sizes) > 0 else LINEAR, LOG),
            show=brief, marks=sizes,
        )  # fmt: skip
        legend = tuple((swatch(looks[name]), name) for name in names)
        yield Figure(title=title, svg=svg, legend=legend, note=_CURVES)


_COLUMNS = (
    "comparison", "candidate", "state", "median", "p10", "p90", "p99", "× torch eager", "interval", "× lower bound",
    "interval", "tokens/s", "memory", "load", "build", "note",
)  # fmt: skip


def _table(found: Sequence[Comparison]) -> Table:
    ran = [(each, row) for each in found for row in sorted(each.rows, key=_order) if row.result["state"] != NOT_RUN]
    return trimmed(
        Table(
            caption="Every timing", columns=_COLUMNS, rows=tuple(_row(*pair) for pair in ran), heads=2,
            right=tuple(range(3, 15)), folded=f"Every timing: {plural(len(ran), 'row')}",
        )
    )  # fmt: skip


def _absent(found: Sequence[Comparison]) -> Iterator[Table]:
    """What was not run, each reason once for each candidate."""
    counted = Counter(
        (each.name(row), row.result.get("reason") or "no reason was given")
        for each in found
        for row in each.rows
        if row.result["state"] == NOT_RUN
    )
    rows = tuple(
        (Cell(text=name), Cell(text=reason), number(str(count), count)) for (name, reason), count in counted.items()
    )
    if rows:
        yield Table(
            caption="Not timed", columns=("candidate", "reason", "times"), rows=rows, right=(2,),
            folded=f"What was not timed, and why: {plural(len(rows), 'row')}",
        )  # fmt: skip


def _order(row: Row) -> tuple[bool, float]:
    return not row.timed, row.median if row.timed else 0.0


def _row(each: Comparison, row: Row) -> tuple[Cell, ...]:
    result = row.result
    spread = result.get("seconds") or {}
    shown = [number(seconds(spread[key]), spread[key]) if spread.get(key) else Cell(text="–")
             for key in ("median", "p10", "p90", "p99")]  # fmt: skip
    for peer in ("torch", "lower_bound"):
        ratio = row.ratio(peer)
        low_high = span(ratio) if ratio else "–"
        shown += [number(times(ratio["median"]), ratio["median"]) if ratio else Cell(text="–"), Cell(text=low_high)]
    speed, memory = result.get("tokens_per_second"), result.get("memory")
    shown += [number(f"{speed:,.0f}", speed) if speed else Cell(text="–")]
    shown += [number(f"{memory / 1e6:,.1f} MB", memory) if memory else Cell(text="–")]
    for key in ("load_seconds", "build_seconds"):
        shown.append(number(seconds(result[key]), result[key]) if result.get(key) else Cell(text="–"))
    tone = {"failed": "bad", "not run": "away"}.get(result["state"], "")
    told = "; ".join(text for text in (result.get("reason"), result.get("note")) if text)
    return (
        Cell(text=f"{each.block}, {each.where}"), Cell(text=each.name(row)), Cell(text=result["state"], tone=tone),
        *shown, Cell(text=told),
    )  # fmt: skip


def _findings(results: Sequence[Result], found: Sequence[Comparison]) -> Iterator[Finding]:
    for each in found:
        for row in each.rows:
            if not row.timed:
                state = FAILED if row.result["state"] == "failed" else NOT_RUN
                reason = row.result.get("reason") or "no reason was given"
                cuda = row.role and row.runtime.endswith("-cuda")
                yield Finding(state=state, who="peers on CUDA" if cuda else row.runtime, reason=reason, where="bench")
    for result in results:
        yield from regressions.findings(result)
        for left in result.data.get("left_out") or ():
            yield Finding(state=NOT_RUN, who=left["scenario"], reason=left["reason"], where="bench")


def _machines(results: Sequence[Result]) -> Iterator[Table]:
    """What each file was measured on; only facts that are known."""
    facts: dict[str, list[str]] = {}
    for at, result in enumerate(results):
        machine = facts_of(result.data)
        own = {"file": result.data["file"], "sha256": result.data.get("sha256"), "rounds": result.data.get("rounds")}
        own |= {"threads": result.data.get("threads"), "machine_load": f"{result.data.get('busy') or 0:.0%}", **machine}
        for key, value in own.items():
            facts.setdefault(key, [""] * len(results))[at] = fact(value)
    rows = tuple(cells(key.replace("_", " "), *values) for key, values in facts.items() if any(values))
    yield Table(
        caption="What it was measured on", columns=("", *(result.name for result in results)), rows=rows,
        folded="The machine, versions and settings of each run",
    )  # fmt: skip
