"""Tuning on the page: what was tried, how far each got and why it stopped there, and the winner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from posexport.page import busy
from posexport.page.blocks import (
    Block,
    Cell,
    Point,
    Section,
    Table,
    cells,
    fact,
    number,
    plural,
    seconds,
    span,
    times,
    trimmed,
)
from posexport.page.boxes import FAILED, NOT_RUN, REFUSED, Finding, Found
from posexport.page.links import Result

LATENCY = "latency"
"""The objective that makes the winner the fastest."""

NAMES = "A name is form/dtype/opset, then /target where the file is not portable, then options of the runtime."
PORTABLE = "portable"
STATES = {"won": "★ won", "raced": "raced", "dropped": "dropped", "failed": "✗ failed", "refused": "– refused",
          "not run": "· not run"}  # fmt: skip
_TONES = {"won": "best", "failed": "bad", "refused": "refused", "not run": "away"}
_FOUND = {"failed": FAILED, "refused": REFUSED, "not run": NOT_RUN}


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section, and what the boxes learn from it."""
    if not results:
        return None, Found()
    tried = [each for result in results for each in result.data["candidates"]]
    counted = Counter(each["state"] for each in tried)
    lead = (
        f"{', '.join(f'{counted[state]} {state}' for state in STATES if counted[state])}. Candidates race in rounds: "
        "those that are clearly slower drop out early, the others go on, and the last one wins. "
        f"Ratios are to the winner. {NAMES}"
    )
    blocks: list[Block] = [*busy.warning(results), *(table for result in results for table in _tables(result))]
    checked = sum(bool(each.get("verified")) or each["state"] == FAILED for each in tried)
    points = [(_by_time(result.data), point) for result in results if (point := _winner(result)) is not None]
    found = Found(
        findings=tuple(_findings(results)),
        fastest=tuple(point for timed, point in points if timed),
        chosen=tuple(point for timed, point in points if not timed),
        timed=sum(bool(each.get("seconds")) for each in tried),
        checked=checked,
        by_tune=checked,
    )
    return Section(id="tune", title="Tuning", lead=lead, blocks=tuple(blocks)), found


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
    text = f"of {plural(len(result.data['candidates']), 'candidate')}"
    if result.data["objective"] != LATENCY:
        text = f"chosen by {result.data['objective']}, not by time, {text}"
    elif not spread:
        text = f"chosen {result.data.get('method') or 'without a race'}, not timed, {text}"
    if won.get("reason"):
        text += f"; {won['reason'].removeprefix(str(result.data.get('method')) + ': ')}"
    text += f"; {_verified(won)}" if won.get("verified") else ""
    figure = seconds(spread["median"]) if spread else ""
    sign = busy.sign(result.data)
    tone, label = "care" if sign else "", f"{sign}tuned {_title(result.data)}"
    return Point(label=label, head=_spelled(won), figure=figure, text=text, tone=tone)


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


_COLUMNS = ("candidate", "state", "median", "× winner", "interval", "rounds", "kernels", "memory", "size", "why")


def _tables(result: Result) -> Iterator[Table]:
    """What raced, then what was never timed: refused, not run, or the same graph as another."""
    order, title = list(STATES), busy.title([result.data], _title(result.data))
    ranked = sorted(
        result.data["candidates"],
        key=lambda each: (order.index(each["state"]), (each.get("seconds") or {}).get("median", 0.0)),
    )
    raced = [each for each in ranked if each.get("rounds") or each["state"] == "won"]
    away = [each for each in ranked if each not in raced]
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
        Cell(text=STATES[each["state"]], tone=_TONES.get(each["state"], "")),
        number(seconds(spread["median"]), spread["median"]) if spread else Cell(text="–"),
        number(times(ratio["median"]), ratio["median"]) if ratio else Cell(text="–"),
        Cell(text=span(ratio) if ratio else "–"),
        number(str(each["rounds"]), each["rounds"]) if each.get("rounds") else Cell(text="–"),
        Cell(text="–" if count is None else str(count)),
        *bytes_of,
        Cell(text="; ".join(text for text in (_verified(each), each.get("reason")) if text)),
    )


def _facts(result: Result) -> Table:
    data = result.data
    facts = {**(data.get("cost") or {}), **(data.get("machine") or {})}
    rows = tuple(cells(key.replace("_", " "), text) for key, value in facts.items() if (text := fact(value)))
    return Table(
        caption=f"Cost and machine: {_title(data)}", columns=("", ""), rows=rows, folded="What it cost, and the machine"
    )


def _findings(results: Sequence[Result]) -> Iterator[Finding]:
    yield from busy.findings(results, "tune")
    for result in results:
        for each in result.data["candidates"]:
            if each["state"] in _FOUND:
                reason = each.get("reason") or "no reason was given"
                yield Finding(state=_FOUND[each["state"]], who=each["name"], reason=reason, where="tune")
