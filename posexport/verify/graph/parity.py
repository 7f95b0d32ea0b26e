"""A runtime's outputs against the float64 evaluation of a file, with a limit from an honest evaluation in its dtypes.

    max |got - float64|  <=  min(multiple * own error + floor * scale, ceiling * scale)

`own error` is the error of torch's evaluation in the file's own dtypes (the largest of several, if more were needed).
`scale` is the root mean square of the float64 values. For outputs of a sigmoid it is at least 1, and for those of a
softmax at least the largest value: runtimes compute these to a certain number of digits of that. Whole numbers and
truth values must be equal, unless they already differ between float64 and the own dtypes. If some values are far larger
than others, values of ordinary size are judged separately (posexport.verify.ordinary). Only values of tokens that are
not padding count. A value that is infinite or NaN in float64 must be so in the runtime. A value that the own dtypes
can't compute shows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import dtype_name
from posexport.spec.arrays import Array
from posexport.verify.blocks import root_mean_square
from posexport.verify.ordinary import first_index
from posexport.verify.parity import SMALLEST, TOLERANCES, largest_error, measured, over_limit
from posexport.verify.result import (
    MISSING_OUTPUT,
    NOT_FINITE,
    OVER_LIMIT,
    UNKNOWN_OUTPUT,
    WRONG_DTYPE,
    WRONG_SHAPE,
    Comparison,
    Tolerance,
)

HUGE = 1e30
"""Numbers from here on count as infinity: masks have such numbers. They don't count in the scale."""

UNDECIDED = 0.25
"""The largest part of whole numbers that may differ between float64 and the own dtypes. Above it, none are compared."""

_ORDER = ("fp64", "fp32", "fp16", "bf16")

FP64 = Tolerance(multiple=8.0, floor=2.0**-40, ceiling=0.06)


def tolerance_of(dtype: str, main: str) -> Tolerance:
    """The tolerance of an output of this dtype in a file with weights of the dtype `main`: that of the coarser
    dtype."""
    return TOLERANCES.get(coarser(dtype, main), FP64)


def coarser(first: str, second: str) -> str:
    """The dtype with fewer digits; the first if they are the same."""
    return max((first, second), key=lambda name: _ORDER.index(name) if name in _ORDER else 0)


@attrs.frozen(kw_only=True)
class Expected:
    """What is known about one output on one case.

    `exact` has the float64 values, `own` those of honest evaluations in the own dtypes. `select` says which values mean
    something (None: all). `dtype` is the declared dtype, `least_scale` the least scale of its errors. `columns` are the
    columns of the output that were kept (None: all).
    """

    name: str
    exact: Array
    own: Sequence[Array]
    select: Array | None
    dtype: str
    tolerance: Tolerance
    least_scale: float = 0.0
    columns: Array | None = None

    def place(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The index of a value in the whole output."""
        return index if self.columns is None else (*index[:-1], int(self.columns[index[-1]]))


def compare(
    case: str, expected: Sequence[Expected], outputs: Arrays, far_out: bool = False
) -> tuple[list[Comparison], list[str]]:
    """Compare every output by name. Also returns what the comparisons leave open, in clauses."""
    comparisons, open_questions = [], []
    reason: Reason | None
    for each in expected:
        if each.name not in outputs:
            text = f"output {each.name!r} is missing: the runtime gave {', '.join(outputs) or 'none'}"
            reason, numbers, left = Reason(MISSING_OUTPUT, text), dict[str, Any](), None
        else:
            reason, numbers, left = _compare(each, outputs[each.name])
        if left is not None:
            open_questions.append(f"{left} of {each.name!r} on {case}")
        comparisons.append(Comparison.of(case, each.name, reason, far_out=far_out, **numbers))
    known = {each.name for each in expected}
    for name in outputs:
        if name not in known:
            reason = Reason(UNKNOWN_OUTPUT, f"output {name!r} is not one of the file's: {', '.join(known)}")
            comparisons.append(Comparison.of(case, name, reason, far_out=far_out))
    return comparisons, open_questions


def _compare(each: Expected, output: Array) -> tuple[Reason | None, dict[str, Any], str | None]:
    """Why an output fails, None if it passes; the fields of its Comparison; what is left open."""
    name, exact = each.name, np.asarray(each.exact)
    if output.shape != exact.shape:
        text = f"output {name!r} has shape {list(output.shape)}, it must be {list(exact.shape)}"
        return Reason(WRONG_SHAPE, text), {}, None
    if each.dtype and dtype_name(output.dtype) != each.dtype:
        return Reason(WRONG_DTYPE, f"output {name!r} is {dtype_name(output.dtype)}, it must be {each.dtype}"), {}, None
    if exact.dtype.kind in "biu":
        return _compare_whole(each, output)
    values = exact.astype(np.float64)
    own = [np.asarray(array).astype(np.float64) for array in each.own if array.shape == values.shape]
    actual = np.asarray(output).astype(np.float64)
    select = np.ones(values.shape, bool) if each.select is None else each.select
    computed = np.isfinite(own[0]) if own else np.ones(values.shape, bool)
    beyond = select & np.isfinite(values) & ~computed
    infinite = select & (~np.isfinite(values) | (np.abs(values) >= HUGE))
    counted = select & ~beyond & ~infinite
    wrong = infinite & ~_alike(values, actual)
    if own:
        wrong &= _alike(values, own[0])
    wrong |= counted & ~np.isfinite(actual)
    if wrong.any():
        index, place = first_index(wrong), each.place(first_index(wrong))
        text = f"output {name!r} has {actual[index]:.3g} at {list(place)}, it must be {values[index]:.3g}"
        return Reason(NOT_FINITE, text), {"index": place}, None
    left = None
    if beyond.any():
        left = f"{int(beyond.sum())} of {beyond.size} values can't be computed in the file's own dtypes"
    if not counted.any():
        return None, {}, left
    errors = np.where(counted, np.abs(actual - np.where(counted, values, 0.0)), 0.0)
    smallest = SMALLEST.get(each.dtype, 0.0)
    those = None if counted.all() else counted
    numbers, among = measured(values, own, errors, those, each.tolerance, smallest, each.least_scale)
    index, error, limit = numbers["index"], numbers["max_error"], numbers["limit"]
    place = each.place(index)
    numbers |= {"index": place, "got": float(actual[index]), "reference": float(values[index])}
    reason = Reason(OVER_LIMIT, over_limit(name, error, place, limit) + among) if error > limit else None
    return reason, numbers, left


def _alike(values: Array, other: Array) -> Array:
    """Where both are NaN, or both are infinite or huge with the same sign."""
    both_nan = np.isnan(values) & np.isnan(other)
    with np.errstate(invalid="ignore"):
        # half precision ends at 65,504
        same = (np.abs(values) >= HUGE) & (np.abs(other) >= 6e4) & (np.sign(values) == np.sign(other))
    return np.asarray(both_nan | same)


def _compare_whole(each: Expected, output: Array) -> tuple[Reason | None, dict[str, Any], str | None]:
    """Compare whole numbers and truth values: they must be equal, unless float64 and the own dtypes already differ."""
    select = np.ones(each.exact.shape, bool) if each.select is None else each.select
    undecided = np.zeros(each.exact.shape, bool)
    for array in each.own:
        if array.shape == each.exact.shape:
            undecided |= np.asarray(array != each.exact)
    undecided &= select
    counted = select & ~undecided
    left = None
    if undecided.any():
        share = f"{int(undecided.sum())} of {undecided.size}"
        left = f"float64 and the file's own dtypes give different whole numbers for {share}"
        if undecided.sum() > UNDECIDED * select.sum():
            return None, {}, left
    if not counted.any():
        return None, {}, left
    exact, actual = (np.asarray(array).astype(np.float64) for array in (each.exact, output))
    errors = np.where(counted, np.abs(actual - exact), 0.0)
    error = float(errors.max())
    index = first_index(errors)
    numbers = {
        "max_error": error,
        "limit": 0.0,
        "torch_error": 0.0,
        "reference_rms": root_mean_square(exact[counted]),
        "index": each.place(index),
        "got": float(actual[index]),
        "reference": float(exact[index]),
    }
    if not error:
        return None, numbers, left
    text = f"output {each.name!r} is {actual[index]:.0f} at {list(each.place(index))}, it must be {exact[index]:.0f}"
    return Reason(OVER_LIMIT, text), numbers, left


def own_error_share(each: Expected) -> float:
    """The error of the honest evaluation as a part of the scale; infinite if it is NaN and float64 is not."""
    exact = np.asarray(each.exact)
    if exact.dtype.kind in "biu" or not each.own or each.own[0].shape != exact.shape:
        return 0.0
    values, own = exact.astype(np.float64), np.asarray(each.own[0]).astype(np.float64)
    counted = np.isfinite(values) & (np.abs(values) < HUGE)
    if each.select is not None:
        counted &= each.select
    if not counted.any():
        return 0.0
    rms = max(root_mean_square(values[counted]), each.least_scale)
    return largest_error(own[counted], values[counted]) / rms if rms else 0.0
