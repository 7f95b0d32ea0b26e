"""Two files on one runtime, if float64 can't evaluate them because of an operator that nothing else knows.

Both run on the same drawn inputs without padding, and may differ only by the rounding of their dtype. This shows less
than a parity check: a fault of the runtime that both files show is not noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.graphs.axes import SLOTS
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Pool, result
from posexport.verify.graph.cases import GraphCase, drawn_cases
from posexport.verify.graph.subject import GraphSubject

LIMITS = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 2e-1, "fp64": 1e-7}
"""The largest difference as a part of the largest value of an output, by dtype.

It is larger than what another order of the same sums makes.
"""

STEP = 5e-2
"""The same for quantised files: one number may be rounded to the next whole number."""

CASES = 8

FAILS, DIFFERS = "new-file-fails", "new-file-differs"
"""Codes of what is wrong with the second file."""


@attrs.frozen(kw_only=True)
class SideBySide:
    """How far two files differ, or what is wrong.

    `error` is the largest difference, as a part of the largest value, on all `cases`; `median` that of half of them.
    """

    error: float = 0.0
    median: float = 0.0
    cases: int = 0
    problem: Reason | None = None


def side_by_side(
    original: GraphSubject,
    other: Path,
    runtime: Runtime,
    time_limit: float,
    roles: Mapping[str, str] | None = None,
    seed: int = 0,
) -> SideBySide:
    """Compare two files with the same inputs on a runtime; no cases if it doesn't run the original on any."""
    limit = STEP if original.is_quantised else LIMITS.get(original.dtype, LIMITS["fp32"])
    whole = [case for case in drawn_cases(original.roles(roles), seed) if _is_without_padding(case)]
    errors = list[float]()
    with Pool(time_limit) as pool:
        for case in whole[:CASES]:
            before, after = (
                result(pool.submit(runtime, path, [case.arrays], key=str(path))) for path in (original.path, other)
            )
            if before.failure is not None:
                continue
            if after.failure is not None:
                text = f"it fails, where the original doesn't, {after.failure} (inputs: {case.name})"
                return SideBySide(cases=len(errors), problem=Reason(FAILS, text))
            found = _difference(before.outputs[0], after.outputs[0])
            errors.append(found)
            if not found <= limit:
                text = f"an output differs from that of the original by {found:.2g} of its largest value"
                return SideBySide(cases=len(errors), problem=Reason(DIFFERS, f"{text} (inputs: {case.name})"))
    return SideBySide(error=max(errors), median=float(np.median(errors)), cases=len(errors)) if errors else SideBySide()


def _is_without_padding(case: GraphCase) -> bool:
    return all(tokens.all() for axis, tokens in case.visible.items() if axis != SLOTS)


def _difference(before: Arrays, after: Arrays) -> float:
    """The largest difference of an output, as a part of its largest value; infinite if outputs can't be compared."""
    worst = 0.0
    for name, want in before.items():
        have = after.get(name)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            return float("inf")
        want, have = (array.astype(np.float64) for array in (want, have))
        finite = np.isfinite(want)
        if (np.isfinite(have) != finite).any():
            return float("inf")
        if finite.any():
            scale = max(float(np.abs(want[finite]).max()), 1e-30)
            worst = max(worst, float(np.abs(have - want)[finite].max()) / scale)
    return worst
