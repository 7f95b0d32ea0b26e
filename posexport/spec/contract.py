"""The contract of an artifact: names, shapes and dtypes of its inputs and outputs, and their dimensions by name.

batch, seq, past_seq (keys in a grown cache), max_seq (slots in a shared one) and encoder_seq may each vary. Two more
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
"""Name to (shape, dtype); a dimension that may vary has a name instead of a size."""

Bounds = dict[str, tuple[int, int | None]]
"""Smallest and largest size of each dimension that may vary; None where there is no largest."""

PRESENT = "past_seq + seq"
"""The name of the length of a grown cache as an output; equals `total_seq`, the length of attention_mask."""

SUMS = {PRESENT: ("past_seq", "seq"), "total_seq": ("past_seq", "seq")}
"""The dimensions that are sums, with their parts."""

TRACED_SIZES = {"batch": 2, "seq": 7, "past_seq": 5, "total_seq": 12, "max_seq": 19, "encoder_seq": 11}
"""Sizes of the example that torch traces; all differ, so that a size that stays in the graph shows."""


_LAYER = re.compile(r"(?P<before>.*?)\.(?P<layer>[0-9]{1,6})(\.(?P<behind>.*))?", re.DOTALL)


def split_layer(name: str) -> tuple[str, int, str] | None:
    """The name of a cache before the number of its layer, the number, and what follows: `past_key.3`, which ends with
    it, or `present.3.key`. None for other names; a number of more than six digits is no layer's."""
    match = _LAYER.fullmatch(name)
    return None if match is None else (match["before"], int(match["layer"]), match["behind"] or "")


def read_dims(dims: Iterable[str | int]) -> list[str | int]:
    """Dimensions as a file names them: some files name a number "16"."""
    return [int(dim) if isinstance(dim, str) and dim.isdecimal() and len(dim) < 20 else dim for dim in dims]


def smallest(dim: str) -> int:
    """The smallest size that a dimension can have."""
    return 0 if dim == "past_seq" else 1  # before the first token, a cache is empty


def dimensions(values: Values) -> list[str]:
    """The named dimensions of `values` that are not sums, in order of appearance."""
    names = dict.fromkeys(dim for shape, _ in values.values() for dim in shape if isinstance(dim, str))
    return [dim for dim in names if dim not in SUMS]


def resolved(dim: str | int, sizes: Mapping[str, int]) -> int:
    """The size of one dimension: a number itself, or the sum of the parts of a sum."""
    if isinstance(dim, int):
        return dim
    return sum(sizes[part] for part in SUMS[dim]) if dim in SUMS else sizes[dim]


def bounds_of(expected: Values, actual: Values) -> Bounds:
    """Bounds of the named dimensions of `expected`; a dimension that is a number in `actual`, a graph's own inputs, is
    fixed to it."""
    bounds: Bounds = {dim: (smallest(dim), None) for dim in dimensions(expected)}
    for name, (shape, _) in expected.items():
        for dim, size in zip(shape, actual[name][0] if name in actual else (), strict=False):
            if dim in bounds and isinstance(size, int):
                bounds[str(dim)] = (size, size)
    return bounds


def within(size: int, bound: tuple[int, int | None]) -> int:
    """The size, or the nearest one that a bound allows."""
    low, high = bound
    return max(low, size if high is None else min(size, high))


def sizes_of(values: Values, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, int]:
    """The size of each named dimension of `values`, sums left out, in `arrays` of these shapes."""
    sizes = {
        dim: size for name, (shape, _) in values.items() for dim, size in zip(shape, arrays[name].shape, strict=True)
    }
    return {dim: sizes[dim] for dim in dimensions(values)}


def graph_inputs(spec: Spec) -> dict[str, tuple[Shape, str]]:
    """The graph's inputs, in order: name to (shape, dtype)."""
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
    """The graph's outputs, in order: name to (shape, dtype)."""
    output: Values = {"output": (("batch", "seq", spec.hidden_size), spec.dtype)}
    return {**output, **_caches(spec, "present", "max_seq" if spec.kv_cache == "shared" else PRESENT)}


def _caches(spec: Spec, prefix: str, length: str) -> Values:
    if spec.kv_cache is None:
        return {}
    shape = ("batch", spec.num_kv_heads, length, spec.head_dim)
    suffixes = [f".{index}" for index in range(spec.layers)] if spec.layers > 1 else [""]
    return {f"{prefix}_{kind}{suffix}": (shape, spec.dtype) for suffix in suffixes for kind in ("key", "value")}
