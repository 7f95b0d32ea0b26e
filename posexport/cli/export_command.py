"""`posexport export`: a block becomes an ONNX file with its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from posexport.cli import console
from posexport.cli.block_options import block_options
from posexport.cli.spec_options import spec_options
from posexport.errors import RequestError
from posexport.export.layer_pattern import parameters_of
from posexport.export.request import read_request, write
from posexport.files import check_writable
from posexport.spec.forms import FORMS, OPSETS, TARGETS


@click.command()
@click.option("--config", metavar="FILE", help="read options from a TOML file; those on the command line win")
@click.option(
    "--preset", metavar="NAME", help="a layer of a public model; 'posexport list --presets' shows them, options win"
)
@click.option(
    "--from",
    metavar="PATH",
    help="a layer of a Hugging Face checkpoint: its folder, or its config.json for the shape alone",
)
@click.option("--layer", metavar="N", help="with --from, take that layer's weights too  [default: from --seed]")
@spec_options
@click.option("--form", metavar="NAME", help=f"one of: {', '.join(FORMS)}  [default: decomposed]")
@click.option("--target", metavar="NAME", help=f"one of: {', '.join(TARGETS)}  [default: portable]")
@click.option("--opset", metavar="N", help=f"{OPSETS[0]} to {OPSETS[-1]}  [default: the lowest that the form takes]")
@block_options
@click.option("--output", "-o", metavar="FILE", help="the file to write  [default: <preset or encoding>.onnx]")
@click.option("--json", "as_json", is_flag=True, help="print the manifest as JSON")
def export(config: str | None, preset: str | None, parameters: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Write an attention block as an ONNX file, with its manifest <file>.json."""
    with console.steps("reading the options") as progress:
        request = read_request(config, preset, parameters_of(parameters), given, progress=progress)
    spec, rest = request.spec, request.options
    path = Path(f"{preset or spec.encoding.name}.onnx" if rest.output is None else rest.output)
    if path.suffix != ".onnx":
        raise RequestError(f"output {str(path)!r} must end in .onnx: name it like {path.stem}.onnx.")
    if not path.parent.is_dir():
        raise RequestError(f"output folder {str(path.parent)!r} is not there: make it first, or give another.")
    check_writable(path)
    with console.steps("loading torch") as progress:
        manifest = write(request, path, progress)
    if as_json:
        console.show_json(manifest)
        return
    files = (path, *(path.with_name(name) for name in manifest.get("external_data", ())))
    console.show_facts(
        f"wrote {path}",
        [
            ("encoding", spec.encoding.name),
            ("form", f"{rest.form}, opset {manifest['opset']}, {spec.dtype}"),
            *((f"{kind} {name}", said) for kind in ("input", "output") for name, said in _tensors(manifest, kind)),
            ("size", console.megabytes(sum(file.stat().st_size for file in files))),
            ("manifest", f"{path}.json"),
        ],
    )


def _tensors(manifest: Mapping[str, Any], kind: str) -> list[tuple[str, str]]:
    """The graph's inputs or outputs by name, with dtype and shape."""
    return console.runs((each["name"], f"{each['dtype']} {each['shape']}") for each in manifest[f"{kind}s"])
