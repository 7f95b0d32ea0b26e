"""Axes: where a number lies between 0 and 1, and at which numbers the ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

LINEAR, LOG = "linear", "log"


@attrs.frozen(kw_only=True)
class Scale:
    """From `low` to `high`: linear, a logarithm, or a logarithm that is linear from 0 up to `linear_to`."""

    low: float
    high: float
    log: bool = False
    linear_to: float = 0.0

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        low, high = self._at(self.low), self._at(self.high)
        return (self._at(value) - low) / (high - low)

    def _at(self, value: float) -> float:
        if not self.log:
            return value
        if not self.linear_to:
            return math.log10(value)
        size = abs(value) / self.linear_to
        return math.copysign(size if size <= 1 else 1 + math.log10(size), value)

    def ticks(self, most: int = 7) -> list[float]:
        """Round numbers within the scale, at most about `most`."""
        if not self.log:
            step = _nice((self.high - self.low) / most)
            first = math.ceil(self.low / step - 1e-9)
            return [each * step for each in range(first, math.floor(self.high / step + 1e-9) + 1)]
        start = self.linear_to or self.low
        decades = range(math.floor(math.log10(start) + 1e-9), math.ceil(math.log10(self.high) - 1e-9) + 1)
        found = [10.0**each for each in decades[:: max(1, math.ceil(len(decades) / most))]]
        if len(decades) <= 3 and not self.linear_to:
            found = [base * 10.0**each for each in decades for base in (1, 2, 5)]
        inside = [each for each in found if start * (1 - 1e-9) <= each <= self.high * (1 + 1e-9)]
        return [0.0, *inside] if self.linear_to and self.low <= 0 else inside


def scale(values: Sequence[float], kind: str | float) -> Scale:
    """The scale that holds all values; `kind` is linear, log, or the number up to which a logarithm is linear.

    Values that a logarithm can't show are left out of it: `shows` says which.
    """
    shown = [value for value in values if shows(value, kind)]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
    if kind == LINEAR:
        low = min(low, 0.0)
        return Scale(low=low, high=high if high > low else low + 1.0)
    if kind == LOG:
        return Scale(low=low, high=high if high > low * 1.01 else low * 10, log=True)
    start = float(kind)
    return Scale(low=min(low, 0.0), high=max(high, start * 10), log=True, linear_to=start)


def shows(value: float, kind: str | float) -> bool:
    """Whether a scale of that kind has a place for the value."""
    return math.isfinite(value) and (kind != LOG or value > 0)


def _nice(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(base * size for base in (1, 2, 5, 10) if base * size >= step * (1 - 1e-9))


def label(value: float) -> str:
    """A tick's number, as short as can be."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.3g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
