"""What a benchmark is held to, on the page: the baseline before it and the budget of its project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from posexport.report.page.blocks import Cell, Table, cells, number, times
from posexport.report.page.results import Result
from posexport.report.page.summary import CARE, FAILED, NOT_RUN, SLOWER, Finding

_TONES = {"slower": "bad", "not run": "away", "fine": "good"}


def findings(result: Result) -> Iterator[Finding]:
    """Whatever isn't fine: it got slower, or over its budget; that can't be told; or it was not run.

    A budget that was not run fails where its runtime is there.
    """
    gate = result.data.get("gate") or {"changes": ()}
    for each in gate["changes"]:
        said = f"{_change(each)} than before, allowed is {gate['limit']:.0%}"
        unsure = f"whether it got slower than before can't be told: {each.get('reason') or _change(each)}"
        yield from _told(each, f"{result.name}, {each['shape']}", said, unsure, "gate")
    for each in result.data.get("limits") or ():
        allowed = f"{each['limit']:g}×"
        said = f"{_ratio(each).text} of {each['reference']}, the budget allows {allowed}"
        unsure = f"whether it keeps the budget of {allowed} of {each['reference']} can't be told"
        yield from _told(each, f"{PurePath(result.data['file']).name}, {each['scenario']}", said, unsure, "budget")


def _told(each: dict[str, Any], where: str, slower: str, unsure: str, held_to: str) -> Iterator[Finding]:
    who, reason = each["runtime"], each.get("reason") or "no reason was given"
    absent, at = (FAILED, where) if each.get("there") else (NOT_RUN, held_to)
    known = {
        "slower": Finding(state=SLOWER, who=who, reason=slower, where=where),
        "inconclusive": Finding(state=CARE, who=f"{who} ({where})", reason=unsure, where=where),
        "not run": Finding(state=absent, who=who, reason=reason, where=at),
    }
    if each["state"] in known:
        yield known[each["state"]]


def _change(each: dict[str, Any]) -> str:
    if each.get("change") is None:
        return "an unknown change"
    share = [each[key] - 1 for key in ("change", "low", "high") if each.get(key) is not None]
    slower = f"{abs(share[0]):.1%} {'slower' if share[0] >= 0 else 'faster'}"
    return f"{slower} ({share[1]:+.1%} to {share[2]:+.1%})" if len(share) == 3 else slower


def _ratio(each: dict[str, Any]) -> Cell:
    return Cell(text="–") if each.get("ratio") is None else number(times(each["ratio"]), each["ratio"])


def tables(result: Result) -> Iterator[Table]:
    """Every change since the baseline, and every limit."""
    gate, limits = result.data.get("gate"), result.data.get("limits")
    if gate:
        rows = tuple(
            (
                *_head(each, each["shape"]),
                number(_change(each), each["change"]) if each.get("change") is not None else Cell(text="–"),
                *cells(each.get("reference") or "–", each.get("reason") or ""),
            )
            for each in gate["changes"]
        )
        yield Table(
            caption=f"Since the baseline, {gate['limit']:.0%} allowed: {result.name}", rows=rows, heads=2, right=(3,),
            columns=("scenario", "runtime", "state", "change", "measured by", "reason"),
            note=" ".join(gate.get("notes") or ()),
        )  # fmt: skip
    if limits:
        rows = tuple(
            (
                *_head(each, each["scenario"]),
                _ratio(each),
                *cells(f"{each['limit']:g}× {each['reference']}", each.get("reason") or ""),
            )
            for each in limits
        )
        yield Table(
            caption=f"Budget of time: {PurePath(result.data['file']).name}", rows=rows, heads=2, right=(3,),
            columns=("scenario", "runtime", "state", "ratio", "allowed", "reason"),
        )  # fmt: skip


def _head(each: dict[str, Any], scenario: str) -> tuple[Cell, ...]:
    state = Cell(text=each["state"], tone=_TONES.get(each["state"], ""))
    return (*cells(scenario, each["runtime"]), state)
