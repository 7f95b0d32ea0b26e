"""The contract of an artifact: names, shapes and dtypes of its inputs and outputs, and the names of their dimensions.

batch, seq, past_seq (keys in a grown cache), max_seq (slots in a shared cache) and encoder_seq may each vary. Two more
dimensions follow from them: `past_seq + seq` of a grown cache as an output, and total_seq, the same number, of
attention_mask. Imports no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from posexport.spec.spec import Spec

Shape = tuple[str | int, ...]

Values = Mapping[str, tuple[Shape, str]]
"""Maps a name to (shape, dtype). A dimension that may vary has a name instead of a size."""

Bounds = dict[str, tuple[int, int | None]]
"""The smallest and the largest size of each dimension that may vary. None means that there is no largest size."""

PRESENT = "past_seq + seq"
"""The name of the length of a grown cache as an output. It equals `total_seq`, the length of attention_mask."""

SUMS = {PRESENT: ("past_seq", "seq"), "total_seq": ("past_seq", "seq")}
"""The dimensions that are sums, with their parts."""

TRACED_SIZES = {"batch": 2, "seq": 7, "past_seq": 5, "total_seq": 12, "max_seq": 19, "encoder_seq": 11}
"""Sizes of the example that torch traces. All differ, so that a size that stays in the graph is recognised."""


_LAYER = re.compile(r"(?P<before>.*?)\.(?P<layer>[0-9]{1,6})(\.(?P<behind>.*))?", re.DOTALL)


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Split the name of a cache into the part before the layer number, the number, and the part after it.

    Examples are `past_key.3` and `present.3.key`. None for other names. A number of more than six digits is not a layer
    number.
    """
    match = _LAYER.fullmatch(name)
    return None if match is None else (match["before"], int(match["layer"]), match["behind"] or "")


def read_dims(dims: Iterable[str | int]) -> list[str | int]:
    """Return dimensions as a file names them, with numbers as int. Some files write a number as "16"."""
    return [int(dim) if isinstance(dim, str) and dim.isdecimal() and len(dim) < 20 else dim for dim in dims]


def smallest(dim: str) -> int:
    """Return the smallest size that a dimension can have."""
    return 0 if dim == "past_seq" else 1  # a cache is empty before the first token


def dimensions(values: Values) -> list[str]:
    """Return the named dimensions of `values` that are not sums, in order of appearance."""
    names = dict.fromkeys(dim for shape, _ in values.values() for dim in shape if isinstance(dim, str))
    return [dim for dim in names if dim not in SUMS]


def resolved(dim: str | int, sizes: Mapping[str, int]) -> int:
    """Return the size of one dimension. A number is its own size. The size of a sum is the sum of its parts."""
    if isinstance(dim, int):
        return dim
    return sum(sizes[part] for part in SUMS[dim]) if dim in SUMS else sizes[dim]


def bounds_of(expected: Values, actual: Values) -> Bounds:
    """Return the bounds of the named dimensions of `expected`.

    `actual` are a graph's own inputs. A dimension that is a number there is fixed to it.
    """
    bounds: Bounds = {dim: (smallest(dim), None) for dim in dimensions(expected)}
    for name, (shape, _) in expected.items():
        for dim, size in zip(shape, actual[name][0] if name in actual else (), strict=False):
            if dim in bounds and isinstance(size, int):
                bounds[str(dim)] = (size, size)
    return bounds


def within(size: int, bound: tuple[int, int | None]) -> int:
    """Return the size, or the nearest size that a bound allows."""
    low, high = bound
    return max(low, size if high is None else min(size, high))


def sizes_of(values: Values, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, int]:
    """Return the size of each named dimension of `values` in `arrays` of these shapes. Sums are left out."""
    sizes = {
        dim: size for name, (shape, _) in values.items() for dim, size in zip(shape, arrays[name].shape, strict=True)
    }
    return {dim: sizes[dim] for dim in dimensions(values)}


def graph_inputs(spec: Spec) -> dict[str, tuple[Shape, str]]:
    """Return the graph's inputs in order: name to (shape, dtype)."""
    inputs: dict[str, tuple[Shape, str]] = (
        {"hidden_states": (("batch", "seq", spec.hidden_size), spec.dtype)}
        if spec.vocab_size is None
        else {"input_ids": (("batch", "seq"), "int64")}
    )
    if spec.cross:
        inputs["encoder_hidden_states"] = (("batch", "encoder_seq", spec.hidden_size), spec.dtype)
    axes = spec.position_axes
    if spec.consecutive:
        if spec.takes_start:
            inputs["position_ids"] = (("batch", 1), "int64")
    elif axes:
        inputs["position_ids"] = (("batch", "seq") if axes == 1 else ("batch", "seq", axes), "int64")
    if spec.padding_mask:
        keys = {None: "seq", "concat": "total_seq", "shared": "max_seq"}[spec.kv_cache]
        inputs["attention_mask"] = (("batch", "encoder_seq" if spec.cross else keys), "int64")
    if spec.kv_cache == "shared":
        inputs["write_indices"] = (("batch",), "int64")
    return {**inputs, **_caches(spec, "past", "max_seq" if spec.kv_cache == "shared" else "past_seq")}


def graph_outputs(spec: Spec) -> dict[str, tuple[Shape, str]]:
    """Return the graph's outputs in order: name to (shape, dtype)."""
    output: Values = {"output": (("batch", "seq", spec.hidden_size), spec.dtype)}
    return {**output, **_caches(spec, "present", "max_seq" if spec.kv_cache == "shared" else PRESENT)}


def _caches(spec: Spec, prefix: str, length: str) -> Values:
    if spec.kv_cache is None:
        return {}
    shape = ("batch", spec.num_kv_heads, length, spec.head_dim)
    suffixes = [f".{index}" for index in range(spec.layers)] if spec.layers > 1 else [""]
    return {f"{prefix}_{kind}{suffix}": (shape, spec.dtype) for suffix in suffixes for kind in ("key", "value")}
