"""Fair timing: everything is measured in alternation, and only ratios within one round are compared.

A machine's speed drifts, and a neighbour's spinning threads slow whoever comes next. So each round calls every
candidate once, in a fresh random order with a short pause before each, and a ratio is the median over rounds of the
ratio within a round. Its interval is that of order statistics: it assumes no distribution, only independent rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, variance

import attrs

SURE = 0.95
"""The probability with which an interval holds the truth, unless another is asked for."""


@attrs.frozen(kw_only=True)
class Summary:
    """Quantiles of one series, in the unit of the series."""

    median: float
    p10: float
    p90: float
    p99: float
    count: int


@attrs.frozen(kw_only=True)
class Ratio:
    """The median of per-round ratios and the interval that holds the true median with probability `confidence`.

    With few rounds no interval reaches 95 %: it then spans all rounds, and `confidence` says what that is worth.
    """

    median: float
    low: float
    high: float
    confidence: float


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` (0 to 1) of a series lies, linear between neighbours."""
    ordered = _finite(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(values: Sequence[float]) -> Summary:
    """Median, p10, p90 and p99 of a series."""
    median, p10, p90, p99 = (quantile(values, fraction) for fraction in (0.5, 0.1, 0.9, 0.99))
    return Summary(median=median, p10=p10, p90=p90, p99=p99, count=len(values))


def ratio(series: Sequence[float], baseline: Sequence[float], confidence: float = SURE) -> Ratio:
    """`series` over `baseline`, round by round; both hold one positive value per round, in the same order."""
    if len(series) != len(baseline):
        raise ValueError(f"{len(series)} rounds against {len(baseline)}: ratios need both in every round")
    if min(baseline, default=0.0) <= 0:
        raise ValueError("a baseline of no or negative time has no ratio")
    ratios = _finite([ours / theirs for ours, theirs in zip(series, baseline, strict=True)])
    rank, reached = _rank(len(ratios), confidence)
    return Ratio(median=quantile(ratios, 0.5), low=ratios[rank], high=ratios[-1 - rank], confidence=reached)


ENOUGH_PROCESSES = 3
"""From so many processes on, intervals are over processes: two say too little about how much they differ."""


def ratio_of_processes(
    series: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], confidence: float = SURE
) -> tuple[Ratio, tuple[float, ...]]:
    """`series` over `baseline`, each a list of rounds per process; and the median ratio of every process.

    A process keeps its luck (where its memory lies, where its threads run) for as long as it lives, so its rounds are
    no independent samples. From `ENOUGH_PROCESSES` on the interval is that of the trimmed mean of the logarithms of the
    processes' medians; with fewer it is that of `ratio`, which holds for these processes only.
    """
    parts = tuple(
        quantile([one / other for one, other in zip(ours, theirs, strict=True)], 0.5)
        for ours, theirs in zip(series, baseline, strict=True)
    )
    whole = ratio([each for part in series for each in part], [each for part in baseline for each in part], confidence)
    if len(parts) < ENOUGH_PROCESSES:
        return whole, parts
    found = trimmed([math.log(part) for part in parts])
    reach = student(confidence, found.freedom) * math.sqrt(found.variance)
    low, high = math.exp(found.middle - reach), math.exp(found.middle + reach)
    median = min(max(whole.median, low), high)  # it lies between them in all but the oddest series
    return Ratio(median=median, low=low, high=high, confidence=confidence), parts


TRIMMED = 7
"""From so many values on a mean is trimmed."""


@attrs.frozen
class Trimmed:
    """A trimmed mean, its variance, and the degrees of freedom of that."""

    middle: float
    variance: float
    freedom: int


def trimmed(values: Sequence[float]) -> Trimmed:
    """Tukey and McLaughlin's: the mean without the smallest and largest fifth, its variance from a series in which
    those count as the next value inwards. A process that something disturbed then moves little and hides little. Below
    `TRIMMED` values none is left out: what is lost in degrees of freedom is more."""
    ordered, cut = sorted(values), len(values) // 5 if len(values) >= TRIMMED else 0
    kept = ordered[cut : len(ordered) - cut]
    drawn_in = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    freedom = len(kept) - 1
    return Trimmed(fmean(kept), (len(ordered) - 1) * variance(drawn_in) / (len(kept) * freedom), freedom)


@lru_cache(maxsize=1024)
def student(confidence: float, freedom: float) -> float:
    """The t with P(|T| <= t) = `confidence` for Student's distribution with `freedom` degrees, fractional ones too.

    With t = sqrt(v) tan(a) the probability is an integral of cos(a)^(v-1), which Simpson's rule takes to ten digits.
    """
    if freedom > 400:  # the normal distribution, to a third of a percent
        return NormalDist().inv_cdf((1 + confidence) / 2)
    factor = 2 / math.sqrt(math.pi) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if factor * _simpson(middle, freedom - 1) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _simpson(angle: float, power: float, steps: int = 128) -> float:
    """The integral of cos(a)^power from 0 to `angle` (at most pi / 2)."""
    width = angle / steps
    values: list[float] = [math.cos(index * width) ** power for index in range(steps)]
    values.append(max(math.cos(angle), 0.0) ** power)
    return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))


def _rank(count: int, confidence: float) -> tuple[int, float]:
    """The largest r for which [r-th, r-th from above] (from 0) holds the median that surely, and its probability.

    The interval misses the median when at most r of `count` fair coins fall on one side.
    """
    rank, reached = 0, 1 - 2.0 ** (1 - count)
    tail, term = 0.0, 2.0**-count
    for candidate in range((count + 1) // 2):
        tail += term
        term *= (count - candidate) / (candidate + 1)
        covered = 1 - 2 * tail
        if covered < confidence:
            break
        rank, reached = candidate, covered
    return rank, max(reached, 0.0)


def _finite(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise ValueError("a series needs at least one value, and every value must be finite")
    return ordered
