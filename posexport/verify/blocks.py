"""Sums over large arrays, block by block: the next step reads a result while it is still in the core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from posexport.spec.arrays import Array

BLOCK = 1 << 15
"""Values of a block. Three blocks of float64 are 768 KB, which fits in the caches of most cores."""


def in_blocks(*arrays: Array) -> Iterator[list[Array]]:
    """The flattened values of arrays of one shape, in float64, one block of each array at a time."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, BLOCK):
        yield [array[start : start + BLOCK].astype(np.float64, copy=False) for array in flat]


def absolute_errors(array: Array, exact: Array) -> Array:
    """|array - exact| in float64, with the shape of the arrays."""
    errors = np.empty(exact.shape)
    for (out, *_), (part, of_exact) in zip(in_blocks(errors), in_blocks(array, exact), strict=True):
        np.abs(np.subtract(part, of_exact, out=out), out=out)
    return errors


def root_mean_square(values: Array) -> float:
    """The root mean square of all values of an array that is not empty."""
    # no call of BLAS: its threads would wait for cores that engines use at the same time
    squares = sum(float(np.einsum("i,i->", part, part)) for (part,) in in_blocks(values))
    return float((squares / values.size) ** 0.5)
