"""`posexport tune`: finds the best way to write a block for one runtime: timed, verified, and written with its
reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from posexport.bench.tune.file_request import FileTuneRequest, read_file_request
from posexport.bench.tune.request import TuneRequest, read_tune_request
from posexport.bench.tune.result import SAME_GRAPH, Result, Row
from posexport.bench.tune.space import ALLOWED, OBJECTIVES, RUNTIMES
from posexport.cli import console
from posexport.cli.options import (
    block_options,
    encoding_option,
    field_options,
    input_roles,
    roles_option,
    sign_option,
    signing_key,
    source_options,
)
from posexport.errors import RequestError
from posexport.export.layer_pattern import parameters_of
from posexport.files import write_json
from posexport.machine import describe_cpu, size_text
from posexport.spec.forms import FORMS, OPSETS, TARGETS
from posexport.spec.spec import DTYPES, Spec

_TIMED = ("median ms", "to winner", "interval", "rounds")
_COUNTED = ("kernels", "attention")


@click.command()
@click.argument("file", required=False)
@source_options
@encoding_option
@click.option("--for", "runtime", metavar="NAME", help=f"one of: {', '.join(RUNTIMES)}  [default: ort-cpu]")
@click.option("--scenario", metavar="NAME:SIZE", help="prefill:512, decode:2048 (tokens in the cache) or batch:8")
@click.option("--objective", metavar="NAME", help=f"one of: {', '.join(OBJECTIVES)}  [default: latency]")
@click.option(
    "--dtype", metavar="NAME", multiple=True, help=f"try only this one; repeatable; one of: {', '.join(DTYPES)}"
)
@click.option(
    "--form", metavar="NAME", multiple=True, help=f"try only this one; repeatable; one of: {', '.join(FORMS)}"
)
@click.option(
    "--target", metavar="NAME", multiple=True, help=f"try only this one; repeatable; one of: {', '.join(TARGETS)}"
)
@click.option("--opset", metavar="N", multiple=True, help=f"try only this one; repeatable; {OPSETS[0]} to {OPSETS[-1]}")
@click.option("--allow", metavar="NAME", multiple=True, help=f"also try this; repeatable; one of: {', '.join(ALLOWED)}")
@field_options([field.name for field in attrs.fields(Spec) if field.name != "dtype"])
@block_options
@roles_option
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    help="the artifact to write  [default: <encoding>.onnx or .plan; <file>-tuned.onnx]",
)
@click.option("--save", type=Path, metavar="FILE", help="write the whole result as JSON, for 'posexport report'")
@click.option(
    "--cache",
    type=Path,
    metavar="DIR",
    help="folder for the cache of measurements, .posexport-tune  [default: the artifact's folder]",
)
@click.option("--resume/--no-resume", default=True, help="use measurements from the cache  [default: yes]")
@sign_option
@click.option("--json", "as_json", is_flag=True, help="print the whole result as JSON")
def tune(
    file: str | None,
    config: str | None,
    preset: str | None,
    parameters: tuple[str, ...],
    save: Path | None,
    cache: Path | None,
    resume: bool,
    sign: str | None,
    roles: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> int:
    """Find the fastest form, dtype, opset and runtime options for a block, and write it.

    FILE can be any .onnx file. It is then tried as it is, and with its attention rewritten in each form, on ONNX
    Runtime. The written file computes the same function.

    The exit code is 1 if no candidate could be verified. Nothing is written then.
    """
    key = signing_key(sign)
    request = _request(file, config, preset, parameters, roles, given, save)
    with console.steps("loading torch") as progress:
        result = request.run(cache, resume, progress, key)
    try:
        if as_json:
            console.show_json(result.to_dict())
        else:
            show_tuning(result, request.output)
    finally:  # the file is written even if stdout fails
        if request.save is not None:
            write_json(request.save, result.to_dict())
    if result.winner is None:
        return console.fail("no candidate was verified, so nothing was written: see the reasons.", 1)
    return 0


def _request(
    file: str | None,
    config: str | None,
    preset: str | None,
    parameters: tuple[str, ...],
    roles: tuple[str, ...],
    given: Mapping[str, Any],
    save: Path | None,
) -> TuneRequest | FileTuneRequest:
    if file is not None:
        every = {"config": config, "preset": preset, "set": parameters, **given}
        return read_file_request(file, every, input_roles(roles), save)
    if roles:
        raise RequestError("--input was given without a file: it is about an ONNX file, so give that too.")
    return read_tune_request(config, preset, parameters_of(parameters), given, save)


def show_tuning(result: Result, output: Path) -> None:
    """Show a table of the candidates, and what was written to `output`."""
    counted = any(row.kernels is not None for row in result.candidates)
    columns, cells = (_COUNTED, _counted) if counted else (_TIMED, _timed)
    rows = [
        (row.name, row.state, *cells(row), _space(row, result.objective), row.reason)
        for row in sorted(result.candidates, key=_order)
        if row.reason_code != SAME_GRAPH
    ]
    space = "size" if result.objective == "size" else "planned memory" if counted else "memory"
    same = len(result.candidates) - len(rows)
    title = f"{result.encoding} for {result.target}, {result.scenario}, {result.objective}: {result.method}"
    console.show_table(
        f"{title}; {describe_cpu(result.machine)}",
        ("candidate", "state", *columns, space, "why"),
        rows,
        right=[name for name in (*columns, space) if name not in ("attention", "interval")],
    )
    if same:
        console.write(f"{same} more are the same graph as one of these, and were timed once; --json lists them")
        console.write()
    cost = result.cost
    share = f" ({cost.timed_runs / cost.everything_runs:.0%} of timing everything)" if cost.everything_runs else ""
    known = f"; {cost.known_before} facts were in the cache" if cost.known_before else ""
    took = f"{cost.seconds:.1f} s, {cost.timed_runs} runs{share}{known}"
    if result.winner is not None:
        ready = " ".join(f"{name}={value}" for name, value in (result.winner.settings or {}).items())
        console.show_facts(
            f"wrote {output}",
            [
                ("winner", result.winner.name),
                ("why", result.winner.reason),
                ("verified on", result.winner.verified or ""),
                ("run it with", ready),
                ("cost", took),
                *console.manifest_facts(output, None),
            ],
        )
    if result.busy:
        console.write(
            f"The machine was busy (other work took {result.machine_load:.0%} of the CPU): tune again at rest."
        )


def _order(row: Row) -> tuple[int, float]:
    states = ("won", "raced", "dropped", "failed", "refused", "not run")
    return states.index(row.state), row.ratio.median if row.ratio else 1e9


def _timed(row: Row) -> tuple[str, ...]:
    ratio = row.ratio
    return (
        "-" if row.seconds is None else f"{row.seconds.median * 1e3:.3f}",
        "-" if ratio is None else f"{ratio.median:.2f}x",
        "-" if ratio is None else f"{ratio.low:.2f} to {ratio.high:.2f}",
        str(row.rounds) if row.rounds else "-",
    )


def _counted(row: Row) -> tuple[str, ...]:
    if row.kernels is None:
        return ("-", "-")
    fused = "fused" if row.kernels["fused_attention"] else "not fused"
    return (f"{row.kernels['count']}+{row.kernels['host_steps']}", fused)


def _space(row: Row, objective: str) -> str:
    """The memory, or the size if that is the objective; files may be too small for MB."""
    if objective == "size":
        return "-" if row.size is None else f"{row.size:,} B"
    return "-" if row.memory is None else size_text(row.memory)
