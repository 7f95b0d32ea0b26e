"""When two functions are equal: a runtime's outputs against the float64 reference, with a limit from torch's error.

The reference is the torch block in float64 with the same rounded weights and inputs. Outputs pair one to one by name;
shapes and dtypes are equal (nothing is broadcast or converted); every value is finite; and then

    max |got - reference|  <=  min(multiple * torch error + floor * rms(reference), ceiling * rms(reference))

where the torch error is max |torch - reference| of torch eager in the artifact's dtype. The ceiling keeps a wrong torch
result from excusing everything. Every verdict states all of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import dtype_name
from posexport.verify.draws import Array
from posexport.verify.result import (
    FAILED,
    MISSING_OUTPUT,
    NOT_FINITE,
    NOTHING_COMPARED,
    OVER_LIMIT,
    PASSED,
    UNKNOWN_OUTPUT,
    WRONG_DTYPE,
    WRONG_SHAPE,
    Comparison,
    Tolerance,
    Verdict,
)

# Measured over every encoding, hidden 64 to 768, 1 to 3 layers, three seeds, on ONNX Runtime and onnx's reference:
# the error is at most 4.7 (fp32), 4.2 (fp16) and 3.6 (bf16) times the torch error, which lies between 2e-7 and 2e-3
# (fp32, with sharp softmax in several layers), 7e-4 and 6e-3 (fp16), 6e-3 and 5e-2 (bf16) of the reference's rms. The
# floor is about one unit in the last place (8 in fp32, where torch is exact more often); the ceiling is ten times the
# largest torch error.
TOLERANCES = {
    "fp32": Tolerance(multiple=8.0, floor=2.0**-20, ceiling=0.06),
    "fp16": Tolerance(multiple=8.0, floor=2.0**-10, ceiling=0.06),
    "bf16": Tolerance(multiple=8.0, floor=2.0**-7, ceiling=0.5),
}


def tolerance_at(dtype: str, rounding: float = 0.0) -> Tolerance:
    """The tolerance in `dtype` where terms of the encoding may differ by `rounding` from one runtime to another.

    The floor grows by it, since torch may be exact by chance, the ceiling to sixteen times of it, since values are
    several times their root mean square.
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
) -> list[Comparison]:
    """Compare every output of `reference` and `outputs` by name; `dtypes` are those that the graph declares."""
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
            values = (reference[name], torch_outputs[name], outputs[name])
            reason, numbers = _compare(name, *values, dtypes[name], tolerance)
        comparisons.append(Comparison.of(case, name, reason, far_out=far_out, **numbers))
    return comparisons


def _compare(
    name: str, reference: Array, torch_output: Array, output: Array, dtype: str, tolerance: Tolerance
) -> tuple[Reason | None, dict[str, Any]]:
    """Why an output fails, None where it passes; and the fields of its Comparison that could be computed."""
    if output.shape != reference.shape:
        text = f"output {name!r} has shape {list(output.shape)}, it must be {list(reference.shape)}"
        return Reason(WRONG_SHAPE, text), {}
    if dtype_name(output.dtype) != dtype:
        return Reason(WRONG_DTYPE, f"output {name!r} is {dtype_name(output.dtype)}, it must be {dtype}"), {}
    exact, by_torch, actual = (np.asarray(array).astype(np.float64) for array in (reference, torch_output, output))
    for who, array in (("the float64 reference", exact), (f"output {name!r}", actual), ("torch eager", by_torch)):
        invalid = ~np.isfinite(array)
        if invalid.any():
            index = _first_index(invalid)
            text = f"{who} has {int(invalid.sum())} of {invalid.size} values not finite, the first at {list(index)}"
            return Reason(NOT_FINITE, text), {"index": index}
    if not exact.size:
        return Reason(NOTHING_COMPARED, f"output {name!r} is empty: nothing was compared"), {}
    errors = np.abs(actual - exact)
    error = float(errors.max())
    index = _first_index(errors == error)
    torch_error = float(np.abs(by_torch - exact).max())
    rms = float(np.sqrt(np.mean(exact**2)))
    limit = tolerance.limit(torch_error, rms)
    text = f"output {name!r} is off by {error:.3g} at {list(index)}, the limit is {limit:.3g}"
    return None if error <= limit else Reason(OVER_LIMIT, text), {
        "max_error": error,
        "rms_error": float(np.sqrt(np.mean(errors**2))),
        "torch_error": torch_error,
        "limit": limit,
        "reference_rms": rms,
        "index": index,
        "got": float(actual[index]),
        "reference": float(exact[index]),
    }


def judge(artifact: str, runtime: str, comparisons: Sequence[Comparison], cases: int, **fields: Any) -> Verdict:
    """The verdict on comparisons: passed only where every one of at least one passed."""
    if not comparisons:
        return Verdict.of(artifact, runtime, FAILED, Reason(NOTHING_COMPARED, "nothing was compared"), **fields)
    worst = worst_of(comparisons)
    nonzero = {comparison.output for comparison in comparisons if comparison.reference_rms != 0.0}
    zero = next((comparison.output for comparison in comparisons if comparison.output not in nonzero), None)
    if worst.state == PASSED and zero is not None:
        text = f"output {zero!r} is zero for all inputs: nothing was compared, give inputs that are not zero"
        return Verdict.of(artifact, runtime, FAILED, Reason(NOTHING_COMPARED, text), cases=cases, **fields)
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
    """Why a failed comparison says nothing about the runtime: torch itself is beyond the ceiling, and the runtime is
    within its limit but for the ceiling. None where that isn't so."""
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


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison that fails most, or comes nearest to its limit."""
    return max(comparisons, key=lambda comparison: (comparison.state == FAILED, comparison.severity))


def _first_index(where: Array) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(where)), where.shape))
