"""The three boxes on top: what is fastest, what is wrong, and what was not run, each found in every result at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from posexport.page.blocks import Box, Point, listed, plural

FAILED, SLOWER, REFUSED, NOT_RUN, CARE = "failed", "slower", "refused", "not run", "care"
SHOWN = 6
"""Points that a box shows at once."""


BUSY = 0.2
"""From this share of the CPU taken by others, times mean little."""

BUSY_SAID = f"other work took more than {BUSY:.0%} of the CPU while they were timed: their times mean little"


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that a box may say: `who` (a runtime, mostly) is in `state` for `reason`; `where` it was found.

    `state` is failed, slower (a regression), refused, not run or care (a result that means less than it seems).
    `count` is how many results it stands for.
    """

    state: str
    who: str
    reason: str
    where: str
    count: int = 1


@attrs.frozen(kw_only=True)
class Found:
    """What one kind of result adds to the boxes: findings, points about the fastest, and how much was `checked`.

    `chosen` are points about what was chosen by something else than its time.
    """

    findings: tuple[Finding, ...] = ()
    fastest: tuple[Point, ...] = ()
    chosen: tuple[Point, ...] = ()
    checked: int = 0
    timed: int = 0


def boxes(found: Sequence[Found]) -> tuple[Box, ...]:
    """Fastest, wrong, not run: always all three, in this order."""
    findings = [finding for each in found for finding in each.findings]
    return (
        _fastest(found, _points(findings, CARE)),
        _wrong(found, findings),
        _not_run(findings),
    )


def _fastest(found: Sequence[Found], care: list[Point]) -> Box:
    points = [point for each in found for point in each.fastest]
    chosen = [point for each in found for point in each.chosen]
    title = "What is fastest"
    if not points:
        timed = any(each.timed for each in found)
        said = "Nothing that was timed got through" if timed else "Nothing was timed"
        said = "Nothing was chosen by its time" if chosen else said
        return Box(
            id="fastest",
            title=title,
            mark="·",
            tone="",
            verdict=f"{said}, so nothing is known about speed.",
            points=(*chosen, *care),
        )
    shown, rest = points[:SHOWN], points[SHOWN:]
    return Box(
        id="fastest",
        title=title,
        mark="★",
        tone="good",
        verdict=f"The fastest in each of {plural(len(points), 'comparison')}:"
        if len(points) > 1
        else "One comparison was timed:",
        points=(*shown, *chosen, *care),
        rest=tuple(rest),
        rest_title=f"{plural(len(rest), 'more comparison')}",
    )


def _wrong(found: Sequence[Found], findings: list[Finding]) -> Box:
    bad = [each for state in (FAILED, SLOWER) for each in findings if each.state == state]
    points = _points(bad, FAILED, SLOWER)
    refused = _points(findings, REFUSED)
    checked = sum(each.checked for each in found)
    counts = {state: sum(each.count for each in bad if each.state == state) for state in (FAILED, SLOWER)}
    if bad:
        said = [f"{counts[FAILED]:,} failed"] * bool(counts[FAILED])
        said += [f"{counts[SLOWER]:,} got slower"] * bool(counts[SLOWER])
        of = f"; {plural(checked, 'check')} ran" if checked else ""
        verdict = f"{' and '.join(said)}{of}."
    elif checked:
        verdict = f"Nothing: all {plural(checked, 'check')} that ran passed."
    else:
        verdict = "Nothing was checked here, so nothing is known to be wrong."
    total = sum(each.count for each in findings if each.state == REFUSED)
    return Box(
        id="wrong",
        title="What is wrong",
        mark="✗" if bad else "✓" if checked else "·",
        tone="bad" if bad else "good" if checked else "",
        verdict=verdict,
        points=tuple(points),
        rest=tuple(refused),
        rest_title=f"{total:,} refused, each with its reason",
    )


def _not_run(findings: list[Finding]) -> Box:
    points = _points(findings, NOT_RUN)
    total = sum(each.count for each in findings if each.state == NOT_RUN)
    verdict = (
        f"{plural(total, 'result')} missing; these say nothing, good or bad:" if total else "Nothing was left out."
    )
    shown, rest = points[:SHOWN], points[SHOWN:]
    return Box(
        id="not-run",
        title="What was not run",
        mark="·" if total else "✓",
        tone="",
        verdict=verdict,
        points=tuple(shown),
        rest=tuple(rest),
        rest_title=f"{plural(len(rest), 'more reason')}",
    )


def _points(findings: Sequence[Finding], *states: str) -> list[Point]:
    """A point for each reason, those that matter to most results first; who it befell is told together."""
    by_reason: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        if each.state in states:
            by_reason.setdefault((each.state, each.reason), []).append(each)
    found = []
    for (state, reason), group in by_reason.items():
        who = list(dict.fromkeys(each.who for each in group if each.who))
        where = list(dict.fromkeys(each.where for each in group if each.where))
        count = sum(each.count for each in group)
        wrong = state in (FAILED, SLOWER)
        text = reason if wrong or state == CARE or not where else f"{reason} ({listed(where)})"
        told = plural(count, "result") if count > 1 and state != CARE else ""
        label = "Take care" if state == CARE else listed(where) if wrong else ""
        found.append((count, Point(label=label, head=listed(who, 5), figure=told, text=text)))
    if FAILED not in states:
        found.sort(key=lambda each: -each[0])
    return [point for _, point in found]
