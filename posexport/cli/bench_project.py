"""Bare `posexport bench`: every file of the project, held against its budget of time and its baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.project_options import open_project, wanted
from posexport.errors import RequestError

if TYPE_CHECKING:
    from posexport.baseline import Gate
    from posexport.bench_result import Benchmark
    from posexport.project.bench import Kept
    from posexport.project.entries import Project
    from posexport.project.files import Product

_COLUMNS = ("file", "runtime", "at", "times", "of", "95 % interval", "allowed", "state")


@attrs.define(kw_only=True)
class Timed:
    """One file: its result, unless it was not run for a reason, and what was judged of it."""

    product: Product
    reason: str = ""
    found: Benchmark | None = None
    gate: Gate | None = None
    limits: Sequence[Kept] = ()
    saved: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `result` is what `posexport bench FILE --save` writes."""
        return {
            "file": str(self.product.path),
            "artifact": self.product.entry.name,
            "state": "not run" if self.found is None else "timed",
            "reason": self.reason,
            "limits": [attrs.asdict(each) for each in self.limits],
            "result": self.result(),
        }

    def result(self) -> dict[str, Any] | None:
        """The result with its limits and its gate."""
        if self.found is None:
            return None
        limits = {"limits": [attrs.asdict(each) for each in self.limits]} if self.limits else {}
        return self.found.to_dict() | limits | ({} if self.gate is None else {"gate": self.gate.to_dict()})


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
    from posexport.bench_candidates import CANDIDATES, choose

    project = open_project(named)
    choose((*runtimes, *required))  # a misspelt name is told before anything loads
    folder = _folder(save)
    with console.progress("loading torch"):
        from posexport.baseline import read_allowed
        from posexport.bench_result import check_place
        from posexport.project import bench as project_bench
        from posexport.project.files import products
    stated = [name for name in project.require if name in CANDIDATES]  # others run no kernels: verify needs them
    required = tuple(dict.fromkeys((*required, *stated)))
    files = products(project)
    sources, _ = wanted(project, files)
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
        timed = _time(product, bases[product.path], allowed, processes, target is not None, asked)
        timed.limits = project_bench.judge(product, timed.found, names)
        result = timed.result()
        if target is not None and result is not None:
            from posexport.files import write_json

            write_json(target, result)
            timed.saved = target
        done.append(timed)
    code, why = _exit_code(done, runtimes, required, strict)
    if as_json:
        rows = [each.to_dict() for each in done]
        console.show_json({**_head(project, code), "files": rows})
    else:
        _show(done, peers, str(project.file))
    for each in done:
        _warn(each)
    if why:
        click.echo(f"Error: {why}.", err=True)
    return code


def _warn(each: Timed) -> None:
    """Say on stderr what is odd about a file's manifest, and whether what was saved is no fit baseline."""
    from posexport.project.bench import unfit

    for doubt in each.found.doubts if each.found else ():
        console.warn(f"{doubt}.")
    if each.found is not None and each.saved is not None and each.product.entry.baseline is not None:
        faults = unfit(each.found, each.limits)
        if faults:
            console.warn(f"{each.saved} is saved, but is no fit baseline: {'; '.join(faults)}.")


def _head(project: Project, code: int) -> dict[str, Any]:
    return {"kind": "bench-project", "version": 1, "project": str(project.file), "exit_code": code}


def _folder(save: str | None) -> Path | None:
    if save is None:
        return None
    path = Path(save)
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        raise RequestError(f"--save is {save!r}: for a project give a folder, which gets a result for each file.")
    there = next((folder for folder in path.parents if folder.exists()), path)
    if there != path and not there.is_dir():
        raise RequestError(f"--save is {save!r}, below a file: give a folder, which gets a result for each.")
    return path


def _show_stale(
    project: Project, files: Sequence[tuple[Product, str | None]], stale: Mapping[Path, str], as_json: bool
) -> None:
    """Why nothing is timed: every file, those that are out of date and those that wait for them."""
    rows = [
        {
            "file": str(product.path),
            "artifact": product.entry.name,
            "state": "out of date" if product.path in stale else "not run",
            "reason": stale.get(product.path) or reason or "other files are out of date",
        }
        for product, reason in files
    ]
    if as_json:
        console.show_json({**_head(project, 1), "files": rows})
    else:
        table = [(row["file"], row["state"], row["reason"]) for row in rows]
        console.show_table(f"Files of {project.file}", ("file", "state", "why"), table)
    told = f"nothing is timed while files are out of date ({len(stale)} of {len(rows)}): run 'posexport build'."
    click.echo(f"Error: {told}", err=True)


def _time(
    product: Product, base: Path | None, allowed: float, processes: int | None, keep: bool, asked: dict[str, Any]
) -> Timed:
    with console.progress(f"reading {product.path.name}") as (bar, task):
        from posexport.bench import PROCESSES, bench
        from posexport.bench_gate import bench_gated, bench_to_keep
        from posexport.bench_result import read_benchmark

        def progress(step: str) -> None:
            bar.update(task, description=f"{product.path.name}: {step}", advance=0)

        if base is not None:
            found, gate = bench_gated(
                product.path,
                baseline=read_benchmark(base),
                allowed=allowed,
                processes=processes,
                keep=keep,
                tell=lambda note: console.warn(f"{product.path.name}: {note}"),
                progress=progress,
                **asked,
            )
            return Timed(product=product, found=found, gate=gate)
        if product.entry.baseline is not None:
            found = bench_to_keep(product.path, processes=processes, progress=progress, **asked)
        else:
            count = processes or (PROCESSES if product.entry.budget.latency else 1)
            found = bench(product.path, processes=count, progress=progress, **asked)
        return Timed(product=product, found=found)


def _exit_code(done: Sequence[Timed], asked: Sequence[str], required: Sequence[str], strict: bool) -> tuple[int, str]:
    """The exit code, and a sentence without its full stop where it needs one; of peers, times are only what was `asked`
    for."""
    from posexport.baseline import SLOWER
    from posexport.bench_candidates import is_peer
    from posexport.bench_result import TIMED
    from posexport.project.bench import broken

    results = [result for each in done if each.found for shape in each.found.shapes for result in shape.results]
    failed = next((each for each in results if each.state == "failed" and not is_peer(each.runtime)), None)
    if failed is not None:
        return 1, f"{failed.runtime} failed: {failed.reason}"
    if any(broken(each.limits, strict) or (each.gate and each.gate.exit_code(strict)) for each in done):
        over = [
            f"{each.product.path.name} at {limit.scenario} on {limit.runtime}"
            for each in done
            for limit in each.limits
            if limit.state == SLOWER
        ]
        return 1, f"over the budget of time: {', '.join(over)}" if over else ""
    for name in required:
        states = [result.state for result in results if result.runtime == name]
        if not states or "not run" in states:
            why = next((result.reason for result in results if result.runtime == name), "no file is timed on it")
            return 3, f"required runtime {name} was not run: {why}"
    if not any(each.state == TIMED and (each.runtime in asked or not is_peer(each.runtime)) for each in results):
        return 3, "nothing was timed: see the reasons"
    return 0, ""


def _show(done: Sequence[Timed], peers: bool, project: str) -> None:
    from posexport.cli.bench_tables import show_benchmark, show_gate

    for each in done:
        if each.found is not None:
            show_benchmark(each.found, peers)
        if each.gate is not None:
            show_gate(each.gate)
    rows = [_row(each.product.path.name, limit) for each in done for limit in each.limits]
    if rows:
        console.show_table(f"Budget of {project}", _COLUMNS, rows, right=("times", "allowed"))
    for each in done:
        for limit in each.limits:
            if limit.reason and limit.reason != each.reason:
                click.echo(f"{each.product.path.name}, {limit.scenario} on {limit.runtime}: {limit.reason}")
        if each.reason:
            click.echo(f"not run: {each.product.path.name} ({each.reason})")


def _row(file: str, each: Kept) -> tuple[str, ...]:
    known = each.ratio is not None
    interval = f"{each.low:.2f} to {each.high:.2f}" if known else "-"
    ratio = f"{each.ratio:.2f}" if known else "-"
    return (file, each.runtime, each.scenario, ratio, each.peer, interval, f"{each.limit:g}", each.state)
