"""Tuning on the page: what was tried, how far each got and why it stopped there, and the winner."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from posexport.bench.statistics import CONFIDENCE
from posexport.report.page import machine_load, sure
from posexport.report.page.blocks import (
    Block,
    Cell,
    Point,
    Prose,
    Section,
    Table,
    cells,
    fact,
    facts_of,
    number,
    plural,
    seconds,
    span,
    times,
    trimmed,
)
from posexport.report.page.results import Result
from posexport.report.page.summary import FAILED, NOT_RUN, REFUSED, Finding, Found

LATENCY = "latency"
"""The objective that makes the winner the fastest."""

NAMES = "A name is form/dtype/opset, then /target where the file is not portable, then options of the runtime."
PORTABLE = "portable"
COMPARE = (
    "Compare by × winner, which is taken over the rounds that both ran; medians are of different rounds, so a dropped "
    "candidate's may lie below the winner's."
)
STATES = {"won": "★ won", "raced": "raced", "dropped": "dropped", "left out": "left out",
          "failed": "✗ failed", "refused": "– refused", "not run": "· not run"}  # fmt: skip
_HOW = {"raced": "raced to the end", "dropped": "raced and dropped"}
_TWIN = "the same "
"""How the reason of a candidate begins whose graph is another one's."""

_TONES = {"won": "best", "failed": "bad", "refused": "refused", "not run": "away"}
_HALF = "slower half"
_TIMES = re.compile(r"\b(\d+(?:\.\d+)?)x\b")
_FOUND = {"failed": FAILED, "refused": REFUSED, "not run": NOT_RUN}


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section, and what the boxes learn from it."""
    if not results:
        return None, Found()
    tried = [each for result in results for each in result.data["candidates"]]
    lead = (
        f"{_counts(tried)}. Candidates race in rounds: what is slower by its interval, or in the slower half in the "
        f"median, drops out early; the others go on, and the last one wins. {NAMES}"
    )
    blocks: list[Block] = [*machine_load.warning(results)]
    blocks += [Prose(text=COMPARE)] if any(each.get("ratio") for each in tried) else []
    blocks += [table for result in results for table in _tables(result)]
    checked = sum(bool(each.get("verified")) or each["state"] == FAILED for each in tried)
    points = [(_by_time(result.data), point) for result in results if (point := _winner(result)) is not None]
    found = Found(
        findings=tuple(_findings(results)),
        fastest=tuple(point for timed, point in points if timed),
        chosen=tuple(point for timed, point in points if not timed),
        timed=sum(bool(each.get("seconds")) for each in tried),
        checked=checked,
        by_tune=checked,
        machine_load=machine_load.shares(results),
    )
    return Section(id="tune", title="Tuning", lead=lead, blocks=tuple(blocks)), found


def _state(each: dict[str, Any]) -> str:
    """Its state, those apart that were dropped before they raced: mostly the same graph as another."""
    return "left out" if each["state"] == "dropped" and not each.get("rounds") else str(each["state"])


def _counts(tried: Sequence[dict[str, Any]]) -> str:
    """How far the candidates got: what raced, then what was never timed, by why."""
    raced = Counter(_state(each) for each in tried if _raced(each))
    away = Counter(
        "the same as another" if (each.get("reason") or "").startswith(_TWIN) else _state(each)
        for each in tried
        if not _raced(each)
    )
    said = [", ".join(f"{raced[state]} {_HOW.get(state, state)}" for state in STATES if raced[state])]
    told = ", ".join(f"{count} {why}" if len(away) > 1 else why for why, count in away.items())
    said += [f"{away.total()} never timed ({told})"] if away else []
    return "; ".join(text for text in said if text)


def _raced(each: dict[str, Any]) -> bool:
    return bool(each.get("rounds")) or each["state"] == "won"


def _title(data: dict[str, Any]) -> str:
    scenario = f", {data['scenario']}" if data.get("scenario") else ""
    return f"{data['encoding']} for {data['target']}{scenario}, by {data['objective']}"


def _won(data: dict[str, Any]) -> dict[str, Any] | None:
    return next((each for each in data["candidates"] if each["state"] == "won"), None)


def _by_time(data: dict[str, Any]) -> bool:
    """Whether the winner won by its time, as the fastest does."""
    return data["objective"] == LATENCY and bool((_won(data) or {}).get("seconds"))


def _winner(result: Result) -> Point | None:
    won = _won(result.data)
    if won is None:
        return None
    spread = won.get("seconds")
    tried = result.data["candidates"]
    timed = sum(bool(each.get("seconds")) for each in tried)
    text = f"of {plural(len(tried), 'candidate')}"
    if result.data["objective"] != LATENCY:
        text = f"chosen by {result.data['objective']}, not by time, {text}"
    elif spread:
        text = f"of {timed} timed ({plural(len(tried), 'candidate')})"
    else:
        text = f"chosen {result.data.get('method') or 'without a race'}, not timed, {text}"
    how = _sure(result.data, won) if _by_time(result.data) else ""
    text += ", in a run of tune's own" if spread else ""
    if won.get("reason") and not how:
        text += f"; {won['reason'].removeprefix(str(result.data.get('method')) + ': ')}"
    text += f"; {_verified(won)}" if won.get("verified") else ""
    figure = seconds(spread["median"]) if spread else ""
    label = f"{machine_load.sign(result.data)}tuned {_title(result.data)}"
    return Point(label=label, head=_spelled(won), figure=figure, sure=how, text=text)


def _sure(data: dict[str, Any], won: dict[str, Any]) -> str:
    """How sure it is that the winner is the fastest: by the intervals of the others' ratios to it."""
    timed = [each for each in data["candidates"] if each.get("seconds") and each is not won]
    if not timed:
        return "nothing else was timed beside it"
    beside = [each for each in timed if each.get("ratio")]
    guessed = any(
        _HALF in (each.get("reason") or "") for each in timed if each not in beside
    )  # shared no round with it
    alike = sorted((each for each in beside if not _behind(each["ratio"])), key=_rank)
    ties = [f"{_spelled(each)} ({times(each['ratio']['median'])})" for each in alike if each["state"] == "raced"]
    early = sum(each["ratio"]["low"] <= 1 for each in alike if each["state"] != "raced")
    dropped = f"; {early} dropped early may be as fast" if early and ties else ""
    return sure.told(ties, unsure=bool(alike) or guessed or machine_load.is_busy(data)) + dropped


def _behind(ratio: dict[str, Any]) -> bool:
    """Whether a ratio to the winner shows that a candidate is slower."""
    return bool(ratio["low"] > 1 and ratio["confidence"] >= CONFIDENCE)


def _rank(each: dict[str, Any]) -> tuple[bool, float]:
    """The winner first, then by the ratio to it; those without one last."""
    return each["state"] != "won", (each.get("ratio") or {}).get("median", float("inf"))


def _verified(each: dict[str, Any]) -> str:
    return f"✓ verified by tune on {each['verified']}" if each.get("verified") else ""


def _spelled(each: dict[str, Any]) -> str:
    """A candidate in words."""
    if not each.get("form"):
        return str(each["name"])
    target = each.get("target") or PORTABLE
    said = [each["form"], each.get("dtype"), f"opset {each['opset']}" if each.get("opset") else None]
    said += [f"for {target}" if target != PORTABLE else None]
    options = (each.get("options") or {}).items()
    said += [name if value is True else f"{name} {fact(value)}" for name, value in options]
    return " · ".join(text for text in said if text)


_COLUMNS = ("candidate", "state", "×\u00a0winner", "interval", "median", "rounds", "kernels", "memory", "size", "why")


def _tables(result: Result) -> Iterator[Table]:
    """What raced, then what was never timed: refused, not run, or the same graph as another."""
    title, tried = machine_load.title([result.data], _title(result.data)), result.data["candidates"]
    raced = sorted(filter(_raced, tried), key=_rank)
    order = list(STATES)
    away = sorted((each for each in tried if not _raced(each)), key=lambda each: order.index(_state(each)))
    yield trimmed(
        Table(
            caption=title, columns=_COLUMNS, rows=tuple(map(_row, raced)), right=(2, 3, 4, 5, 6, 7, 8),
            note=f"Compared by: {result.data['method']}." if result.data.get("method") else "",
        )
    )  # fmt: skip
    if away:
        rows = tuple((row[0], row[1], row[-1]) for row in map(_row, away))
        folded = f"{plural(len(away), 'candidate')} never timed, and why"
        yield Table(
            caption=f"Never timed: {_title(result.data)}",
            columns=("candidate", "state", "why"),
            rows=rows,
            folded=folded,
        )
    yield _facts(result)


def _row(each: dict[str, Any]) -> tuple[Cell, ...]:
    spread, ratio = each.get("seconds"), each.get("ratio")
    kernels = each.get("kernels")
    count = kernels.get("count") if isinstance(kernels, dict) else kernels
    bytes_of = [
        number(f"{each[key] / 1e6:,.2f} MB", each[key]) if each.get(key) else Cell(text="–")
        for key in ("memory", "size")
    ]
    return (
        Cell(text=each["name"]),
        Cell(text=STATES[_state(each)], tone=_TONES.get(each["state"], "")),
        number(times(ratio["median"]), ratio["median"]) if ratio else Cell(text="–"),
        Cell(text=span(ratio) if ratio and each["state"] != "won" else "–"),
        number(seconds(spread["median"]), spread["median"]) if spread else Cell(text="–"),
        number(str(each["rounds"]), each["rounds"]) if each.get("rounds") else Cell(text="–"),
        Cell(text="–" if count is None else str(count)),
        *bytes_of,
        Cell(text="; ".join(text for text in (_verified(each), _why(each)) if text), more=each.get("reason") or ""),
    )


def _why(each: dict[str, Any]) -> str:
    """Why it stopped: not that it is slower where its interval doesn't say so. Ratios are written as the page does."""
    reason, ratio = each.get("reason") or "", each.get("ratio")
    if _state(each) == "dropped" and _HALF in reason and ratio and ratio["low"] <= 1 <= ratio["high"]:
        return f"{_HALF} in the median, after {plural(each['rounds'], 'round')}"
    return _TIMES.sub(r"\1×", reason)


def _facts(result: Result) -> Table:
    data = result.data
    facts = {**(data.get("cost") or {}), **facts_of(data)}
    rows = tuple(cells(key.replace("_", " "), text) for key, value in facts.items() if (text := fact(value)))
    return Table(
        caption=f"Cost and machine: {_title(data)}", columns=("", ""), rows=rows, folded="What it cost, and the machine"
    )


def _findings(results: Sequence[Result]) -> Iterator[Finding]:
    for result in results:
        for each in result.data["candidates"]:
            if each["state"] in _FOUND:
                reason = each.get("reason") or "no reason was given"
                yield Finding(state=_FOUND[each["state"]], who=each["name"], reason=reason, where="tune")
