"""`--from` and `--layer`: what stands beside them, and the checkpoint that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport.checkpoints import OPTIONS, Checkpoint, read_checkpoint
from posexport.cli import console
from posexport.errors import RequestError
from posexport.fields import integer, text
from posexport.spec import Spec


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """Which layers of which checkpoint, validated."""

    path: str | None = text(None, "a config.json, or the folder of a checkpoint")
    layer: int | None = integer(None, "the layer whose weights are taken", at_least=0, optional=True)
    layers: int = integer(1, "number of layers")


def checkpoint_of(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of `from`, None where it wasn't given; RequestError for options that config.json decides, and for
    sources of weights beside `layer`."""
    if options.get("from") is None:
        if options.get("layer") is not None:
            raise RequestError(
                "layer was given without from: give the folder of its checkpoint with --from, or drop it."
            )
        return None
    decided = {field.name for field in attrs.fields(Spec)} - {*OPTIONS, "layers"}
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
    with console.progress("reading the checkpoint"):
        fields = {name: options[name] for name in OPTIONS if options.get(name) is not None}
        return read_checkpoint(Path(asked.path), asked.layer, asked.layers, fields)
