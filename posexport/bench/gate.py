"""Benchmarks that are judged, or saved to judge later ones. They run as many processes as a clear answer needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from posexport.bench import regression
from posexport.bench.benchmark import PROCESSES, BenchRun, bench
from posexport.bench.candidates import CANDIDATES, EAGER, LOWER_BOUND, choose, is_reference
from posexport.bench.options import DEFAULTS, BenchOptions
from posexport.bench.regression import MOST_PROCESSES, is_steady
from posexport.bench.result import FAILED, NOT_RUN, TIMED, Benchmark, Gate, check_place, read_benchmark
from posexport.machine import differences, machine
from posexport.progress import Progress, Warn, silent

GATE_TIMEOUT = 300.0
"""Seconds after the first judgement in which more processes may start."""

_warn = logging.getLogger(__name__).warning


def bench_to_keep(path: Path, options: BenchOptions = DEFAULTS, *, progress: Progress = silent) -> Benchmark:
    """Time the artifact at `path` to compare later runs with the result.

    It runs `options.processes`, or as many as make the result steady. RequestError as in `bench`.
    """
    planned = attrs.evolve(options, processes=options.processes or PROCESSES)
    with BenchRun(path, planned, progress=progress) as run:
        return _settled(run, options.processes or MOST_PROCESSES, is_steady)


def bench_gated(
    path: Path,
    reference: Benchmark | Path,
    limit: float,
    options: BenchOptions = DEFAULTS,
    *,
    keep: bool = False,
    warn: Warn = _warn,
    progress: Progress = silent,
) -> Benchmark:
    """Time the artifact at `path` and judge it by `reference`: a saved result, or an earlier artifact.

    Scenarios, shapes, runtimes, threads and CUDA graphs that are not given are those of a saved result. `limit` is the
    largest share by which it may be slower (0.05 is 5 %). With `keep`, timing also continues until the result is
    steady, because a result that stopped when it looked fast is not a baseline. Before anything is timed, `warn` is
    called with a sentence for each thing that makes the comparison less certain. By default it is logged. RequestError
    as in `bench`, and for a result of something else.
    """
    planned = attrs.evolve(options, processes=options.processes or PROCESSES)
    baseline, previous = (reference, None) if isinstance(reference, Benchmark) else (None, reference)
    methods = {}
    if baseline is not None:
        planned = _as_in(baseline, planned)
        methods = {} if differences(dict(baseline.machine), machine()) else baseline.bound_methods()

    def judge(result: Benchmark) -> Gate:
        if baseline is None:
            gate = regression.compare_previous(result, limit, (*options.runtimes, *options.required))
            return attrs.evolve(gate, notes=run.notes)
        return regression.compare(result, baseline, limit)

    def enough(result: Benchmark) -> bool:
        return judge(result).settled and (not keep or is_steady(result))

    with BenchRun(path, planned, previous_artifact=previous, methods=methods, progress=progress) as run:
        for note in () if baseline is None else regression.notes_on(baseline, run.result()):
            warn(f"{path.name}: {note}")
        result = _settled(run, max(options.processes or 0, MOST_PROCESSES), enough)
    return attrs.evolve(result, gate=judge(result))


def _settled(run: BenchRun, most: int, enough: Callable[[Benchmark], bool]) -> Benchmark:
    """The result once it is enough, or after `most` processes or `GATE_TIMEOUT`."""
    run.open_processes(run.planned)
    start = time.monotonic()
    result = run.result()
    while run.processes < most and not enough(result) and time.monotonic() - start <= GATE_TIMEOUT:
        run.open_processes()
        result = run.result()
    return result


def _as_in(baseline: Benchmark, options: BenchOptions) -> BenchOptions:
    """Options that were not given are taken from the baseline."""
    if not options.scenarios and not options.shapes:
        scenarios = tuple(name for shape in baseline.shapes for name in shape.scenarios)
        shapes = tuple(str(shape.sizes) for shape in baseline.shapes if shape.scenario is None)
        options = attrs.evolve(options, scenarios=scenarios, shapes=shapes)
    if not options.runtimes:
        timed = {timing.runtime for timing in baseline.timings if timing.state == TIMED}
        runtimes = tuple(name for name, candidate in CANDIDATES.items() if name in timed and not candidate.role)
        options = attrs.evolve(options, runtimes=runtimes)
    threads = baseline.threads if options.threads is None else options.threads
    return attrs.evolve(options, threads=threads, cuda_graph=baseline.cuda_graph or options.cuda_graph)


def bench_file(
    path: Path,
    options: BenchOptions,
    *,
    baseline: Path | None = None,
    previous_artifact: Path | None = None,
    limit: str = regression.DEFAULT_LIMIT,
    save: Path | None = None,
    warn: Warn = _warn,
    progress: Progress = silent,
) -> Benchmark:
    """Time an artifact as `posexport bench FILE` does.

    With `save`, as many processes run as a saved result needs. With a saved `baseline` or a `previous_artifact`, it has
    a gate, whose `limit` is text such as `5%`. Nothing is written here. RequestError for invalid requests, before
    anything is timed.
    """
    choose(options.required)  # a misspelt name is reported before anything is read
    if save is not None:
        check_place(save, baseline)
    share = regression.read_limit(limit)
    saved = None if baseline is None else read_benchmark(baseline)
    if saved is not None:
        regression.check_named(saved, options.runtimes)
    reference = saved or previous_artifact
    if reference is not None:
        return bench_gated(path, reference, share, options, keep=save is not None, warn=warn, progress=progress)
    return (bench if save is None else bench_to_keep)(path, options, progress=progress)


def excused_references(named: Sequence[str]) -> set[str]:
    """The references that nobody named. If they fail, that says nothing about the artifact."""
    return {name for name in CANDIDATES if is_reference(name)} - set(named)


def exit_code(result: Benchmark, options: BenchOptions, strict: bool) -> tuple[int, str]:
    """The exit code of `posexport bench FILE`, and a sentence without its full stop where it needs one."""
    asked = (*options.required, *(() if options.module is None else (EAGER,)))
    for name in asked:
        timings = [timing for timing in result.timings if timing.runtime == name]
        missing = next((timing.reason for timing in timings if timing.state == NOT_RUN), None)
        if missing is not None or not timings:
            return 3, f"required runtime {name} was not run: {missing or 'nothing was timed on it'}"
    excused = excused_references((*options.runtimes, *asked))
    if any(timing.state == FAILED and timing.runtime not in excused for timing in result.timings):
        return 1, ""
    bounds = {name for name in excused if CANDIDATES[name].role == LOWER_BOUND}
    if not any(timing.state == TIMED and timing.runtime not in bounds for timing in result.timings):
        why = next((one.reason for one in result.timings if one.runtime not in excused and one.reason), "")
        return 3, f"nothing was timed: {why or 'no runtime was asked for'}"
    return (0 if result.gate is None else result.gate.exit_code(strict)), ""
