"""The dimensions of an artifact by the names that its spec gives them: bounds, sums and sizes. Imports no engine.

batch, seq, past_seq (keys in a grown cache), max_seq (places in a shared one) and encoder_seq may each vary. Two more
follow from them, and are given by nobody: `past_seq + seq`, of a grown cache that comes out, and total_seq, the same
number, of attention_mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from posexport.spec.spec import Spec

Shape = tuple[str | int, ...]

Values = Mapping[str, tuple[Shape, str]]
"""Name to (shape, dtype), a dimension by name where it may vary."""

Bounds = dict[str, tuple[int, int | None]]
"""Smallest and largest size of each dimension that may vary; None where there is no largest."""

PRESENT = "past_seq + seq"
"""The name of the length of a grown cache; `total_seq`, that of attention_mask, is the same number."""

SUMS = {PRESENT: ("past_seq", "seq"), "total_seq": ("past_seq", "seq")}
"""The dimensions that are sums, with their parts."""

SMALLEST_SIZES = {"past_seq": 0}
"""The smallest size of a dimension where that is not 1: before the first token, a cache is empty."""


def smallest(dim: str) -> int:
    """The smallest size that a dimension can have."""
    return SMALLEST_SIZES.get(dim, 1)


def dimensions(values: Values) -> list[str]:
    """The dimensions that `values` have by name and that are no sums, in the order in which they come."""
    found = dict.fromkeys(dim for shape, _ in values.values() for dim in shape if isinstance(dim, str))
    return [dim for dim in found if dim not in SUMS]


def resolved(dim: str | int, sizes: Mapping[str, int]) -> int:
    """The size of one dimension: a number is itself, a sum that of its parts."""
    if isinstance(dim, int):
        return dim
    return sum(sizes[part] for part in SUMS[dim]) if dim in SUMS else sizes[dim]


def bounds_of(wanted: Values, found: Values) -> Bounds:
    """What a graph's own inputs `found` say about the dimensions of its spec's, `wanted`: a number is fixed."""
    bounds: Bounds = {dim: (smallest(dim), None) for dim in dimensions(wanted)}
    for name, (shape, _) in wanted.items():
        for dim, size in zip(shape, found[name][0] if name in found else (), strict=False):
            if dim in bounds and isinstance(size, int):
                bounds[str(dim)] = (size, size)
    return bounds


def sizes_of(wanted: Values, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, int]:
    """The sizes that arrays of the shapes of `wanted` have, by dimension, sums left out."""
    found = {
        dim: size for name, (shape, _) in wanted.items() for dim, size in zip(shape, arrays[name].shape, strict=True)
    }
    return {dim: found[dim] for dim in dimensions(wanted)}


def graph_inputs(spec: Spec) -> dict[str, tuple[Shape, str]]:
    """The graph's inputs: name to (shape, dtype), dimensions by name where they may vary."""
    found: dict[str, tuple[Shape, str]] = (
        {"hidden_states": (("batch", "seq", spec.hidden_size), spec.dtype)}
        if spec.vocab_size is None
        else {"input_ids": (("batch", "seq"), "int64")}
    )
    if spec.cross:
        found["encoder_hidden_states"] = (("batch", "encoder_seq", spec.hidden_size), spec.dtype)
    axes = spec.position_axes
    if axes:
        found["position_ids"] = (("batch", "seq") if axes == 1 else ("batch", "seq", axes), "int64")
    if spec.padding_mask:
        found["attention_mask"] = (("batch", _key_dim(spec)), "int64")
    if spec.kv_cache == "shared":
        found["write_indices"] = (("batch",), "int64")
    return {**found, **_caches(spec, "past", "max_seq" if spec.kv_cache == "shared" else "past_seq")}


def graph_outputs(spec: Spec) -> dict[str, tuple[Shape, str]]:
    """The graph's outputs, as `inputs` gives its inputs."""
    output: Values = {"output": (("batch", "seq", spec.hidden_size), spec.dtype)}
    return {**output, **_caches(spec, "present", "max_seq" if spec.kv_cache == "shared" else PRESENT)}


def _key_dim(spec: Spec) -> str:
    """The dimension of the keys that a query may see."""
    if spec.cross:
        return "encoder_seq"
    return {None: "seq", "concat": "total_seq", "shared": "max_seq"}[spec.kv_cache]


def _caches(spec: Spec, when: str, seq: str) -> Values:
    if spec.kv_cache is None:
        return {}
    shape = ("batch", spec.num_kv_heads, seq, spec.head_dim)
    numbers = [f".{index}" for index in range(spec.layers)] if spec.layers > 1 else [""]
    return {f"{when}_{kind}{number}": (shape, spec.dtype) for number in numbers for kind in ("key", "value")}
