"""A matrix on the page: thousands of cells as a heat-map of encodings by runtime and form, and every reason once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from posexport.report.page.blocks import Block, Cell, Section, Table, cells, listed, number
from posexport.report.page.results import Result
from posexport.report.page.summary import REFUSED, Finding, Found
from posexport.report.page.verdicts import MARKS, TONES, key_of, step

_EAGER = (1.0, 2.0, 4.0, 6.0)
BUILD = "build"
EAGER = "torch"
"""The column of the measure itself."""

_GROUPS = {BUILD: "build: plans with fused attention"}


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """The section of `posexport matrix`, and what the boxes learn from it."""
    if not results:
        return None, Found()
    blocks: list[Block] = []
    for result in results:
        blocks += _matrix(result, f" ({result.name})" if len(results) > 1 else "")
    everything = [cell for result in results for cell in result.data["cells"]]
    counted = Counter(cell["state"] for cell in everything)
    lead = (
        f"{', '.join(f'{counted[state]:,} {state}' for state in MARKS)}. Every encoding and form, with all dtypes and "
        "modes in one cell: a number is the largest error over torch eager's own in the same place. Up to 8 passes, "
        "and a little more where eager comes out nearly exact. Under build are TensorRT's plans, "
        "and in how many of them attention is fused."
    )
    findings = tuple(_of_cells(results))
    section = Section(id="matrix", title="What works where", lead=lead, blocks=tuple(blocks))
    return section, Found(findings=findings, checked=counted["passed"] + counted["failed"])


def _of_cells(results: Sequence[Result]) -> Iterator[Finding]:
    for result in results:
        grouped: Counter[tuple[str, str, str, str]] = Counter()
        for cell in result.data["cells"]:
            if cell["state"] == "passed":
                continue
            name = " ".join(cell[key] for key in ("encoding", "form", "dtype", "mode"))
            reason = cell.get("reason") or "no reason was given"
            failed = cell["state"] == "failed"
            who = cell["encoding"] if cell["state"] == REFUSED else cell["column"]
            grouped[cell["state"], who, reason, name if failed else "matrix"] += 1
        for (state, who, reason, where), count in grouped.items():
            yield Finding(state=state, who=who, reason=reason, where=where, count=count)


def _matrix(result: Result, told: str) -> list[Block]:
    found = result.data["cells"]
    judged = [name for name in dict.fromkeys(cell["column"] for cell in found)
              if any(cell["column"] == name and cell["state"] in ("passed", "failed") for cell in found)]  # fmt: skip
    forms = list(dict.fromkeys(cell["form"] for cell in found))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    dtypes: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in found:
        groups.setdefault((cell["encoding"], cell["column"], cell["form"]), []).append(cell)
        dtypes.setdefault((cell["mode"] + ", " + cell["dtype"], cell["column"], cell["form"]), []).append(cell)
    idle = [name for name in dict.fromkeys(cell["column"] for cell in found) if name not in judged]
    even = [name for name in judged if name == EAGER and all(_is_one(cell) for cell in found if cell["column"] == name)]
    judged = [name for name in judged if name not in even] or judged
    note = "◦ some of it was refused or not run: the cell tells on hover, the tables below in full."
    note += f" Nothing ran on {', '.join(idle)}, so they have no column." if idle else ""
    note += f" {', '.join(even)} is the measure itself: 1 everywhere." if even and even != judged else ""
    tables = []
    for title, grouped in (("by encoding", groups), ("by mode and dtype", dtypes)):
        rows = [
            (Cell(text=row), *(_sum(row, grouped.get((row, name, form), [])) for name in judged for form in forms))
            for row in dict.fromkeys(key[0] for key in grouped)
        ]
        tables.append(
            Table(
                caption=f"Worst error over torch eager's, {title}{told}",
                columns=(title.removeprefix("by "), *(form for _ in judged for form in forms)),
                rows=tuple(rows),
                groups=(("", 1), *((_GROUPS.get(name, name), len(forms)) for name in judged)),
                heat=True,
                note=note,
                key=key_of(_EAGER, "error over torch eager's"),
                folded="" if title == "by encoding" else f"The same by mode and dtype{told}",
            )
        )
    return [*tables, _totals(found, [*even, *judged], told), _reasons(found, told), _made(result, told)]


def _is_one(cell: dict[str, Any]) -> bool:
    """Whether a cell is no more than the measure held against itself."""
    return cell["state"] != "failed" and cell.get("ratio") in (None, 1.0)


def _sum(row: str, group: Sequence[dict[str, Any]]) -> Cell:
    """One cell for several: the state that matters most, the worst number, and all counts on hover."""
    if not group:
        return Cell(text="")
    counted = Counter(cell["state"] for cell in group)
    judged = [name for name in ("failed", "passed") if counted[name]]
    state = judged[0] if judged else counted.most_common(1)[0][0]
    some = " ◦" if judged and len(counted) > len(judged) else ""
    ratios = [cell["ratio"] for cell in group if cell.get("ratio") is not None]
    fused = [cell["fused"] for cell in group if cell.get("fused") is not None]
    first = group[0]
    said = [f"{row}, {first['form']}, {first['column']}: " + ", ".join(f"{n} {name}" for name, n in counted.items())]
    said += [f"worst {max(ratios):g} times torch eager's"] if ratios else []
    said += [f"attention fused in {sum(fused)} of {len(fused)} plans"] if fused else []
    if state == "passed":
        value = max(ratios, default=None)
        shown = "✓" if value is None else f"✓ {value:.2g}"
        if first["column"] == BUILD:
            shown = f"✓ {sum(fused)}/{len(fused)}" if fused else "✓"
        return Cell(text=shown + some, more="; ".join(said), tone=step(value or 0.0, _EAGER), value=value)
    reasons = dict.fromkeys(cell["reason"] for cell in group if cell["state"] == state and cell.get("reason"))
    said += [next(iter(reasons))] if reasons else []
    text = f"{MARKS[state]} {counted[state]}{some}" if state == "failed" else MARKS[state]
    return Cell(text=text, more="; ".join(said), tone=TONES[state])


def _totals(found: Sequence[dict[str, Any]], judged: Sequence[str], told: str) -> Table:
    rows = []
    for name in judged:
        own = [cell for cell in found if cell["column"] == name]
        counted = Counter(cell["state"] for cell in own)
        worst = max((cell["ratio"] for cell in own if cell.get("ratio") is not None), default=None)
        fused = [cell["fused"] for cell in own if cell.get("fused") is not None]
        rows.append(
            (
                Cell(text=name),
                *(number(f"{counted[state]:,}", counted[state]) for state in MARKS),
                Cell(text="–") if worst is None else number(f"{worst:g}×", worst),
                Cell(text=f"{sum(fused)} of {len(fused)}" if fused else "–"),
            )
        )
    return Table(
        caption=f"Totals{told}", columns=("runtime", *MARKS, "worst to eager's", "fused"), rows=tuple(rows),
        right=(1, 2, 3, 4, 5, 6), folded=f"Totals by runtime{told}",
    )  # fmt: skip


def _reasons(found: Sequence[dict[str, Any]], told: str) -> Table:
    """Every reason once, with what it befell."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in found:
        if cell["state"] != "passed":
            grouped.setdefault((cell["state"], cell.get("reason") or ""), []).append(cell)
    rows = tuple(
        (
            Cell(text=f"{MARKS[state]} {state}", tone=TONES[state]),
            number(f"{len(own):,}", len(own)),
            Cell(text=reason),
            *(
                Cell(text=listed(list(dict.fromkeys(c[key] for c in own)), 6))
                for key in ("column", "encoding", "form", "dtype", "mode")
            ),
        )
        for (state, reason), own in sorted(grouped.items(), key=lambda each: -len(each[1]))
    )
    return Table(
        caption=f"Reasons{told}", columns=("state", "cells", "reason", "on", "encodings", "forms", "dtypes", "modes"),
        rows=rows, right=(1,), folded=f"Every reason for what was refused or not run{told}: {len(rows)}",
    )  # fmt: skip


def _made(result: Result, told: str) -> Table:
    versions = {(cell["column"], cell["version"]) for cell in result.data["cells"] if cell.get("version")}
    rows = [cells(name, version) for name, version in [*result.data["made_by"].items(), *sorted(versions)]]
    return Table(
        caption=f"Versions{told}", columns=("what", "version"), rows=tuple(rows), folded=f"Made and judged by{told}"
    )
