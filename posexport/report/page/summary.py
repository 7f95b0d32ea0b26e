"""The three boxes on top: what is fastest, what is wrong, and what was not run, from all results at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from posexport.bench.result import SLOWER
from posexport.report.page import machine_load
from posexport.report.page.blocks import Box, Point, listed, plural
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PASSED

CARE = "care"
MARKS = {PASSED: "✓", FAILED: "✗", REFUSED: "–", NOT_RUN: "·"}
TONES = {FAILED: "bad", REFUSED: "refused", NOT_RUN: "away"}
"""A mark and a tone for each state."""

NO_REASON = "no reason was given"
SHOWN = 5
"""Points that a box shows at once."""

_LABELS = {CARE: "Take care", REFUSED: "Refused"}


@attrs.frozen(kw_only=True)
class Finding:
    """One thing for a box: `who` (a runtime, mostly) is in `state` for `reason`; `where` it was found.

    `state` is failed, slower (a regression), refused, not run or care (a result that means less than it seems). `count`
    is the number of results that it stands for; a known `cause` leads.
    """

    state: str
    who: str
    reason: str
    where: str = ""
    count: int = 1
    cause: str = ""


@attrs.frozen(kw_only=True)
class Highlights:
    """What one kind of result adds to the boxes: findings, points about the fastest, and the number `checked`.

    `chosen` are points about what was chosen by something other than time. Of the checks, `by_tune` are tune's own;
    `stale` ones, of other bytes than the file on the page, are not among them. `machine_load` has the files that were
    timed on a busy machine, with the share of the CPU that other work took.
    """

    findings: tuple[Finding, ...] = ()
    fastest: tuple[Point, ...] = ()
    chosen: tuple[Point, ...] = ()
    checked: int = 0
    by_tune: int = 0
    stale: int = 0
    timed: int = 0
    machine_load: tuple[tuple[str, float], ...] = ()


def boxes(parts: Sequence[Highlights]) -> tuple[Box, ...]:
    """Fastest, wrong, not run: always all three, in this order."""
    findings = [finding for part in parts for finding in part.findings]
    return (_fastest(parts, findings), _wrong(parts, findings), _not_run(findings))


def _box(points: Sequence[Point], more: Sequence[Point] = (), more_title: str = "", **fields: str) -> Box:
    """A box that shows the first points; the others and `more` start closed."""
    shown, closed = points[:SHOWN], points[SHOWN:]
    titles = [f"and {len(closed):,} more"] * bool(closed) + [more_title] * bool(more)
    return Box(points=tuple(shown), closed=(*closed, *more), closed_title="; ".join(titles), **fields)


def _fastest(parts: Sequence[Highlights], findings: list[Finding]) -> Box:
    fastest = [point for part in parts for point in part.fastest]
    chosen = [point for part in parts for point in part.chosen]
    busy = [share for part in parts for share in part.machine_load]
    if len(fastest) > 1:
        verdict = f"The fastest in each of {plural(len(fastest), 'comparison')}:"
    elif fastest:
        verdict = "One comparison was timed:"
    else:
        timed = any(part.timed for part in parts)
        known = "All that was timed failed" if timed else "Nothing was timed"
        verdict = f"{'Nothing was chosen by its time' if chosen else known}, so nothing is known about speed."
    return _box(
        [*([machine_load.point(busy)] if busy else []), *fastest, *chosen, *_points(findings, CARE)],
        id="fastest", title="What is fastest", mark="★" if fastest else "·", tone="good" if fastest else "",
        verdict=verdict,
    )  # fmt: skip


def _wrong(parts: Sequence[Highlights], findings: list[Finding]) -> Box:
    counts = {state: sum(each.count for each in findings if each.state == state) for state in (FAILED, SLOWER)}
    checked, by_tune, stale = (sum(getattr(part, name) for part in parts) for name in ("checked", "by_tune", "stale"))
    tuned = f", {'' if by_tune == checked else f'{by_tune:,} of them '}by tune itself" if by_tune else ""
    bad = any(counts.values())
    if bad:
        faults, failed = len(_points(findings, FAILED)), counts[FAILED]
        shared = "" if faults == failed else ", all by one fault" if faults == 1 else f", by {faults:,} faults"
        texts = [f"{plural(failed, 'result')} failed{shared}"] * bool(failed)
        texts += [f"{counts[SLOWER]:,} got slower"] * bool(counts[SLOWER])
        verdict = " and ".join(texts) + (f"; {plural(checked, 'check')} ran{tuned}" if checked else "")
    elif checked:
        verdict = f"Nothing: {f'all {checked:,} checks' if checked > 1 else 'the one check'} that ran passed{tuned}"
    else:
        verdict = "Nothing was checked here, so nothing is known to be wrong"
    verdict += f"; {plural(stale, 'stale verdict')} not counted, of other bytes than the file here" if stale else ""
    return _box(
        _points(findings, FAILED, SLOWER), id="wrong", title="What is wrong", verdict=f"{verdict}.",
        mark="✗" if bad else "✓" if checked else "·", tone="bad" if bad else "good" if checked else "",
    )  # fmt: skip


def _not_run(findings: list[Finding]) -> Box:
    total, refused = (sum(each.count for each in findings if each.state == state) for state in (NOT_RUN, REFUSED))
    missing = f"{plural(total, 'result')} missing; these are neither good nor bad:"
    return _box(
        _points(findings, NOT_RUN), _points(findings, REFUSED), f"{refused:,} refused, each with its reason",
        id="not-run", title="What was not run", mark="·" if total else "✓", tone="",
        verdict=missing if total else "Nothing was left out.",
    )  # fmt: skip


def _points(findings: Sequence[Finding], *states: str) -> list[Point]:
    """A point for each cause or reason; where nothing failed, those that stand for most results come first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(
        (each for each in findings if each.state in states), key=lambda each: states.index(each.state)
    ):
        groups.setdefault((finding.state, finding.cause or finding.reason), []).append(finding)
    points = []
    for (state, reason), group in groups.items():
        who = list(dict.fromkeys(finding.who for finding in group if finding.who))
        where = list(dict.fromkeys(finding.where for finding in group if finding.where))
        count, wrong = sum(finding.count for finding in group), state in (FAILED, SLOWER)
        label = listed(where) if wrong else _LABELS.get(state, "")
        if group[0].cause:
            point = Point(label=label, head=reason, text=f"{_scope(who, where)}; {group[0].reason}")
        else:
            point = Point(
                label=label, head=listed(who, 5), figure=plural(count, "result") if count > 1 and state != CARE else "",
                text=reason if wrong or state == CARE or not where else f"{reason} ({listed(where)})",
                tone="care" if state == CARE else "",
            )  # fmt: skip
        points.append((count, point))
    if FAILED not in states:
        points.sort(key=lambda pair: -pair[0])
    return [point for _, point in points]


def _scope(who: Sequence[str], where: Sequence[str]) -> str:
    """The files and runtimes that one cause made fail."""
    files = plural(len(where), "file") if len(where) > 1 else "one file"
    runtimes = len({name.partition(": ")[0] for name in who})
    return f"{files}, on {f'{runtimes} runtimes: ' if runtimes > 1 else ''}{listed(who, 5)}"
