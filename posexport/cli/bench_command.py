"""`posexport bench`: latency of an artifact on the runtimes that are there, beside torch and the lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.bench_project import bench_project
from posexport.cli.project_options import project_option
from posexport.errors import RequestError
from posexport.spec.fields import integer, positive

if TYPE_CHECKING:
    from posexport.bench.result import Benchmark

_ALLOWED = "5%"


@attrs.frozen(kw_only=True)
class BenchOptions:
    """The numbers among the options, validated; None is the default of the stage."""

    rounds: int | None = integer(None, "rounds", optional=True)
    warmup: int = integer(3, "runs before the first round")
    threads: int | None = integer(None, "threads of each runtime", optional=True)
    seed: int = integer(0, "seed of the inputs and of the order within rounds", at_least=0)
    seconds: float = positive(60.0, "seconds for the rounds of one shape")
    processes: int | None = integer(None, "processes of each runtime", at_most=100, optional=True)


@click.command()
@click.argument("file", required=False)
@project_option
@click.option("--runtime", "runtimes", metavar="NAME", multiple=True, help="time this one, repeatable  [default: all]")
@click.option(
    "--scenario",
    "scenarios",
    metavar="NAME[:N,...]",
    multiple=True,
    help="prefill, decode or batch: the whole sweep; decode:2048 one step behind 2048 tokens; repeatable",
)
@click.option(
    "--shape", "shapes", metavar="SIZES", multiple=True, help="such as batch=1,seq=1,past_seq=512, repeatable"
)
@click.option("--peers", is_flag=True, help="beside torch's own ONNX export and ONNX Runtime's optimizer too")
@click.option(
    "--rounds",
    metavar="N",
    help="rounds, each of some timed runs per runtime  [default: 20; 10 in each of several processes]",
)
@click.option("--seconds", metavar="N", help="at most so many for the rounds of one shape  [default: 60]")
@click.option("--warmup", metavar="N", help="runs before the first round  [default: 3]")
@click.option("--threads", metavar="N", help="CPU threads of each runtime  [default: its own choice]")
@click.option("--processes", metavar="N", help="of each runtime, in turn  [default: 1; 7 to 20 to save or compare]")
@click.option("--seed", metavar="N", help="seed of the inputs  [default: 0]")
@click.option("--cuda-graph", is_flag=True, help="capture the run as a CUDA graph where a runtime can")
@click.option("--save", metavar="FILE", help="write the result as JSON, for --baseline and for posexport report")
@click.option("--baseline", metavar="FILE", help="exit 1 if a runtime got slower since this result was saved")
@click.option("--against", metavar="FILE", help="exit 1 if it is slower than this earlier artifact, timed beside it")
@click.option("--max-regression", metavar="SHARE", help=f"what may be slower, as 5% or 0.05  [default: {_ALLOWED}]")
@click.option("--strict", is_flag=True, help="exit 1 also where it can't be told whether it got slower")
@click.option("--require", "required", metavar="NAME", multiple=True, help="exit 3 if this runtime isn't timed")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON (seconds and bytes)")
def bench(
    file: str | None,
    project_file: str | None,
    runtimes: tuple[str, ...],
    scenarios: tuple[str, ...],
    shapes: tuple[str, ...],
    peers: bool,
    cuda_graph: bool,
    save: str | None,
    baseline: str | None,
    against: str | None,
    max_regression: str | None,
    strict: bool,
    required: tuple[str, ...],
    as_json: bool,
    **numbers: Any,
) -> int:
    """Time an artifact (.onnx or .plan) on the runtimes that are there, in alternation with torch and the lower bound.

    Without FILE, those of the project (posexport.toml, or [tool.posexport] of a pyproject.toml), each at the scenarios
    of its budget, which must be kept, and beside its baseline; --save then names a folder.

    Exits 1 where a runtime fails or got slower, 3 where a required one is not there.
    """
    options = BenchOptions(**{name: value for name, value in numbers.items() if value is not None})
    asked: dict[str, Any] = {
        "rounds": options.rounds,
        "warmup": options.warmup,
        "threads": options.threads,
        "seed": options.seed,
        "budget": options.seconds,
        "cuda_graph": cuda_graph,
    }
    if file is None:
        alone = {"scenario": scenarios, "shape": shapes, "baseline": baseline, "against": against}
        for name, value in {**alone, "max-regression": max_regression}.items():
            if value:
                raise RequestError(f"--{name} was given without a file: a project's file states it, so drop it.")
        return bench_project(
            project_file,
            runtimes=runtimes,
            required=required,
            peers=peers,
            processes=options.processes,
            save=save,
            strict=strict,
            as_json=as_json,
            options=asked,
        )
    if project_file is not None:
        raise RequestError("both a file and --project were given: without a file the project's are meant; drop one.")
    if baseline is not None and against is not None:
        raise RequestError("--baseline and --against were both given: compare with one of them at a time.")
    gated = baseline is not None or against is not None
    for name, given in (("--max-regression", max_regression is not None), ("--strict", strict)):
        if given and not gated:
            raise RequestError(f"{name} was given without something to compare with: give --baseline or --against too.")
    with console.steps("reading the artifact") as progress:
        from posexport.bench.benchmark import bench as run
        from posexport.bench.candidates import choose
        from posexport.bench.gate import bench_gated, bench_to_keep
        from posexport.bench.regression import check_named, read_allowed
        from posexport.bench.result import check_place, read_benchmark

        choose(required)  # a misspelt name is told before anything runs
        if save is not None:
            check_place(Path(save), None if baseline is None else Path(baseline))
        allowed = read_allowed(max_regression or _ALLOWED)
        asked |= {
            "runtimes": runtimes,
            "also": required,
            "scenarios": scenarios,
            "shapes": shapes,
            "peers": peers,
            "progress": progress,
        }
        base = None if baseline is None else read_benchmark(Path(baseline))
        if base is not None:
            check_named(base, runtimes)
        if gated:
            asked |= {"baseline": base, "against": against and Path(against)}
            found = bench_gated(
                Path(file),
                allowed=allowed,
                processes=options.processes,
                keep=save is not None,
                tell=console.warn,
                **asked,
            )
        elif save:
            found = bench_to_keep(Path(file), processes=options.processes, **asked)
        else:
            found = run(Path(file), processes=options.processes or 1, **asked)
    _give(found, save, peers, as_json)
    return _exit_code(found, runtimes, required) or (0 if found.gate is None else found.gate.exit_code(strict))


def _give(found: Benchmark, save: str | None, peers: bool, as_json: bool) -> None:
    from posexport.cli.bench_tables import show_benchmark, show_gate
    from posexport.files import write_json

    data = found.to_dict()
    for doubt in found.manifest_warnings:
        console.warn(f"{doubt}.")
    try:
        if as_json:
            console.show_json(data)
        else:
            show_benchmark(found, peers)
            if found.gate is not None:
                show_gate(found.gate)
    finally:  # last, and whatever became of stdout: each is kept where the other fails
        if save is not None:
            write_json(Path(save), data)
    if save is not None and not as_json:
        click.echo(f"saved to {save}")


def _exit_code(found: Benchmark, runtimes: tuple[str, ...], required: tuple[str, ...]) -> int:
    from posexport.bench.candidates import CANDIDATES, is_peer

    results = found.timings
    for name in required:
        results_of = [result for result in results if result.runtime == name]
        missing = next((result for result in results_of if result.state == "not run"), None)
        if missing is not None or not results_of:
            why = "nothing was timed on it" if missing is None else missing.reason
            return console.fail(f"required runtime {name} was not run: {why}.", 3)
    # a peer that nobody named says nothing about the artifact by failing
    excused = {name for name in CANDIDATES if is_peer(name)} - {*runtimes, *required}
    return int(any(result.state == "failed" and result.runtime not in excused for result in results))
