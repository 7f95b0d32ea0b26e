"""Values of ordinary size in outputs that also have far larger ones; they are judged separately.

One feature may be in the hundreds, as in trained models. In half precision, it is rounded to steps that are larger than
anything a block adds to the other features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posexport.spec.arrays import Array
from posexport.verify.blocks import absolute_errors, in_blocks, root_mean_square
from posexport.verify.result import Tolerance

APART = 32.0
"""How many times the median a value of ordinary size may be. Among normal numbers, none is eight times as large."""

AMONG = " among values of ordinary size, where others are far larger"
"""Which values an error is of; comes after the sentence that says how large it is."""


def ordinary(exact: Array, counted: Array | None = None) -> Array | None:
    """Which values that count (None: all) are of ordinary size, bool of their shape; None if all of them are."""
    if counted is not None:
        exact = np.where(counted, exact, 0.0)
    if not exact.size or _surely_ordinary(exact):
        return None
    sizes = np.abs(exact)
    usual: Array = sizes <= APART * np.median(sizes[sizes > 0])
    usual = usual if counted is None else usual & counted
    return None if usual.sum() == (usual.size if counted is None else counted.sum()) else usual


def _surely_ordinary(exact: Array) -> bool:
    """Whether more than half of the values that are not zero are at least the largest divided by APART.

    Then the median is at least as large, too; it takes far longer to find.
    """
    least = max(exact.max(), -exact.min()) / APART
    reached = sum(int(np.count_nonzero(np.abs(part) >= least)) for (part,) in in_blocks(exact))
    return bool(2 * reached > np.count_nonzero(exact))


def judged_apart(
    exact: Array,
    own: Sequence[Array],
    errors: Array,
    tolerance: Tolerance,
    smallest: float,
    counted: Array | None = None,
) -> dict[str, Any] | None:
    """The numbers of a comparison that fails only for values of ordinary size; None if they pass.

    `errors` are those of the runtime, `own` the results of honest evaluations. Returns None if rounding errors come
    near their ceiling, for example if values are small because large ones cancel out.
    """
    usual = ordinary(exact, counted)
    if usual is None:
        return None
    rms = root_mean_square(exact[usual])
    own_error = max(float(absolute_errors(array[usual], exact[usual]).max()) for array in own)
    limit = tolerance.uncapped(own_error, rms)
    apart = np.where(usual, errors, 0.0)
    index = first_index(apart)
    if not limit <= tolerance.ceiling * rms or apart[index] <= max(limit, smallest):
        return None
    return {
        "max_error": float(apart[index]),
        "rms_error": root_mean_square(errors[usual]),
        "torch_error": own_error,
        "limit": max(limit, smallest),
        "reference_rms": rms,
        "index": index,
    }


def first_index(array: Array) -> tuple[int, ...]:
    """The index of the first value that is true, or the largest."""
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(array)), array.shape))
