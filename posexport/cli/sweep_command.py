"""`posexport sweep`: many jobs, on this machine or on a Ray cluster; what is done is kept, and never done again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.errors import PosexportError, RequestError
from posexport.spec.fields import integer, positive
from posexport.workflows.sweep.address import check_address

if TYPE_CHECKING:
    from posexport.workflows.sweep.folder import Folder
    from posexport.workflows.sweep.job_plan import Plan
    from posexport.workflows.sweep.jobs import Job, Record
    from posexport.workflows.sweep.run import Executor

STATES = ("passed", "failed", "not run")


@attrs.frozen(kw_only=True)
class SweepOptions:
    """The numbers among the options, validated."""

    workers: int | None = integer(None, "jobs side by side on this machine", optional=True)
    tries: int = integer(3, "attempts that a job gets")
    time_limit: float = positive(3600.0, "seconds that one job may take")


@click.command()
@click.argument("file", required=False)
@click.option("--job", "texts", metavar="TEXT", multiple=True, help="such as 'verify artifact=rope.onnx', repeatable")
@click.option("--output", "-o", metavar="FOLDER", default="sweep", help="where results go  [default: ./sweep]")
@click.option(
    "--ray", metavar="ADDRESS", help="HOST:PORT of the Ray cluster to run on; 'auto' is the one of this machine"
)
@click.option("--workers", metavar="N", help="jobs side by side here  [default: one per core, as memory allows]")
@click.option("--tries", metavar="N", help="attempts of a job whose process or machine is lost  [default: 3]")
@click.option("--time-limit", metavar="SECONDS", help="for one job  [default: 3600]")
@click.option("--dry-run", is_flag=True, help="only show the jobs, and which are done")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def sweep(
    file: str | None,
    texts: tuple[str, ...],
    output: str,
    ray: str | None,
    dry_run: bool,
    as_json: bool,
    **numbers: Any,
) -> int:
    """Run matrix, verify, bench and tune jobs, those of a TOML file or of --job, on many machines or on this one.

    Results are kept as they come; the same command again goes on where it was stopped. Exits 1 where a job failed, 3
    where a required runtime, or every job, was not run.
    """
    options = SweepOptions(**{name: value for name, value in numbers.items() if value is not None})
    if ray is not None and options.workers is not None:
        raise RequestError(f"--workers {options.workers} is for this machine and --ray {ray} for a cluster: give one.")
    if ray is not None:
        check_address(ray)
    with console.steps("reading the jobs") as progress:
        from posexport.workflows.sweep.folder import Folder
        from posexport.workflows.sweep.job_plan import plan, read_tables, read_text
        from posexport.workflows.sweep.run import drive, left

        if not file and not texts:
            raise RequestError("there are no jobs: give a TOML file, or --job 'matrix encoding=rope'.")
        path = Path(file) if file else None
        tables = [] if path is None else [(said, path.parent) for said in read_tables(path)]
        planned = plan([*tables, *((read_text(text), Path()) for text in texts)])
        folder = Folder(Path(output))
        if dry_run:
            _show_plan(planned, folder, as_json)
            return 0
        progress.update("starting", total=len(planned.jobs))
        with closing(_executor(ray, planned, folder, options)) as executor, folder.hold():
            before = folder.judged()
            todo = left(planned.jobs, before)
            records = {job.id: before[job.id] for job in planned.jobs if job.id in before}
            known = len(records)
            progress.update(completed=known)

            def finish(job: Job, outcome: Any, attempts: int) -> None:
                records[job.id] = folder.keep(job, outcome, attempts)
                progress.update(f"{outcome.state}: {job.label}", advance=1)

            try:
                folder.tell(planned.jobs, records, planned.refused)
                drive(todo, executor, finish, tries=options.tries)
            except KeyboardInterrupt:
                _collect(folder, planned, records)
                click.echo(
                    f"Error: interrupted: {len(planned.jobs) - len(records)} of {len(planned.jobs)} jobs are left, "
                    "so run it again to go on.",
                    err=True,
                )
                return 130
            except PosexportError:  # the cluster went away: what has ended stays
                if records:
                    _collect(folder, planned, records)
                raise
            notes = _collect(folder, planned, records)
    found = [records[job.id] for job in planned.jobs]
    if as_json:
        console.show_json(_plain(found, planned, folder, known, notes))
    else:
        _show(found, planned, folder, known, notes)
    code = _exit_code(found, planned)
    if code == 3:
        click.echo(f"Error: {_not_there(found, planned)}", err=True)
    return code


def _executor(ray: str | None, planned: Plan, folder: Folder, options: SweepOptions) -> Executor:
    """Who does the jobs; a cluster only where one is left. It comes before the folder, which no sweep needs without."""
    from posexport.workflows.sweep.run import left

    todo = [] if ray is None else left(planned.jobs, folder.judged())
    if ray is not None and todo:
        from posexport.workflows.sweep.ray import Cluster

        return Cluster(ray, todo, options.time_limit)
    from posexport.verify.matrix.run import default_jobs
    from posexport.workflows.sweep.local import Local

    return Local(options.workers or default_jobs(), options.time_limit)


def _collect(folder: Folder, planned: Plan, records: Mapping[str, Record]) -> list[str]:
    """Put the cells of matrix jobs together, and write down what became of all; returns what is to be said of that."""
    from posexport.files import staged
    from posexport.workflows.sweep.matrix import file_name, merged

    results = [
        folder.path / record.result
        for job in planned.jobs
        if job.kind == "matrix" and (record := records.get(job.id)) is not None and record.result is not None
    ]
    matrices, others = merged(results, planned.refused)
    with staged() as files:
        for target, matrix in matrices.items():
            files.write(folder.path / file_name(target), methodcaller("write", matrix.to_bytes()))
    notes = [f"{others} matrix jobs were done by other versions and are not in matrix.json"] if others else []
    folder.tell(planned.jobs, records, planned.refused, notes)
    return notes


def _exit_code(found: Sequence[Record], planned: Plan) -> int:
    states = {record.state for record in found}
    if "failed" in states:
        return 1
    required = any(record.state == "not run" and job.requires for record, job in zip(found, planned.jobs, strict=True))
    return 3 if required or states == {"not run"} else 0


def _not_there(found: Sequence[Record], planned: Plan) -> str:
    for record, job in zip(found, planned.jobs, strict=True):
        if record.state == "not run" and job.requires:
            return f"{job.label} was not run: {record.reason}."
    return "no job was run, see their reasons."


def _plain(found: Sequence[Record], planned: Plan, folder: Folder, known: int, notes: Sequence[str]) -> dict[str, Any]:
    counts = Counter(record.state for record in found)
    return {
        "kind": "sweep",
        "version": 1,
        "folder": str(folder.path),
        "counts": {state: counts[state] for state in STATES},
        "done_before": known,
        "jobs": [{"kind": job.kind, **attrs.asdict(record)} for job, record in zip(planned.jobs, found, strict=True)],
        "refused": [{**said, "reason": why} for said, why in planned.refused],
        "notes": list(notes),
    }


def _jobs(number: int) -> str:
    return f"{number} job{'s' * (number != 1)}"


def _show(found: Sequence[Record], planned: Plan, folder: Folder, known: int, notes: Sequence[str]) -> None:
    kinds = dict.fromkeys(job.kind for job in planned.jobs)
    counts = Counter((job.kind, record.state) for job, record in zip(planned.jobs, found, strict=True))
    rows = [(kind, *(str(counts[kind, state]) for state in STATES)) for kind in kinds]
    console.show_table(f"{_jobs(len(found))}, {known} of them done before", ("kind", *STATES), rows, right=STATES)
    for record in found:
        if record.state == "failed":
            where = f" on {record.where}" if record.where else ""
            click.echo(f"failed: {record.label}{where}: {record.reason}")
    idle = Counter(record.reason or "" for record in found if record.state == "not run")
    for reason, number in idle.items():
        click.echo(f"not run: {_jobs(number)} ({reason})")
    if planned.refused:
        click.echo(f"refused: {len(planned.refused)} combinations, which a form can't carry (see sweep.json)")
    for note in notes:
        click.echo(note)
    click.echo(f"results are in {folder.path}")


def _show_plan(planned: Plan, folder: Folder, as_json: bool) -> None:
    before = folder.judged()
    if as_json:
        console.show_json(
            {
                "kind": "sweep",
                "version": 1,
                "jobs": [{**job.to_dict(), "done": job.id in before} for job in planned.jobs],
                "refused": [{**said, "reason": why} for said, why in planned.refused],
            }
        )
        return
    rows = [
        (job.id, job.label, str(job.needs), before[job.id].state if job.id in before else "to do")
        for job in planned.jobs
    ]
    console.show_table(_jobs(len(rows)), ("id", "job", "takes", "state"), rows)
