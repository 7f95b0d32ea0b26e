"""When two functions are equal: a runtime's outputs against the float64 reference, with a limit from torch's error.

The reference is the torch block in float64 with the same rounded weights and inputs. Outputs are paired by name. Shapes
and dtypes must be equal (nothing is broadcast or converted). Every value must be finite, except those that torch can't
compute on the user's own inputs. Then the limit is

    max |got - reference|  <=  min(multiple * torch error + floor * rms(reference), ceiling * rms(reference))

or the smallest number of the dtype, if that is larger. If some values are far larger than others, the others must also
be within the limit by themselves (posexport.verify.ordinary). The torch error is max |torch - reference| of torch eager
in the artifact's dtype. The ceiling keeps a wrong torch result from excusing everything. Every verdict states all of
these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import dtype_name
from posexport.spec.arrays import Array
from posexport.verify.blocks import absolute_errors, in_blocks, root_mean_square
from posexport.verify.ordinary import AMONG, first_index, judged_apart
from posexport.verify.result import (
    FAILED,
    MISSING_OUTPUT,
    NOT_FINITE,
    NOT_RUN,
    NOTHING_COMPARED,
    OVER_LIMIT,
    PASSED,
    UNKNOWN_OUTPUT,
    WRONG_DTYPE,
    WRONG_SHAPE,
    Comparison,
    State,
    Tolerance,
    Verdict,
)

# Measured with every encoding, hidden sizes 64 to 768, 1 to 3 layers and three seeds, on ONNX Runtime and onnx's
# reference: the error is at most 4.7 (fp32), 4.2 (fp16) and 3.6 (bf16) times the torch error. The torch error lies
# between 2e-7 and 2e-3 (fp32, with sharp softmax in several layers), 7e-4 and 6e-3 (fp16), 6e-3 and 5e-2 (bf16) of the
# reference's rms. The floor is about one unit in the last place (8 in fp32, since torch is exact more often there). The
# ceiling is ten times the largest torch error.
TOLERANCES = {
    "fp32": Tolerance(multiple=8.0, floor=2.0**-20, ceiling=0.06),
    "fp16": Tolerance(multiple=8.0, floor=2.0**-10, ceiling=0.06),
    "bf16": Tolerance(multiple=8.0, floor=2.0**-7, ceiling=0.5),
}


SMALLEST = {"fp32": 2.0**-126, "fp16": 2.0**-24, "bf16": 2.0**-126, "fp64": 0.0}
"""The size below which a number may be zero in a runtime: below it, fp32 and bf16 have no normal numbers, and fp16 has
no numbers at all."""


JUMP = 8
"""The largest error as a multiple of the root mean square of all errors, above which only few values are off.

It is about 4 if every value is off by rounding or a fault, and 8 or more if one token of seven or more is.
"""

UNCLEAR = 4
"""At most one in so many comparisons of an output may be set aside because of rounding errors.

Rounding errors that are smaller than the ceiling divided by this hide nothing.
"""


def tolerance_at(dtype: str, rounding: float = 0.0) -> Tolerance:
    """The tolerance in `dtype` if terms of the encoding may differ by `rounding` from one runtime to another.

    The floor grows by it, since torch may be exact by chance. The ceiling grows to sixteen times of it, since values
    are several times their root mean square.
    """
    tolerance = TOLERANCES[dtype]
    return attrs.evolve(tolerance, floor=tolerance.floor + rounding, ceiling=max(tolerance.ceiling, 16 * rounding))


def compare(
    case: str,
    reference: Arrays,
    torch_outputs: Arrays,
    outputs: Arrays,
    dtypes: Mapping[str, str],
    tolerance: Tolerance,
    far_out: bool = False,
    given: bool = False,
    again: Arrays | None = None,
) -> list[Comparison]:
    """Compare every output of `reference` and `outputs` by name; `dtypes` are those that the graph declares.

    `given`: the inputs are the user's, so they may be larger than torch can compute in the artifact's dtype. If the
    reference is finite and torch is not, the runtime may give NaN or infinity too, or the right value. `again` has
    another result of torch.
    """
    comparisons = []
    for name in dict.fromkeys((*reference, *outputs)):
        reason: Reason | None
        numbers: dict[str, Any] = {}
        if name not in outputs:
            text = f"output {name!r} is missing: the runtime gave {', '.join(outputs) or 'none'}"
            reason = Reason(MISSING_OUTPUT, text)
        elif name not in reference:
            reason = Reason(UNKNOWN_OUTPUT, f"output {name!r} is not one of the block's: {', '.join(reference)}")
        elif name not in torch_outputs or torch_outputs[name].shape != reference[name].shape:
            reason = Reason(WRONG_SHAPE, f"torch eager gave no output {name!r} of the reference's shape")
        else:
            by_torch = [torch_outputs[name], *([again[name]] if again is not None and name in again else [])]
            reason, numbers = _compare(name, reference[name], by_torch, outputs[name], dtypes[name], tolerance, given)
        comparisons.append(Comparison.of(case, name, reason, far_out=far_out, **numbers))
    return comparisons


def _compare(
    name: str,
    reference: Array,
    torch_outputs: Sequence[Array],
    output: Array,
    dtype: str,
    tolerance: Tolerance,
    given: bool,
) -> tuple[Reason | None, dict[str, Any]]:
    """Why an output fails, None if it passes; and the fields of its Comparison that could be computed."""
    if output.shape != reference.shape:
        text = f"output {name!r} has shape {list(output.shape)}, it must be {list(reference.shape)}"
        return Reason(WRONG_SHAPE, text), {}
    if dtype_name(output.dtype) != dtype:
        return Reason(WRONG_DTYPE, f"output {name!r} is {dtype_name(output.dtype)}, it must be {dtype}"), {}
    exact, actual, by_torch, *more = (np.asarray(array) for array in (reference, output, *torch_outputs))
    beyond = _beyond(exact, by_torch, actual, tolerance) if given else None
    if beyond is not None and not beyond.any():
        beyond = None
    for who, array in (("the float64 reference", exact), (f"output {name!r}", actual), ("torch eager", by_torch)):
        valid = np.isfinite(array) if beyond is None else np.isfinite(array) | beyond
        if not valid.all():
            index, count = first_index(~valid), valid.size - int(valid.sum())
            text = f"{who} has {count} of {valid.size} values not finite, the first at {list(index)}"
            return Reason(NOT_FINITE, text), {"index": index}
    if not exact.size:
        return Reason(NOTHING_COMPARED, f"output {name!r} is empty: nothing was compared"), {}
    if beyond is not None:
        limit = tolerance.ceiling * root_mean_square(exact[beyond])
        wrong = beyond & np.isfinite(actual)
        wrong[wrong] = absolute_errors(actual[wrong], exact[wrong]) > limit
        if wrong.any():
            index = first_index(wrong)
            off = abs(float(actual[index]) - exact[index])
            text = f"output {name!r} is off by {off:.3g} at {list(index)}, where torch eager gives no finite value, "
            text += f"the limit is {limit:.3g}"
            return Reason(OVER_LIMIT, text), {"index": index}
        if beyond.all():
            return None, {}
        exact, actual, by_torch, *more = (np.where(beyond, 0.0, array) for array in (exact, actual, by_torch, *more))
    own = [by_torch, *(array for array in more if np.isfinite(array).all())]
    counted = None if beyond is None else ~beyond
    numbers, among = measured(exact, own, absolute_errors(actual, exact), counted, tolerance, SMALLEST[dtype])
    index, error, limit = numbers["index"], numbers["max_error"], numbers["limit"]
    reason = None if error <= limit else Reason(OVER_LIMIT, over_limit(name, error, index, limit) + among)
    return reason, {**numbers, "got": float(actual[index]), "reference": float(exact[index])}


def measured(
    exact: Array,
    own: Sequence[Array],
    errors: Array,
    counted: Array | None,
    tolerance: Tolerance,
    smallest: float,
    least_scale: float = 0.0,
) -> tuple[dict[str, Any], str]:
    """The numbers of a comparison, and the values that they are about, as the end of a sentence.

    They are about all values that are `counted` (bool, at least one; None: all). If only those of ordinary size are
    over their limit, the numbers are about these.

    `errors` are those of the runtime, zero for values that aren't counted. `own` has honest evaluations in the dtypes
    at hand, `smallest` is the least limit, `least_scale` the least scale of errors.
    """
    values, kept_errors, *kept = (each if counted is None else each[counted] for each in (exact, errors, *own))
    rms, index = root_mean_square(values), first_index(errors)
    scale = max(rms, least_scale) if rms else rms
    own_error = max((largest_error(array, values) for array in kept), default=0.0)
    numbers: dict[str, Any] = {
        "max_error": float(errors[index]),
        "rms_error": root_mean_square(kept_errors),
        "torch_error": own_error,
        "limit": max(tolerance.limit(own_error, max(rms, least_scale)), smallest),
        "reference_rms": scale,
        "index": index,
    }
    if numbers["max_error"] <= numbers["limit"] and not least_scale:
        finite = [array for array, part in zip(own, kept, strict=True) if np.isfinite(part).all()]
        apart = judged_apart(exact, finite, errors, tolerance, smallest, counted) if finite else None
        if apart is not None:
            return apart, AMONG
    return numbers, ""


def largest_error(array: Array, exact: Array) -> float:
    """The largest error of an honest evaluation. Values that it can't compute have no error."""
    largest = 0.0
    for part, of_exact in in_blocks(array, exact):
        errors = np.abs(part - of_exact)
        most = errors.max()
        largest = max(largest, float(most if np.isfinite(most) else errors[np.isfinite(errors)].max(initial=0.0)))
    return largest


def over_limit(name: str, error: float, index: Sequence[int], limit: float) -> str:
    """A sentence that an output is off, where, and what its limit is."""
    return f"output {name!r} is off by {error:.3g} at {list(index)}, the limit is {limit:.3g}"


def _beyond(reference: Array, torch_output: Array, output: Array, tolerance: Tolerance) -> Array:
    """The values that a runtime doesn't have to compute, bool of their shape: finite in float64, and not in torch.

    In a token (a row of the last axis) in which torch is off by more than the ceiling, these are also the values that
    are not finite in the runtime. If sums overflow, some kernels give NaN, and others a number that means nothing.
    """
    finite, computed = np.isfinite(reference), np.isfinite(torch_output)
    exact, by_torch = (np.where(finite & computed, array, 0.0) for array in (reference, torch_output))
    rms = np.sqrt(np.mean(exact**2, axis=-1, keepdims=True))
    off = (np.abs(by_torch - exact) > tolerance.ceiling * rms).any(axis=-1, keepdims=True)
    return np.asarray(finite & (~computed | (off & ~np.isfinite(output))))


def not_computed(
    case: str, reference: Arrays, torch_outputs: Arrays, outputs: Arrays, dtype: str, tolerance: Tolerance
) -> Iterator[str]:
    """What was not compared in the outputs on the user's inputs, since torch can't compute it in `dtype`; in
    clauses."""
    for name in reference:
        arrays = [np.asarray(each[name]) for each in (reference, torch_outputs, outputs) if name in each]
        if len({array.shape for array in arrays}) == 1 and len(arrays) == 3:
            exact, by_torch, actual = (array.astype(np.float64) for array in arrays)
            beyond = _beyond(exact, by_torch, actual, tolerance)
            if beyond.any():
                yield (
                    f"{int(beyond.sum())} of {beyond.size} values of {name!r} on {case} were not compared, because "
                    f"torch can't compute them in {dtype} either: give smaller inputs"
                )


def judge(
    artifact: str, runtime: str, comparisons: Sequence[Comparison], cases: int, given: bool = False, **fields: Any
) -> Verdict:
    """The verdict on comparisons: passed only if there is at least one and all of them passed.

    An output that is zero, or not computed, for all inputs shows nothing. If the inputs are `given` by the user, that
    is not a fault of the artifact: then nothing was compared, or the verdict is inconclusive.
    """
    if not comparisons:
        return Verdict.of(artifact, runtime, FAILED, Reason(NOTHING_COMPARED, "nothing was compared"), **fields)
    worst = worst_of(comparisons)
    shows = [comparison for comparison in comparisons if comparison.reference_rms or comparison.max_error]
    compared = {comparison.output for comparison in shows}
    blank = [comparison for comparison in comparisons if comparison.output not in compared]
    if worst.state == PASSED and blank and not (given and compared):
        what = "is zero" if blank[0].reference_rms is not None else "can't be computed in its dtype, by torch either,"
        advice = "give inputs that are not zero" if blank[0].reference_rms is not None else "give smaller inputs"
        text = f"output {blank[0].output!r} {what} for all inputs: nothing was compared, {advice}"
        state: State = NOT_RUN if given else FAILED
        return Verdict.of(artifact, runtime, state, Reason(NOTHING_COMPARED, text), cases=cases, **fields)
    if worst.state == PASSED:
        zeros = [f"output {each.output!r} is zero for all inputs" for each in blank if each.reference_rms == 0.0]
        fields["not_shown"] = tuple(dict.fromkeys([*fields.get("not_shown", ()), *zeros]))
    usual = [comparison for comparison in comparisons if not comparison.far_out]
    return Verdict(
        artifact=artifact,
        runtime=runtime,
        state=worst.state,
        reason=None if worst.state == PASSED else f"{worst.reason} (inputs: {worst.case})",
        reason_code=worst.reason_code,
        worst=worst,
        worst_usual=worst_of(usual) if usual else None,
        cases=cases,
        **fields,
    )


def inconclusive_reason(worst: Comparison, tolerance: Tolerance) -> str | None:
    """Why a failed comparison says nothing about the runtime; None if it does.

    Torch itself is beyond the ceiling, and without the ceiling the runtime would be within its limit.
    """
    if worst.torch_error is None or worst.reference_rms is None or worst.max_error is None:
        return None
    ceiling = tolerance.ceiling * worst.reference_rms
    if worst.torch_error <= ceiling or worst.max_error > tolerance.uncapped(worst.torch_error, worst.reference_rms):
        return None
    return (
        f"inconclusive: torch eager itself is off by {worst.torch_error:.3g} in {worst.output!r}, above the ceiling of "
        f"{ceiling:.3g}: either rounding errors grow that much in this block or torch's own result is wrong, so these "
        "inputs say nothing about the runtime"
    )


def set_aside(
    comparisons: Sequence[Comparison], tolerances: Mapping[str, Tolerance], is_routed: bool = False
) -> tuple[list[Comparison], tuple[str, ...]]:
    """The comparisons that say something, and what the others leave open, in clauses; `tolerances` are by case.

    If the ceiling is less than a runtime's share of torch's own error, rounding errors grow that much on these inputs.
    A runtime above the ceiling but within its share may then be right. If there are such outputs and `is_routed`, a few
    values of any output may be far off: rounding sends a token to another expert. If there are many such comparisons,
    they count as failures all the same: then torch may be wrong.
    """
    failed = [each for each in comparisons if each.state == FAILED]
    unclear = [each for each in failed if is_unclear(each, tolerances[each.case])]
    few = [each for each in failed if is_routed and unclear and each not in unclear and _is_of_few_values(each)]
    outputs = {
        each.output
        for each in (*unclear, *few)
        if UNCLEAR * sum(other.output == each.output for other in (*unclear, *few))
        <= sum(other.output == each.output for other in comparisons)
    }
    aside = [each for each in unclear if each.output in outputs]
    clauses = [
        f"torch itself is off by {each.torch_error:.2g} of {each.reference_rms:.2g} in {each.output!r} on {each.case}: "
        "rounding errors hide what the runtime does there"
        for each in aside[:3]
    ]
    left = [each for each in few if each.output in outputs and aside]
    clauses += [
        f"a few values of {each.output!r} are off by {each.max_error:.2g} on {each.case}, as if rounding sent a token "
        "to another expert"
        for each in left[:3]
    ]
    return [each for each in comparisons if each not in aside and each not in left], tuple(clauses)


def _is_of_few_values(each: Comparison) -> bool:
    """Whether an output is over its limit in only a few values: the largest error is many times the mean of all."""
    if each.reason_code != OVER_LIMIT or each.max_error is None or each.rms_error is None:
        return False
    return each.max_error >= JUMP * each.rms_error


def is_unclear(each: Comparison, tolerance: Tolerance) -> bool:
    """Whether an output is over its limit only because of the ceiling.

    Rounding errors may be as large as that, since torch has such errors too.
    """
    if each.torch_error is None or each.reference_rms is None or each.max_error is None:
        return False
    return each.max_error <= tolerance.uncapped(each.torch_error, each.reference_rms)


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison that fails most, or that comes nearest to its limit.

    Failed comparisons on which torch itself is within the limit come first, since others may say nothing.
    """

    def rank(each: Comparison) -> tuple[bool, bool, float]:
        beyond = each.torch_error is not None and each.limit is not None and each.torch_error > each.limit
        return each.state == FAILED, not (each.state == FAILED and beyond), each.severity

    return max(comparisons, key=rank)
