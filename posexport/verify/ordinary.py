"""Values of ordinary size beside far larger ones, which are judged apart: one feature of hundreds, as trained models
have it, is rounded to steps that are larger than anything a block adds to the other features in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posexport.verify.draws import Array
from posexport.verify.result import Tolerance

APART = 32.0
"""How many times the median a value may be and be of ordinary size; of normal numbers, none is eight times as large."""

AMONG = " among values of ordinary size, where others are far larger"
"""Which values an error is of, behind the sentence that says how large it is."""


def ordinary(exact: Array, counted: Array | None = None) -> Array | None:
    """Which values that count (None: all) are of ordinary size, bool of their shape; None where all of them are."""
    counted = np.ones(exact.shape, bool) if counted is None else counted
    sizes = np.abs(np.where(counted, exact, 0.0))
    if not (sizes > 0).any():
        return None
    usual = counted & (sizes <= APART * np.median(sizes[sizes > 0]))
    return None if (usual == counted).all() else np.asarray(usual)


def judged_apart(
    exact: Array,
    own: Sequence[Array],
    errors: Array,
    tolerance: Tolerance,
    smallest: float,
    counted: Array | None = None,
) -> dict[str, Any] | None:
    """The numbers of a comparison that fails for values of ordinary size alone; None where they pass.

    `errors` are those of the runtime, `own` the results of honest evaluations. Where rounding errors come near their
    ceiling, as where values are small because large ones cancel out, nothing is said.
    """
    usual = ordinary(exact, counted)
    if usual is None:
        return None
    rms = float(np.sqrt(np.mean(exact[usual] ** 2)))
    own_error = max(float(np.abs(array[usual] - exact[usual]).max()) for array in own)
    limit = tolerance.uncapped(own_error, rms)
    apart = np.where(usual, errors, 0.0)
    if not limit <= tolerance.ceiling * rms or apart.max() <= max(limit, smallest):
        return None
    return {
        "max_error": float(apart.max()),
        "rms_error": float(np.sqrt(np.mean(errors[usual] ** 2))),
        "torch_error": own_error,
        "limit": max(limit, smallest),
        "reference_rms": rms,
        "index": first_index(apart == apart.max()),
    }


def first_index(where: Array) -> tuple[int, ...]:
    """The index of the first value that is true."""
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(where)), where.shape))
