"""Biases that depend only on the distance d = query position - key position, as encodings of posexport.models.biases.

alibi      -m_h |d|; keys ahead of the query may have their own slopes
t5         constant within buckets of distance, whose edges grow with its logarithm
kerple     -r1 log(1 + r2 |d|), or -r1 |d|^r2, both per head
sandwich   N/(8h) times sums of cosines of d

A number that is added to all logits of a query doesn't change a softmax, so a bias is measured from that of d = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import brentq

from posexport.graphs.fits.progressions import EXACT, shortest
from posexport.models.biases import alibi_slopes, t5_buckets

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]

Parameters = dict[str, Any]

ROUNDING = 1e-5
"""The part of the largest bias that may be rounding of a graph's own constants."""

FLOAT32 = 1e-7
"""The part of a number that rounding to float32 may change."""

MOST_BUCKETS = 4096
"""The most rows of a table of buckets."""

DISTANCES = (128, 256, 512, 64, 1024, 32, 2048, 20, 4096)
"""The largest distances that models distinguish, the most frequent first."""


def distance_parameters(behind: Array, ahead: Array, tables: Sequence[int]) -> Parameters | None:
    """The encoding of a bias; None if none of the known encodings has it.

    `behind` [N, D] is the bias at distances 0, 1, 2, ..., and `ahead` [N, E] at 0, -1, -2, .... In causal attention,
    `ahead` has one column. Both are 0 at distance 0. `tables` are the numbers of rows of tables that the bias may be
    looked up in.
    """
    return _alibi(behind, ahead) or _t5(behind, ahead, tables) or _kerple(behind, ahead) or _sandwich(behind, ahead)


def _near(one: Array, other: Array) -> bool:
    size = max(float(np.abs(other).max(initial=0.0)), 1e-30)
    return bool(np.abs(one - other).max(initial=0.0) <= ROUNDING * size)


def _alibi(behind: Array, ahead: Array) -> Parameters | None:
    slopes = []
    for side in (behind, ahead):
        distances = np.arange(side.shape[1])
        slope = -(side @ distances) / max(float(distances @ distances), 1.0)
        if not _near(-slope[:, None] * distances, side):
            return None
        slopes.append([shortest(float(one), FLOAT32) for one in slope])
    count = len(behind)
    authors = np.abs(np.array(slopes[0]) - alibi_slopes(count)).max() <= 10 * EXACT * max(map(abs, slopes[0]))
    found: Parameters = {"name": "alibi"} if authors else {"name": "alibi", "slopes": slopes[0]}
    if ahead.shape[1] > 1 and slopes[1] != slopes[0]:
        found["slopes_ahead"] = slopes[1]
    return found


def _starts(side: Array) -> list[int]:
    """The distances at which the bias of some head changes, beginning with 0."""
    size = max(float(np.abs(side).max()), 1e-30)
    changes = (np.abs(np.diff(side, axis=1)) > 1e-9 * size).any(0)
    return [0, *(np.flatnonzero(changes) + 1).tolist()]


def _t5(behind: Array, ahead: Array, tables: Sequence[int]) -> Parameters | None:
    causal = ahead.shape[1] == 1
    starts = _starts(behind)
    if len(starts) == behind.shape[1]:
        return None  # a bucket for each distance that was measured
    for buckets in dict.fromkeys((*tables, len(starts) * (1 if causal else 2))):
        side = buckets if causal else buckets // 2
        if not 2 <= buckets <= MOST_BUCKETS or buckets % (2 if causal else 4) or not 2 <= len(starts) <= side:
            continue
        for distance in _max_distances(starts, side):
            made = np.array(t5_buckets(buckets, distance, not causal))  # of keys from `distance` behind to ahead
            back, forth = made[: distance + 1][::-1], made[distance:]
            exact = _exact_edges(side, distance)
            if _has_buckets(behind, back, exact) and (causal or _has_buckets(ahead, forth, exact)):
                return {"name": "t5", "num_buckets": buckets, "max_distance": distance}
    return None


def _exact_edges(side: int, distance: int) -> set[int]:
    """Distances whose bucket number is an integer before it is rounded down.

    Computed with a logarithm, it depends on rounding errors.
    """
    exact = side // 2
    wide = side - exact
    return {
        far
        for far in range(exact + 1, distance + 1)
        for step in range(1, wide)
        if far**wide == exact ** (wide - step) * distance**step
    }


def _has_buckets(side: Array, buckets: Array, exact: set[int]) -> bool:
    """Whether all distances of a bucket have the same bias, and neighbouring buckets have different ones.

    A bucket that begins at one of the `exact` distances may begin one distance later.
    """
    count = side.shape[1]
    padded = np.concatenate([buckets, np.full(max(count - len(buckets), 0), buckets[-1])])[:count]
    expected = [0, *(np.flatnonzero(np.diff(padded)) + 1).tolist()]
    starts = _starts(side)
    return len(starts) == len(expected) and all(
        start == edge or (start == edge + 1 and edge in exact) for start, edge in zip(starts, expected, strict=True)
    )


def _max_distances(starts: list[int], side: int) -> Iterator[int]:
    """The values of max_distance with which the last bucket begins where it does, usual ones first.

    If it begins beyond the measured distances, or if some buckets have no distance, all possible values are given.
    """
    exact = side // 2
    wide = side - exact
    last = starts[-1]
    if len(starts) == side and last >= 2 and wide >= 2:
        least, most = (math.exp((wide * math.log(edge) - math.log(exact)) / (wide - 1)) for edge in (last - 1, last))
        fitting = range(max(int(least), exact + 1), min(int(most) + 2, 2**20))
    else:
        fitting = range(exact + 1, max(2 * last, exact) + 2)
        yield from (distance for distance in DISTANCES if distance > fitting[-1])
    yield from sorted(fitting, key=lambda distance: (distance not in DISTANCES, len(str(distance).rstrip("0"))))


def _kerple(behind: Array, ahead: Array) -> Parameters | None:
    if behind.shape[1] < 4 or not _symmetric(behind, ahead) or not (behind[:, 1:] < 0).all():
        return None
    distances = np.arange(behind.shape[1], dtype=float)
    power = np.log(behind[:, 2] / behind[:, 1]) / math.log(2)
    if power.min() > 0 and _near(behind[:, 1:2] * distances ** power[:, None], behind):
        return {"name": "kerple", "kernel": "power"}
    made = []
    for row in behind:
        ratio = float(row[3] / row[1])

        def excess(rate: float, ratio: float = ratio) -> float:
            return math.log1p(3 * rate) / math.log1p(rate) - ratio

        if excess(1e-9) * excess(1e9) > 0:
            return None
        rate = float(brentq(excess, 1e-9, 1e9, xtol=1e-15, rtol=1e-14))
        made.append(row[1] / math.log1p(rate) * np.log1p(rate * distances))
    return {"name": "kerple"} if _near(np.array(made), behind) else None


def _symmetric(behind: Array, ahead: Array) -> bool:
    width = min(behind.shape[1], ahead.shape[1])
    return _near(ahead[:, :width], behind[:, :width])


def _sandwich(behind: Array, ahead: Array) -> Parameters | None:
    """sandwich with the usual theta: sums of cosines of many frequencies can't be separated."""
    count, width = behind.shape
    if width < 4 or not _symmetric(behind, ahead):
        return None
    rates = count / (8.0 * np.arange(1, count + 1))
    whole = behind[0] / rates[0]
    if not _near(rates[:, None] * whole, behind):
        return None
    for dim in (128, 64, 256, 32, 512, 16, 1024, 2048):
        frequencies = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
        made = (np.cos(np.arange(width)[:, None] * frequencies) - 1).sum(1)
        if _near(made, whole):
            return {"name": "sandwich", "dim": dim}
    return None
