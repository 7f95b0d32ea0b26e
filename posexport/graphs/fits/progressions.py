"""Frequencies that fall by one factor from pair to pair, numbers of few digits, and what parameters make of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

Parameters = dict[str, Any]

EXACT = 1e-6
"""Part of a frequency that may differ: graphs hold frequencies in float32, computed by operations of several kinds."""

USUAL_THETA = 10_000.0
"""What frequencies without any progression are said to be divided by factors of."""

Fit = Callable[[Array, float], Iterator[Parameters]]
"""(frequencies, slack) to parameters that may have them; `slack` in radians per position is what may be error."""


def shortest(number: float, tolerance: float) -> float:
    """The number with the fewest digits within a part `tolerance` of `number`."""
    for digits in range(1, 17):
        candidate = float(f"{number:.{digits - 1}e}")
        if abs(candidate - number) <= tolerance * abs(number):
            return candidate
    return number


def agree(one: Array, other: Array, slack: float | Array) -> bool:
    """Whether frequencies are the same but for rounding."""
    return one.shape == other.shape and bool((np.abs(one - other) <= EXACT * np.abs(other) + slack).all())


def frequencies_of(parameters: Mapping[str, Any], pairs: int) -> Array:
    """What posexport makes of parameters, in float64."""
    import torch

    from posexport.models.scaling import SCALINGS, UNSCALED

    scaling = SCALINGS.get(parameters.get("scaling", ""), UNSCALED)
    values = {name: parameters.get(name, default) for name, default in scaling.takes.items()}
    made = scaling.frequencies(parameters["theta"], 2 * pairs, torch.float64, **values)
    result: Array = made["frequencies"].numpy()
    return result


def progression(values: Array, dim: int, slack: float) -> tuple[float, float] | None:
    """(theta, first) of values that are first * theta^(-2i/dim); None where they aren't."""
    if len(values) < 2 or values.min() <= 0:
        return None
    index = np.arange(len(values))
    weights = values / (EXACT * values + slack)  # slow pairs are known less well, in parts of themselves
    slope, start = np.polyfit(index, np.log(values), 1, w=weights)
    if abs(slope) * dim > 200:
        return None
    tolerance = max(EXACT, slack / float(np.median(values))) * (dim / 2) / (len(values) - 1)
    theta, first = shortest(math.exp(-slope * dim / 2), tolerance), shortest(math.exp(start), EXACT)
    return (theta, first) if agree(first * theta ** (-2 * index / dim), values, slack) else None
