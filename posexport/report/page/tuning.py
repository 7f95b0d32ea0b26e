"""Tuning on the page: what was tried, how far each candidate got and why it stopped there, and the winner."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from posexport.bench.comparisons import Order, order_of
from posexport.bench.results import Result
from posexport.bench.tune.result import DROPPED, FAILED, NOT_RUN, RACED, REFUSED, SAME_GRAPH, SLOWER_HALF, WON, Row
from posexport.bench.tune.result import Result as Tuning
from posexport.jsondata import unstructure
from posexport.report.page.blocks import Block, Cell, Point, Prose, Section, Table, cells, number, ratio_cells
from posexport.report.page.summary import NO_REASON, Finding, Highlights, busy_shares, busy_warning, confidence
from posexport.report.text import fact, megabytes, plural, seconds, times

LATENCY = "latency"
"""The objective whose winner is the fastest."""

LEFT_OUT = "left out"
STATES = {WON: "★ won", RACED: "raced", DROPPED: "dropped", LEFT_OUT: LEFT_OUT, FAILED: "✗ failed",
          REFUSED: "– refused", NOT_RUN: "· not run"}  # fmt: skip
_TONES = {WON: "best", FAILED: "bad", REFUSED: "refused", NOT_RUN: "away"}
_COUNTS = {RACED: "raced to the end", DROPPED: "raced and dropped"}
_LEAD = (
    "Candidates race in rounds: those slower by their interval, or in the slower half in the median, drop out early; "
    "the others go on, and the last one wins. A name is form/dtype/opset, then /target where the file is not portable, "
    "then options of the runtime."
)
_COMPARE = (
    "Compare by × winner, which is taken over the rounds that both ran; medians are of different rounds, so a dropped "
    "candidate's may lie below the winner's."
)


def section(results: Sequence[Result[Tuning]]) -> tuple[Section, Highlights]:
    """The section, and its highlights."""
    tried, busy = [row for result in results for row in result.data.candidates], busy_shares(results)
    blocks: list[Block] = [*busy_warning(busy)]
    blocks += [Prose(text=_COMPARE)] if any(row.ratio for row in tried) else []
    blocks += [table for result in results for table in _tables(result.data)]
    checked = sum(bool(row.verified) or row.state == FAILED for row in tried)
    winners = [(result.data, row) for result in results for row in result.data.candidates if row.state == WON]
    by_time = [tuning.objective == LATENCY and won.seconds is not None for tuning, won in winners]
    points = [_point(tuning, won) for tuning, won in winners]
    away = (row for row in tried if row.state in (FAILED, REFUSED, NOT_RUN))
    findings = [Finding(state=row.state, who=row.name, reason=row.reason or NO_REASON, where="tune") for row in away]
    return Section(id="tune", title="Tuning", lead=f"{_counts(tried)}. {_LEAD}", blocks=blocks), Highlights(
        findings=tuple(findings),
        fastest=tuple(itertools.compress(points, by_time)),
        chosen=tuple(itertools.compress(points, (not fastest for fastest in by_time))),
        timed=sum(bool(row.seconds) for row in tried),
        checked=checked,
        by_tune=checked,
        machine_load=busy,
    )


def _state(row: Row) -> str:
    """Its state. One that was dropped before it raced is left out, mostly because its graph is another candidate's."""
    return LEFT_OUT if row.state == DROPPED and not row.rounds else row.state


def _raced(row: Row) -> bool:
    return bool(row.rounds) or row.state == WON


def _counts(tried: Sequence[Row]) -> str:
    """The number of candidates by how far they got: those that raced, then those that were never timed."""
    raced = Counter(_state(row) for row in tried if _raced(row))
    away = Counter(
        "the same as another" if row.reason_code == SAME_GRAPH else _state(row) for row in tried if not _raced(row)
    )
    texts = [", ".join(f"{raced[state]} {_COUNTS.get(state, state)}" for state in STATES if raced[state])]
    causes = ", ".join(f"{count} {cause}" if len(away) > 1 else cause for cause, count in away.items())
    texts += [f"{away.total()} never timed ({causes})"] if away else []
    return "; ".join(filter(None, texts))


def _title(tuning: Tuning) -> str:
    scenario = f", {tuning.scenario}" if tuning.scenario else ""
    return f"{tuning.encoding} for {tuning.target}{scenario}, by {tuning.objective}"


def _point(tuning: Tuning, won: Row) -> Point:
    tried, certainty = plural(len(tuning.candidates), "candidate"), ""
    if tuning.objective != LATENCY:
        text = f"chosen by {tuning.objective}, not by time, of {tried}"
    elif won.seconds:
        text = f"of {sum(bool(row.seconds) for row in tuning.candidates)} timed ({tried})"
        certainty = _confidence(tuning, won)
    else:
        text = f"chosen {tuning.method or 'without a race'}, not timed, of {tried}"
    text += ", in a run of tune's own" if won.seconds else ""
    text += f"; {won.reason}" if won.reason and not certainty else ""
    text += f"; {_verified(won)}" if won.verified else ""
    label = f"{'⚠ ' * tuning.busy}tuned {_title(tuning)}"
    figure = seconds(won.seconds.median) if won.seconds else ""
    return Point(label=label, head=_name(won), confidence=certainty, text=text, figure=figure)


def _confidence(tuning: Tuning, won: Row) -> str:
    """How certain it is that the winner is the fastest, by the intervals of the others' ratios to it."""
    timed = sorted((row for row in tuning.candidates if row.seconds and row is not won), key=_rank)
    if not timed:
        return "nothing else was timed beside it"
    orders: dict[Order, list[str]] = {}
    early, doubtful = 0, tuning.busy
    for row in timed:
        if row.ratio is None:
            doubtful |= row.reason_code == SLOWER_HALF  # it shared no round with the winner
            continue
        order = order_of(row.ratio, inverted=True)
        if row.state == RACED:
            orders.setdefault(order, []).append(f"{_name(row)} ({times(row.ratio.median)})")
        early += row.state != RACED and order == "tie"
        doubtful |= order != "faster"
    text = confidence(orders, doubtful=doubtful)
    return text + (f"; {early} dropped early may be as fast" if early and orders.get("tie") else "")


def _rank(row: Row) -> tuple[bool, float]:
    """The sort key: the winner first, then by the ratio to it, then rows without a ratio."""
    return row.state != WON, row.ratio.median if row.ratio else float("inf")


def _verified(row: Row) -> str:
    return f"✓ verified by tune on {row.verified}" if row.verified else ""


def _name(row: Row) -> str:
    options = (name if value is True else f"{name} {fact(value)}" for name, value in row.options.items())
    target = [f"for {row.target}"] if row.target != "portable" else []
    promise = [f"{row.positions} positions"] if row.positions != "data" else []
    return " · ".join([row.form, row.dtype, f"opset {row.opset}", *target, *promise, *options])


_COLUMNS = ("candidate", "state", "×\u00a0winner", "interval", "median", "rounds", "kernels", "memory", "size", "why")


def _tables(tuning: Tuning) -> Iterator[Table]:
    """What raced, then what was never timed: refused, not run, or the same graph as another."""
    title, order = _title(tuning), list(STATES)
    raced = sorted(filter(_raced, tuning.candidates), key=_rank)
    note = f"Compared by: {tuning.method}." if tuning.method else ""
    caption = "⚠ busy machine: " * tuning.busy + title
    yield Table(caption=caption, columns=_COLUMNS, rows=map(_row, raced), note=note).trimmed()
    away = sorted((row for row in tuning.candidates if not _raced(row)), key=lambda row: order.index(_state(row)))
    if away:
        yield Table(
            caption=f"Never timed: {title}",
            columns=("candidate", "state", "why"),
            rows=[(row[0], row[1], row[-1]) for row in map(_row, away)],
            folded=f"{plural(len(away), 'candidate')} never timed, and why",
        )
    facts = {**unstructure(tuning.cost), **tuning.machine}
    yield Table.of_facts(f"Cost and machine: {title}", "What it cost, and the machine", [("", facts)])


def _row(row: Row) -> tuple[Cell, ...]:
    ratio, interval = ratio_cells(row.ratio)
    return cells(
        row.name,
        Cell(STATES[_state(row)], tone=_TONES.get(row.state, "")),
        ratio,
        None if row.state == WON else interval,
        number(row.seconds.median if row.seconds else None, seconds),
        number(row.rounds or None),
        number(row.kernels.get("count") if row.kernels else None),
        number(row.memory, megabytes),
        number(row.size, megabytes),
        Cell("; ".join(filter(None, (_verified(row), _why(row)))), more=row.reason),
    )


def _why(row: Row) -> str:
    """Why it stopped. One that was only in the slower half is not called slower."""
    if row.reason_code == SLOWER_HALF and row.ratio and row.ratio.low <= 1 <= row.ratio.high:
        return f"slower half in the median, after {plural(row.rounds, 'round')}"
    return row.reason
