"""`posexport export`: turns a block, a user's torch module or a whole model into an ONNX file with its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli import console
from posexport.cli.options import (
    block_options,
    encoding_option,
    field_options,
    module_option,
    sign_option,
    signing_key,
    source_options,
)
from posexport.errors import FieldError, shown
from posexport.export.layer_pattern import parameters_of
from posexport.export.model_request import ModelOptions, model_options, write_model
from posexport.export.module_request import ModuleOptions, module_options, write_module
from posexport.export.request import Request, read_request, write
from posexport.files import check_output
from posexport.jsondata import unstructure
from posexport.machine import size_text
from posexport.spec.forms import FORMS, OPSETS, TARGETS
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.artifact.manifest import OnnxManifest
    from posexport.artifact.signing import SigningKey


@click.command()
@module_option
@click.option("--example", metavar="FILE", help="with --module, an .npz file with an example input for each parameter")
@click.option("--model", "whole", is_flag=True, help="with --from FOLDER, export the whole model of the checkpoint")
@click.option("--hidden-states", is_flag=True, help="with --model, add an output with the states that enter the head")
@click.option(
    "--require-all", is_flag=True, help="with --model, write nothing and exit with 1 if an attention is not in the form"
)
@source_options
@encoding_option
@field_options([field.name for field in attrs.fields(Spec)])
@click.option("--form", metavar="NAME", help=f"one of: {', '.join(FORMS)}  [default: decomposed]")
@click.option("--target", metavar="NAME", help=f"one of: {', '.join(TARGETS)}  [default: portable]")
@click.option("--opset", metavar="N", help=f"{OPSETS[0]} to {OPSETS[-1]}  [default: the lowest that the form needs]")
@block_options
@click.option("--output", "-o", metavar="FILE", help="the file to write  [default: <preset or encoding>.onnx]")
@sign_option
@click.option("--json", "as_json", is_flag=True, help="print the manifest as JSON")
def export(
    module: str | None,
    example: str | None,
    whole: bool,
    config: str | None,
    preset: str | None,
    parameters: tuple[str, ...],
    sign: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Write an attention block, a torch module or a whole model as an ONNX file, with its manifest <file>.json."""
    key = signing_key(sign)
    given = {name: value for name, value in given.items() if name not in _WITH_MODEL or value}
    if module is not None:
        beside = {"config": config, "preset": preset, "parameters": parameters}
        _export_module(module_options({"module": module, "example": example, **given, **beside}), key, as_json)
        return 0
    if whole:
        beside = {"config": config, "preset": preset, "parameters": parameters, "example": example}
        return _export_model(model_options({**given, **beside}), key, as_json)
    _refuse_others({"example": example, **given})
    with console.steps("reading the options") as progress:
        request = read_request(config, preset, parameters_of(parameters), given, progress=progress)
    name = preset or request.spec.encoding.name
    path = Path(f"{name}.onnx" if request.options.output is None else request.options.output)
    check_output(path, ".onnx")
    with console.steps("loading torch") as progress:
        manifest = write(request, path, progress, key)
    if as_json:
        console.show_json(unstructure(manifest))
    else:
        facts = [
            ("encoding", request.spec.encoding.name),
            ("form", f"{request.options.form}, opset {manifest.opset}, {request.spec.dtype}"),
            ("weights", _weights(request)),
        ]
        _show_files(path, manifest, facts)
        if request.checkpoint is not None and given["layer"] is None:
            count = request.spec.layers
            what = "This is one layer" if count == 1 else f"These are {count} layers"
            console.say(f"{what} of the checkpoint: give --model for the whole model.")
    return 0


_WITH_MODEL = ("hidden_states", "require_all")


def _refuse_others(given: Mapping[str, Any]) -> None:
    """RequestError for an option that is only for --module or --model."""
    needed = {"example": "module FILE.py:NAME", **dict.fromkeys(_WITH_MODEL, "model")}
    for name, other in needed.items():
        if given.get(name):
            with_other = other.partition(" ")[0]
            raise FieldError(name, f"was given without --{with_other}: give --{other} too, or drop it.")


def _show_files(path: Path, manifest: OnnxManifest, facts: list[tuple[str, str]]) -> None:
    files = (path, *(path.with_name(name) for name in manifest.external_data))
    console.show_facts(
        f"wrote {path}",
        [
            *facts,
            *((f"{kind} {name}", text) for kind in ("input", "output") for name, text in _tensors(manifest, kind)),
            ("size", size_text(sum(file.stat().st_size for file in files))),
            *console.manifest_facts(path, manifest.signer),
        ],
    )


def _export_module(options: ModuleOptions, key: SigningKey | None, as_json: bool) -> None:
    check_output(options.path, ".onnx")
    with console.steps("loading torch") as progress:
        exported, manifest = write_module(options, progress, key)
    attentions = {"operators": exported.operators, "attentions": exported.attentions()}
    if as_json:
        console.show_json({**unstructure(manifest), **attentions})
    else:
        _show_files(
            options.path,
            manifest,
            [
                ("module", options.module),
                ("form", f"{options.form}, opset {manifest.opset}"),
                ("attention", exported.summary()),
            ],
        )
    _warn_of_left(exported.left(), options.form)
    if not any(attentions.values()):
        console.warn(f"no attention was found in {options.module}: its graph is as torch's exporter writes it.")
    if exported.fixed:
        console.warn(
            f"{', '.join(exported.fixed)} can't vary, because the example has the size 1 there: give one with larger "
            "sizes, or dynamic_shapes."
        )


def _export_model(options: ModelOptions, key: SigningKey | None, as_json: bool) -> int:
    with console.steps("loading torch") as progress:
        written = write_model(options, progress, key)
    if as_json:
        console.show_json(
            {
                "kind": "model",
                "manifests": [unstructure(manifest) for manifest in written.manifests],
                "attentions": unstructure(written.attentions),
                "beside": list(written.beside),
                "left_out": list(written.left_out),
                "warnings": list(written.remarks),
            }
        )
    for exported, manifest in zip(written.exported, () if as_json else written.manifests, strict=False):
        count = len(exported.attentions)
        facts = [
            ("model", f"{exported.architecture} of {options.checkpoint}"),
            ("form", f"{options.form}, opset {manifest.opset}"),
            ("attention", f"{count - len(exported.left())} of {count} in the form" if count else "none found"),
        ]
        _show_files(options.path_of(exported.part), manifest, facts)
    if written.beside and not as_json:
        console.say(f"beside it: {', '.join(written.beside)}")
    if written.left_out:
        console.warn(
            f"{written.checkpoint_class} has parts for {' and '.join(written.left_out)}, which are left out: "
            "the file takes tokens alone."
        )
    if written.unread:
        console.warn(
            f"{len(written.unread)} tensors of {options.checkpoint} are not in the model, such as "
            f"{shown(written.unread[0])}: see that its config.json is that of these weights."
        )
    for remark in written.remarks:
        console.warn(remark)
    _warn_of_left(written.left, options.form)
    if not written.manifests:
        return console.fail(f"{options.path} is not written: an attention is left, and --require-all was given.", 1)
    return 0


def _warn_of_left(records: Iterable[Mapping[str, Any]], form: str) -> None:
    for one in records:
        console.warn(f"attention {one['name']} is not in the form {form}: {one['reason']['text']}.")


def _weights(request: Request) -> str:
    """Where the weights come from, and how to get others if the user chose none."""
    given = request.given
    if request.checkpoint is not None:
        return f"{request.checkpoint}" + ("" if "layer" in given else "; give --layer for another")
    if request.options.weights is not None:
        return f"file {Path(request.options.weights).name}"
    seed = f"random, seed {request.options.seed or 0}"
    if "seed" in given:
        return seed
    other = "the checkpoint's folder to --from" if "from" in given else "--weights or --from"
    return f"{seed}; give {other} for trained ones"


def _tensors(manifest: OnnxManifest, kind: str) -> list[tuple[str, str]]:
    tensors = manifest.inputs if kind == "input" else manifest.outputs
    return console.runs((tensor.name, f"{tensor.dtype} {list(tensor.shape)}") for tensor in tensors)
