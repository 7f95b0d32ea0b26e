"""The three boxes on top: what is fastest, what is wrong, and what was not run, each found in every result at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from posexport.report.page import machine_load
from posexport.report.page.blocks import Box, Point, listed, plural

FAILED, SLOWER, REFUSED, NOT_RUN, CARE = "failed", "slower", "refused", "not run", "care"
SHOWN = 5
"""Points that a box shows at once."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that a box may say: `who` (a runtime, mostly) is in `state` for `reason`; `where` it was found.

    `state` is failed, slower (a regression), refused, not run or care (a result that means less than it seems). `count`
    is how many results it stands for; `cause` is what brought it about, where that is known, and leads.
    """

    state: str
    who: str
    reason: str
    where: str
    count: int = 1
    cause: str = ""


@attrs.frozen(kw_only=True)
class Found:
    """What one kind of result adds to the boxes: findings, points about the fastest, and how much was `checked`.

    `chosen` are points about what was chosen by something else than its time. Of the checks, `by_tune` are tune's own
    on what it chose; `stale` ones, of other bytes than the file on the page, are not among them. `busy` are the files
    that were timed on a busy machine, with the share of the CPU that other work took.
    """

    findings: tuple[Finding, ...] = ()
    fastest: tuple[Point, ...] = ()
    chosen: tuple[Point, ...] = ()
    checked: int = 0
    by_tune: int = 0
    stale: int = 0
    timed: int = 0
    machine_load: tuple[tuple[str, float], ...] = ()


def boxes(found: Sequence[Found]) -> tuple[Box, ...]:
    """Fastest, wrong, not run: always all three, in this order."""
    findings = [finding for each in found for finding in each.findings]
    return (_fastest(found, findings), _wrong(found, findings), _not_run(findings))


def _box(points: Sequence[Point], more: Sequence[Point] = (), more_said: str = "", **rest: str) -> Box:
    """A box that shows the first points; behind the others stand `more`, which are never shown at once."""
    shown, closed = points[:SHOWN], points[SHOWN:]
    said = [f"and {len(closed):,} more"] * bool(closed) + [more_said] * bool(more)
    return Box(points=tuple(shown), rest=(*closed, *more), rest_title="; ".join(said), **rest)


def _fastest(found: Sequence[Found], findings: list[Finding]) -> Box:
    fastest = [point for each in found for point in each.fastest]
    chosen = [point for each in found for point in each.chosen]
    shares = [share for each in found for share in each.machine_load]
    if fastest:
        several = f"The fastest in each of {plural(len(fastest), 'comparison')}:"
        verdict = several if len(fastest) > 1 else "One comparison was timed:"
    else:
        timed = any(each.timed for each in found)
        said = "Nothing that was timed got through" if timed else "Nothing was timed"
        said = "Nothing was chosen by its time" if chosen else said
        verdict = f"{said}, so nothing is known about speed."
    return _box(
        [*([machine_load.point(shares)] if shares else []), *fastest, *chosen, *_points(findings, CARE)],
        id="fastest", title="What is fastest", mark="★" if fastest else "·", tone="good" if fastest else "",
        verdict=verdict,
    )  # fmt: skip


def _wrong(found: Sequence[Found], findings: list[Finding]) -> Box:
    bad = [each for state in (FAILED, SLOWER) for each in findings if each.state == state]
    checked, by_tune, stale = (sum(getattr(each, name) for each in found) for name in ("checked", "by_tune", "stale"))
    counts = {state: sum(each.count for each in bad if each.state == state) for state in (FAILED, SLOWER)}
    some = "" if by_tune == checked else f"{by_tune:,} of them "
    own = f", {some}by tune itself" if by_tune else ""
    points = _points(bad, FAILED, SLOWER)
    if bad:
        failed = f"{plural(counts[FAILED], 'result')} failed"
        causes = len(_points(bad, FAILED))
        shared = "" if causes == counts[FAILED] else ", all by one fault" if causes == 1 else f", by {causes:,} faults"
        said = [failed + shared] * bool(counts[FAILED])
        said += [f"{counts[SLOWER]:,} got slower"] * bool(counts[SLOWER])
        verdict = " and ".join(said) + (f"; {plural(checked, 'check')} ran{own}" if checked else "")
    elif checked:
        verdict = f"Nothing: {f'all {checked:,} checks' if checked > 1 else 'the one check'} that ran passed{own}"
    else:
        verdict = "Nothing was checked here, so nothing is known to be wrong"
    verdict += f"; {plural(stale, 'stale verdict')} not counted, of other bytes than the file here" if stale else ""
    return _box(
        points,
        id="wrong", title="What is wrong", verdict=f"{verdict}.",
        mark="✗" if bad else "✓" if checked else "·", tone="bad" if bad else "good" if checked else "",
    )  # fmt: skip


def _not_run(findings: list[Finding]) -> Box:
    total, refused = (sum(each.count for each in findings if each.state == state) for state in (NOT_RUN, REFUSED))
    verdict = (
        f"{plural(total, 'result')} missing; these say nothing, good or bad:" if total else "Nothing was left out."
    )
    return _box(
        _points(findings, NOT_RUN), _points(findings, REFUSED), f"{refused:,} refused, each with its reason",
        id="not-run", title="What was not run", mark="·" if total else "✓", tone="", verdict=verdict,
    )  # fmt: skip


_LABELS = {CARE: "Take care", REFUSED: "Refused"}


def _points(findings: Sequence[Finding], *states: str) -> list[Point]:
    """A point for each cause or reason, those that matter to most results first; who it befell is told together."""
    by_reason: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        if each.state in states:
            by_reason.setdefault((each.state, each.cause or each.reason), []).append(each)
    found = []
    for (state, reason), group in by_reason.items():
        who = list(dict.fromkeys(each.who for each in group if each.who))
        where = list(dict.fromkeys(each.where for each in group if each.where))
        count = sum(each.count for each in group)
        wrong = state in (FAILED, SLOWER)
        label = listed(where) if wrong else _LABELS.get(state, "")
        if group[0].cause:
            point = Point(label=label, head=group[0].cause, text=f"{_befell(who, where)}; {group[0].reason}")
        else:
            text = reason if wrong or state == CARE or not where else f"{reason} ({listed(where)})"
            told = plural(count, "result") if count > 1 and state != CARE else ""
            tone = "care" if state == CARE else ""
            point = Point(label=label, head=listed(who, 5), figure=told, text=text, tone=tone)
        found.append((count, point))
    if FAILED not in states:
        found.sort(key=lambda each: -each[0])
    return [point for _, point in found]


def _befell(who: Sequence[str], where: Sequence[str]) -> str:
    """What one cause befell."""
    files = plural(len(where), "file") if len(where) > 1 else "one file"
    runtimes = len({name.partition(": ")[0] for name in who})
    return f"{files}, on {f'{runtimes} runtimes: ' if runtimes > 1 else ''}{listed(who, 5)}"
