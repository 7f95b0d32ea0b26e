"""Options of a block, from the command line, a TOML file, a preset or a checkpoint, as a spec and its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import FieldError, RequestError, unknown
from posexport.export.layer_pattern import check_layers_follow, check_reach, read_parts, read_pattern
from posexport.files import not_a_file
from posexport.models import ENCODINGS, read_spec
from posexport.models.checkpoints import OPTIONS as CHECKPOINT_FIELDS
from posexport.models.checkpoints import Checkpoint, read_checkpoint
from posexport.progress import Progress, silent
from posexport.spec.fields import integer, stated, text
from posexport.spec.presets import read_preset
from posexport.spec.spec import Spec
from posexport.spec.toml_file import read_toml

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path()


@attrs.frozen(kw_only=True)
class BlockOptions:
    """Options of a block that are not part of its spec, validated wherever they come from."""

    batch: int | None = integer(None, "fixed batch size")
    seq: int | None = integer(None, "fixed sequence length")
    max_seq: int | None = integer(None, "fixed length of shared caches")
    seed: int | None = integer(None, "seed of the weights", at_least=0)
    weights: str | None = text(None, "a .safetensors file")
    output: str | None = text(None, "the file to write")

    def __attrs_post_init__(self) -> None:
        if self.weights is not None and self.seed is not None:
            raise RequestError(
                "both weights and seed were given: weights come from a file or from a seed, so drop one."
            )
        if self.weights is not None and (wrong := not_a_file(Path(self.weights))):
            raise RequestError(f"weights {self.weights!r} can't be read, they are {wrong}: give a .safetensors file.")


def merge_options(
    config: str | None,
    preset: str | None,
    given_set: Mapping[str, Any],
    given: Mapping[str, Any],
    known: Collection[str],
    folder: Path = HERE,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all options, parameters of the encoding). `given` options override those of a preset or a config file.

    A config file is TOML with the `known` options, named as on the command line (`-` or `_`), and `[set]` as a table.
    None and () mean "not given".
    """
    options: dict[str, Any] = {}
    if preset is not None:
        for name, value in (("config", config), ("encoding", given.get("encoding")), ("from", given.get("from"))):
            if value is not None:
                raise RequestError(
                    f"both preset and {name} were given: a preset is a whole block, so drop one of them."
                )
        options = preset_options(preset)
    elif config is not None:
        path = folder / config
        options = known_options(read_toml(path, "config"), f"config {str(path)!r}", known)
    overrides = stated(given)
    check_layers_follow(options, {**overrides, **given_set})
    parameters = {**options.pop("set", {}), **given_set}
    return {**options, **overrides}, parameters


def known_options(data: Mapping[str, Any], where: str, known: Collection[str]) -> dict[str, Any]:
    """The options of a file, called `where` in messages; RequestError for unknown ones."""
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
    """The options that a preset stands for: fields of a spec, and `set`."""
    return known_options(read_preset(name).options, f"preset {name!r}", [field.name for field in attrs.fields(Spec)])


def spec_of(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> Spec:
    """The spec that the options describe; None means "not given"."""
    encoding = options.get("encoding")
    if encoding is None and options.get("layer_pattern") is not None:
        encoding = read_parts(options["layer_pattern"])[0][0]
    if encoding is None:
        raise RequestError(f"no encoding was given: give one of {', '.join(ENCODINGS)}.")
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
        check_reach(layers, sizes, options["layer_pattern"], parameters)
        data["encoding"] = layers[0]["encoding"]
    return read_spec(data)


def weights_of(path: str, spec: Spec, bias_given: bool) -> tuple[Spec, Mapping[str, Tensor]]:
    """The spec with the biases that the file at `path` has, and the file's weights in the spec's dtype.

    Raises RequestError if `bias_given` and the file has other biases than the spec.
    """
    from posexport.models.weights import read_weights

    file_spec, weights = read_weights(Path(path), spec)
    if bias_given and file_spec.bias != spec.bias:
        raise RequestError(
            f"bias was given but {path!r} has biases for {', '.join(file_spec.bias) or 'no projection'}: with weights "
            "the file decides, so drop bias."
        )
    return file_spec, weights


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """Which layers of a checkpoint, validated."""

    layer: int | None = integer(None, "the first layer", at_least=0)
    layers: int = integer(1, "number of layers")


def takes_weights(options: Mapping[str, Any]) -> bool:
    """Whether weights are read from the checkpoint.

    They are if a layer was given, or if a folder but no seed was given. A config.json gives only the shape.
    """
    source = options.get("from")
    if not isinstance(source, str):
        return False
    return options.get("layer") is not None or (options.get("seed") is None and Path(source).is_dir())


def checkpoint_of(
    options: Mapping[str, Any], parameters: Mapping[str, Any], progress: Progress = silent, *, weights: bool = True
) -> Checkpoint | None:
    """The checkpoint that the option `from` names, None if it is not given; without its weights if not `weights`.

    Raises RequestError for options that config.json decides, and for a second source of weights.
    """
    source = options.get("from")
    if source is None:
        if options.get("layer") is not None:
            raise RequestError("layer was given without from: give the folder of its checkpoint as from, or drop it.")
        return None
    if not isinstance(source, str):
        raise FieldError("from", f"is {source!r}: it must be text.")
    _check_alone(options, parameters)
    names = [field.name for field in attrs.fields(CheckpointOptions)]
    chosen = CheckpointOptions(**{name: options[name] for name in names if options.get(name) is not None})
    progress("reading the checkpoint")
    layer = (chosen.layer or 0) if takes_weights(options) else None
    fields = {name: options[name] for name in CHECKPOINT_FIELDS if options.get(name) is not None}
    return read_checkpoint(Path(source), layer, chosen.layers, fields, weights=weights)


def _check_alone(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """RequestError for an option given with `from` that config.json decides, and for a second source of weights."""
    decided = {field.name for field in attrs.fields(Spec)} - {*CHECKPOINT_FIELDS, "layers"}
    given = [name for name, value in options.items() if name in decided and value is not None]
    for name in (*given, *(["set"] if parameters else [])):
        raise RequestError(f"{name} was given with from: config.json decides it, so drop it.")
    for source, other in (("from", "weights"), ("layer", "seed")):
        if options.get(source) is not None and options.get(other) is not None:
            raise RequestError(
                f"both {source} and {other} were given: weights come from one place, so drop one of them."
            )
