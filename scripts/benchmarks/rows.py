"""One line of a benchmark's result: a ratio, its interval, the target beside it, and the state that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from posexport.bench import statistics


@attrs.frozen(kw_only=True)
class Row:
    """`state` is passed, failed, not run, or measured where there is no target; `target` is the largest allowed ratio
    or count."""

    what: str
    target: float | None
    state: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = "ratio"
    details: dict[str, Any] = attrs.field(factory=dict)
    reason: str = ""

    def data(self) -> dict[str, Any]:
        """Plain data, four significant digits, without empty fields."""
        return {name: _rounded(value) for name, value in attrs.asdict(self).items() if value not in (None, "", {})}


def counted(what: str, value: float, target: float, unit: str, **details: Any) -> Row:
    """A row for a value that has no noise: passed where it is at most the target."""
    state = "passed" if value <= target else "failed"
    return Row(what=what, target=target, state=state, value=value, unit=unit, details=details)


def compared(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    target: float,
    confidence: float = 0.95,
    *,
    within_interval: bool = False,
    **details: Any,
) -> Row:
    """A row for two series of seconds in the same rounds: passed where their ratio is at most the target.

    With `within_interval` the interval's lower end decides: only a ratio that is surely above the target fails.
    """
    found = statistics.ratio(ours, theirs, confidence)
    milliseconds = {
        "ours_ms": statistics.summarize(ours).median * 1e3,
        "theirs_ms": statistics.summarize(theirs).median * 1e3,
    }
    return Row(
        what=what,
        target=target,
        state="passed" if (found.low if within_interval else found.median) <= target else "failed",
        value=found.median,
        low=found.low,
        high=found.high,
        details={**milliseconds, "rounds": len(ours), "confidence": found.confidence, **details},
    )


def measured(what: str, ours: Sequence[float], theirs: Sequence[float], **details: Any) -> Row:
    """A row as `compared` makes it, for what has no target and stands beside for information."""
    return attrs.evolve(compared(what, ours, theirs, math.inf, **details), target=None, state="measured")


def observed(what: str, value: float, unit: str, **details: Any) -> Row:
    """A row as `counted` makes it, for what has no target."""
    return attrs.evolve(counted(what, value, math.inf, unit, **details), target=None, state="measured")


def not_run(what: str, target: float | None, reason: str) -> Row:
    """A row for what could not be measured here."""
    return Row(what=what, target=target, state="not run", reason=reason)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return value
