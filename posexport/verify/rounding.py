"""Errors if inputs and weights differ in their last bits: what rounding does, in case one draw of it was luck.

Torch eager rounds once, so its error is one draw of possible rounding errors. On few values it may be ten times smaller
than the next draw. A runtime that rounds in another order is then not worse, though it is above it. The runtime may
have bad luck too. But the error of a wrong graph is in every draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.processes import EXHAUSTED, KILLED, LIMITED, MEMORY, STOPPED, TIMED_OUT
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, result
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.arrays import Array
from posexport.spec.spec import Spec
from posexport.verify.cases import Case
from posexport.verify.coverage import are_alike
from posexport.verify.ordinary import ordinary
from posexport.verify.parity import is_unclear, over_limit, tolerance_at
from posexport.verify.result import FAILED, OVER_LIMIT, REFERENCE_FAILED, Comparison, Tolerance

DRAWS = 8
"""The number of copies of a case on which errors are measured again."""

NEAR = 64.0
"""Torch's error is measured again for errors up to this multiple of their limit.

If tokens have logits of hundreds, one draw of it was 70 times smaller than the error of a correct runtime.
"""

LOST = (TIMED_OUT, MEMORY, LIMITED, EXHAUSTED, KILLED, STOPPED)
"""Failures that say nothing about the computation: the machine was too slow or too small for it."""

Rerun = Callable[[Sequence[Arrays], dict[str, Any]], "Future[Answer]"]
"""Runs sets of inputs with further options."""

_LARGEST = 1e30
"""The error of a number that is not finite."""

_FLOATS = [NUMPY_DTYPES[name] for name in ("fp32", "fp16", "bf16")]


def of_encodings(spec: Spec, position: int, keys: int) -> float:
    """How much runtimes may differ in terms of the encoding, up to `position` and with `keys` keys.

    The difference is that of values near 1. Each layer adds its own error to that of the layers before; errors add up
    like squares.
    """
    layers = [layer.encoding.rounding(layer, position, keys) for layer in spec.distinct_layers()]
    return math.sqrt(sum(layers[index % len(layers)] ** 2 for index in range(spec.layers)))


def tolerances_of(spec: Spec, cases: Sequence[Case], outputs: Sequence[Arrays]) -> dict[str, Tolerance]:
    """The tolerance by the case's name: that of the dtype, wider if runtimes round terms of the encoding differently.

    `outputs` are those of the reference, as far as there are any.
    """
    tolerances = {}
    for index, case in enumerate(cases):
        rounding = of_encodings(spec, case.farthest, case.keys)
        exact = outputs[index]["output"] if index < len(outputs) else np.zeros((1, 1, 1))
        if exact.shape[1] > 1 and np.isfinite(exact).all() and are_alike([exact], spec.dtype):
            # the averaged values are alike too, and sums of such values are rounded in the same direction
            rounding += case.keys * 2.0**-25
        tolerances[case.name] = tolerance_at(spec.dtype, rounding)
    return tolerances


def is_near(each: Comparison) -> bool:
    """Whether an output is over its limit by so little that torch's error may have been small by luck."""
    if each.reason_code != OVER_LIMIT or each.max_error is None or each.limit is None:
        return False
    return each.max_error <= NEAR * each.limit


def last_bits_changed(arrays: Arrays, seed: int) -> Iterator[Arrays]:
    """DRAWS copies of a case's inputs, with each float moved to the next one of its dtype, up or down; zeros stay."""
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
    """Several of torch's results on one case.

    For each output, `outputs` has the finite one that is farthest from the reference, and `usual` the one that is
    farthest in values of ordinary size (posexport.verify.ordinary). `errors` has the errors of each token in all
    results: the largest along the last axis, infinite if one is not finite. `failure` is why most of the requested
    results are missing.
    """

    outputs: Arrays
    usual: Arrays
    errors: Mapping[str, tuple[Array, ...]]
    failure: Reason | None = None

    @classmethod
    def of(cls, reference: Arrays, outputs: Arrays) -> Draws:
        """The draws with one result."""
        return cls(outputs, outputs, {name: (_errors(outputs[name], reference[name]),) for name in reference})

    def with_another(self, reference: Arrays, outputs: Arrays) -> Draws:
        """These draws and one more."""
        farthest, usual, errors = {}, {}, {}
        for name, before in self.errors.items():
            more = _errors(outputs[name], reference[name])
            farther = max(map(_largest, before)) < _largest(more)
            farthest[name] = outputs[name] if farther else self.outputs[name]
            where = ordinary(reference[name])
            known, new = (_usual_error(array, reference[name], where) for array in (self.usual[name], outputs[name]))
            usual[name] = outputs[name] if known < new else self.usual[name]
            errors[name] = (*before, more)
        return Draws(farthest, usual, errors, self.failure)


def drawn(run: Rerun | None, arrays: Arrays, seed: int, reference: Arrays, first: Arrays, count: int) -> Draws:
    """The first result on a case's inputs, and those of `count` copies that differ in their last bits."""
    draws = Draws.of(reference, first)
    lost = []
    for number, copy in enumerate(itertools.islice(last_bits_changed(arrays, seed), count)):
        if run is None:
            break
        answer = result(run([copy], {"last_bits": number}))
        if answer.failure is None:
            draws = draws.with_another(reference, answer.outputs[0])
        elif answer.failure.code in LOST:
            lost.append(answer.failure)
    return attrs.evolve(draws, failure=lost[0]) if 2 * len(lost) > count else draws


def without_copies(why: Reason) -> Reason:
    """Why a verdict that depends on copies is open, if most of them are missing."""
    text = "results on inputs that differ in their last bits, which decide here, could not be computed"
    return Reason(REFERENCE_FAILED, f"{text}: {why}")


def _usual_error(array: Array, reference: Array, where: Array | None) -> float:
    """The largest error of an output in these of its values; -1 if there are none or one error is infinite."""
    return -1.0 if where is None else _largest(_errors(array[where], reference[where]))


def _errors(array: Array, reference: Array) -> Array:
    errors = np.abs(array.astype(np.float64) - reference).max(-1, initial=0.0)
    return np.where(np.isfinite(errors), errors, np.inf)


def _largest(errors: Array) -> float:
    """The largest error; -1 if one is infinite."""
    largest = float(errors.max(initial=0.0))
    return largest if np.isfinite(largest) else -1.0


def medians(
    comparisons: Sequence[Comparison], reference: Arrays, runs: Sequence[Arrays], draws: Draws, tolerance: Tolerance
) -> list[Comparison]:
    """A runtime's comparisons on a case, with unclear outputs judged again by all `runs`.

    These are outputs over the ceiling that may be so by rounding (posexport.verify.parity.is_unclear). `runs` are those
    on the case and on its copies.
    """
    return [
        _median(each, reference[each.output], [run.get(each.output) for run in runs], draws, tolerance)
        if each.state == FAILED and is_unclear(each, tolerance)
        else each
        for each in comparisons
    ]


def _median(
    first: Comparison, reference: Array, outputs: Sequence[Array | None], draws: Draws, tolerance: Tolerance
) -> Comparison:
    """The comparison of one output by the median error of each token.

    The token that counts is the one with the largest median error among those that torch's errors on the same token
    don't excuse (their upper quartile, of the finite ones), if there is one. What makes the rounding errors of a token
    large makes them large in many draws of both.
    """
    if (
        first.reference_rms is None
        or first.limit is None
        or any(array is None or array.shape != reference.shape for array in outputs)
    ):
        return first
    arrays = [np.asarray(array) for array in outputs]
    errors = np.array([np.minimum(_errors(array, reference), _LARGEST).ravel() for array in arrays])
    by_torch = np.array([each.ravel() for each in draws.errors[first.output]])
    median, rms = np.median(errors, axis=0), first.reference_rms
    of_torch = np.nanquantile(np.where(np.isfinite(by_torch), by_torch, np.nan), 0.75, axis=0)
    over = median > first.limit
    excused = over & [
        error <= tolerance.uncapped(float(share), rms) for error, share in zip(median, of_torch, strict=True)
    ]
    counts = next(where for where in (over & ~excused, over, median >= 0) if where.any())
    token = int(np.argmax(np.where(counts, median, -1.0)))
    place = tuple(map(int, np.unravel_index(token, reference.shape[:-1])))
    run = arrays[int(np.argsort(errors[:, token])[len(arrays) // 2])]
    index = (*place, int(np.argmax(np.abs(run[place].astype(np.float64) - reference[place]))))
    error, torch_error = float(median[token]), float(of_torch[token])
    limit = tolerance.limit(torch_error, rms) if over.any() else first.limit
    return Comparison.of(
        first.case,
        first.output,
        Reason(OVER_LIMIT, over_limit(first.output, error, index, limit)) if over.any() else None,
        far_out=first.far_out,
        max_error=error,
        rms_error=first.rms_error,
        torch_error=torch_error,
        limit=limit,
        reference_rms=rms,
        index=index,
        got=float(run[index]),
        reference=float(reference[index]),
    )
