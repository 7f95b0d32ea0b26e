"""Hugging Face checkpoints: the spec of an attention layer from a config.json, and its weights from .safetensors.

Unknown config keys are errors. Every key must be read, or be known not to affect attention. `ARCHITECTURES` has an
entry for each `model_type`, `PARTS` for models of several parts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError, check_known, unknown
from posexport.models import ENCODINGS, read_spec
from posexport.models.checkpoints import decoders, encoders, fused, vision
from posexport.models.checkpoints.architecture import Architecture, Weights
from posexport.models.checkpoints.config import FILE, PARTS, Data, ignored_tensors, open_config, part_of
from posexport.models.checkpoints.tensors import Tensors, weights_file
from posexport.models.weights import TORCH_DTYPES, LazyWeights, weight_shapes
from posexport.spec.spec import LAYER_FIELDS, Spec

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES: Mapping[str, Architecture] = {
    **decoders.ARCHITECTURES,
    **fused.ARCHITECTURES,
    **encoders.ARCHITECTURES,
    **vision.ARCHITECTURES,
}
"""Every architecture by its `model_type`."""


OPTIONS = ("dtype", "kv_cache", "padding_mask", "angles", "positions", "prefix_tokens")
"""Fields of a spec that no config.json sets. The exception is prefix_tokens, which some config.json files set."""


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A block as config.json describes it, and its weights by our names in the spec's dtype.

    Weights are read when they are looked up. They are None if only the config was read.
    """

    spec: Spec
    weights: Mapping[str, Tensor] | None


def read_checkpoint(
    path: Path, layer: int | None, layers: int, options: Mapping[str, Any], *, weights: bool = True
) -> Checkpoint:
    """Read the attention layer `layer` of the checkpoint in a folder, or a stack of `layers` layers that begins with
    it.

    If `layer` is None, only the config is read, from layer 0 on, and `path` may be the config.json itself. Without
    `weights`, only the config of those layers is read. `options` are fields of OPTIONS. Raises RequestError for unknown
    model types, keys, options and tensors. If `layer` is given, also if there is no folder with weights.
    """
    where = str(path / FILE if path.is_dir() else path)
    model_type, config = part_of(open_config(path), where)
    if model_type not in ARCHITECTURES:
        error = unknown(f"model_type in {where}", model_type, [*ARCHITECTURES, *PARTS], similarity=0.85)
        raise RequestError(f"{error} The whole model of another type is written by posexport export --model.")
    architecture = ARCHITECTURES[model_type]
    first, total = layer or 0, architecture.layers(config)
    if first + layers > total:
        raise RequestError(f"{where} describes {total} layers, 0 to {total - 1}: {first + layers - 1} is none of them.")
    numbers = range(first, first + layers)
    described = [architecture.spec(config, number) for number in numbers]
    config.refuse_unread(model_type)
    for name in options:
        check_known("option with a checkpoint", name, OPTIONS)
        if name in described[0]:
            raise RequestError(f"{name} was given, but {where} sets it ({described[0][name]}): drop it.")
    spec = read_spec({**_stacked(described, where), **options})
    if layer is None:
        return Checkpoint(spec=spec, weights=None)
    if not path.is_dir():
        raise RequestError(f"{str(path)!r} is a file without weights: give the folder that has the .safetensors too.")
    weights_file(path)  # refused here too if only the config is read
    if not weights:
        return Checkpoint(spec=spec, weights=None)
    tensors = Tensors(path)
    modules = [tensors.path(architecture.paths(config, number)) for number in numbers]

    def read(index: int) -> Weights:
        weights = architecture.weights(tensors, modules[index], read_spec(described[index]), config)
        tensors.refuse_unread(modules[index], model_type, ignored_tensors(model_type))
        return weights

    return Checkpoint(spec=spec, weights=_lazy(spec, read))


def _lazy(spec: Spec, read: Callable[[int], Weights]) -> LazyWeights:
    """Return weights by their public names in the spec's dtype. RequestError if a weight overflows in it.

    `read` returns all weights of a layer, because some checkpoints store them in one tensor. The weights of the layer
    that was read last are kept. Errors in the first layer raise RequestError now. Errors in another layer raise when it
    is looked up.
    """
    import torch

    shapes, dtype = weight_shapes(spec), getattr(torch, TORCH_DTYPES[spec.dtype])

    @functools.lru_cache(maxsize=1)
    def layer(index: int) -> Weights:
        weights = {}
        for inner, tensor in read(index).items():
            of_block = spec.layers == 1 or (inner.startswith("encoding.") and spec.encoding.at_input)
            name = inner if of_block else f"layers.{index}.{inner}"
            assert tuple(tensor.shape) == shapes[name]
            weights[name] = tensor.to(dtype).contiguous()
            if not bool(torch.isfinite(weights[name]).all()):
                raise RequestError(f"{name} overflows in {spec.dtype}: give dtype bf16 or fp32.")
        return weights

    def make(name: str) -> Tensor:
        numbered = re.match(r"layers\.(\d+)\.", name)
        return layer(0 if numbered is None else int(numbered[1]))[name]

    layer(0)
    return LazyWeights(shapes, make)


def _stacked(layers: Sequence[Data], where: str) -> Data:
    """Return data for a spec of these layers in order. RequestError if one block cannot have all of them."""
    first = layers[0]
    if ENCODINGS[first["encoding"]["name"]].at_input:  # it acts once, before the first layer, for all layers
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
    """Return the shortest prefix whose repetition gives all layers."""
    for length in range(1, len(layers)):
        if all(layer == layers[index % length] for index, layer in enumerate(layers)):
            return layers[:length]
    return layers
