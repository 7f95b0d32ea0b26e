"""Layers of a checkpoint as one block: the fields that they share, and the pattern of those that differ."""

from __future__ import annotations

from collections.abc import Sequence

from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.models.checkpoints.architecture import Data
from posexport.spec.spec import LAYER_FIELDS


def stacked(layers: Sequence[Data], where: str) -> Data:
    """Data for a spec of these layers in order; RequestError where one block can't have all of them."""
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
    # the type and epsilon of qk_norm are fields of the block
    shared["qk_norm"] = any(layer.get("qk_norm", False) for layer in layers)
    kinds = [
        {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
        | {"qk_norm": layer.get("qk_norm", False), "encoding": layer["encoding"]}
        for layer in layers
    ]
    period = _period(kinds)
    if len(period) == 1:
        return {**shared, **period[0], "layers": len(layers)}
    pattern = [{name: value for name, value in kind.items() if shared.get(name) != value} for kind in period]
    return {**shared, "encoding": period[0]["encoding"], "layer_pattern": pattern, "layers": len(layers)}


def _period(layers: Sequence[Data]) -> Sequence[Data]:
    """The shortest prefix whose repetition gives all layers."""
    for length in range(1, len(layers)):
        if all(layer == layers[index % length] for index, layer in enumerate(layers)):
            return layers[:length]
    return layers
