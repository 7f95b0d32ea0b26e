"""`posexport bench`: latency of an artifact on the runtimes that are there, beside torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.fields import integer

if TYPE_CHECKING:
    from posexport.bench import Benchmark, Timing


@attrs.frozen(kw_only=True)
class BenchOptions:
    """The numbers among the options, validated."""

    rounds: int = integer(20, "rounds")
    warmup: int = integer(3, "runs before the first round")
    threads: int | None = integer(None, "threads of each runtime", optional=True)
    seed: int = integer(0, "seed of the inputs and of the order within rounds", at_least=0)


@click.command()
@click.argument("file")
@click.option("--runtime", "runtimes", metavar="NAME", multiple=True, help="time this one, repeatable  [default: all]")
@click.option(
    "--shape", "shapes", metavar="SIZES", multiple=True, help="such as batch=1,seq=1,past_seq=512, repeatable"
)
@click.option("--rounds", metavar="N", help="rounds, each of three timed runs per runtime  [default: 20]")
@click.option("--warmup", metavar="N", help="runs before the first round  [default: 3]")
@click.option("--threads", metavar="N", help="CPU threads of each runtime  [default: its own choice]")
@click.option("--seed", metavar="N", help="seed of the inputs  [default: 0]")
@click.option("--cuda-graph", is_flag=True, help="capture the run as a CUDA graph where a runtime can")
@click.option("--require", "required", metavar="NAME", multiple=True, help="exit 3 if this runtime isn't timed")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON (seconds and bytes)")
def bench(
    file: str,
    runtimes: tuple[str, ...],
    shapes: tuple[str, ...],
    cuda_graph: bool,
    required: tuple[str, ...],
    as_json: bool,
    **numbers: Any,
) -> int:
    """Time an artifact (.onnx or .plan) on the runtimes that are there, in alternation with torch and torch.compile.

    Exits 1 where a runtime fails, 3 where a required one is not there.
    """
    options = BenchOptions(**{name: value for name, value in numbers.items() if value is not None})
    wanted = (*runtimes, *required) if runtimes else ()
    with console.progress("reading the artifact") as (bar, task):
        from posexport.bench import bench as run
        from posexport.bench_candidates import choose

        choose(required)  # a misspelt name is told before anything runs
        found = run(
            Path(file),
            runtimes=wanted,
            shapes=shapes,
            rounds=options.rounds,
            warmup=options.warmup,
            threads=options.threads,
            seed=options.seed,
            cuda_graph=cuda_graph,
            progress=lambda step: bar.update(task, description=step, advance=0),
        )
    if as_json:
        console.show_json(found.to_dict())
    else:
        _show(found)
    return _exit_code(found, required)


def _exit_code(found: Benchmark, required: tuple[str, ...]) -> int:
    results = [result for _, results in found.shapes for result in results]
    for result in results:
        if result.runtime in required and result.state == "not run":
            click.echo(f"Error: required runtime {result.runtime} was not run: {result.reason}.", err=True)
            return 3
    return int(any(result.state == "failed" for result in results))


def _show(found: Benchmark) -> None:
    from posexport.bench import BUSY

    for sizes, results in found.shapes:
        console.show_table(
            f"{found.file}: {found.encoding}, {found.form}, {found.dtype}, {sizes}, {found.rounds} rounds",
            ("runtime", "median ms", "p10", "p90", "p99", "to torch eager", "95 % interval", "memory", "state"),
            [_row(result) for result in results],
            right=("median ms", "p10", "p90", "p99", "to torch eager", "95 % interval", "memory"),
        )
    timings = [result for _, results in found.shapes for result in results]
    for name, said in {result.runtime: result.reason or result.note for result in timings}.items():
        if said:
            click.echo(f"{name}: {said}")
    if found.busy > BUSY:
        click.echo(f"The machine was busy (other work took {found.busy:.0%} of the CPU): time it again at rest.")


def _row(result: Timing) -> tuple[str, ...]:
    if result.seconds is None:
        return (result.runtime, *["-"] * 7, result.state)
    seconds, ratio = result.seconds, result.ratio
    times = (f"{value * 1e3:.3f}" for value in (seconds.median, seconds.p10, seconds.p90, seconds.p99))
    compared = ("-", "-") if ratio is None else (f"{ratio.median:.2f}x", f"{ratio.low:.2f} to {ratio.high:.2f}")
    memory = console.megabytes(result.memory or 0)
    if result.gpu_memory is not None:
        memory += f" + {console.megabytes(result.gpu_memory)} on the GPU"
    return (result.runtime, *times, *compared, memory, result.state)
