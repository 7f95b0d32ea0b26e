"""The rows of `scripts/gpu_acceptance`: the result of each file on each runtime, written as data and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import Reason
from posexport.files import staged, write_json
from posexport.report.text import MARKS, table_lines
from posexport.verify.eligibility import UNSUPPORTED
from posexport.verify.matrix.run import OUT_OF_TIME
from posexport.verify.result import FAILED, NOT_RUN, PARITY, PASSED, Verdict

STATES = (PASSED, FAILED, NOT_RUN)
COLUMNS = ("file", "runtime", "check", "state", "error / torch / limit", "what was measured, or why it was not")
TITLE = "Acceptance on {device}"


@attrs.define(kw_only=True)
class Row:
    """One check of one file on one runtime. The errors are those of the comparison nearest to its limit. `times`
    contains the median seconds and the tokens per second at each size."""

    file: str
    runtime: str
    check: str
    state: str
    reason: str = ""
    code: str = ""
    sha256: str | None = None
    error: float | None = None
    torch_error: float | None = None
    limit: float | None = None
    cases: int = 0
    measured: str = ""
    engine: Mapping[str, str] = attrs.field(factory=dict)
    times: list[dict[str, Any]] = attrs.field(factory=list)

    @classmethod
    def of(cls, file: str, verdict: Verdict) -> Row:
        """The row of a verdict."""
        worst = verdict.worst
        return cls(
            file=file,
            runtime=verdict.runtime,
            check=verdict.check,
            state=verdict.state,
            reason=verdict.reason or "",
            code=verdict.reason_code or "",
            sha256=verdict.sha256,
            error=None if worst is None else worst.max_error,
            torch_error=None if worst is None else worst.torch_error,
            limit=None if worst is None else worst.limit,
            cases=verdict.cases,
            measured="; ".join(filter(None, (verdict.measurement, *verdict.not_shown, *verdict.notes))),
            engine=dict(verdict.describe),
        )

    def shown(self) -> tuple[str, ...]:
        """The row as a line of the table."""
        errors = [number for number in (self.error, self.torch_error, self.limit) if number is not None]
        return (
            self.file,
            self.runtime,
            self.check,
            f"{MARKS[self.state]} {self.state}",
            " / ".join(f"{number:.1e}" for number in errors) or "-",
            "; ".join(filter(None, (self.reason, self.measured, *map(_time, self.times)))) or "-",
        )


def _time(timed: Mapping[str, Any]) -> str:
    speed = "" if timed["tokens_per_second"] is None else f", {timed['tokens_per_second']:,.0f} tokens per second"
    ratio = f", {timed['to_torch']:.2f} of torch eager's time" if timed["to_torch"] is not None else ""
    return f"{timed['sizes']}: {timed['seconds'] * 1e3:.3f} ms{speed}{ratio}"


@attrs.define(kw_only=True)
class Results:
    """The rows so far. They are written to a folder after every change, grouped by file. `earlier` contains the rows of
    an earlier run with the same `header`, by file and runtime. They stay valid until new rows replace them."""

    folder: Path
    header: Mapping[str, Any]
    rows: list[Row] = attrs.field(factory=list)
    earlier: dict[tuple[str, str], list[Row]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        path = self.folder / "acceptance.json"
        data = json.loads(path.read_bytes()) if path.exists() else {"rows": []}
        if {**data, "rows": None} == {**json.loads(json.dumps(self.header)), "rows": None}:
            for row in data["rows"]:
                self.earlier.setdefault((row["file"], row["runtime"]), []).append(Row(**row))

    def standing(
        self, file: str, runtime: str, missing: Reason | None, sha256: str | None = None, in_time: bool = True
    ) -> list[Row]:
        """The rows of the earlier run, if a new run could not change any of them; otherwise an empty list.

        A row could change if it failed, if the time ran out before it, if its runtime was `missing` and is here
        now, or if its file has another `sha256` (None: unknown). When no time is left, all rows of the same file stay
        valid.
        """
        rows = self.earlier.get((file, runtime), [])
        stand = all(
            (None in (sha256, row.sha256) or sha256 == row.sha256)
            and (
                not in_time
                or (
                    row.state != FAILED
                    and row.reason != OUT_OF_TIME
                    and (row.check != PARITY or row.state == PASSED or row.code == UNSUPPORTED or missing is not None)
                )
            )
            for row in rows
        )
        return rows if stand else []

    def keep(self, rows: Sequence[Row]) -> None:
        """Keep rows of the earlier run."""
        self.rows += [row for row in rows if row not in self.rows]

    def add(self, row: Row) -> None:
        """Add a row, and write all rows."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write the rows as data, and as a page."""
        here = {(row.file, row.runtime) for row in self.rows}
        rows = [*self.rows, *(row for key, others in self.earlier.items() if key not in here for row in others)]
        places = {file: place for place, file in enumerate(dict.fromkeys(row.file for row in rows))}
        rows.sort(key=lambda row: places[row.file])
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "acceptance.json", {**self.header, "rows": list(map(attrs.asdict, rows))})
        title = TITLE.format(device=self.header["device"])
        lines = [f"# {title}", "", f"Written by `scripts/gpu_acceptance`: {summary(rows)}.", ""]
        lines += table_lines(COLUMNS, [row.shown() for row in rows], escape=lambda text: text.replace("|", "/"))
        with staged() as files:
            files.write(self.folder / "acceptance.md", lambda file: file.write("\n".join([*lines, ""]).encode()))

    def exit_code(self, lacking: bool) -> int:
        """1 if something failed, 3 if nothing passed or a runtime that was named is `lacking`, otherwise 0."""
        states = {row.state for row in self.rows}
        return 1 if FAILED in states else 3 if lacking or PASSED not in states else 0


def summary(rows: Sequence[Row]) -> str:
    """The number of rows in each state, in words."""
    states = [row.state for row in rows]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES)
