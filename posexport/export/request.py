"""What an export asks for, from every source: options, a config file, a preset, a checkpoint. All of it is
checked before anything is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError, unknown
from posexport.export import support as forms
from posexport.export.layer_pattern import _check_reach, _pattern_parts, _read_layer, check_layers_follow, read_pattern
from posexport.files import read_toml
from posexport.models import ENCODINGS, read_spec
from posexport.models.checkpoints import OPTIONS as CHECKPOINT_FIELDS
from posexport.models.checkpoints import Checkpoint, read_checkpoint
from posexport.progress import Progress, silent
from posexport.spec.fields import integer, text
from posexport.spec.presets import read_preset
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


HERE = Path()


@attrs.frozen(kw_only=True)
class BlockOptions:
    """Options that are no part of the spec; validated wherever they come from."""

    batch: int | None = integer(None, "fixed batch size", optional=True)
    seq: int | None = integer(None, "fixed sequence length", optional=True)
    max_seq: int | None = integer(None, "fixed length of shared caches", optional=True)
    seed: int | None = integer(None, "seed of the weights", at_least=0, optional=True)
    weights: str | None = text(None, "a .safetensors file")
    output: str | None = text(None, "the file to write")

    def __attrs_post_init__(self) -> None:
        if self.weights is not None and self.seed is not None:
            raise RequestError(
                "both weights and seed were given: weights come from a file or from a seed, so drop one."
            )
        if self.weights is not None and not Path(self.weights).is_file():
            wrong = "no file" if Path(self.weights).exists() else "not there"
            raise RequestError(f"weights {self.weights!r} can't be read, they are {wrong}: give a .safetensors file.")


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


def read_request(
    config: str | None,
    preset: str | None,
    given_set: Mapping[str, Any],
    given: Mapping[str, Any],
    folder: Path = HERE,
    progress: Progress = silent,
) -> Request:
    """The request that a config or a preset and what is `given` beside it amount to; None means "not given".

    Paths in it are relative to `folder`.
    """
    options, encoding_set = gather(config, preset, given_set, given, OPTIONS, folder)
    for name in ("from", "weights"):
        if folder != HERE and isinstance(options.get(name), str):
            options[name] = str(folder / options[name])
    checkpoint = checkpoint_of(options, encoding_set, progress)
    spec = spec_of(options, encoding_set) if checkpoint is None else checkpoint.spec
    known = {field.name for field in attrs.fields(ExportOptions)}
    rest = ExportOptions(**{name: value for name, value in options.items() if name in known})
    forms.check_request(rest.form, rest.target)
    forms.check(spec, rest.form, rest.target, rest.opset or forms.default_opset(rest.form, spec))
    own = None if checkpoint is None else checkpoint.weights
    return Request(spec=spec, options=rest, bias_given="bias" in options, weights=own)


def write(request: Request, path: Path, progress: Progress = silent) -> dict[str, Any]:
    """Export and write; returns the manifest."""
    spec, options, weights = request.spec, request.options, request.weights
    progress("loading torch")
    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.export.exporter import export as export_block
    from posexport.models.weights import seeded

    progress("weights")
    if options.weights is not None:
        spec, weights = weights_of(options.weights, spec, request.bias_given)
    elif weights is None:
        weights = seeded(spec, options.seed or 0)
    progress(f"exporting {spec.encoding.name}")
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
    progress(f"writing {path.name}")
    return write_onnx(model, path)


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """Which layers of which checkpoint, validated."""

    path: str | None = text(None, "a config.json, or the folder of a checkpoint")
    layer: int | None = integer(None, "the layer whose weights are taken", at_least=0, optional=True)
    layers: int = integer(1, "number of layers")


def checkpoint_of(
    options: Mapping[str, Any], parameters: Mapping[str, Any], progress: Progress = silent
) -> Checkpoint | None:
    """The checkpoint of `from`, None where it wasn't given; RequestError for options that config.json decides, and for
    sources of weights beside `layer`."""
    if options.get("from") is None:
        if options.get("layer") is not None:
            raise RequestError(
                "layer was given without from: give the folder of its checkpoint with --from, or drop it."
            )
        return None
    decided = {field.name for field in attrs.fields(Spec)} - {*CHECKPOINT_FIELDS, "layers"}
    for name in ("encoding", *options, *(["set"] if parameters else [])):
        if name == "set" or (name in decided and options.get(name) is not None):
            raise RequestError(f"{name} was given with from: config.json decides it, so drop it.")
    for name, beside in (("weights", "from"), ("seed", "layer")):
        if options.get(beside) is not None and options.get(name) is not None:
            raise RequestError(
                f"both {beside} and {name} were given: weights come from one place, so drop one of them."
            )
    asked = CheckpointOptions(
        path=options["from"], **{name: options[name] for name in ("layer", "layers") if options.get(name) is not None}
    )
    assert asked.path is not None
    progress("reading the checkpoint")
    fields = {name: options[name] for name in CHECKPOINT_FIELDS if options.get(name) is not None}
    return read_checkpoint(Path(asked.path), asked.layer, asked.layers, fields)


def gather(
    config: str | None,
    preset: str | None,
    given_set: Mapping[str, Any],
    given: Mapping[str, Any],
    known: Collection[str],
    folder: Path = HERE,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all options, parameters of the encoding): those of a preset, or of a config, which may hold the `known`, and
    those that are `given` beside it, which win; None and () mean "not given"."""
    options: dict[str, Any] = {}
    if preset is not None:
        for name, value in (("config", config), ("encoding", given.get("encoding")), ("from", given.get("from"))):
            if value is not None:
                raise RequestError(
                    f"both preset and {name} were given: a preset is a whole block, so drop one of them."
                )
        options = preset_options(preset)
    elif config is not None:
        options = read_config(folder / config, known)
    said = {name: value for name, value in given.items() if value is not None and value != ()}
    check_layers_follow(options, {**said, **given_set})
    encoding_set = {**options.pop("set", {}), **given_set}
    return {**options, **said}, encoding_set


def weights_of(path: str, spec: Spec, bias_given: bool) -> tuple[Spec, Mapping[str, Tensor]]:
    """The weights in a file, and the spec with the biases that it has; RequestError where others were asked for."""
    from posexport.models.weights import read_weights

    found, weights = read_weights(Path(path), spec)
    if bias_given and found.bias != spec.bias:
        raise RequestError(
            f"bias was given but {path!r} has biases for {', '.join(found.bias) or 'no projection'}: with weights the "
            "file decides, so drop bias."
        )
    return found, weights


def read_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The options in a TOML file, named as on the command line (`-` or `_`), `[set]` a table; unknown ones refused."""
    return known_options(read_toml(path, "config"), f"config {str(path)!r}", known)


def known_options(data: Mapping[str, Any], where: str, known: Collection[str]) -> dict[str, Any]:
    """The options of a file that `where` names in words; RequestError for what isn't one."""
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known and name != "set":
            raise unknown(f"key in {where}", key, [*known, "set"])
        if name in options:
            raise RequestError(f"{where} gives {name} twice, with '-' and with '_': drop one.")
        options[name] = value
    if not isinstance(options.get("set", {}), dict):
        raise RequestError(f"{where}: set must be a table of parameters, such as [set] theta = 500000.")
    return options


def preset_options(name: str) -> dict[str, Any]:
    """The options that a preset stands for, all of them fields of a spec, and `set`."""
    return known_options(read_preset(name).options, f"preset {name!r}", [field.name for field in attrs.fields(Spec)])


def spec_of(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> Spec:
    """The spec that the options describe; None means "not given"."""
    encoding = options.get("encoding")
    if encoding is None and options.get("layer_pattern") is not None:
        encoding = _read_layer(_pattern_parts(options["layer_pattern"])[0])[0]
    if encoding is None:
        raise RequestError(f"no encoding was given: add --encoding with one of {', '.join(ENCODINGS)}.")
    if "name" in parameters:
        raise unknown(f"parameter of {encoding}", "name", [])
    names = (field.name for field in attrs.fields(Spec) if field.name != "encoding")
    sizes = {name: options[name] for name in names if options.get(name) is not None}
    data = {"encoding": {"name": encoding, **parameters}, **sizes}
    if "layer_pattern" in sizes:
        layers = data["layer_pattern"] = read_pattern(sizes["layer_pattern"], data["encoding"])
        if encoding not in {layer["encoding"]["name"] for layer in layers}:
            raise RequestError(
                f"encoding {encoding} was given, but no layer of layer_pattern has it: drop one of them."
            )
        _check_reach(layers, sizes, _pattern_parts(options["layer_pattern"]), parameters)
        data["encoding"] = layers[0]["encoding"]
    return read_spec(data)
