"""Fair timing: everything is measured in alternation, and only ratios within one round are compared.

A machine's speed drifts, and spinning threads of one candidate slow the next one. Each round therefore calls every
candidate once, in a new random order, with a short pause before each call. A ratio is the median over rounds of the
ratio within a round. Its interval is that of order statistics. It assumes no distribution, only independent rounds.
scipy is loaded when a number is first computed, because readers of results only need the classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, variance
from typing import Any

import attrs

CONFIDENCE = 0.95
"""The probability with which an interval contains the true value, by default."""

_positive: Any = attrs.validators.gt(0)


@attrs.frozen(kw_only=True)
class Summary:
    """Quantiles of one series, in the unit of the series."""

    median: float = attrs.field(validator=_positive)
    p10: float = attrs.field(validator=_positive)
    p90: float = attrs.field(validator=_positive)
    p99: float = attrs.field(validator=_positive)
    count: int


@attrs.frozen(kw_only=True)
class Ratio:
    """The median of per-round ratios, and the interval that contains the true median with probability `confidence`.

    With few rounds, no interval reaches 95 %. It then spans all rounds, and `confidence` is its probability.
    """

    median: float = attrs.field(validator=_positive)
    low: float = attrs.field(validator=_positive)
    high: float = attrs.field(validator=_positive)
    confidence: float


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` (0 to 1) of a series lies, linear between neighbours."""
    import numpy as np

    return float(np.quantile(_finite(values), fraction))


def exponential(logarithm: float) -> float:
    """exp, limited to 10^-87 and 10^87. Values beyond are not ratios of times, and may not be floats."""
    return math.exp(min(max(logarithm, -200.0), 200.0))


def summarize(values: Sequence[float]) -> Summary:
    """Median, p10, p90 and p99 of a series."""
    median, p10, p90, p99 = (quantile(values, fraction) for fraction in (0.5, 0.1, 0.9, 0.99))
    return Summary(median=median, p10=p10, p90=p90, p99=p99, count=len(values))


def ratio(series: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """`series` over `baseline`, round by round. Both have one positive value for each round, in the same order."""
    if len(series) != len(baseline):
        raise ValueError(f"{len(series)} rounds against {len(baseline)}: ratios need both in every round")
    if min(baseline, default=0.0) <= 0:
        raise ValueError("a baseline of no or negative time has no ratio")
    ratios = _finite([ours / theirs for ours, theirs in zip(series, baseline, strict=True)])
    rank, reached = _rank(len(ratios), confidence)
    return Ratio(median=quantile(ratios, 0.5), low=ratios[rank], high=ratios[-1 - rank], confidence=reached)


ENOUGH_PROCESSES = 3
"""From this number of processes on, intervals are over processes. Two say too little about their differences."""


def ratio_of_processes(
    series: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], confidence: float = CONFIDENCE
) -> tuple[Ratio, tuple[float, ...]]:
    """`series` over `baseline`, each a list of rounds for each process, and the median ratio of each process.

    Memory placement and thread affinity bias a process for its whole life, so its rounds are not independent samples.
    From `ENOUGH_PROCESSES` on, the interval is that of the trimmed mean of the logarithms of the processes' medians.
    With fewer, it is that of `ratio`, which is valid for these processes only.
    """
    medians = tuple(
        quantile([one / other for one, other in zip(ours, theirs, strict=True)], 0.5)
        for ours, theirs in zip(series, baseline, strict=True)
    )
    whole = ratio([run for part in series for run in part], [run for part in baseline for run in part], confidence)
    if len(medians) < ENOUGH_PROCESSES:
        return whole, medians
    mean = log_mean(medians)
    reach = student(confidence, mean.freedom) * math.sqrt(mean.variance)
    low, high = exponential(mean.middle - reach), exponential(mean.middle + reach)
    median = min(max(whole.median, low), high)  # it is almost always between them already
    return Ratio(median=median, low=low, high=high, confidence=confidence), medians


TRIMMED = 7
"""From this number of values on, a mean is trimmed."""


@attrs.frozen
class Trimmed:
    """A trimmed mean, its variance, and the degrees of freedom of the variance."""

    middle: float
    variance: float
    freedom: int


def trimmed(values: Sequence[float]) -> Trimmed:
    """Tukey and McLaughlin's trimmed mean: without the smallest and largest fifth, with the winsorized variance.

    One disturbed process then changes the mean and its variance little. With fewer than `TRIMMED` values, none is left
    out, because the lost degrees of freedom would cost more. (scipy.stats.trim_mean gives the mean, but not its
    variance.)
    """
    ordered, cut = sorted(values), len(values) // 5 if len(values) >= TRIMMED else 0
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    freedom = len(kept) - 1
    return Trimmed(fmean(kept), (len(ordered) - 1) * variance(winsorized) / (len(kept) * freedom), freedom)


def log_mean(ratios: Sequence[float]) -> Trimmed:
    """The trimmed mean of the logarithms of ratios. The variance of a single one is infinite."""
    logs = [math.log(ratio) for ratio in ratios]
    return trimmed(logs) if len(logs) > 1 else Trimmed(logs[0], math.inf, 1)


@lru_cache(maxsize=1024)
def student(confidence: float, freedom: float) -> float:
    """The t with P(|T| <= t) = `confidence` for Student's distribution. `freedom` may be fractional."""
    from scipy import stats

    return float(stats.t.ppf((1 + confidence) / 2, freedom))


@lru_cache(maxsize=1024)
def _rank(count: int, confidence: float) -> tuple[int, float]:
    """The largest r for which [r-th, r-th from above] contains the median with this `confidence`, and its probability.

    r counts from 0. The interval misses the median if at most r of `count` fair coins fall on one side.
    (scipy.stats.quantile_test gives no interval for few rounds, and not the probability that it reaches.)
    """
    from scipy import stats

    coins = stats.binom(count, 0.5)
    rank = int(coins.ppf((1 - confidence) / 2))
    if 1 - 2 * coins.cdf(rank) < confidence:
        rank = max(rank - 1, 0)
    return rank, max(float(1 - 2 * coins.cdf(rank)), 0.0)


def _finite(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise ValueError("a series needs at least one value, and every value must be finite")
    return ordered
