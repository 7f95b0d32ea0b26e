"""Verdicts on the page: a heat-map whose cells say their state by a symbol, a number and a colour."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from posexport.report.page.blocks import Block, Cell, Section, Table, cells, number, plural
from posexport.report.page.results import Result
from posexport.report.page.summary import FAILED, NOT_RUN, Finding, Found

MARKS = {"passed": "✓", "failed": "✗", "refused": "–", "not run": "·"}
TONES = {"failed": "bad", "refused": "refused", "not run": "away"}
WORST_FIRST = ("failed", "passed", "refused", "not run")
"""What a cell for several results shows: whatever comes first here, the others being told on hover."""

PARITY = "parity"
_ALLOWED = (0.1, 0.25, 0.5, 0.75)


def step(value: float, steps: Sequence[float]) -> str:
    return f"h{sum(value > step for step in steps) + 1}"


def key_of(steps: Sequence[float], unit: str) -> tuple[Cell, ...]:
    """The legend of a heat-map."""
    ends = [f"≤ {step:g}" for step in steps] + [f"> {steps[-1]:g}"]
    shades = [Cell(text=f"✓ {end}", tone=f"h{at + 1}", more=unit) for at, end in enumerate(ends)]
    return (*shades, *(Cell(text=f"{MARKS[state]} {state}", tone=tone) for state, tone in TONES.items()))


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section of `posexport verify`, and what the boxes learn from it."""
    if not results:
        return None, Found()
    results = _told_apart(results)
    verdicts = [verdict for result in results for verdict in result.data["verdicts"]]
    parity = [each for each in verdicts if (each.get("check") or PARITY) == PARITY]
    others = [each for each in verdicts if (each.get("check") or PARITY) != PARITY]
    counted = Counter(each["state"] for each in verdicts)
    lead = (
        f"{counted['passed']:,} passed, {counted['failed']:,} failed, {counted['not run']:,} not run. Each artifact is "
        "held against its torch block in float64; a number is the largest error as a part of what is allowed, so 1 is "
        "the limit."
    )
    blocks: list[Block] = [_heat(parity)] if parity else []
    blocks += [_verdicts("Every check of a property", others)] if others else []
    blocks += [_verdicts("Every verdict", parity)] if parity else []
    findings = tuple(_of_verdicts(results))
    ran = [each for each in verdicts if each["state"] != "not run"]
    stale = sum(bool(each.get("stale")) for each in ran)
    broken = sum(len(each.data.get("unreadable") or ()) for each in results)
    section = Section(id="parity", title="Parity", lead=lead, blocks=tuple(blocks))
    return section, Found(findings=findings, checked=len(ran) - stale + broken, stale=stale)


def _told_apart(results: Sequence[Result]) -> list[Result]:
    """The results with artifacts of one name told apart: by their hashes, or by file where both have one verdict."""
    held: dict[str, dict[int, list[tuple[str, str]]]] = {}
    hashes: dict[tuple[str, int], str] = {}
    for at, result in enumerate(results):
        for each in result.data["verdicts"]:
            judged = each["runtime"], each.get("check") or PARITY
            held.setdefault(each["artifact"], {}).setdefault(at, []).append(judged)
            hashes[each["artifact"], at] = each.get("sha256") or ""

    def name(verdict: dict[str, Any], at: int) -> str:
        return bare(verdict["artifact"], at) + (" (stale)" if verdict.get("stale") else "")

    def bare(artifact: str, at: int) -> str:
        known = {other: hashes[artifact, other] for other in held[artifact]}
        if all(known.values()):
            return artifact if len(set(known.values())) == 1 else f"{artifact} ({known[at][:8]})"
        every = [judged for own in held[artifact].values() for judged in set(own)]
        return artifact if len(set(every)) == len(every) else f"{artifact} ({results[at].name})"

    return [
        attrs.evolve(
            result,
            data={
                **result.data,
                "verdicts": [{**each, "artifact": name(each, at)} for each in result.data["verdicts"]],
            },
        )
        for at, result in enumerate(results)
    ]


def _of_verdicts(results: Sequence[Result]) -> Iterator[Finding]:
    for result in results:
        for each in result.data["verdicts"]:
            if each["state"] == "passed":
                continue
            state = FAILED if each["state"] == "failed" else NOT_RUN
            reason = each.get("reason") or "no reason was given"
            reason += "; stale: of other bytes than the file here" if state == FAILED and each.get("stale") else ""
            who, where = each["runtime"], each["artifact"] if state == FAILED else "verify"
            check = each.get("check") or PARITY
            label = who if check == PARITY else f"{who}: {check}"
            yield Finding(state=state, who=label, reason=reason, where=where, cause=_cause(each))
        for broken in result.data.get("unreadable") or ():
            yield Finding(state=FAILED, who=broken["artifact"], reason=broken["error"], where="unreadable")


_DEPARTS = re.compile(r"\S+ '(.+)', node (\d+) of the graph, has (.+), in a fresh export (.+)")


def _cause(verdict: dict[str, Any]) -> str:
    """Where a failed artifact departs from a fresh export of its block, in one clause; nothing where nobody looked."""
    clause: str = (verdict.get("where") or "").partition("; ")[0]
    found = _DEPARTS.fullmatch(clause)
    if found is None:
        return clause
    name, node, have, want = found.groups()
    fresh = want.removeprefix(have.partition("=")[0] + "=")
    return f"node {node} {name}: {have}, a fresh export has {fresh}: export it again"


def _severity(verdict: dict[str, Any]) -> float | None:
    worst = verdict.get("worst") or {}
    error, allowed = worst.get("max_error"), worst.get("limit")
    return None if error is None or not allowed else error / allowed


def _heat(verdicts: Sequence[dict[str, Any]]) -> Table:
    runtimes = list(dict.fromkeys(each["runtime"] for each in verdicts))
    idle = [name for name in runtimes if all(e["state"] == "not run" for e in verdicts if e["runtime"] == name)]
    runtimes = [name for name in runtimes if name not in idle] or runtimes
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for each in verdicts:
        kept = rows.setdefault(each["artifact"], {}).get(each["runtime"])
        if kept is None or _rank(each) < _rank(kept):
            rows[each["artifact"]][each["runtime"]] = each
    shown = {artifact: own for artifact, own in rows.items() if own.keys() & set(runtimes)}
    made = [
        (Cell(text=artifact), *(_shade(own[name]) if name in own else Cell(text="") for name in runtimes))
        for artifact, own in shown.items()
    ]
    note = "torch is the block rebuilt from the file's weights, not its graph: there an edited graph passes too. "
    note = note if any(name.startswith("torch") for name in runtimes) else ""
    note += f"Nothing ran on {', '.join(idle)}, so they have no column." if idle and idle != runtimes else ""
    nowhere = [artifact for artifact in rows if artifact not in shown]
    note += f" Not run anywhere, so without a row: {', '.join(nowhere)}." if nowhere else ""
    return Table(
        caption="Error over what is allowed, by artifact and runtime", columns=("artifact", *runtimes),
        rows=tuple(made), heat=True, note=note.strip(), key=key_of(_ALLOWED, "error over allowed"),
    )  # fmt: skip


def _rank(verdict: dict[str, Any]) -> tuple[int, float]:
    return WORST_FIRST.index(verdict["state"]), -(_severity(verdict) or 0.0)


def _shade(verdict: dict[str, Any]) -> Cell:
    state, value, worst = verdict["state"], _severity(verdict), verdict.get("worst") or {}
    said = [f"{verdict['artifact']} on {verdict['runtime']}: {state}"]
    if value is not None:
        said.append(f"error {worst['max_error']:.2e}, allowed {worst['limit']:.2e}")
    said += [text for text in (verdict.get("reason"),) if text]
    tone = TONES.get(state) or step(value or 0.0, _ALLOWED)
    shown = f"{MARKS[state]} {value:.2g}" if value is not None else f"{MARKS[state]} {state}"
    return Cell(text=shown, more="; ".join(said), tone=tone, value=value)


_COLUMNS = ("artifact", "runtime", "state", "error", "torch eager's", "allowed", "part of allowed", "inputs", "note")


def _verdicts(title: str, verdicts: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for each in verdicts:
        worst, check = each.get("worst") or {}, each.get("check") or PARITY
        numbers = [worst.get(key) for key in ("max_error", "torch_error", "limit")]
        part = _severity(each)
        told = [each.get("reason"), each.get("where"), *(each.get("notes") or ())]
        rows.append(
            (
                *cells(each["artifact"], each["runtime"] + ("" if check == PARITY else f": {check}")),
                Cell(text=each["state"], tone=TONES.get(each["state"], "good")),
                *(Cell(text="–") if value is None else number(f"{value:.2e}", value) for value in numbers),
                Cell(text="–") if part is None else number(f"{part:.2g}", part),
                number(str(each.get("cases") or "–"), each.get("cases")),
                Cell(text="; ".join(text for text in told if text)),
            )
        )
    return Table(
        caption=title, columns=_COLUMNS, rows=tuple(rows), heads=2, right=(3, 4, 5, 6, 7),
        folded=f"{title}: {plural(len(rows), 'row')}",
    )  # fmt: skip
