"""Frequencies that fall by one factor from pair to pair, numbers with few digits, and the frequencies of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

Parameters = dict[str, Any]

EXACT = 1e-6
"""The part of a frequency that may be error: graphs hold frequencies in float32 and compute them in several ways."""

USUAL_THETA = 10_000.0
"""The theta of frequencies that form no progression: factors then divide the frequencies of this theta."""

Fit = Callable[[Array, float], Iterator[Parameters]]
"""Takes (frequencies, slack) and gives parameters that may have these frequencies.

`slack` is the possible error in radians per position.
"""


def shortest(number: float, tolerance: float) -> float:
    """The number with the fewest digits that differs from `number` by at most the part `tolerance` of it."""
    for digits in range(1, 17):
        candidate = float(f"{number:.{digits - 1}e}")
        if abs(candidate - number) <= tolerance * abs(number):
            return candidate
    return number


def agree(one: Array, other: Array, slack: float | Array) -> bool:
    """Whether frequencies are the same within rounding and `slack`."""
    return one.shape == other.shape and bool((np.abs(one - other) <= EXACT * np.abs(other) + slack).all())


def frequencies_of(parameters: Mapping[str, Any], pairs: int) -> Array:
    """The frequencies that posexport computes from parameters, in float64."""
    import torch

    from posexport.models.scaling import SCALINGS, UNSCALED

    scaling = SCALINGS.get(parameters.get("scaling", ""), UNSCALED)
    values = {name: parameters.get(name, default) for name, default in scaling.takes.items()}
    made = scaling.frequencies(parameters["theta"], 2 * pairs, torch.float64, **values)
    result: Array = made["frequencies"].numpy()
    return result


def progression(values: Array, dim: int, slack: float) -> tuple[float, float] | None:
    """(theta, first) if the values are first * theta^(-2i/dim); None otherwise."""
    if len(values) < 2 or values.min() <= 0:
        return None
    index = np.arange(len(values))
    weights = values / (EXACT * values + slack)  # the relative error of slow pairs is larger
    slope, start = np.polyfit(index, np.log(values), 1, w=weights)
    if abs(slope) * dim > 200:
        return None
    tolerance = max(EXACT, slack / float(np.median(values))) * (dim / 2) / (len(values) - 1)
    theta, first = shortest(math.exp(-slope * dim / 2), tolerance), shortest(math.exp(start), EXACT)
    return (theta, first) if agree(first * theta ** (-2 * index / dim), values, slack) else None
