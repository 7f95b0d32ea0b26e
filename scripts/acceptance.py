"""`scripts/gpu_acceptance`: what needs a GPU to be shown.

Whole models and blocks are prepared (exported, with inputs and float64 references), then verified on every runtime of
the GPU machine, and timed there. `--prepare FOLDER` does the first part alone, on any machine; `--from-prepared FOLDER`
the second, without an exporter. Rows are written to a folder that is named after the GPU as they come, most telling
first; what a limit of time leaves out is "not run", and running it again goes on. Exits 0 where everything that ran
passed, 1 where something failed, 3 where nothing passed or a runtime that was named is missing.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
from acceptance_items import MODELS, Prepared, PreparedList, items, prepare, read_list
from results import RESULTS, record

from posexport import temporary
from posexport.bench import bench
from posexport.bench.candidates import CANDIDATES
from posexport.bench.options import BenchOptions
from posexport.cli import console
from posexport.errors import PosexportError, Reason, check_known
from posexport.files import staged, write_json
from posexport.models import ENCODINGS
from posexport.report.text import MARKS, table_lines
from posexport.runtimes import RUNTIMES, cuda, gpu_missing
from posexport.runtimes.pool import Pool
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES
from posexport.verify.eligibility import UNSUPPORTED
from posexport.verify.matrix.run import OUT_OF_TIME
from posexport.verify.matrix.table import MODES, makers
from posexport.verify.prepared.check import check_file
from posexport.verify.result import FAILED, NOT_RUN, PARITY, PASSED, Verdict

TIME_LIMIT = 240.0
"""Seconds that a runtime may take for one file, building a plan included."""

VERIFYING = 0.6
"""The part of the time after which no further block is verified."""

STATES = (PASSED, FAILED, NOT_RUN)
TIMING, GRAPH_TIMING = "time", "time with CUDA graphs"
COLUMNS = ("file", "runtime", "check", "state", "error / torch / limit", "what was measured, or why it was not")
TITLE = "Acceptance on {device}"


@attrs.define(kw_only=True)
class Row:
    """One file on one runtime by one check; errors are those of the comparison nearest to its limit, `times` has the
    median seconds and tokens per second at each size."""

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
        """That of a verdict."""
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
        """A line of the table."""
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
    """The rows so far, written to a folder after every change. `earlier` are those of a run before with the same
    `header`, by their file and runtime: they stand until there are others in their place."""

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

    def keep(
        self, file: str, runtime: str, missing: Reason | None, sha256: str | None = None, in_time: bool = True
    ) -> bool:
        """Keep the rows of the run before, if there are some and none may be another now: no failure, none that time
        did not reach, no runtime that was `missing` and is here, no file of another `sha256` (None: not known). Where
        no time is left all rows of the same file are kept."""
        rows = self.earlier.get((file, runtime), [])
        kept = bool(rows) and all(
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
        self.rows += [row for row in rows if kept and row not in self.rows]
        return kept

    def add(self, row: Row) -> None:
        """Add a row, and write all."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write the rows as data, and as a page."""
        here = {(row.file, row.runtime) for row in self.rows}
        rows = [*self.rows, *(row for key, others in self.earlier.items() if key not in here for row in others)]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "acceptance.json", {**self.header, "rows": list(map(attrs.asdict, rows))})
        title = TITLE.format(device=self.header["device"])
        lines = [f"# {title}", "", f"Written by `scripts/gpu_acceptance`: {summary(rows)}.", ""]
        lines += table_lines(COLUMNS, [row.shown() for row in rows], escape=lambda text: text.replace("|", "/"))
        with staged() as files:
            files.write(self.folder / "acceptance.md", lambda file: file.write("\n".join([*lines, ""]).encode()))

    def exit_code(self, lacking: bool) -> int:
        """1 where something failed, 3 where nothing passed or a runtime that was named is `lacking`."""
        states = {row.state for row in self.rows}
        return 1 if FAILED in states else 3 if lacking or PASSED not in states else 0


def summary(rows: Sequence[Row]) -> str:
    """How many rows are in each state, in words."""
    states = [row.state for row in rows]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES)


@click.command()
@click.option(
    "--prepare", "target", type=click.Path(path_type=Path, file_okay=False), help="prepare into a folder, only"
)
@click.option("--from-prepared", type=click.Path(path_type=Path, file_okay=False), help="verify and time this folder")
@click.option(
    "--megabytes", type=click.FloatRange(1), default=120, show_default=True, help="prepare at most about so many"
)
@click.option("--runtime", multiple=True, help="this one only, repeatable  [default: all that need a GPU]")
@click.option("--model", multiple=True, type=click.Choice(list(MODELS)), help="this one only, repeatable")
@click.option("--encoding", multiple=True, help="this one only, repeatable")
@click.option("--form", multiple=True, type=click.Choice(list(FORMS)), help="this one only, repeatable")
@click.option("--dtype", multiple=True, type=click.Choice(DTYPES), help="this one only, repeatable")
@click.option("--mode", multiple=True, type=click.Choice(list(MODES)), help="this one only, repeatable")
@click.option(
    "--minutes", type=click.FloatRange(0), default=25, show_default=True, help="begin nothing more after these"
)
@click.option("--time/--no-time", "timed", default=True, help="time files too  [default: yes]")
@click.option("--quick", is_flag=True, help="prepare tiny files, time few rounds")
@click.option("--output", type=click.Path(path_type=Path), help="a folder  [default: docs/results/<device>]")
def main(
    target: Path | None,
    from_prepared: Path | None,
    megabytes: float,
    runtime: tuple[str, ...],
    minutes: float,
    timed: bool,
    quick: bool,
    output: Path | None,
    **only: tuple[str, ...],
) -> None:
    """Verify and time whole models and blocks on every runtime of a GPU machine."""
    names = runtime or tuple(name for name, row in RUNTIMES.items() if row.needs_gpu)
    try:
        for kind, given, known in (("runtime", runtime, RUNTIMES), ("encoding", only["encoding"], ENCODINGS)):
            for name in given:
                check_known(kind, name, known)
        if target is not None and from_prepared is not None:
            raise click.UsageError("--prepare and --from-prepared are two steps: give one of them.")
        chosen = items(**only, quick=quick)
        if target is not None:
            _prepare_only(target, prepare(target, chosen, megabytes * 2**20, quick))
            return
        missing = {name: RUNTIMES[name].missing() for name in names}
        reasons = [reason.text for reason in missing.values() if reason is not None]
        if from_prepared is None and len(reasons) == len(names):
            click.echo(f"not run: {'; '.join(dict.fromkeys(reasons))}", err=True)
            raise SystemExit(3)
        listed = None if from_prepared is None else read_list(from_prepared)
        device, made_by = _device(names), makers() if listed is None else dict(listed.made_by)
        header = {"device": device, "made_by": made_by, "quick": quick if listed is None else listed.quick, **record()}
        folder = output or RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        results = Results(folder=folder, header=header)
        with temporary.folder() as made:
            if from_prepared is None or listed is None:
                left = (one for one in chosen if not all(results.keep(one.name, *each) for each in missing.items()))
                source, lists = made, prepare(made, left, float("inf"), quick)
            else:
                source, lists = from_prepared, _one_by_one(listed, {one.name for one in chosen})
            run(source, lists, missing, results, minutes=minutes, timed=timed, prepares=from_prepared is None)
        if not results.rows:
            raise click.UsageError("nothing of what was chosen is there: choose other names.")
        results.write()
    except PosexportError as error:
        raise click.UsageError(str(error)) from None
    console.show_table(TITLE.format(device=results.header["device"]), COLUMNS, [row.shown() for row in results.rows])
    click.echo(f"{summary(results.rows)}: {results.folder / 'acceptance.json'}")
    raise SystemExit(results.exit_code(bool(runtime and reasons)))


def _prepare_only(folder: Path, lists: Iterator[PreparedList]) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{str(folder)!r} is not empty: give a new folder.")
    listed = None
    for listed in lists:
        one = listed.items[-1]
        click.echo(f"{one.place}{f': {one.error}' if one.error else ''}")
    if listed is None:
        raise click.UsageError("nothing of what was chosen can be exported: choose other forms, dtypes or modes.")
    wrong = sum(bool(one.error) for one in listed.items)
    click.echo(f"{len(listed.items) - wrong} prepared, {wrong} failed: {folder}")
    raise SystemExit(1 if wrong else 0)


def _one_by_one(listed: PreparedList, names: set[str]) -> Iterator[PreparedList]:
    """The list as it was when each item was added, of those that are chosen."""
    for one in listed.items:
        if one.name in names:
            yield attrs.evolve(listed, items=(one,))


def run(
    source: Path,
    lists: Iterator[PreparedList],
    missing: Mapping[str, Reason | None],
    results: Results,
    *,
    minutes: float,
    timed: bool,
    prepares: bool,
) -> None:
    """Verify and time the last item of each list, whose folder is below `source`, on runtimes that may be missing.

    Whole models are timed at once; blocks, which take longer, once all are verified or VERIFYING of the time is over.
    Where the list `prepares` each item as it goes on, it ends then.
    """
    start, quick, later = time.monotonic(), bool(results.header["quick"]), list[Prepared]()
    end, end_of_blocks = start + 60 * minutes, start + 60 * minutes * (VERIFYING if timed else 1)
    with Pool(TIME_LIMIT) as pool, console.steps("preparing") as progress:
        for listed in lists:
            prepared = listed.items[-1]
            in_time = time.monotonic() < (end if prepared.is_model else end_of_blocks)
            progress.update(f"verifying {prepared.name}")
            _check(source / prepared.place, prepared, pool, missing, results, in_time)
            if timed and prepared.is_model:
                progress.update(f"timing {prepared.name}")
                _bench(source / prepared.place, prepared, results, quick, in_time=time.monotonic() < end)
            elif timed and prepared.shapes is not None:
                later.append(prepared)
            if prepares and not in_time:
                break
            progress.update("preparing")
        for prepared in later:
            progress.update(f"timing {prepared.name}")
            _bench(source / prepared.place, prepared, results, quick, in_time=time.monotonic() < end)


def _check(
    folder: Path, prepared: Prepared, pool: Pool, missing: Mapping[str, Reason | None], results: Results, in_time: bool
) -> None:
    """Add the rows of a file on each runtime whose rows of the run before don't stand."""
    sha256 = None if prepared.file is None else prepared.file.sha256[prepared.file.model]
    names = [name for name in missing if not results.keep(prepared.name, name, missing[name], sha256, in_time)]
    why = (FAILED, f"it could not be prepared: {prepared.error}") if prepared.file is None else None
    if why is None and not folder.is_dir():
        why = (NOT_RUN, f"{prepared.place} is not here: copy its part")
    if why is None and not in_time:
        why = (NOT_RUN, OUT_OF_TIME)
    if why is not None or prepared.file is None:
        for name in names:
            state, reason = why or (FAILED, "")
            results.add(Row(file=prepared.name, runtime=name, check=PARITY, state=state, reason=reason))
        return
    for verdict in check_file(prepared.file, folder, pool, {name: RUNTIMES[name] for name in names}, missing):
        results.add(Row.of(prepared.name, verdict))


def _bench(folder: Path, prepared: Prepared, results: Results, quick: bool, in_time: bool) -> None:
    """Time a file on the runtimes that passed on it, with captured CUDA graphs too where it is a whole model."""
    rows = [row for row in results.rows if row.file == prepared.name]
    done = {(row.runtime, row.check) for row in rows if row.check in (TIMING, GRAPH_TIMING)}
    passed = [row.runtime for row in rows if row.check == PARITY and row.state == PASSED]
    able = [name for name in dict.fromkeys(passed) if name in CANDIDATES and not CANDIDATES[name].role]
    for check in (TIMING, GRAPH_TIMING):
        graphs = check == GRAPH_TIMING
        names = [name for name in able if (name, check) not in done]
        names = [name for name in names if not graphs or CANDIDATES[name].takes("cuda_graph")]
        if names and not in_time:
            for name in names:
                results.add(Row(file=prepared.name, runtime=name, check=check, state=NOT_RUN, reason=OUT_OF_TIME))
        elif names and prepared.file is not None:
            for row in _times(folder / prepared.file.model, prepared, names, check, quick):
                results.add(row)


def _times(path: Path, prepared: Prepared, names: Sequence[str], check: str, quick: bool) -> list[Row]:
    """A row for each runtime; whatever an engine raises is a row too."""
    rows = [Row(file=prepared.name, runtime=name, check=check, state=FAILED, reason="no timing") for name in names]
    rounds, seconds = (2, 2.0) if quick else (15, 8.0)
    options = BenchOptions(
        runtimes=tuple(names),
        shapes=prepared.shapes or (),
        cuda_graph=check == GRAPH_TIMING,
        rounds=rounds,
        seconds=seconds,
    )
    try:
        shapes = bench(path, options).shapes
    except Exception as error:
        return [attrs.evolve(row, reason=str(error).strip().partition("\n")[0]) for row in rows]
    for row in rows:
        for shape in shapes:
            timing = next(result for result in shape.results if result.runtime == row.runtime)
            if timing.seconds is None:
                row.state, row.reason = timing.state, timing.reason
                continue
            row.state, row.reason = PASSED, ""
            ratio = timing.ratios.get("torch")
            row.times.append(
                {
                    "sizes": ", ".join(f"{name} {size}" for name, size in shape.sizes.to_dict().items()),
                    "seconds": timing.seconds.median,
                    "tokens_per_second": timing.tokens_per_second,
                    "to_torch": None if ratio is None else ratio.median,
                    "gpu_memory": timing.gpu_memory,
                }
            )
    return rows


def _device(names: Sequence[str]) -> str:
    if gpu_missing() is not None or not any(RUNTIMES[name].needs_gpu for name in names):
        return "cpu-acceptance"
    name, capability = cuda.device()
    return f"{name} sm{capability.replace('.', '')}"


if __name__ == "__main__":
    main()
