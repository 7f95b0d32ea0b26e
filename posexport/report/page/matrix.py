"""A matrix on the page: a heat-map of encodings by runtime and form for thousands of cells, and every reason once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from posexport.bench.results import Result
from posexport.report.page.blocks import Cell, Section, Table, cells, number
from posexport.report.page.summary import NO_REASON, TONES, Finding, Highlights
from posexport.report.page.verdicts import heat, key_of
from posexport.report.text import MARKS, listed
from posexport.runtimes import TORCH_WORKER
from posexport.verify.matrix.table import BUILD, REFUSED, TOTALS, Entry, Matrix, idle, judged, totals
from posexport.verify.matrix.table import Cell as MatrixCell
from posexport.verify.result import FAILED, PASSED

_STEPS = (1.0, 2.0, 4.0, 6.0)


def section(results: Sequence[Result[Matrix]]) -> tuple[Section, Highlights]:
    """The section of `posexport matrix`, and its highlights."""
    several = len(results) > 1
    blocks = [table for result in results for table in _tables(result.data, f" ({result.name})" * several)]
    counted: Counter[str] = Counter(cell.state for result in results for cell in result.data.cells.values())
    lead = (
        f"{', '.join(f'{counted[state]:,} {state}' for state in MARKS)}. Every encoding and form, with all dtypes and "
        "modes in one cell: a number is the largest error over torch's own error in the same place. Up to 8 passes, "
        "and a little more where torch is nearly exact. Under build are TensorRT's plans, and in how many of them "
        "attention is fused."
    )
    return Section(id="matrix", title="What works where", lead=lead, blocks=blocks), Highlights(
        findings=tuple(_findings(results)), checked=counted[PASSED] + counted[FAILED]
    )


def _findings(results: Sequence[Result[Matrix]]) -> Iterator[Finding]:
    for result in results:
        grouped: Counter[tuple[str, str, str, str]] = Counter()
        for cell in result.data.ordered():
            entry = cell.entry
            if cell.state != PASSED:
                name = f"{entry.encoding} {entry.form} {entry.dtype} {entry.mode}" if cell.state == FAILED else "matrix"
                who = entry.encoding if cell.state == REFUSED else cell.column
                grouped[cell.state, who, cell.reason or NO_REASON, name] += 1
        for (state, who, reason, where), count in grouped.items():
            yield Finding(state=state, who=who, reason=reason, where=where, count=count)


def _tables(matrix: Matrix, suffix: str) -> Iterator[Table]:
    every = matrix.ordered()
    columns, forms = judged(every), list(dict.fromkeys(cell.entry.form for cell in every))
    # torch compared with itself says nothing
    even = all(cell.state != FAILED and cell.ratio in (None, 1.0) for cell in every if cell.column == TORCH_WORKER)
    shown = [name for name in columns if name != TORCH_WORKER or not even] or columns
    note = "◦ some of it was refused or not run: the cell shows more on hover, the tables below all of it."
    away = list(idle(every))
    note += f" Nothing ran on {', '.join(away)}, so they have no column." if away else ""
    note += f" {TORCH_WORKER} is the reference itself: 1 everywhere." if shown != columns else ""
    groups = [(f"{name}: plans with fused attention" if name == BUILD else name, len(forms)) for name in shown]

    def heat_map(name: str, folded: str, row_of: Callable[[Entry], str]) -> Table:
        grouped: dict[str, dict[tuple[str, str], list[MatrixCell]]] = {}
        for cell in every:
            grouped.setdefault(row_of(cell.entry), {}).setdefault((cell.column, cell.entry.form), []).append(cell)
        return Table(
            caption=f"Worst error over torch error, by {name}{suffix}",
            columns=(name, *forms * len(shown)),
            rows=[
                cells(row, *(_sum(row, group.get((column, form), [])) for column in shown for form in forms))
                for row, group in grouped.items()
            ],
            groups=(("", 1), *groups),
            heat=True,
            note=note,
            key=key_of(_STEPS, "error over torch error"),
            folded=folded,
        )

    yield heat_map("encoding", "", lambda entry: entry.encoding)
    yield heat_map(
        "mode and dtype", f"The same by mode and dtype{suffix}", lambda entry: f"{entry.mode}, {entry.dtype}"
    )
    counted = [
        cells(name, *(number(int(count)) for count in counts), worst, fused)
        for name, *counts, worst, fused in totals(every)
    ]
    yield Table(caption=f"Totals{suffix}", columns=TOTALS, rows=counted, folded=f"Totals by runtime{suffix}")
    yield _reasons(every, suffix)
    versions = sorted({(cell.column, cell.version) for cell in every if cell.version})
    made = [*matrix.made_by.items(), *versions]
    yield Table(
        caption=f"Versions{suffix}", columns=("what", "version"), rows=made, folded=f"Made and judged by{suffix}"
    )


def _sum(row: str, group: Sequence[MatrixCell]) -> Cell:
    """One cell for several: the most important state, the worst number, and all counts on hover."""
    if not group:
        return Cell("")
    counted: Counter[str] = Counter(cell.state for cell in group)
    ran = [name for name in (FAILED, PASSED) if counted[name]]
    state = ran[0] if ran else counted.most_common(1)[0][0]
    some = " ◦" if ran and len(counted) > len(ran) else ""
    ratios = [cell.ratio for cell in group if cell.ratio is not None]
    fused = [cell.fused for cell in group if cell.fused is not None]
    column = group[0].column
    texts = [f"{row}, {group[0].entry.form}, {column}: " + ", ".join(f"{n} {name}" for name, n in counted.items())]
    texts += [f"worst {max(ratios):g} times torch error"] if ratios else []
    texts += [f"attention fused in {sum(fused)} of {len(fused)} plans"] if fused else []
    if state == PASSED:
        value = max(ratios, default=None)
        figure = "" if value is None else f" {value:.2g}"
        figure = f" {sum(fused)}/{len(fused)}" if column == BUILD and fused else figure
        return Cell(f"✓{figure}{some}", more="; ".join(texts), tone=heat(value or 0.0, _STEPS), value=value)
    texts += [reason for cell in group if cell.state == state and (reason := cell.reason)][:1]
    text = f"{MARKS[state]} {counted[state]}{some}" if state == FAILED else MARKS[state]
    return Cell(text, more="; ".join(texts), tone=TONES[state])


def _reasons(every: Sequence[MatrixCell], suffix: str) -> Table:
    """Every reason once, with the cells that it explains."""
    grouped: dict[tuple[str, str], list[MatrixCell]] = {}
    for cell in every:
        if cell.state != PASSED:
            grouped.setdefault((cell.state, cell.reason or ""), []).append(cell)
    made = []
    for (state, reason), group in sorted(grouped.items(), key=lambda pair: -len(pair[1])):
        entries = [cell.entry for cell in group]
        names = [[cell.column for cell in group]]
        names += [[getattr(entry, key) for entry in entries] for key in ("encoding", "form", "dtype", "mode")]
        listings = (listed(list(dict.fromkeys(column)), 6) for column in names)
        made.append(cells(Cell(f"{MARKS[state]} {state}", tone=TONES[state]), number(len(group)), reason, *listings))
    return Table(
        caption=f"Reasons{suffix}",
        columns=("state", "cells", "reason", "on", "encodings", "forms", "dtypes", "modes"),
        rows=made,
        folded=f"Every reason for what was refused or not run{suffix}: {len(made)}",
    )
