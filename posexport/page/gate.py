"""What a benchmark's gate found, on the page: every change since the baseline, and what got slower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posexport.page.blocks import Cell, Table, cells, number
from posexport.page.boxes import CARE, NOT_RUN, SLOWER, Finding
from posexport.page.links import Result


def slower(result: Result) -> Iterator[Finding]:
    """What the gate found to be slower than before, and what it couldn't tell."""
    gate = result.data.get("gate") or {"changes": ()}
    for each in gate["changes"]:
        where, reason = f"{result.name}, {each['shape']}", each.get("reason") or ""
        if each["state"] == "slower":
            said = f"{_change(each)} than before, allowed is {gate['allowed']:.0%}"
            yield Finding(state=SLOWER, who=each["runtime"], reason=said, where=where)
        elif each["state"] == "can't tell":
            said = f"whether it got slower than before can't be told: {reason or _change(each)}"
            yield Finding(state=CARE, who=f"{each['runtime']} ({where})", reason=said, where=where)
        elif each["state"] == "not run":
            yield Finding(state=NOT_RUN, who=each["runtime"], reason=reason or "no reason was given", where="gate")


def _change(each: dict[str, Any]) -> str:
    if each.get("change") is None:
        return "an unknown change"
    share = [each[key] - 1 for key in ("change", "low", "high") if each.get(key) is not None]
    slower = f"{abs(share[0]):.1%} {'slower' if share[0] >= 0 else 'faster'}"
    return f"{slower} ({share[1]:+.1%} to {share[2]:+.1%})" if len(share) == 3 else slower


def changes(result: Result) -> Table:
    """Every change since the baseline."""
    gate = result.data["gate"]
    tones = {"slower": "bad", "not run": "away", "fine": "good"}
    rows = [
        (
            *cells(each["shape"], each["runtime"]),
            Cell(text=each["state"], tone=tones.get(each["state"], "")),
            number(_change(each), each["change"]) if each.get("change") is not None else Cell(text="–"),
            *cells(each.get("by") or "–", each.get("reason") or ""),
        )
        for each in gate["changes"]
    ]
    return Table(
        caption=f"Since the baseline, {gate['allowed']:.0%} allowed: {result.name}",
        columns=("scenario", "runtime", "state", "change", "measured by", "reason"), rows=tuple(rows), heads=2,
        right=(3,), note=" ".join(gate.get("notes") or ()),
    )  # fmt: skip
