"""`posexport tune`: the best way to write a block for one runtime, raced, verified, and written with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.artifact.weight_source import checkpoint_weights, file_weights, random_weights
from posexport.bench.result import HIGH_MACHINE_LOAD
from posexport.bench.scenarios import Scenario, read_scenario
from posexport.bench.tune.result import SAME_GRAPH
from posexport.bench.tune.space import OBJECTIVES, RUNTIMES, Limits, check_objective, check_runtime
from posexport.cli import console
from posexport.cli.block_options import block_options
from posexport.cli.spec_options import field_options
from posexport.errors import RequestError
from posexport.export.block_options import BlockOptions, merge_options, spec_of, weights_of
from posexport.export.checkpoint_options import checkpoint_of, takes_weights
from posexport.export.layer_pattern import parameters_of
from posexport.files import check_writable
from posexport.models import ENCODINGS
from posexport.spec.fields import integer, text
from posexport.spec.forms import FORMS, OPSETS, TARGETS
from posexport.spec.spec import DTYPES, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from posexport.bench.tune.result import Result, Row
    from posexport.bench.tune.search import Block, Request

_FIELDS = [field.name for field in attrs.fields(Spec) if field.name != "dtype"]
_USUAL = 512


@attrs.frozen(kw_only=True)
class TuneOptions(BlockOptions):
    """Options that are no part of the spec, validated wherever they come from."""

    runtime: str = text("ort-cpu", "runtime to tune for")
    objective: str = text("latency", "what is made small")
    scenario: str | None = text(None, "what is timed")


@click.command()
@click.option("--config", metavar="FILE", help="read options from a TOML file; those on the command line win")
@click.option("--preset", metavar="NAME", help="a layer of a public model; 'posexport list --presets' shows them")
@click.option("--from", metavar="PATH", help="a layer of a Hugging Face checkpoint: its folder, or its config.json")
@click.option("--layer", metavar="N", help="with --from FOLDER, the layer whose weights are taken  [default: 0]")
@click.option("--encoding", metavar="NAME", help="one of: " + ", ".join(ENCODINGS))
@click.option("--for", "runtime", metavar="NAME", help=f"one of: {', '.join(RUNTIMES)}  [default: ort-cpu]")
@click.option("--scenario", metavar="NAME:SIZE", help="prefill:512, decode:2048 (tokens in the cache) or batch:8")
@click.option("--objective", metavar="NAME", help=f"one of: {', '.join(OBJECTIVES)}  [default: latency]")
@click.option("--dtype", metavar="NAME", multiple=True, help=f"only this one, repeatable, of: {', '.join(DTYPES)}")
@click.option("--form", metavar="NAME", multiple=True, help=f"only this one, repeatable, of: {', '.join(FORMS)}")
@click.option("--target", metavar="NAME", multiple=True, help=f"only this one, repeatable, of: {', '.join(TARGETS)}")
@click.option("--opset", metavar="N", multiple=True, help=f"only this one, repeatable, {OPSETS[0]} to {OPSETS[-1]}")
@lambda command: field_options(command, _FIELDS)
@block_options
@click.option("--output", "-o", metavar="FILE", help="the artifact to write  [default: <encoding>.onnx, or .plan]")
@click.option("--save", metavar="FILE", help="write the whole result as JSON, for 'posexport report'")
@click.option("--cache", metavar="DIR", help="keep what was found out in .posexport-tune in here  [default: beside it]")
@click.option("--resume/--no-resume", default=True, help="use what the cache holds  [default: yes]")
@click.option("--json", "as_json", is_flag=True, help="print the whole result as JSON")
def tune(
    config: str | None,
    preset: str | None,
    parameters: tuple[str, ...],
    save: str | None,
    cache: str | None,
    resume: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Find the fastest form, dtype, opset and runtime options for a block, and write it.

    Exits 1 where nothing that was tried is verified; then nothing is written.
    """
    known = ["for" if name == "runtime" else name for name in given]
    options, encoding_set = merge_options(config, preset, parameters_of(parameters), given, known)
    if "for" in options:
        options.setdefault("runtime", options.pop("for"))
    names = {field.name for field in attrs.fields(TuneOptions)}
    rest = TuneOptions(**{name: value for name, value in options.items() if name in names})
    check_runtime(rest.runtime)
    check_objective(rest.objective)
    limits = Limits(
        forms=_several(options, "form"),
        targets=_several(options, "target"),
        opsets=tuple(_Opset(opset=each).opset for each in _several(options, "opset")),
    )
    specs = _specs(options, encoding_set)
    first = next(iter(specs.values()))
    scenario = _scenario(rest, first)
    ending = ".plan" if rest.runtime.startswith("tensorrt") else ".onnx"
    output = Path(f"{preset or first.encoding.name}{ending}" if rest.output is None else rest.output)
    if output.suffix != ending:
        raise RequestError(f"output {str(output)!r} must end in {ending} for {rest.runtime}: name it like x{ending}.")
    saved = None if save is None else Path(save)
    for path in (output, *([saved] if saved else [])):
        if not path.parent.is_dir() or path.is_dir():
            raise RequestError(f"output {str(path)!r} can't be written: give a file in a folder that is there.")
    if saved is not None and saved.suffix != ".json":
        raise RequestError(f"--save {save!r} must end in .json: name it like tune.json.")
    manifests = {Path(f"{output.with_suffix(each)}.json").resolve() for each in (ending, ".onnx")}
    if saved is not None and saved.resolve() in manifests:
        raise RequestError(f"--save {save!r} is the manifest of the output: name it otherwise, like tune.json.")
    for path in (output, *([saved] if saved else [])):
        check_writable(path)
    with console.steps("loading torch") as progress:
        from posexport.bench.tune.search import Request, Store
        from posexport.bench.tune.search import tune as run
        from posexport.files import write_json

        request = Request(scenario=scenario, runtime=rest.runtime, objective=rest.objective, limits=limits)
        _check_there(request)
        block = _block(options, encoding_set, rest, specs)
        store = Store(output.parent if cache is None else Path(cache), resume)
        result = run(block, request, output, store, progress)
    try:
        if as_json:
            console.show_json(result.to_dict())
        else:
            _show(result, output)
    finally:  # each is kept where the other fails
        if saved is not None:
            write_json(saved, result.to_dict())
    if result.winner is None:
        return console.fail("nothing that was tried is verified, so nothing was written: see the reasons.", 1)
    return 0


@attrs.frozen(kw_only=True)
class _Opset:
    opset: int = integer(OPSETS[0], "ONNX opset", at_least=OPSETS[0], at_most=OPSETS[-1])


def _several(options: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """An option that may be given several times: on the command line, or as a list in a file."""
    found = options.get(name, ())
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _spec(options: Mapping[str, Any], encoding_set: Mapping[str, Any], dtype: str) -> Spec:
    asked = {**options, "dtype": dtype}
    checkpoint = checkpoint_of(asked, encoding_set, weights=False)
    return spec_of(asked, encoding_set) if checkpoint is None else checkpoint.spec


def _specs(options: Mapping[str, Any], encoding_set: Mapping[str, Any]) -> dict[str, Spec]:
    """The spec in each dtype that was given, or in every one; one that a dtype can't hold is left out, unless that is
    so of all."""
    if options.get("layer") is not None and options.get("from") is None:
        checkpoint_of(options, encoding_set)  # says what is wrong
    specs, wrong = {}, None
    for dtype in dict.fromkeys(_several(options, "dtype") or DTYPES):
        try:
            specs[dtype] = _spec(options, encoding_set, dtype)
        except RequestError as error:
            if options.get("dtype") is not None:
                raise
            wrong = wrong or error
    if not specs and wrong is not None:
        raise wrong
    return specs


def _block(
    options: Mapping[str, Any], encoding_set: Mapping[str, Any], rest: TuneOptions, specs: dict[str, Spec]
) -> Block:
    """What is tuned; weights are loaded when a program is exported, in the dtype of that."""
    from posexport.bench.tune.search import Block
    from posexport.models.weights import digest_of, read_weights, seeded_weights

    source, from_layer = f"seed {rest.seed or 0}", takes_weights(options)
    weight_source = random_weights(rest.seed or 0)
    if rest.weights is not None:
        spec, _ = weights_of(rest.weights, next(iter(specs.values())), "bias" in options)
        specs = {dtype: attrs.evolve(each, bias=spec.bias) for dtype, each in specs.items()}
        weight_source = file_weights(Path(rest.weights))
        source = f"file {weight_source.sha256}"
    elif from_layer:
        dtype = next(iter(specs))
        found = checkpoint_of({**options, "dtype": dtype}, encoding_set)
        assert found is not None and found.weights is not None
        source = f"layer {digest_of(found.weights)} as {dtype}"
        weight_source = checkpoint_weights(Path(options["from"]), int(options.get("layer") or 0))

    def load(dtype: str) -> tuple[Spec, Mapping[str, Tensor]]:
        if rest.weights is not None:
            return read_weights(Path(rest.weights), specs[dtype])
        if from_layer:
            loaded = checkpoint_of({**options, "dtype": dtype}, encoding_set)
            assert loaded is not None and loaded.weights is not None
            return loaded.spec, loaded.weights
        return specs[dtype], seeded_weights(specs[dtype], rest.seed or 0)

    fixed = {name: size for name in ("batch", "seq", "max_seq") if (size := getattr(rest, name)) is not None}
    return Block(specs=specs, load=load, source=source, weight_source=weight_source, fixed=fixed)


def _scenario(rest: TuneOptions, spec: Spec) -> Scenario:
    """The one that was given; else a prompt, or a step where there is a cache, of a usual length that the block has."""
    if rest.scenario is not None:
        found = read_scenario(rest.scenario)
        if len(found) != 1 or found[0].swept:
            raise RequestError(
                f"--scenario {rest.scenario!r} is {len(found)} sizes: tune for one, such as {found[0].kind}:512."
            )
        if found[0].kind == "decode" and spec.kv_cache is None:
            raise RequestError(
                f"--scenario {rest.scenario} is a step over a cache, and this block has none: give --kv-cache too, or "
                "a prefill."
            )
        return found[0]
    room = min(each for each in (_USUAL, rest.max_seq, spec.token_limit()) if each)
    if spec.kv_cache is None or (rest.seq or 1) > 1:
        return Scenario("prefill", rest.seq or room)
    return Scenario("decode", max(min(_USUAL, room - 1), 1))


def _check_there(request: Request) -> None:
    from posexport.bench.tune.search import check_there

    check_there(request.runtime)


_TIMED = ("median ms", "to winner", "interval", "rounds")
_COUNTED = ("kernels", "attention")


def _timed(row: Row) -> tuple[str, ...]:
    ratio = row.ratio
    return (
        "-" if row.seconds is None else f"{row.seconds.median * 1e3:.3f}",
        "-" if ratio is None else f"{ratio.median:.2f}x",
        "-" if ratio is None else f"{ratio.low:.2f} to {ratio.high:.2f}",
        str(row.rounds) if row.rounds else "-",
    )


def _counted(row: Row) -> tuple[str, ...]:
    found = row.kernels
    if found is None:
        return ("-", "-")
    fused = "fused" if found["fused_attention"] else "not fused"
    return (f"{found['count']}+{found['host_steps']}", fused)


def _space(row: Row, objective: str) -> str:
    """What it takes: memory, unless size is the objective; files may be too small for MB."""
    if objective == "size":
        return "-" if row.size is None else f"{row.size:,} B"
    return "-" if row.memory is None else console.megabytes(row.memory)


def _show(result: Result, output: Path) -> None:
    counted = any(row.kernels is not None for row in result.candidates)
    columns, cells = (_COUNTED, _counted) if counted else (_TIMED, _timed)
    rows = [
        (row.name, row.state, *cells(row), _space(row, result.objective), row.reason)
        for row in sorted(result.candidates, key=_order)
        if row.reason_code != SAME_GRAPH
    ]
    space = "size" if result.objective == "size" else "planned memory" if counted else "memory"
    twins = len(result.candidates) - len(rows)
    console.show_table(
        f"{result.encoding} for {result.target}, {result.scenario}, {result.objective}: {result.method}",
        ("candidate", "state", *columns, space, "why"),
        rows,
        right=[name for name in (*columns, space) if name not in ("attention", "interval")],
    )
    if twins:
        click.echo(f"{twins} more are the same graph as one of these, and were timed once; --json lists them\n")
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
                ("manifest", f"{output}.json"),
            ],
        )
    if result.machine_load > HIGH_MACHINE_LOAD:
        click.echo(f"The machine was busy (other work took {result.machine_load:.0%} of the CPU): tune again at rest.")


def _order(row: Row) -> tuple[int, float]:
    states = ("won", "raced", "dropped", "failed", "refused", "not run")
    return states.index(row.state), row.ratio.median if row.ratio else 1e9
