"""The three boxes on top: what is fastest, what is wrong, and what was not run, each found in every result at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from posexport.page.blocks import Box, Point, listed, plural

FAILED, SLOWER, REFUSED, NOT_RUN, CARE, BUSY = "failed", "slower", "refused", "not run", "care", "busy"
SHOWN = 5
"""Points that a box shows at once."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that a box may say: `who` (a runtime, mostly) is in `state` for `reason`; `where` it was found.

    `state` is failed, slower (a regression), refused, not run, care (a result that means less than it seems) or busy
    (times that a busy machine spoilt). `count` is how many results it stands for, `detail` what differs between results
    that it befell for one reason.
    """

    state: str
    who: str
    reason: str
    where: str
    count: int = 1
    detail: str = ""


@attrs.frozen(kw_only=True)
class Found:
    """What one kind of result adds to the boxes: findings, points about the fastest, and how much was `checked`.

    `chosen` are points about what was chosen by something else than its time. Of the checks, `by_tune` are tune's own
    on what it chose; `stale` ones, of other bytes than the file on the page, are not among them.
    """

    findings: tuple[Finding, ...] = ()
    fastest: tuple[Point, ...] = ()
    chosen: tuple[Point, ...] = ()
    checked: int = 0
    by_tune: int = 0
    stale: int = 0
    timed: int = 0


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
    if fastest:
        several = f"The fastest in each of {plural(len(fastest), 'comparison')}:"
        verdict = several if len(fastest) > 1 else "One comparison was timed:"
    else:
        timed = any(each.timed for each in found)
        said = "Nothing that was timed got through" if timed else "Nothing was timed"
        said = "Nothing was chosen by its time" if chosen else said
        verdict = f"{said}, so nothing is known about speed."
    return _box(
        [*_points(findings, BUSY), *fastest, *chosen, *_points(findings, CARE)],
        id="fastest", title="What is fastest", mark="★" if fastest else "·", tone="good" if fastest else "",
        verdict=verdict,
    )  # fmt: skip


def _wrong(found: Sequence[Found], findings: list[Finding]) -> Box:
    bad = [each for state in (FAILED, SLOWER) for each in findings if each.state == state]
    checked, by_tune, stale = (sum(getattr(each, name) for each in found) for name in ("checked", "by_tune", "stale"))
    counts = {state: sum(each.count for each in bad if each.state == state) for state in (FAILED, SLOWER)}
    some = "" if by_tune == checked else f"{by_tune:,} of them "
    own = f", {some}by tune itself" if by_tune else ""
    if bad:
        said = [f"{counts[FAILED]:,} failed"] * bool(counts[FAILED])
        said += [f"{counts[SLOWER]:,} got slower"] * bool(counts[SLOWER])
        verdict = " and ".join(said) + (f"; {plural(checked, 'check')} ran{own}" if checked else "")
    elif checked:
        verdict = f"Nothing: {f'all {checked:,} checks' if checked > 1 else 'the one check'} that ran passed{own}"
    else:
        verdict = "Nothing was checked here, so nothing is known to be wrong"
    verdict += f"; {plural(stale, 'stale verdict')} not counted, of other bytes than the file here" if stale else ""
    return _box(
        _points(bad, FAILED, SLOWER),
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


_LABELS = {CARE: "Take care", BUSY: "⚠ Take care", REFUSED: "Refused"}


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
        care, wrong = state in (CARE, BUSY), state in (FAILED, SLOWER)
        text = reason if wrong or care or not where else f"{reason} ({listed(where)})"
        text = "; ".join([text, *[each.detail for each in group if each.detail][:1]])
        told = plural(count, "result") if count > 1 and not care else ""
        label = listed(where) if wrong else _LABELS.get(state, "")
        tone = "care" if care else ""
        found.append((count, Point(label=label, head=listed(who, 5), figure=told, text=text, tone=tone)))
    if FAILED not in states:
        found.sort(key=lambda each: -each[0])
    return [point for _, point in found]
