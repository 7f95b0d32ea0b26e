"""The options `from`, `layer` and `layers`: which layers of which checkpoint an artifact is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import FieldError, RequestError
from posexport.models.checkpoints import OPTIONS as CHECKPOINT_FIELDS
from posexport.models.checkpoints import Checkpoint, read_checkpoint
from posexport.models.checkpoints.tensors import has_weights
from posexport.progress import Progress, silent
from posexport.spec.fields import integer
from posexport.spec.spec import Spec


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """Which layers of a checkpoint, validated."""

    layer: int | None = integer(None, "the first layer", at_least=0)
    layers: int = integer(1, "number of layers")


def takes_weights(options: Mapping[str, Any]) -> bool:
    """Whether weights are read from the checkpoint: where a layer was given, and where its folder has weights and no
    seed was given. A config.json gives the shape alone."""
    source = options.get("from")
    if not isinstance(source, str):
        return False
    return options.get("layer") is not None or (options.get("seed") is None and has_weights(Path(source)))


def checkpoint_of(
    options: Mapping[str, Any], parameters: Mapping[str, Any], progress: Progress = silent, *, weights: bool = True
) -> Checkpoint | None:
    """The checkpoint that the option `from` names, None where it is not given; without its weights if not `weights`.

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
    """RequestError for an option beside `from` that config.json decides, and for a second source of weights."""
    decided = {field.name for field in attrs.fields(Spec)} - {*CHECKPOINT_FIELDS, "layers"}
    given = [name for name, value in options.items() if name in decided and value is not None]
    for name in (*given, *(["set"] if parameters else [])):
        raise RequestError(f"{name} was given with from: config.json decides it, so drop it.")
    for source, other in (("from", "weights"), ("layer", "seed")):
        if options.get(source) is not None and options.get(other) is not None:
            raise RequestError(
                f"both {source} and {other} were given: weights come from one place, so drop one of them."
            )
