"""The dimensions of an artifact by the names that its spec gives them: bounds, sums and sizes. Imports no engine.

batch, seq, past_seq (keys in a grown cache), max_seq (places in a shared one) and encoder_seq may each vary. Two more
follow from them, and are given by nobody: `past_seq + seq`, of a grown cache that comes out, and total_seq, the same
number, of attention_mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posexport.spec import PRESENT

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[str | int, ...]

Values = Mapping[str, tuple[Shape, str]]
"""Name to (shape, dtype), a dimension by name where it may vary."""

Bounds = dict[str, tuple[int, int | None]]
"""Smallest and largest size of each dimension that may vary; None where there is no largest."""

SUMS = {PRESENT: ("past_seq", "seq"), "total_seq": ("past_seq", "seq")}
"""The dimensions that are sums, with their parts."""

LEAST = {"past_seq": 0}
"""The smallest size of a dimension where that is not 1: before the first token, a cache is empty."""


def smallest(dim: str) -> int:
    """The smallest size that a dimension can have."""
    return LEAST.get(dim, 1)


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
