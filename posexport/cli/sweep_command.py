"""`posexport sweep`: runs many jobs, on this machine or on a Ray cluster; finished jobs are kept and never run
again."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.cli import console
from posexport.spec.fields import stated

if TYPE_CHECKING:
    from posexport.workflows.sweep.job_plan import Plan
    from posexport.workflows.sweep.sweep import SweepResult


@click.command()
@click.argument("file", required=False)
@click.option(
    "--job", "texts", metavar="TEXT", multiple=True, help="a job such as 'verify artifact=rope.onnx'; repeatable"
)
@click.option("--output", "-o", metavar="FOLDER", default="sweep", help="folder for results  [default: ./sweep]")
@click.option(
    "--ray", metavar="ADDRESS", help="HOST:PORT of the Ray cluster to run on; 'auto' for the cluster on this machine"
)
@click.option(
    "--workers", metavar="N", help="number of parallel jobs on this machine  [default: one per core, if memory allows]"
)
@click.option("--tries", metavar="N", help="maximum attempts for a job whose process or machine is lost  [default: 3]")
@click.option("--time-limit", metavar="SECONDS", help="time limit for one job  [default: 3600]")
@click.option("--dry-run", is_flag=True, help="only show the jobs and which are done, and refuse jobs that can't work")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def sweep(file: str | None, texts: tuple[str, ...], output: str, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Run matrix, verify, bench and tune jobs, from a TOML file or --job, on one or many machines.

    After an interruption, the same command continues.

    Exit codes: 0 if every job that ran succeeded, 1 if a job failed, 3 if a required runtime was not run or no job was.
    """
    with console.steps("reading the jobs") as progress:
        from posexport.workflows.sweep.folder import Folder
        from posexport.workflows.sweep.sweep import SweepOptions, read_plan, run_sweep

        chosen = SweepOptions(**stated(options))
        planned = read_plan(file, texts, _options_of)
        folder = Folder(Path(output))
        if not dry_run:
            total = len(planned.jobs)
            result = run_sweep(
                planned, folder, chosen, lambda step, done: progress.update(step, completed=done, total=total)
            )
    if dry_run:
        _show_plan(planned, {id: record.state for id, record in folder.final().items()}, as_json)
        return 0
    if result.left:
        counts = f"{result.left} of {len(planned.jobs)}"
        return console.fail(f"interrupted: {counts} jobs are left, so run it again to continue.", 130)
    if as_json:
        console.show_json(result.to_dict())
    else:
        _show(result)
    code = result.exit_code()
    return console.fail(result.missing(), code) if code == 3 else code


def _options_of(name: str) -> dict[str, click.Option]:
    """The options of a command by their names without dashes."""
    command: click.Command = getattr(import_module(f"posexport.cli.{name}_command"), name)
    options = (parameter for parameter in command.params if isinstance(parameter, click.Option))
    return {option.opts[0].removeprefix("--"): option for option in options}


def _jobs(number: int) -> str:
    return f"{number} job{'s' * (number != 1)}"


def _show(result: SweepResult) -> None:
    from posexport.workflows.sweep.sweep import STATES

    kinds = {job.id: job.kind for job in result.plan.jobs}
    counts = Counter((kinds[record.id], record.state) for record in result.records)
    rows = [(kind, *(str(counts[kind, state]) for state in STATES)) for kind in dict.fromkeys(kinds.values())]
    title = f"{_jobs(len(result.records))}, {result.done_before} of them done before"
    console.show_table(title, ("kind", *STATES), rows, right=STATES)
    for record in result.records:
        if record.state == "failed":
            where = f" on {record.where}" if record.where else ""
            console.write(f"failed: {record.label}{where}: {record.reason}")
    not_run = Counter(record.reason or "" for record in result.records if record.state == "not run")
    for reason, number in not_run.items():
        console.write(f"not run: {_jobs(number)} ({reason})")
    if result.plan.refused:
        console.write(f"refused: {len(result.plan.refused)} combinations that no form can hold (see sweep.json)")
    for note in result.notes:
        console.write(note)
    console.write(f"results are in {result.folder}")


def _show_plan(planned: Plan, states: dict[str, str], as_json: bool) -> None:
    if as_json:
        jobs = [{**job.to_dict(), "done": job.id in states} for job in planned.jobs]
        console.show_json({"kind": "sweep", "version": 1, "jobs": jobs, "refused": planned.refusals()})
        return
    rows = [(job.id, job.label, str(job.needs), states.get(job.id, "to do")) for job in planned.jobs]
    console.show_table(_jobs(len(rows)), ("id", "job", "takes", "state"), rows)
