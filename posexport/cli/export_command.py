"""`posexport export`: a block becomes an ONNX file with its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport import forms
from posexport.cli import console
from posexport.cli.block_options import HERE, BlockOptions, block_options, gather, weights_of
from posexport.cli.checkpoint_options import checkpoint_of
from posexport.cli.spec_options import parameters_of, spec_of, spec_options
from posexport.errors import RequestError
from posexport.fields import integer, text
from posexport.files import check_writable
from posexport.forms import TARGETS
from posexport.spec import FORMS, OPSETS, Spec

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class ExportOptions(BlockOptions):
    """Options of the export that are no part of the spec; validated wherever they come from."""

    form: str = text("decomposed", "form of the graph")
    target: str = text("portable", "what the form is lowered for")
    opset: int | None = integer(None, "ONNX opset", optional=True)


@attrs.frozen(kw_only=True)
class Request:
    """An export as it was asked for, checked; `weights` are those of a checkpoint, None where they come from a file or
    a seed, and `bias_given` says whether somebody asked for biases."""

    spec: Spec
    options: ExportOptions
    bias_given: bool
    weights: Mapping[str, Tensor] | None


OPTIONS = (
    *(field.name for field in attrs.fields(Spec)),
    *(field.name for field in attrs.fields(ExportOptions)),
    *("from", "layer"),
)
"""The options that a file of them may hold, and `set`."""


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
    request = read_request(config, preset, parameters_of(parameters), given)
    spec, rest = request.spec, request.options
    path = Path(f"{preset or spec.encoding.name}.onnx" if rest.output is None else rest.output)
    if path.suffix != ".onnx":
        raise RequestError(f"output {str(path)!r} must end in .onnx: name it like {path.stem}.onnx.")
    if not path.parent.is_dir():
        raise RequestError(f"output folder {str(path.parent)!r} is not there: make it first, or give another.")
    check_writable(path)
    manifest = write(request, path)
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


def read_request(
    config: str | None, preset: str | None, given_set: Mapping[str, Any], given: Mapping[str, Any], folder: Path = HERE
) -> Request:
    """The request that a config or a preset and what is `given` beside it amount to; None means "not given".

    Paths in it are relative to `folder`.
    """
    options, encoding_set = gather(config, preset, given_set, given, OPTIONS, folder)
    for name in ("from", "weights"):
        if folder != HERE and isinstance(options.get(name), str):
            options[name] = str(folder / options[name])
    checkpoint = checkpoint_of(options, encoding_set)
    spec = spec_of(options, encoding_set) if checkpoint is None else checkpoint.spec
    known = {field.name for field in attrs.fields(ExportOptions)}
    rest = ExportOptions(**{name: value for name, value in options.items() if name in known})
    forms.check_request(rest.form, rest.target)
    forms.check(spec, rest.form, rest.target, rest.opset or forms.default_opset(rest.form, spec))
    own = None if checkpoint is None else checkpoint.weights
    return Request(spec=spec, options=rest, bias_given="bias" in options, weights=own)


def write(request: Request, path: Path) -> dict[str, Any]:
    """Export and write; returns the manifest."""
    spec, options, weights = request.spec, request.options, request.weights
    with console.progress("loading torch") as (bar, task):
        from posexport.artifact import write_onnx
        from posexport.export import export as export_block
        from posexport.models.weights import seeded

        bar.update(task, description="weights")
        if options.weights is not None:
            spec, weights = weights_of(options.weights, spec, request.bias_given)
        elif weights is None:
            weights = seeded(spec, options.seed or 0)
        bar.update(task, description=f"exporting {spec.encoding.name}")
        model = export_block(
            spec,
            weights,
            form=options.form,
            target=options.target,
            opset=options.opset,
            batch=options.batch,
            seq=options.seq,
            max_seq=options.max_seq,
        )
        bar.update(task, description=f"writing {path.name}")
        return write_onnx(model, path)
