"""An architecture: how its config.json describes an attention layer, and where its checkpoints store the tensors.

Each architecture is one entry in the table of its family's file, under its `model_type`. The functions below read what
many architectures share: sizes, causality, types of layers, and tensors that differ only in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from posexport.errors import RequestError
from posexport.models.checkpoints.config import Config, Data
from posexport.models.checkpoints.tensors import Tensors
from posexport.models.weights import layer_shapes
from posexport.spec.spec import ATTENTION_PROJECTIONS, Spec

if TYPE_CHECKING:
    from torch import Tensor

Weights = dict[str, "Tensor"]
"""Tensors by our names, without `layers.N.`."""

Reader = Callable[[Tensors, str, Spec, Config], Weights]
"""Reads the weights of the layer that `spec` describes, from the module at a path of the checkpoint."""

QKV = ATTENTION_PROJECTIONS[:3]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def renamed(names: Mapping[str, str] | None = None) -> Reader:
    """Return a reader of weights that differ from ours only in their names. `names` maps our name to the checkpoint's.

    Weights of an encoding are read only if `names` contains them.
    """
    return lambda tensors, path, spec, config: read_renamed(tensors, path, spec, names or {})


SAME_NAMES = renamed()


def projections(*names: str) -> dict[str, str]:
    """Map our names of the query, key, value and output projections to the checkpoint's names."""
    return dict(zip(ATTENTION_PROJECTIONS, names, strict=True))


def read_renamed(tensors: Tensors, path: str, spec: Spec, names: Mapping[str, str], *others: str) -> Weights:
    """Do the same as `renamed`, without the projections in `others`, which are read elsewhere."""
    weights: Weights = {}
    for name, shape in layer_shapes(spec).items():
        stem, dot, kind = name.rpartition(".")
        stem, ending = (stem, dot + kind) if kind in ("weight", "bias") else (name, "")
        if stem not in others and (stem in names or not name.startswith("encoding.")):
            weights[name] = tensors(f"{path}.{names.get(stem, stem)}{ending}", shape)
    return weights


@attrs.frozen
class Architecture:
    """One `model_type`.

    `layers` returns the number of layers. `spec` describes one layer as data for `read_spec`. `paths` lists the
    possible names of its attention module in a checkpoint. `weights` reads its tensors. Keys and tensors of the module
    that do not affect attention are in `ignored_keys.toml`.
    """

    layers: Callable[[Config], int]
    spec: Callable[[Config, int], Data]
    paths: Callable[[Config, int], Sequence[str]]
    weights: Reader = SAME_NAMES


def count(default: int, *names: str) -> Callable[[Config], int]:
    """Return a function that reads the number of layers from a key."""
    return lambda config: config.integer(*(names or ("num_hidden_layers",)), default=default)


def under(path: str, *roots: str) -> Callable[[Config, int], Sequence[str]]:
    """Return a function for the paths of a module: without a root, or below one of `roots`, as in models with a head.

    `{}` in `path` is replaced by the layer's number.
    """
    return lambda config, layer: [f"{root}{path}".format(layer) for root in ("", *roots)]


def full_heads(
    config: Config,
    hidden: int,
    heads: int,
    hidden_names: tuple[str, ...] = ("hidden_size",),
    heads_names: tuple[str, ...] = ("num_attention_heads",),
) -> Data:
    """Read the sizes of a layer with as many key heads as query heads, and head_dim = hidden_size / num_heads."""
    width, number = config.integer(*hidden_names, default=hidden), config.integer(*heads_names, default=heads)
    return {"hidden_size": width, "num_heads": number, "head_dim": _shared_width(config, width, number)}


def grouped_heads(config: Config, hidden: int, heads: int, kv: int | None = None, head_dim: int | None = None) -> Data:
    """Read the sizes of a layer with num_key_value_heads and head_dim. null and None mean a derived value."""
    width, number = config.integer("hidden_size", default=hidden), config.integer("num_attention_heads", default=heads)
    given = config.optional_integer("head_dim", default=head_dim)
    return {
        "hidden_size": width,
        "num_heads": number,
        "num_kv_heads": config.optional_integer("num_key_value_heads", default=kv) or number,
        "head_dim": given or _shared_width(config, width, number),
    }


def _shared_width(config: Config, hidden: int, heads: int) -> int:
    width, remainder = divmod(hidden, heads)
    if remainder:
        raise RequestError(f"{config.where}: {heads} heads don't divide a width of {hidden}: fix one.")
    return width


def causal(config: Config, window: int | None = None, chunk: int | None = None) -> Data:
    """Return which keys a query of a decoder sees. If `is_causal` is false, it is an encoder."""
    is_causal = config.flag("is_causal", default=True)
    if not is_causal and (window or chunk):
        raise config.wrong("is_causal", "true for layers with a window")
    return {"causal": is_causal, "window": window, "attention_chunk_size": chunk}


def window(config: Config, width: int | None, slides: bool = True) -> int | None:
    """Return the window of a layer that `slides`, with a `width` of 0 or more tokens. None in other layers.

    In other layers, `width` may have any value.
    """
    if slides and width == 0:
        raise config.wrong("sliding_window", "from 1 in layers that use it, because with 0 no query sees a key")
    return width if slides else None


def is_local(config: Config, layer: int, default: bool, local: str = SLIDING) -> bool:
    """Whether `layer_types` gives a layer the type `local`, not FULL. `default` if there is no such key."""
    kinds, listed = (FULL, local), config.value("layer_types")
    if listed is None:
        return default
    if not isinstance(listed, list) or len(listed) <= layer or not all(kind in kinds for kind in listed):
        raise config.wrong("layer_types", f"a list of {' and '.join(kinds)}, one for each layer")
    return bool(listed[layer] == local)
