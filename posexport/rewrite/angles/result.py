"""What became of the angles of one attention, as data; imports no engine."""

from __future__ import annotations

from typing import Any

import attrs

from posexport.errors import Reason

EXACT, PARITY = "exact", "parity"
"""The states of angles: as exact as their dtype allows, or products in float32 as in PyTorch models."""


@attrs.frozen(kw_only=True)
class SiteAngles:
    """The angles of one attention: `state` is EXACT or PARITY; `reason` says why they stay as they are.

    `original_error` and `error` are the largest errors of cosines and sines compared with float64, before and after, in
    the graph's own dtypes, up to `positions`, the farthest that was tried. `cases` is the number of sets of inputs on
    which old and new ones were compared. `changed`: they are other angles than before.
    """

    state: str
    reason: Reason | None = None
    positions: int | None = None
    original_error: float | None = None
    error: float | None = None
    cases: int = 0
    changed: bool = False


def angles_record(angles: SiteAngles | None) -> dict[str, Any] | None:
    """The same with the keys of `posexport rewrite --json`."""
    if angles is None:
        return None
    reason = angles.reason
    return {
        "state": angles.state,
        "reason": None if reason is None else {"code": reason.code, "text": reason.text},
        "positions": angles.positions,
        "original_error": _rounded(angles.original_error),
        "error": _rounded(angles.error),
        "cases": angles.cases,
    }


def _rounded(error: float | None) -> float | None:
    """An error with two digits: further digits are chance."""
    return None if error is None else float(f"{error:.1e}")
