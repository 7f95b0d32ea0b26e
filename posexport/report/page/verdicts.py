"""Verdicts on the page: a heat-map whose cells show their state by symbol, number and colour, and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from posexport.bench.evidence import Evidence
from posexport.bench.results import Result
from posexport.report.page.blocks import Block, Cell, Section, Table, cells, number
from posexport.report.page.summary import NO_REASON, TONES, Finding, Highlights
from posexport.report.text import MARKS, plural
from posexport.verify.matrix.table import REFUSED
from posexport.verify.result import FAILED, NOT_RUN, PARITY, PASSED, PROJECT, Report, Verdict

_WORST_FIRST = (FAILED, PASSED, REFUSED, NOT_RUN)  # the order in which a cell for several results shows them
_STEPS = (0.1, 0.25, 0.5, 0.75)
_LEAD = (
    " Each artifact is compared with its torch block in float64, a graph without a spec with itself, or with the file "
    "that it is held against; a number is the largest error as a part of its limit, so 1 is the limit."
)
_TORCH_NOTE = "torch is the block rebuilt from the file's weights, not its graph: there an edited graph passes too. "
_COLUMNS = ("artifact", "runtime", "state", "error", "torch error", "limit", "part of limit", "inputs", "note")


def heat(value: float, steps: Sequence[float]) -> str:
    """The tone of a number in a heat-map."""
    return f"h{sum(value > step for step in steps) + 1}"


def key_of(steps: Sequence[float], unit: str) -> tuple[Cell, ...]:
    """The legend of a heat-map."""
    ends = [f"≤ {step:g}" for step in steps] + [f"> {steps[-1]:g}"]
    shades = [Cell(f"✓ {end}", tone=f"h{at + 1}", more=unit) for at, end in enumerate(ends)]
    return (*shades, *(Cell(f"{MARKS[state]} {state}", tone=tone) for state, tone in TONES.items()))


@attrs.frozen
class _Row:
    """A verdict with the name of its artifact on the page. `stale` if it is about other bytes than the file there."""

    verdict: Verdict
    artifact: str
    stale: bool

    @property
    def label(self) -> str:
        """What judged it: a runtime with its check, or a check of a project."""
        return self.verdict.check if self.verdict.runtime == PROJECT else self.verdict.label

    @property
    def severity(self) -> float | None:
        """The error as a part of its limit. None if either is unknown."""
        worst = self.verdict.worst
        return None if worst is None or worst.max_error is None or not worst.limit else worst.max_error / worst.limit


def section(results: Sequence[Result[Report]], evidence: Evidence) -> tuple[Section, Highlights]:
    """The section of `posexport verify`, and its highlights."""
    rows = list(_rows(results, evidence))
    checks = [row for row in rows if row.verdict.runtime == PROJECT]
    parity = [row for row in rows if row.verdict.check == PARITY and row not in checks]
    properties = [row for row in rows if row.verdict.check != PARITY and row not in checks]
    groups = {"Every check of a project": checks, "Every check of a property": properties, "Every verdict": parity}
    blocks: list[Block] = [_heat(parity)] if parity else []
    blocks += [_table(title, group) for title, group in groups.items() if group]
    leads = [_lead("verdict", "", [*parity, *properties]), _lead("check", " of a project", checks)]
    lead = " ".join(filter(None, leads)) + (_LEAD if parity else "")
    ran = [row for row in rows if row.verdict.state != NOT_RUN]
    stale, unreadable = sum(row.stale for row in ran), sum(len(result.data.unreadable) for result in results)
    return Section(id="parity", title="Parity", lead=lead, blocks=blocks), Highlights(
        findings=tuple(_findings(results, rows)), checked=len(ran) - stale + unreadable, stale=stale
    )


def _lead(noun: str, of: str, rows: Sequence[_Row]) -> str:
    counted = Counter(row.verdict.state for row in rows)
    counts = ", ".join(f"{counted[state]:,} {state}" for state in (PASSED, FAILED, NOT_RUN))
    return f"{plural(len(rows), noun)}{of}: {counts}." if rows else ""


def _rows(results: Sequence[Result[Report]], evidence: Evidence) -> Iterator[_Row]:
    """The verdicts, with different names for different artifacts of the same name.

    They differ by hash, or if hashes are not known, by result file if two files judge the same.
    """
    judged: dict[str, dict[int, set[tuple[str, str]]]] = {}
    hashes: dict[tuple[str, int], str] = {}
    verdicts = [(at, verdict) for at, result in enumerate(results) for verdict in result.data.verdicts]
    for at, verdict in verdicts:
        judged.setdefault(verdict.artifact, {}).setdefault(at, set()).add((verdict.runtime, verdict.check))
        hashes[verdict.artifact, at] = verdict.sha256 or hashes.get((verdict.artifact, at), "")

    def name(artifact: str, at: int) -> str:
        known = {other: hashes[artifact, other] for other in judged[artifact]}
        if all(known.values()):
            return artifact if len(set(known.values())) == 1 else f"{artifact} ({known[at][:8]})"
        twice = len(set().union(*judged[artifact].values())) < sum(map(len, judged[artifact].values()))
        return f"{artifact} ({results[at].name})" if twice else artifact

    for at, verdict in verdicts:
        stale = evidence.is_stale(verdict.artifact, verdict.sha256)
        yield _Row(verdict, name(verdict.artifact, at) + " (stale)" * stale, stale)


def _findings(results: Sequence[Result[Report]], rows: Sequence[_Row]) -> Iterator[Finding]:
    for row in rows:
        verdict, reason = row.verdict, row.verdict.reason or NO_REASON
        if verdict.state == FAILED:
            reason += "; stale: of other bytes than the file here" if row.stale else ""
            cause = verdict.departure or verdict.where or ""
            yield Finding(state=FAILED, who=row.label, reason=reason, where=row.artifact, cause=cause)
        elif verdict.state == NOT_RUN:
            yield Finding(state=NOT_RUN, who=verdict.label, reason=reason, where="verify")
    for file in (file for result in results for file in result.data.unreadable):
        yield Finding(state=FAILED, who=file.artifact, reason=file.error, where="unreadable")


def _heat(rows: Sequence[_Row]) -> Table:
    runtimes = list(dict.fromkeys(row.verdict.runtime for row in rows))
    ran = {row.verdict.runtime for row in rows if row.verdict.state != NOT_RUN}
    columns = [name for name in runtimes if name in ran] or runtimes
    worst: dict[str, dict[str, _Row]] = {}
    for row in sorted(rows, key=lambda row: (_WORST_FIRST.index(row.verdict.state), -(row.severity or 0.0))):
        worst.setdefault(row.artifact, {}).setdefault(row.verdict.runtime, row)
    artifacts = dict.fromkeys(row.artifact for row in rows)
    shown = [artifact for artifact in artifacts if worst[artifact].keys() & set(columns)]
    idle = [name for name in runtimes if name not in columns]
    note = _TORCH_NOTE if any(name.startswith("torch") for name in columns) else ""
    note += f"Nothing ran on {', '.join(idle)}, so they have no column." if idle else ""
    nowhere = [artifact for artifact in artifacts if artifact not in shown]
    note += f" Not run anywhere, so without a row: {', '.join(nowhere)}." if nowhere else ""
    return Table(
        caption="Error over its limit, by artifact and runtime",
        columns=("artifact", *columns),
        rows=[(artifact, *(_shade(worst[artifact].get(name)) for name in columns)) for artifact in shown],
        heat=True,
        note=note.strip(),
        key=key_of(_STEPS, "error over its limit"),
    )


def _shade(row: _Row | None) -> Cell:
    if row is None:
        return Cell("")
    verdict, value = row.verdict, row.severity
    texts = [f"{row.artifact} on {verdict.runtime}: {verdict.state}"]
    if value is not None and verdict.worst is not None:
        texts.append(f"error {verdict.worst.max_error:.2e}, limit {verdict.worst.limit:.2e}")
    tone = TONES.get(verdict.state) or heat(value or 0.0, _STEPS)
    shown = f"{MARKS[verdict.state]} {verdict.state if value is None else f'{value:.2g}'}"
    return Cell(shown, more="; ".join([*texts, *filter(None, [verdict.reason])]), tone=tone, value=value)


def _table(title: str, rows: Sequence[_Row]) -> Table:
    return Table(caption=title, columns=_COLUMNS, rows=map(_cells, rows), heads=2).fold(title)


def _cells(row: _Row) -> tuple[Cell, ...]:
    verdict, worst = row.verdict, row.verdict.worst
    numbers = (worst.max_error, worst.torch_error, worst.limit) if worst else (None, None, None)
    notes = dict.fromkeys((verdict.reason, verdict.measurement, verdict.where, *verdict.notes))
    return cells(
        row.artifact,
        row.label,
        Cell(verdict.state, tone=TONES.get(verdict.state, "good")),
        *(number(value, "{:.2e}".format) for value in numbers),
        number(row.severity, "{:.2g}".format),
        number(verdict.cases or None),
        "; ".join(filter(None, notes)),
    )
