"""The caches of a decoder as onnxruntime-genai binds them: key and value of the same size in each layer, and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import RequestError, shown
from posexport.export.triton.served_artifact import ServedArtifact
from posexport.models.whole import CONVOLUTION, STATES, cached_layers

_CACHE_DTYPES = ("fp32", "fp16", "bf16")


@attrs.frozen(kw_only=True)
class Caches:
    """The caches of a decoder: the numbers of layers and of key heads, the head size, and whether keys are in buffers.

    `states` are the kinds of states that some layers have. `of_convolutions` are settings for models with only states
    of convolutions, which onnxruntime-genai doesn't find by itself.
    """

    layers: int
    heads: int
    size: int
    are_buffers: bool
    states: tuple[str, ...]
    of_convolutions: Mapping[str, Any]


def caches_of(path: Path, served: ServedArtifact) -> Caches:
    """The caches of a file; RequestError if onnxruntime-genai can't bind them."""
    try:
        return _caches(served)
    except _Unusable as problem:
        raise RequestError(f"{str(path)!r} {problem}: {problem.advice}.") from None


class _Unusable(Exception):
    """What onnxruntime-genai can't bind, and what helps."""

    def __init__(self, problem: str, advice: str = "run it with 'posexport generate', or give another decoder") -> None:
        super().__init__(problem)
        self.advice = advice


def _caches(served: ServedArtifact) -> Caches:
    layers = cached_layers(served.inputs)
    if any(".encoder." in name for name in served.inputs):
        raise _Unusable("is of an encoder-decoder, which is not packaged for onnxruntime-genai")
    found = {
        kind: [layer for layer in layers if _past(layer, kind) in served.inputs] for kind in ("key", "value", *STATES)
    }
    states = tuple(kind for kind in STATES if found[kind])
    keyed = sorted({*found["key"], *found["value"]})
    if not keyed:
        raise _Unusable(
            "has no caches past_key_values.N.key and past_key_values.N.value, which onnxruntime-genai needs",
            "give a decoder that 'posexport export --model' made with --kv-cache concat or shared",
        )
    if not states and layers != list(range(len(layers))):
        missing = next(at for at, layer in enumerate(layers) if at != layer)
        raise _Unusable(f"has no cache for layer {missing}, and onnxruntime-genai gives one to each")
    keys = sorted(_past(layer, kind) for layer in keyed for kind in ("key", "value"))
    _check_names(served, {*keys, *(_past(layer, kind) for kind in states for layer in found[kind])})
    lengths = _lengths(served, keys)
    heads, size = _sizes(served, keys)
    last = max(layers)
    return Caches(
        layers=last + 1,
        heads=heads,
        size=size,
        are_buffers=all(past == present != "?" for past, present in lengths),
        states=states,
        of_convolutions=_of_convolutions(served, keyed, found[CONVOLUTION], last) if states == (CONVOLUTION,) else {},
    )


def _past(layer: int, kind: str) -> str:
    return f"past_key_values.{layer}.{kind}"


def _present(past: str) -> str:
    """The name of the output of a cache."""
    return past.replace("past_key_values", "present", 1)


def _check_names(served: ServedArtifact, pasts: set[str]) -> None:
    """Check that a file has these caches as inputs and outputs, and no inputs that onnxruntime-genai doesn't give."""
    unknown = sorted(served.inputs.keys() - {"input_ids", "attention_mask", "position_ids", *pasts})
    if unknown:
        raise _Unusable(f"has the input {shown(unknown[0])}, which onnxruntime-genai does not give")
    lacking = sorted(({"input_ids", "attention_mask"} - served.inputs.keys()) | (pasts - served.inputs.keys()))
    lacking += sorted({"logits", *map(_present, pasts)} - served.outputs.keys())
    if lacking:
        raise _Unusable(f"lacks {shown(lacking[0])}")


def _lengths(served: ServedArtifact, keys: Sequence[str]) -> list[tuple[Any, Any]]:
    """The lengths of each cache of keys or values [B, K, length, D], as an input and as an output."""
    lengths = []
    for name in keys:
        past, present = served.inputs[name][0], served.outputs[_present(name)][0]
        if len(past) != 4 or len(present) != 4:
            raise _Unusable(f"has caches {shown(name)} of other than 4 dimensions")
        lengths.append((past[2], present[2]))
    return lengths


def _sizes(served: ServedArtifact, keys: Sequence[str]) -> tuple[int, int]:
    """The number of key heads and their size, which are the same for all caches."""
    kinds = {(served.inputs[name][0][1], served.inputs[name][0][3], served.inputs[name][1]) for name in keys}
    if len(kinds) > 1:
        raise _Unusable("has caches of several sizes, and onnxruntime-genai has one for all layers")
    heads, size, dtype = kinds.pop()
    if not isinstance(heads, int) or not isinstance(size, int) or dtype not in _CACHE_DTYPES:
        raise _Unusable(f"has caches of {shown([heads, size])} {dtype}, not of fixed heads and sizes in a float dtype")
    return heads, size


def _of_convolutions(
    served: ServedArtifact, keyed: Sequence[int], convolved: Sequence[int], last: int
) -> dict[str, Any]:
    """The settings for layers with either keys or a state of a convolution, up to the layer `last`."""
    for at in range(last + 1):
        if (at in keyed) == (at in convolved):
            kinds = "both keys and a state" if at in keyed else "neither keys nor a state"
            raise _Unusable(f"has {kinds} in layer {at}, and onnxruntime-genai takes one beside convolutions")
    return {
        "layer_types": ["full_attention" if at in keyed else "conv" for at in range(last + 1)],
        "conv_cache_size": served.inputs[_past(convolved[0], CONVOLUTION)][0][-1],
    }
