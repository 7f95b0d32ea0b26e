"""Outputs with very many columns, such as the logits of a large vocabulary: for many tokens, only some are kept.

600 tokens of a vocabulary of 150,000 are 730 MB in float64, for each set of inputs and each evaluation. An error of a
token shows in nearly all of its logits, and an error of a column shows at any token. So outputs with few tokens keep
all columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from posexport.runtimes.base import Arrays
from posexport.spec.arrays import Array
from posexport.spec.contract import Values

WIDE = 8192
"""From this number of columns on, an output is wide."""

MOST = 2**21
"""The most elements of a wide output that is kept whole."""

COLUMNS = 1024
"""The number of columns that are kept of an output with more elements."""


def widths(outputs: Values) -> dict[str, int]:
    """The number of columns (the last axis) of the outputs that are wide by their declared shapes."""
    last = {name: shape[-1] for name, (shape, _) in outputs.items() if len(shape) > 1}
    return {name: size for name, size in last.items() if isinstance(size, int) and size >= WIDE}


def kept_columns(rows: tuple[int, ...], width: int) -> Array | None:
    """The columns that are kept of an output [*rows, width], in order, with the first and the last; None for all.

    For other rows, other columns are kept.
    """
    if math.prod(rows) * width <= MOST:
        return None
    between = np.random.default_rng((width, *rows)).choice(width - 2, COLUMNS - 2, replace=False)
    return np.asarray([0, *np.sort(between + 1), width - 1])


def columns_of(shape: tuple[int, ...], width: int | None) -> Array | None:
    """The columns that an array of this shape has of an output with `width` columns; None if it has all."""
    return None if width is None or shape[-1] == width else kept_columns(shape[:-1], width)


def with_few_columns(arrays: Arrays, wide: Mapping[str, int]) -> Arrays:
    """The arrays, with only the kept columns of those that have as many columns as `wide` says."""
    return {name: _few(array, wide.get(name)) for name, array in arrays.items()}


def _few(array: Array, width: int | None) -> Array:
    if width is None or array.ndim < 2 or array.shape[-1] != width:
        return array
    columns = kept_columns(array.shape[:-1], width)
    return array if columns is None else array[..., columns]
