"""When two functions are equal: a runtime's outputs against the truth, beside eager's own error on the same inputs.

The truth is the torch block in float64 with the same rounded weights and inputs. Outputs pair one to one by name;
shapes and dtypes are equal (nothing is broadcast or converted); every value is finite; and then

    max |got - truth|  <=  min(multiple * max |eager - truth| + floor * rms(truth), ceiling * rms(truth))

where eager is torch in the artifact's dtype. Eager's own error is judged by the same rule, so the ceiling is what keeps
a wrong yardstick from excusing everything. All numbers are stated in every verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import dtype_name
from posexport.verify.result import FAILED, PASSED, Comparison, Tolerance, Verdict

# Measured over every encoding, hidden 64 to 768, 1 to 3 layers, three seeds, on ONNX Runtime and onnx's reference:
# the error is at most 4.7 (fp32), 4.2 (fp16) and 3.6 (bf16) times eager's, and eager's own lies between 2e-7 and 2e-3
# (fp32, at position 100,000; 2e-2 in the keys of a cache, which no attention averages), 7e-4 and 6e-3 (fp16), 6e-3 and
# 5e-2 (bf16) of the truth's rms. The floor is about one unit in the last place (8 in fp32, where eager comes out exact
# more often); the ceiling is ten times eager's worst, three times that of cached keys.
TOLERANCES = {
    "fp32": Tolerance(multiple=8.0, floor=2.0**-20, ceiling=0.06),
    "fp16": Tolerance(multiple=8.0, floor=2.0**-10, ceiling=0.06),
    "bf16": Tolerance(multiple=8.0, floor=2.0**-7, ceiling=0.5),
}


FARTHEST = 2**20
"""The farthest position that parity makes allowance for."""


def tolerance_at(dtype: str, position: int) -> Tolerance:
    """The tolerance in `dtype` where angles are fp32 products of positions up to `position`.

    Frequencies and products are rounded to 24 bits, so that every angle may be off by position * 2^-23, torch eager's
    as much as anybody's. The floor grows by half of that, since eager's may come out exact by luck, the ceiling by
    eight times, since values are several times their root mean square. Neither grows beyond FARTHEST: from there on,
    angles in fp32 mean nothing, and no wide tolerance shall hide it.
    """
    tolerance, position = TOLERANCES[dtype], min(position, FARTHEST)
    return attrs.evolve(
        tolerance,
        floor=tolerance.floor + position * 2.0**-24,
        ceiling=max(tolerance.ceiling, 8 * position * 2.0**-23),
    )


def compare(
    case: str,
    truth: Arrays,
    eager: Arrays,
    got: Arrays,
    dtypes: Mapping[str, str],
    dtype: str,
    tolerance: Tolerance | None = None,
) -> list[Comparison]:
    """Hold `got` against `truth`, every output of either by name; `dtypes` are those that the graph declares.

    `dtype` is the artifact's own and chooses the tolerance where none is given.
    """
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    found = []
    for name in dict.fromkeys((*truth, *got)):
        if name not in got:
            have = ", ".join(got) or "none"
            found.append(_wrong(case, name, f"output {name!r} is missing: the runtime gave {have}"))
        elif name not in truth:
            found.append(_wrong(case, name, f"output {name!r} is not one of the block's: {', '.join(truth)}"))
        elif name not in eager or eager[name].shape != truth[name].shape:
            found.append(_wrong(case, name, f"torch eager gave no output {name!r} of the truth's shape"))
        else:
            found.append(_compare(case, name, truth[name], eager[name], got[name], dtypes.get(name, dtype), tolerance))
    return found


def _compare(case: str, name: str, truth: Any, eager: Any, got: Any, dtype: str, tolerance: Tolerance) -> Comparison:
    if got.shape != truth.shape:
        return _wrong(case, name, f"output {name!r} has shape {list(got.shape)}, it must be {list(truth.shape)}")
    if dtype_name(got.dtype) != dtype:
        return _wrong(case, name, f"output {name!r} is {dtype_name(got.dtype)}, it must be {dtype}")
    truth, eager, wide = (np.asarray(array).astype(np.float64) for array in (truth, eager, got))
    for who, array in (("the truth itself", truth), ("output " + repr(name), wide), ("torch eager", eager)):
        bad = ~np.isfinite(array)
        if bad.any():
            index = _index(bad)
            reason = f"{who} has {int(bad.sum())} of {bad.size} values not finite, the first at {list(index)}"
            return attrs.evolve(_wrong(case, name, reason), index=index)
    if not truth.size:
        return Comparison(
            case=case, output=name, state=FAILED, reason=f"output {name!r} is empty: nothing was compared"
        )
    error = np.abs(wide - truth)
    index = _index(error == error.max())
    torch_error = float(np.abs(eager - truth).max())
    rms = float(np.sqrt(np.mean(truth**2)))
    allowed = min(tolerance.beside(torch_error, rms), tolerance.ceiling * rms)
    worst = float(error.max())
    passed = worst <= allowed
    return Comparison(
        case=case,
        output=name,
        state=PASSED if passed else FAILED,
        reason=None if passed else f"output {name!r} is off by {worst:.3g} at {list(index)}, allowed is {allowed:.3g}",
        max_error=worst,
        rms_error=float(np.sqrt(np.mean(error**2))),
        torch_error=torch_error,
        limit=allowed,
        reference_rms=rms,
        index=index,
        got=float(wide[index]),
        truth=float(truth[index]),
    )


def judge(artifact: str, runtime: str, comparisons: Sequence[Comparison], cases: int, **rest: Any) -> Verdict:
    """The verdict that comparisons amount to: passed only where every one of at least one passed."""
    if not comparisons:
        return Verdict(artifact=artifact, runtime=runtime, state=FAILED, reason="nothing was compared", **rest)
    worst = worst_of(comparisons)
    alive = {each.output for each in comparisons if each.reference_rms != 0.0}
    silent = next((each.output for each in comparisons if each.output not in alive), None)
    if worst.state == PASSED and silent is not None:
        why = f"output {silent!r} is zero for all inputs: nothing was compared, give inputs that are not zero"
        return Verdict(artifact=artifact, runtime=runtime, state=FAILED, reason=why, cases=cases, **rest)
    reason = None if worst.state == PASSED else f"{worst.reason} (inputs: {worst.case})"
    return Verdict(
        artifact=artifact, runtime=runtime, state=worst.state, reason=reason, worst=worst, cases=cases, **rest
    )


def inconclusive_reason(worst: Comparison, tolerance: Tolerance) -> str | None:
    """Why a failed comparison says nothing of the runtime: eager is itself beyond the ceiling, and the runtime no
    further off than it may be beside eager; None where that isn't so."""
    if worst.torch_error is None or worst.reference_rms is None or worst.max_error is None:
        return None
    if worst.max_error > tolerance.beside(worst.torch_error, worst.reference_rms):
        return None
    most = tolerance.ceiling * worst.reference_rms
    if worst.torch_error <= most:
        return None
    return (
        f"torch eager itself is off by {worst.torch_error:.3g} in {worst.output!r}, and nobody may be off by more than "
        f"{most:.3g}: either rounding grows that much in this block or torch's own result is wrong, and of the runtime "
        "these inputs say nothing"
    )


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison that fails most, or comes nearest to it."""
    return max(comparisons, key=lambda each: (each.state == FAILED, each.severity))


def _wrong(case: str, name: str, reason: str) -> Comparison:
    return Comparison(case=case, output=name, state=FAILED, reason=reason)


def _index(where: Any) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(where)), where.shape))
