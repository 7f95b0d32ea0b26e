"""Errors where inputs and weights differ in their last bits: what rounding does, if one draw of it was luck.

Torch eager rounds once, so its error is one draw of what rounding errors can be. On few values it may be ten times
smaller than that of the next draw, and a runtime that rounds in another order is then no worse for being above it. The
runtime may have bad luck too; the error of a wrong graph is there in every draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.verify.draws import Array
from posexport.verify.parity import is_unclear, over_limit
from posexport.verify.result import FAILED, OVER_LIMIT, Comparison, Tolerance

DRAWS = 8
"""Copies of a case on which errors are taken again."""

NEAR = 8.0
"""Torch's error is taken again for errors up to this multiple of their limit."""

_FLOATS = [NUMPY_DTYPES[name] for name in ("fp32", "fp16", "bf16")]


def is_near(each: Comparison) -> bool:
    """Whether an output is over its limit by so little that torch's error may have been small by luck."""
    if each.reason_code != OVER_LIMIT or each.max_error is None or each.limit is None:
        return False
    return each.max_error <= NEAR * each.limit


def last_bits_changed(arrays: Arrays, seed: int) -> Iterator[Arrays]:
    """DRAWS copies of a case's inputs, each float of them the next one of its dtype, up or down; zeros stay."""
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS):
        yield {name: _changed(array, rng) if array.dtype in _FLOATS else array for name, array in arrays.items()}


def _changed(array: Array, rng: np.random.Generator) -> Array:
    up = rng.random(array.shape, np.float32) < 0.5
    above, below = (np.nextafter(array, np.asarray(end, array.dtype)) for end in (np.inf, -np.inf))
    changed: Array = np.where(array == 0, array, np.where(up, above, below))
    return changed


@attrs.frozen
class Draws:
    """Several of torch's results on one case: of each output the one that is farthest from the reference and finite,
    and the errors of each token (the largest along the last axis; infinite where one is not finite) in all of them."""

    outputs: Arrays
    errors: Mapping[str, tuple[Array, ...]]

    @classmethod
    def of(cls, reference: Arrays, outputs: Arrays) -> Draws:
        """One result."""
        return cls(outputs, {name: (_errors(outputs[name], reference[name]),) for name in reference})

    def with_another(self, reference: Arrays, outputs: Arrays) -> Draws:
        """These and one more."""
        farthest, errors = {}, {}
        for name, before in self.errors.items():
            more = _errors(outputs[name], reference[name])
            farther = max(map(_largest, before)) < _largest(more)
            farthest[name] = outputs[name] if farther else self.outputs[name]
            errors[name] = (*before, more)
        return Draws(farthest, errors)


def _judged_by_its_token(each: Comparison, draws: Draws, tolerance: Tolerance) -> Comparison:
    """A failed comparison with the median of torch's errors (of the finite ones) on the token where the error is."""
    if each.max_error is None or each.reference_rms is None or each.index is None:
        return each
    by_torch = np.array([errors[each.index[:-1]] for errors in draws.errors[each.output]])
    torch_error = float(np.median(by_torch[np.isfinite(by_torch)]))
    limit = tolerance.limit(torch_error, each.reference_rms)
    reason = over_limit(each.output, each.max_error, each.index, limit)
    return attrs.evolve(each, torch_error=torch_error, limit=limit, reason=reason)


def _errors(array: Array, reference: Array) -> Array:
    errors = np.abs(array.astype(np.float64) - reference).max(-1, initial=0.0)
    return np.where(np.isfinite(errors), errors, np.inf)


def _largest(errors: Array) -> float:
    """The largest error, -1 where one is infinite."""
    largest = float(errors.max(initial=0.0))
    return largest if np.isfinite(largest) else -1.0


def medians(tries: Sequence[Sequence[Comparison]], draws: Draws, tolerance: Tolerance) -> list[Comparison]:
    """The first of `tries` (a runtime's comparisons on a case, then on its copies), but for outputs that are over the
    ceiling and may be so by rounding (posexport.verify.parity.is_unclear): of them, the try with the median error. If
    it is over its limit too, its limit is that of torch's median error on the same token, since what makes rounding
    errors of a token large makes them large in every draw."""
    comparisons = []
    for first, *others in zip(*tries, strict=True):
        if first.state == FAILED and is_unclear(first, tolerance):
            median = sorted((first, *others), key=lambda each: each.severity)[len(tries) // 2]
            comparisons.append(median if median.state != FAILED else _judged_by_its_token(median, draws, tolerance))
        else:
            comparisons.append(first)
    return comparisons
