"""Timing the files of a project, each with its latency budget and its baseline, and the exit code for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.folders import make_folders
from posexport.bench.benchmark import PROCESSES, bench
from posexport.bench.candidates import CANDIDATES, choose, is_reference
from posexport.bench.gate import bench_gated, bench_to_keep, excused_references
from posexport.bench.options import BenchOptions
from posexport.bench.regression import DEFAULT_LIMIT, read_limit
from posexport.bench.result import (
    FAILED,
    NOT_RUN,
    OUT_OF_DATE,
    SLOWER,
    TIMED,
    Benchmark,
    FileResult,
    FileState,
    ProjectBenchmark,
    check_place,
    read_benchmark,
)
from posexport.errors import RequestError
from posexport.files import write_json
from posexport.progress import Progress, Warn
from posexport.workflows.project import latency
from posexport.workflows.project.file import Project
from posexport.workflows.project.products import Product, out_of_date, products


def check_results_folder(path: Path | None) -> None:
    """RequestError where `path`, if it is given, can't be the folder that gets a result for each file."""
    if path is None:
        return
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        raise RequestError(f"--save is {str(path)!r}: for a project give a folder, which gets a result for each file.")
    nearest = next((folder for folder in path.parents if folder.exists()), path)
    if nearest != path and not nearest.is_dir():
        raise RequestError(f"--save is {str(path)!r}, below a file: give a folder, which gets a result for each.")


def bench_project(
    project: Project, options: BenchOptions, folder: Path | None, *, strict: bool, warn: Warn, progress: Progress
) -> ProjectBenchmark:
    """Time every file of a project. With `folder`, save the result of each in it.

    The exit code is 1 if a file is out of date, fails or is slower than its limit (with `strict` also if that is
    inconclusive). It is 3 if a required runtime was not run, or if nothing was run. `warn` is called with a sentence
    for each result that is not a good baseline, and for what makes a comparison less certain. RequestError for requests
    that don't fit the project.
    """
    choose((*options.runtimes, *options.required))  # a misspelt name is reported before anything is read
    stated = [name for name in project.require if name in CANDIDATES]  # others run no kernels: verify needs them
    required = tuple(dict.fromkeys((*options.required, *stated)))
    files = products(project)
    chosen = (*options.runtimes, *required) if options.runtimes else ()
    jobs = [(product, *latency.timed_on(product, chosen)) for product in files]
    stale = {
        product.path: old.text
        for product, _, unable in jobs
        if unable is None and (old := out_of_date(product)) is not None
    }
    if stale:  # their times would be about something else
        message = f"nothing is timed while files are out of date ({len(stale)} of {len(files)}): run 'posexport build'"
        results = [
            _head(product, OUT_OF_DATE, stale[product.path])
            if product.path in stale
            else _head(product, NOT_RUN, why or "other files are out of date")
            for product, _, why in jobs
        ]
        return ProjectBenchmark(project=str(project.file), exit_code=1, reason=message, files=tuple(results))
    targets = {product.path: folder and folder / latency.result_name(product) for product in files}
    baselines = {
        product.path: latency.baseline_of(project, product, targets[product.path])
        for product, _, reason in jobs
        if reason is None
    }
    if folder is not None:
        make_folders(folder)
    for place in filter(None, targets.values()):
        check_place(place)
    results = []
    for product, names, reason in jobs:
        if reason is not None:
            limits = tuple(latency.judge(product, None, names, reason))
            results.append(_head(product, NOT_RUN, reason, limits=limits))
            continue
        target = targets[product.path]
        asked = latency.options_for(product, names, options)
        result = _time(product, baselines[product.path], asked, target is not None, warn, progress)
        result = attrs.evolve(result, limits=tuple(latency.judge(product, result, names)))
        if target is not None:
            write_json(target, result.to_dict())
            if product.entry.baseline is not None and (problems := latency.baseline_problems(result)):
                warn(f"{target} is saved, but is no fit baseline: {'; '.join(problems)}.")
        results.append(_head(product, TIMED, "", limits=result.limits, result=result))
    code, why = exit_code(results, options.runtimes, required, strict)
    return ProjectBenchmark(project=str(project.file), exit_code=code, reason=why, files=tuple(results))


def _head(product: Product, state: FileState, reason: str, **results: Any) -> FileResult:
    return FileResult(file=str(product.path), artifact=product.entry.name, state=state, reason=reason, **results)


def _time(
    product: Product, baseline: Path | None, options: BenchOptions, keep: bool, warn: Warn, progress: Progress
) -> Benchmark:
    path, entry = product.path, product.entry
    progress(f"{path.name}: reading the artifact")

    def step(text: str) -> None:
        progress(f"{path.name}: {text}")

    if baseline is not None:
        limit = read_limit(DEFAULT_LIMIT) if entry.max_regression is None else entry.max_regression
        return bench_gated(path, read_benchmark(baseline), limit, options, keep=keep, warn=warn, progress=step)
    if entry.baseline is not None:
        return bench_to_keep(path, options, progress=step)
    processes = options.processes or (PROCESSES if entry.budget.latency else 1)
    return bench(path, attrs.evolve(options, processes=processes), progress=step)


def exit_code(
    files: Sequence[FileResult], named: Sequence[str], required: Sequence[str], strict: bool
) -> tuple[int, str]:
    """The exit code, and a sentence without its full stop, or an empty text.

    References count only if they are `named`. If they fail, they also count if they are `required`.
    """
    results = [file.result for file in files if file.result is not None]
    timings = [timing for result in results for timing in result.timings]
    excused = excused_references((*named, *required))
    for timing in timings:
        if timing.state == FAILED and timing.runtime not in excused:
            return 1, f"{timing.runtime} failed: {timing.reason}"
    limits = [(Path(file.file).name, limit) for file in files for limit in file.limits]
    slower = any(result.gate is not None and result.gate.exit_code(strict) for result in results)
    if slower or any(latency.is_exceeded(limit, strict) for _, limit in limits):
        over = [f"{name} at {limit.scenario} on {limit.runtime}" for name, limit in limits if limit.state == SLOWER]
        return 1, f"over the budget of time: {', '.join(over)}" if over else ""
    for name in required:
        of_runtime = [timing for timing in timings if timing.runtime == name]
        if not of_runtime or any(timing.state == NOT_RUN for timing in of_runtime):
            why = of_runtime[0].reason if of_runtime else "no file is timed on it"
            return 3, f"required runtime {name} was not run: {why}"
    counted = [timing for timing in timings if timing.runtime in named or not is_reference(timing.runtime)]
    if not any(timing.state == TIMED for timing in counted):
        return 3, "nothing was timed: see the reasons"
    return 0, ""
