"""The three boxes at the top: what is fastest, what is wrong, and what was not run, from all results together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from posexport.bench.comparisons import Order
from posexport.bench.result import SLOWER, Benchmark
from posexport.bench.results import Result
from posexport.bench.tune.result import Result as Tuning
from posexport.report.page.blocks import Box, Point, Prose
from posexport.report.text import listed, plural
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN

CARE = "care"
TONES = {FAILED: "bad", REFUSED: "refused", NOT_RUN: "away"}
"""The tone of each state that is not passed."""

NO_REASON = "no reason was given"
SHOWN = 5
"""How many points a box shows at once."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing for a box: `who` (usually a runtime) is in `state` for `reason`. `where` says where it was found.

    `state` is failed, slower (a regression), refused, not run, or care (a result that means less than it seems).
    `count` is the number of results that it stands for. A known `cause` comes first.
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

    `chosen` are points about what was chosen by something other than time. `by_tune` is how many of the checks are
    tune's own. `stale` verdicts are about other bytes than the file on the page, and are not among the checks.
    `machine_load` has the files that were timed on a busy machine, with the share of the CPU that other work took.
    """

    findings: tuple[Finding, ...] = ()
    fastest: tuple[Point, ...] = ()
    chosen: tuple[Point, ...] = ()
    checked: int = 0
    by_tune: int = 0
    stale: int = 0
    timed: int = 0
    machine_load: tuple[tuple[str, float], ...] = ()


def busy_shares(results: Sequence[Result[Benchmark]] | Sequence[Result[Tuning]]) -> tuple[tuple[str, float], ...]:
    """The files that were timed on a busy machine, with the share of the CPU that other work took."""
    return tuple((result.name, result.data.machine_load) for result in results if result.data.busy)


def busy_points(files: Sequence[tuple[str, float]]) -> list[Point]:
    """The line above the winners, if some files were timed on a busy machine."""
    if not files:
        return []
    ends = dict.fromkeys(f"{end(share for _, share in files):.0%}" for end in (min, max))
    advice = "ratios hold roughly, absolute times don't; time again at rest"
    head = f"⚠ Other work took {' to '.join(ends)} of the CPU: {advice}"
    names = [f"{name} ({share:.0%})" for name, share in files] if len(files) > 1 else [files[0][0]]
    return [Point(head=head, text=f"in {listed(names)}", tone="care")]


def busy_warning(files: Sequence[tuple[str, float]]) -> list[Prose]:
    """The same as a paragraph above the times."""
    return [Prose(text=f"{point.head}.", tone="care", note=f"({point.text})") for point in busy_points(files)]


def confidence(orders: Mapping[Order, Sequence[str]], doubtful: bool, separate: bool = False) -> str:
    """How certain it is that a winner is the fastest.

    `orders` has the other candidates, with their figures, by how the winner compares with them. `doubtful` is set for
    other doubts, such as a busy machine, and `separate` for ties across separate runs.
    """
    starts: dict[Order, str] = {
        "tie": "too close to call against" if separate else "tie with",
        "inconclusive": "inconclusive against",
        "too few rounds": "too few rounds to rank it against",
    }
    texts = [f"{start} {listed(orders[order], 2)}" for order, start in starts.items() if orders.get(order)]
    return "; ".join(texts) or ("likely the fastest" if doubtful else "clearly the fastest")


def boxes(parts: Sequence[Highlights]) -> tuple[Box, ...]:
    """Fastest, wrong, not run: always all three, in this order."""
    findings = [finding for part in parts for finding in part.findings]
    return (_fastest(parts, findings), _wrong(parts, findings), _not_run(findings))


def _box(points: Sequence[Point], more: Sequence[Point] = (), more_title: str = "", **fields: str) -> Box:
    """A box that shows the first points. The others and `more` start closed."""
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
        known = "All that was timed failed" if any(part.timed for part in parts) else "Nothing was timed"
        verdict = f"{'Nothing was chosen by its time' if chosen else known}, so nothing is known about speed."
    points = [*busy_points(busy), *fastest, *chosen, *_points(findings, CARE)]
    mark, tone = ("★", "good") if fastest else ("·", "")
    return _box(points, id="fastest", title="What is fastest", mark=mark, tone=tone, verdict=verdict)


def _count(findings: Sequence[Finding], state: str) -> int:
    return sum(finding.count for finding in findings if finding.state == state)


def _wrong(parts: Sequence[Highlights], findings: list[Finding]) -> Box:
    failed, slower = _count(findings, FAILED), _count(findings, SLOWER)
    checked, by_tune, stale = (sum(getattr(part, name) for part in parts) for name in ("checked", "by_tune", "stale"))
    tuned = f", {'' if by_tune == checked else f'{by_tune:,} of them '}by tune itself" if by_tune else ""
    mark, tone = ("✗", "bad") if failed or slower else ("✓", "good") if checked else ("·", "")
    if failed or slower:
        faults = len(_points(findings, FAILED))
        shared = "" if faults == failed else ", all by one fault" if faults == 1 else f", by {faults:,} faults"
        texts = [f"{plural(failed, 'result')} failed{shared}"] * bool(failed)
        texts += [f"{slower:,} got slower"] * bool(slower)
        verdict = " and ".join(texts) + (f"; {plural(checked, 'check')} ran{tuned}" if checked else "")
    elif checked:
        verdict = f"Nothing: {f'all {checked:,} checks' if checked > 1 else 'the one check'} that ran passed{tuned}"
    else:
        verdict = "Nothing was checked here, so nothing is known to be wrong"
    verdict += f"; {plural(stale, 'stale verdict')} not counted, of other bytes than the file here" if stale else ""
    points = _points(findings, FAILED, SLOWER)
    return _box(points, id="wrong", title="What is wrong", verdict=f"{verdict}.", mark=mark, tone=tone)


def _not_run(findings: list[Finding]) -> Box:
    total, more_title = _count(findings, NOT_RUN), f"{_count(findings, REFUSED):,} refused, each with its reason"
    missing = f"{plural(total, 'result')} missing; these are neither good nor bad:"
    mark, verdict = ("·", missing) if total else ("✓", "Nothing was left out.")
    fields = {"id": "not-run", "title": "What was not run", "mark": mark, "tone": "", "verdict": verdict}
    return _box(_points(findings, NOT_RUN), _points(findings, REFUSED), more_title, **fields)


def _points(findings: Sequence[Finding], *states: str) -> list[Point]:
    """A point for each cause or reason. Unless failed ones are asked for, those with the most results come first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for state in states:
        for finding in findings:
            if finding.state == state:
                groups.setdefault((state, finding.cause or finding.reason), []).append(finding)
    if FAILED not in states:
        groups = dict(sorted(groups.items(), key=lambda item: -sum(finding.count for finding in item[1])))
    return [_point(state, group) for (state, _), group in groups.items()]


def _point(state: str, group: Sequence[Finding]) -> Point:
    """One line for findings of one state with the same cause or reason."""
    who = list(dict.fromkeys(finding.who for finding in group if finding.who))
    where = list(dict.fromkeys(finding.where for finding in group if finding.where))
    reason, cause, count = group[0].reason, group[0].cause, sum(finding.count for finding in group)
    wrong, care = state in (FAILED, SLOWER), state == CARE
    label = listed(where) if wrong else {CARE: "Take care", REFUSED: "Refused"}.get(state, "")
    if cause:
        files = plural(len(where), "file") if len(where) > 1 else "one file"
        runtimes = len({name.partition(": ")[0] for name in who})
        scope = f"{files}, on {f'{runtimes} runtimes: ' if runtimes > 1 else ''}{listed(who, 5)}"
        return Point(label=label, head=cause, text=f"{scope}; {reason}")
    text = reason if wrong or care or not where else f"{reason} ({listed(where)})"
    figure = plural(count, "result") if count > 1 and not care else ""
    return Point(label=label, head=listed(who, 5), figure=figure, text=text, tone="care" if care else "")
