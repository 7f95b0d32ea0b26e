"""Bare `posexport bench`: every file of the project, held against its budget of time and its baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.workflows.project.bench import Timed, exit_code, results_folder, time_file
from posexport.workflows.project.requests import open_project, read_requests

if TYPE_CHECKING:
    from posexport.bench.result import FileResult, LimitResult
    from posexport.workflows.project.file import Project
    from posexport.workflows.project.products import Product

_COLUMNS = ("file", "runtime", "at", "times", "of", "95 % interval", "allowed", "state")


def bench_project(
    named: str | None,
    *,
    runtimes: tuple[str, ...],
    required: tuple[str, ...],
    peers: bool,
    processes: int | None,
    save: str | None,
    strict: bool,
    as_json: bool,
    options: Mapping[str, Any],
) -> int:
    """Time all files; exits 1 where one is out of date, fails or is slower than allowed, 3 where a required runtime
    was not run, or nothing was."""
    from posexport.bench.candidates import CANDIDATES, choose

    project = open_project(named)
    choose((*runtimes, *required))  # a misspelt name is told before anything loads
    folder = results_folder(save)
    with console.steps("loading torch"):
        from posexport.bench.regression import read_allowed
        from posexport.bench.result import check_place
        from posexport.workflows.project import latency as project_bench
        from posexport.workflows.project.products import products
    stated = [name for name in project.require if name in CANDIDATES]  # others run no kernels: verify needs them
    required = tuple(dict.fromkeys((*required, *stated)))
    files = products(project)
    sources, _ = read_requests(project, files)
    chosen = (*runtimes, *required) if runtimes else ()
    todo = []
    for product in files:
        names, reason = project_bench.timed_on(product, chosen)
        todo.append((product, names, reason))
    stale = project_bench.stale_files([product for product, _, reason in todo if reason is None], sources)
    if stale:
        _show_stale(project, [(product, reason) for product, _, reason in todo], stale, as_json)
        return 1
    saved = {product.path: folder and folder / project_bench.result_name(product) for product in files}
    bases = {
        product.path: project_bench.baseline_of(project, product, saved[product.path])
        for product, _, reason in todo
        if reason is None
    }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for place in filter(None, saved.values()):
        check_place(place)
    done = []
    for product, names, reason in todo:
        if reason is not None:
            limits = project_bench.judge(product, None, names, reason)
            done.append(Timed(product=product, reason=reason, limits=limits))
            continue
        asked = {**options, **project_bench.asked_of(product), "runtimes": names}
        asked["peers"] |= peers
        allowed = product.entry.max_regression
        allowed = read_allowed("5%") if allowed is None else allowed
        target = saved[product.path]
        with console.steps(f"reading {product.path.name}") as progress:
            timed = time_file(
                product, bases[product.path], allowed, processes, target is not None, asked, progress, console.warn
            )
        timed.limits = project_bench.judge(product, timed.found, names)
        if timed.found is not None:
            timed.found = attrs.evolve(timed.found, limits=tuple(timed.limits))
        if target is not None and timed.found is not None:
            from posexport.files import write_json

            write_json(target, timed.found.to_dict())
            timed.saved = target
        done.append(timed)
    code, why = exit_code(done, runtimes, required, strict)
    if as_json:
        console.show_json(_as_json(project, code, [timed.result() for timed in done]))
    else:
        _show(done, peers, str(project.file))
    for each in done:
        _warn(each)
    return console.fail(f"{why}.", code) if why else code


def _warn(each: Timed) -> None:
    """Say on stderr what is odd about a file's manifest, and whether what was saved is no fit baseline."""
    from posexport.workflows.project.latency import baseline_problems

    for doubt in each.found.manifest_warnings if each.found else ():
        console.warn(f"{doubt}.")
    if each.found is not None and each.saved is not None and each.product.entry.baseline is not None:
        faults = baseline_problems(each.found, each.limits)
        if faults:
            console.warn(f"{each.saved} is saved, but is no fit baseline: {'; '.join(faults)}.")


def _as_json(project: Project, code: int, files: Sequence[FileResult]) -> Any:
    from posexport.bench.result import ProjectBenchmark
    from posexport.jsondata import unstructure

    return unstructure(ProjectBenchmark(project=str(project.file), exit_code=code, files=tuple(files)))


def _show_stale(
    project: Project, files: Sequence[tuple[Product, str | None]], stale: Mapping[Path, str], as_json: bool
) -> None:
    """Why nothing is timed: every file, those that are out of date and those that wait for them."""
    from posexport.bench.result import FileResult

    rows = [
        FileResult(
            file=str(product.path),
            artifact=product.entry.name,
            state="out of date" if product.path in stale else "not run",
            reason=stale.get(product.path) or reason or "other files are out of date",
        )
        for product, reason in files
    ]
    if as_json:
        console.show_json(_as_json(project, 1, rows))
    else:
        table = [(row.file, row.state, row.reason) for row in rows]
        console.show_table(f"Files of {project.file}", ("file", "state", "why"), table)
    told = f"nothing is timed while files are out of date ({len(stale)} of {len(rows)}): run 'posexport build'."
    console.fail(told, 1)


def _show(done: Sequence[Timed], peers: bool, project: str) -> None:
    from posexport.cli.bench_tables import show_benchmark, show_gate

    for each in done:
        if each.found is not None:
            show_benchmark(each.found, peers)
        if each.found is not None and each.found.gate is not None:
            show_gate(each.found.gate)
    rows = [_row(each.product.path.name, limit) for each in done for limit in each.limits]
    if rows:
        console.show_table(f"Budget of {project}", _COLUMNS, rows, right=("times", "allowed"))
    for each in done:
        for limit in each.limits:
            if limit.reason and limit.reason != each.reason:
                click.echo(f"{each.product.path.name}, {limit.scenario} on {limit.runtime}: {limit.reason}")
        if each.reason:
            click.echo(f"not run: {each.product.path.name} ({each.reason})")


def _row(file: str, each: LimitResult) -> tuple[str, ...]:
    known = each.ratio is not None
    interval = f"{each.low:.2f} to {each.high:.2f}" if known else "-"
    ratio = f"{each.ratio:.2f}" if known else "-"
    return (file, each.runtime, each.scenario, ratio, each.reference, interval, f"{each.limit:g}", each.state)
