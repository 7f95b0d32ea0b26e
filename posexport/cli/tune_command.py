"""`posexport tune`: the best way to write a block for one runtime, timed, verified, and written with its reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

from posexport.bench.tune.request import read_tune_request
from posexport.bench.tune.space import OBJECTIVES, RUNTIMES
from posexport.cli import console
from posexport.cli.block_options import block_options
from posexport.cli.spec_options import field_options
from posexport.export.layer_pattern import parameters_of
from posexport.models import ENCODINGS
from posexport.spec.forms import FORMS, OPSETS, TARGETS
from posexport.spec.spec import DTYPES, Spec

_FIELDS = [field.name for field in attrs.fields(Spec) if field.name != "dtype"]


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
    request = read_tune_request(config, preset, parameters_of(parameters), given, save)
    with console.steps("loading torch") as progress:
        result = request.run(None if cache is None else Path(cache), resume, progress)
    from posexport.cli.tune_tables import show_tuning
    from posexport.files import write_json

    try:
        if as_json:
            console.show_json(result.to_dict())
        else:
            show_tuning(result, request.output)
    finally:  # the file is written also where stdout fails
        if request.save is not None:
            write_json(request.save, result.to_dict())
    if result.winner is None:
        return console.fail("nothing that was tried is verified, so nothing was written: see the reasons.", 1)
    return 0
