"""Layers of a checkpoint as one block: what all of them share, and the pattern of what they differ in."""

from __future__ import annotations

from collections.abc import Sequence

from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.models.checkpoints.architecture import Data
from posexport.spec.spec import LAYER_FIELDS


def stacked(layers: Sequence[Data], where: str) -> Data:
    """Data of a spec of these layers, one after the other; RequestError where no block holds them together."""
    first = layers[0]
    if ENCODINGS[first["encoding"]["name"]].at_input:  # it acts once, before the first layer, for all of them
        layers = [first, *({**layer, "encoding": first["encoding"]} for layer in layers[1:])]
    shared: Data = {}
    for layer in layers:
        for name, value in layer.items():
            if name not in (*LAYER_FIELDS, "encoding") and shared.setdefault(name, value) != value:
                raise RequestError(
                    f"{where}: {name} is {shared[name]} in one of these layers and {value} in another: a stack "
                    "has one, so give fewer layers."
                )
    shared["qk_norm"] = any(layer.get("qk_norm", False) for layer in layers)  # what goes with it is no field of a layer
    own = [
        {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
        | {"qk_norm": layer.get("qk_norm", False), "encoding": layer["encoding"]}
        for layer in layers
    ]
    kinds = _period(own)
    if len(kinds) == 1:
        return {**shared, **kinds[0], "layers": len(layers)}
    pattern = [{name: value for name, value in kind.items() if shared.get(name) != value} for kind in kinds]
    return {**shared, "encoding": kinds[0]["encoding"], "layer_pattern": pattern, "layers": len(layers)}


def _period(layers: Sequence[Data]) -> Sequence[Data]:
    """The shortest run of layers that gives all of them when it is repeated."""
    for length in range(1, len(layers)):
        if all(layer == layers[index % length] for index, layer in enumerate(layers)):
            return layers[:length]
    return layers
