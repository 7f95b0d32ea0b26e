"""Torch's error where inputs and weights differ in their last bits: what rounding does, if torch was exact by luck.

Torch eager rounds once, so its error is one draw of what rounding errors can be. On few values it may be ten times
smaller than that of the next draw, and a runtime that rounds in another order is then no worse for being above it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.verify.draws import Array
from posexport.verify.result import OVER_LIMIT, Comparison

DRAWS = 8
"""Further inputs on which torch's error is taken."""

NEAR = 8.0
"""Torch's error is taken again for errors up to this multiple of their limit."""

_FLOATS = [NUMPY_DTYPES[name] for name in ("fp32", "fp16", "bf16")]


def is_near(each: Comparison) -> bool:
    """Whether an output is over its limit by so little that torch's error may have been small by luck."""
    if each.reason_code != OVER_LIMIT or each.max_error is None or each.limit is None:
        return False
    return each.max_error <= NEAR * each.limit


def last_bits_changed(arrays: Arrays, seed: int) -> Iterator[Arrays]:
    """DRAWS copies of a case's inputs, each float of them the next one of its dtype, up or down."""
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS):
        yield {name: _changed(array, rng) if array.dtype in _FLOATS else array for name, array in arrays.items()}


def _changed(array: Array, rng: np.random.Generator) -> Array:
    up = rng.random(array.shape, np.float32) < 0.5
    above, below = (np.nextafter(array, np.asarray(end, array.dtype)) for end in (np.inf, -np.inf))
    changed: Array = np.where(up, above, below)
    return changed


def farther(reference: Arrays, one: Arrays, other: Arrays) -> Arrays:
    """Of each output of the reference, the one of torch's two results that is farther from it and finite."""
    return {name: max(one[name], other[name], key=lambda array: _error(array, reference[name])) for name in reference}


def _error(array: Array, reference: Array) -> float:
    errors = np.abs(array.astype(np.float64) - reference)
    return float(errors.max()) if errors.size and np.isfinite(errors).all() else -1.0
