"""Frequencies of RoPE that are divided by a factor s for slow pairs and kept for fast ones, with a ramp in between.

    w_i = v_i (r_i + (1 - r_i) / s), v_i = theta^(-2i/dim)
    llama3: r = (L v / 2 pi - low) / (high - low), from 0 to 1 (Llama Team 2024, arXiv:2407.21783, and its code)
    yarn: r falls linearly in i, from the pair that makes beta_fast turns within L to the one that makes beta_slow
          (Peng et al. 2023, arXiv:2309.00071)

First, the trained lengths L that models have are tried with the usual low, high and betas. If none fits, the ramp is
solved for. For llama3, only the ratios of L, low and high matter, so low is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from posexport.graphs.fits.progressions import EXACT, Fit, Parameters, frequencies_of, progression, shortest

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]
    Flags = np.ndarray[Any, np.dtype[np.bool_]]
    Places = np.ndarray[Any, np.dtype[np.intp]]

LENGTHS = tuple(2**power for power in (13, 12, 15, 11, 17, 14, 16, 10, 18, 9, 19, 20, 8, 7, 6))
"""Trained lengths that models have, the most frequent first."""

THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Thetas that are tried too, in case too few pairs have kept their frequencies."""

BETA_FAST, BETA_SLOW, LOW, HIGH = 32.0, 1.0, 1.0, 4.0
"""The usual turns within the trained length between which yarn and llama3 go from one frequency to the other."""

ROUND = 1e-4
"""The part that may be error of a number that is computed from differences of others."""

LEAST_FACTOR = 1.01
"""The least factor that counts as a scaling. With a smaller one, other faults of a few pairs have the same form."""

_HUGE = 2.0**40  # a length that no model has


def ramps(amplitude: float) -> tuple[Fit, ...]:
    """The fits of llama3 and yarn to try, by the factor on cosines and sines: only yarn has such a factor."""

    def usual_yarn(frequencies: Array, slack: float) -> Iterator[Parameters]:
        yield from _usual("yarn", frequencies, slack, math.exp(min((amplitude - 1.0) / 0.1, 50.0)))

    def usual_llama3(frequencies: Array, slack: float) -> Iterator[Parameters]:
        yield from _usual("llama3", frequencies, slack, None)

    plain = abs(amplitude - 1.0) <= EXACT
    return (usual_llama3, usual_yarn, _llama3, _yarn) if plain else (usual_yarn, _yarn)


def _usual(scaling: str, frequencies: Array, slack: float, hint: float | None) -> Iterator[Parameters]:
    """Parameters with a trained length of LENGTHS, those whose factor has few digits first.

    `hint` is the factor if the frequencies don't tell it.
    """
    pairs = len(frequencies)
    others: list[Parameters] = []
    for theta in _thetas(frequencies, slack):
        plain = _plain(theta, pairs)
        for length in LENGTHS:
            for truncate in (True, False) if scaling == "yarn" else (True,):
                found: Parameters = {"theta": theta, "scaling": scaling, "original_max_position_embeddings": length}
                found |= {} if truncate else {"truncate": False}
                factor = _factor(found, frequencies, plain, slack, hint)
                if factor is not None:
                    found = {**found, "factor": factor}
                    if _is_short(factor):
                        yield found
                    else:
                        others.append(found)
    yield from others


def _factor(parameters: Parameters, frequencies: Array, plain: Array, slack: float, hint: float | None) -> float | None:
    """The factor s, computed from the pair that it slows down most; None if no factor fits."""
    defaults = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "beta_fast": BETA_FAST, "beta_slow": BETA_SLOW}
    kept = 2 * frequencies_of({**defaults, **parameters, "factor": 2.0}, len(plain)) / plain - 1  # r + (1 - r) / 2
    place = int(kept.argmin())
    if kept[place] > 1 - ROUND:
        return None if hint is None or hint < 1 else shortest(hint, 10 * EXACT)
    rest = float(frequencies[place] / plain[place] - kept[place])
    number = (1 - float(kept[place])) / rest if rest > 0 else 0.0
    tolerance = (EXACT + slack / float(plain[place])) * max(number, 1.0) / (1 - float(kept[place]))
    factor = shortest(number, min(4 * tolerance, ROUND))
    return factor if factor == 1.0 or factor >= LEAST_FACTOR else None  # a factor of 1 leaves that on cos and sin


def _is_short(number: float) -> bool:
    return number == shortest(number, 5e-3)


def _plain(theta: float, pairs: int) -> Array:
    return np.asarray(theta ** (-np.arange(pairs) / pairs))


def _thetas(frequencies: Array, slack: float) -> Iterator[float]:
    """The thetas of the longest plain run at the beginning and of the longest run at the end, then usual ones."""
    pairs = len(frequencies)
    thetas: list[float] = []
    for count in range(pairs, 1, -1):
        found = progression(frequencies[:count], 2 * pairs, slack)
        if found is not None and found[1] == 1.0:
            thetas.append(found[0])
            break
    for first in range(1, pairs - 1):
        found = progression(frequencies[first:], 2 * pairs, slack)
        if found is not None:
            thetas.append(found[0])
            break
    yield from dict.fromkeys((*thetas, *THETAS))


def _kept(frequencies: Array, theta: float) -> tuple[float, Array, Array, Flags]:
    """The factor of the slowest pair, v_i, r_i, and which r_i are between 0 and 1."""
    plain = _plain(theta, len(frequencies))
    factor = shortest(float(plain[-1] / frequencies[-1]), 4 * EXACT)
    kept = (frequencies / plain - 1 / factor) / (1 - 1 / factor) if factor >= LEAST_FACTOR else np.ones(len(plain))
    return factor, plain, kept, (kept > ROUND) & (kept < 1 - ROUND)


def _llama3(frequencies: Array, slack: float) -> Iterator[Parameters]:
    if frequencies.min() <= 0:
        return
    for theta in _thetas(frequencies, slack):
        factor, plain, kept, between = _kept(frequencies, theta)
        if between.sum() < 2:
            continue
        slope, start = np.polyfit(plain[between], kept[between], 1)
        if slope <= 0 or start >= 0:
            continue
        high = shortest((1 - start) / -start, ROUND)  # low is 1
        length = 2 * math.pi * slope * (high - 1)
        if 2 <= length < _HUGE:
            found: Parameters = {"theta": theta, "scaling": "llama3", "factor": factor}
            found["original_max_position_embeddings"] = round(length)
            yield found if high == HIGH else {**found, "high_freq_factor": high}


def _yarn(frequencies: Array, slack: float) -> Iterator[Parameters]:
    if frequencies.min() <= 0:
        return
    for theta in _thetas(frequencies, slack):
        if theta <= 1:
            continue
        factor, _, kept, between = _kept(frequencies, theta)
        for low, high in _ramp(kept, np.flatnonzero(between)):
            for bands in _yarn_bands(low, high, theta, len(frequencies)):
                yield {"theta": theta, "scaling": "yarn", "factor": factor, **bands}


def _ramp(kept: Array, places: Places) -> Iterator[tuple[float, float]]:
    """The pair numbers at which r_i begins to fall from 1 and reaches 0. `places` are the pairs in between."""
    first = int((kept >= 1 - ROUND).sum()) - 1  # the last pair that keeps its frequency
    if len(places) >= 2:
        slope, start = np.polyfit(places, kept[places], 1)
        if slope < 0:
            yield (1.0 - start) / slope, -start / slope
    elif first >= 0 and first + 1 < len(kept):
        yield float(first), first + 1 / (1 - float(kept[first + 1]))


def _yarn_bands(low: float, high: float, theta: float, pairs: int) -> Iterator[Parameters]:
    """The trained length and the betas of a ramp between two pair numbers."""
    dim, length_name = 2 * pairs, "original_max_position_embeddings"

    def length_of(place: float, turns: float) -> float:
        return 2 * math.pi * turns * math.exp(max(min(math.log(theta) * 2 * place / dim, 200.0), -200.0))

    whole = [abs(place - round(place)) <= ROUND for place in (low, high)]
    if all(whole):
        first, last = round(low), round(high)
        least = max(length_of(first, BETA_FAST) if first > 0 else 0.0, length_of(last - 1, BETA_SLOW))
        most = min(length_of(first + 1, BETA_FAST), length_of(last, BETA_SLOW) if last < dim - 1 else _HUGE)
        if 2 <= math.ceil(least) <= most:
            yield {length_name: math.ceil(least)}
    exact = length_of(low, BETA_FAST)
    if 2 <= exact < _HUGE:
        yield {length_name: round(exact), "truncate": False}
    length = max(LENGTHS[1], 2)
    fast, slow = (shortest(length / length_of(place, 1.0), 1e-9) for place in (low, high))
    yield {length_name: length, "beta_fast": fast, "beta_slow": slow, "truncate": False}
