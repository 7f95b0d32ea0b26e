"""`posexport bench`: latency of an artifact on the installed runtimes, compared with torch and the lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.bench.options import BenchOptions
from posexport.cli import console
from posexport.cli.options import (
    check_no_project,
    input_roles,
    project_options,
    roles_option,
    trust_option,
    trusted_keys,
)
from posexport.errors import RequestError
from posexport.spec.fields import stated

if TYPE_CHECKING:
    from posexport.bench.result import Benchmark
    from posexport.workflows.project.file import Project


@click.command()
@click.argument("file", required=False)
@project_options
@click.option(
    "--runtime", "runtimes", metavar="NAME", multiple=True, help="time this runtime; repeatable  [default: all]"
)
@click.option(
    "--scenario",
    "scenarios",
    metavar="NAME[:N,...]",
    multiple=True,
    help="prefill, decode or batch for all sizes, or one size: decode:2048 is a step after 2048 tokens; repeatable",
)
@click.option(
    "--shape", "shapes", metavar="SIZES", multiple=True, help="sizes such as batch=1,seq=1,past_seq=512; repeatable"
)
@roles_option
@click.option("--module", metavar="FILE.py:NAME", help="compare with this torch module; its file is executed")
@click.option(
    "--peers",
    "alternatives",
    is_flag=True,
    help="also compare with torch's own ONNX export and ONNX Runtime's optimizer",
)
@click.option(
    "--rounds",
    metavar="N",
    help="rounds of timed runs of each runtime  [default: 20; 10 per process with several processes]",
)
@click.option("--seconds", metavar="N", help="maximum seconds for the rounds of one shape  [default: 60]")
@click.option("--warmup", metavar="N", help="runs before the first round  [default: 3]")
@click.option("--threads", metavar="N", help="CPU threads of each runtime  [default: the runtime's own]")
@click.option(
    "--processes",
    metavar="N",
    help="processes per runtime, one after the other  [default: 1; 7 to 20 with --save or a comparison]",
)
@click.option("--seed", metavar="N", help="seed of the inputs  [default: 0]")
@click.option("--cuda-graph", is_flag=True, help="record each run as a CUDA graph if the runtime can")
@click.option(
    "--save", type=Path, metavar="FILE", help="write the result as JSON, for --baseline and for posexport report"
)
@click.option(
    "--baseline", type=Path, metavar="FILE", help="exit with 1 if a runtime got slower since this result was saved"
)
@click.option(
    "--against", type=Path, metavar="FILE", help="exit with 1 if the file is slower than this one, which is timed too"
)
@click.option("--max-regression", metavar="SHARE", help="allowed slowdown, such as 5% or 0.05  [default: 5%]")
@click.option("--strict", is_flag=True, help="also exit with 1 if the comparison is inconclusive")
@click.option("--require", "required", metavar="NAME", multiple=True, help="exit with 3 if this runtime is not timed")
@trust_option
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON (seconds and bytes)")
def bench(
    file: str | None,
    project_file: str | None,
    allow_outside: bool,
    save: Path | None,
    baseline: Path | None,
    against: Path | None,
    max_regression: str | None,
    strict: bool,
    roles: tuple[str, ...],
    trust: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> int:
    """Time an artifact (.onnx or .plan) on each installed runtime, in alternation with torch and the lower bound.

    An .onnx file that posexport did not write is timed alone, or compared with another file (--against) or with the
    torch module that it was made from (--module). If the name of an input does not tell its role, give the role with
    --input.

    Without FILE, the artifacts of the project are timed (posexport.toml, or [tool.posexport] of a pyproject.toml), each
    at the scenarios of its budget and compared with its baseline. --save is then a folder.

    Exit codes: 0 if nothing got slower or went over its budget, 1 if a runtime failed, got slower or went over its
    budget, 3 if a required runtime was not timed.
    """
    options = BenchOptions(**stated(given), trusted=trusted_keys(trust), roles=input_roles(roles))
    if file is None:
        of_file: dict[str, object] = {
            "scenario": options.scenarios,
            "shape": options.shapes,
            "baseline": baseline,
            "against": against,
            "input": roles,
            "module": options.module,
            "max-regression": max_regression,
        }
        for name, value in of_file.items():
            if value:
                raise RequestError(f"--{name} was given without a file: a project's file states it, so drop it.")
        from posexport.workflows.project.file import find_project

        return _bench_project(find_project(project_file, allow_outside), options, save, strict, as_json)
    check_no_project("a file", project_file, allow_outside)
    if baseline is not None and against is not None:
        raise RequestError("--baseline and --against were both given: compare with one of them at a time.")
    for name, given_alone in (("--max-regression", max_regression is not None), ("--strict", strict)):
        if given_alone and baseline is None and against is None:
            raise RequestError(f"{name} was given without something to compare with: give --baseline or --against too.")
    with console.steps("reading the artifact") as progress:
        from posexport.bench.gate import bench_file, exit_code

        result = bench_file(
            Path(file),
            options,
            baseline=baseline,
            previous_artifact=against,
            limit="5%" if max_regression is None else max_regression,
            save=save,
            warn=console.warn,
            progress=progress,
        )
    _show(result, save, options.alternatives, as_json)
    code, why = exit_code(result, options, strict)
    return console.fail(f"{why}.", code) if why else code


def _bench_project(project: Project, options: BenchOptions, save: Path | None, strict: bool, as_json: bool) -> int:
    from posexport.cli.bench_tables import show_project

    with console.steps("loading torch") as progress:
        from posexport.workflows.project.bench import bench_project, check_results_folder

        check_results_folder(save)
        result = bench_project(project, options, save, strict=strict, warn=console.warn, progress=progress)
    show_project(result, options.alternatives, as_json)
    return console.fail(f"{result.reason}.", result.exit_code) if result.reason else result.exit_code


def _show(result: Benchmark, save: Path | None, alternatives: bool, as_json: bool) -> None:
    from posexport.cli.bench_tables import show_benchmark
    from posexport.files import write_json

    for warning in result.manifest_warnings:
        console.warn(f"{warning}.")
    try:
        if as_json:
            console.show_json(result.to_dict())
        else:
            show_benchmark(result, alternatives)
    finally:  # the file is written even if stdout fails
        if save is not None:
            write_json(save, result.to_dict())
    if save is not None and not as_json:
        console.write(f"saved to {save}")
