"""Outputs with very many columns, as the logits of a large vocabulary are: of many tokens, some columns are kept.

600 tokens of a vocabulary of 150,000 are 730 MB in float64, for each set of inputs and each evaluation. An error of a
token shows in nearly all of its logits, and that of a column shows at any token: few tokens keep all columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from posexport.runtimes.base import Arrays
from posexport.spec.contract import Values

Array = np.ndarray[Any, Any]

WIDE = 8192
"""Columns from which on an output is wide."""

MOST = 2**21
"""Numbers of a wide output that are kept whole."""

COLUMNS = 1024
"""Columns that are kept of one that has more numbers."""


def widths(outputs: Values) -> dict[str, int]:
    """The number of columns, those of the last axis, of the outputs that are wide by their declared shapes."""
    last = {name: shape[-1] for name, (shape, _) in outputs.items() if len(shape) > 1}
    return {name: size for name, size in last.items() if isinstance(size, int) and size >= WIDE}


def kept_columns(rows: tuple[int, ...], width: int) -> Array | None:
    """Which columns are kept of an output [*rows, width], in order, the first and the last among them; None for all.
    They are others where it has other rows."""
    if math.prod(rows) * width <= MOST:
        return None
    between = np.random.default_rng((width, *rows)).choice(width - 2, COLUMNS - 2, replace=False)
    return np.asarray([0, *np.sort(between + 1), width - 1])


def columns_of(shape: tuple[int, ...], width: int | None) -> Array | None:
    """Which columns an array of this shape holds of an output that has `width`; None where it holds all."""
    return None if width is None or shape[-1] == width else kept_columns(shape[:-1], width)


def with_few_columns(arrays: Arrays, wide: Mapping[str, int]) -> Arrays:
    """The arrays, of those that have so many columns as `wide` says the kept ones."""
    return {name: _few(array, wide.get(name)) for name, array in arrays.items()}


def _few(array: Array, width: int | None) -> Array:
    if width is None or array.ndim < 2 or array.shape[-1] != width:
        return array
    columns = kept_columns(array.shape[:-1], width)
    return array if columns is None else array[..., columns]
