"""Frequencies of RoPE as the parameters that make them: theta, and the scalings of posexport.models.scaling.

With v_i = theta^(-2i/dim), the frequencies of pairs i = 0 ... dim/2 - 1 are one of

    v_i · v_i / s (linear) · v_i, then 0 (proportional) · slow pairs v_i / s, fast pairs v_i, a ramp between (yarn,
    llama3: posexport.graphs.fits.ramps) · v_i / f_i (longrope) · v_i of a theta that grows with the length
    (dynamic)

Parameters are solved for, and made the shortest numbers that are the same within the error of what was measured. They
must give the frequencies that were measured. Different parameters may give the same (ntk is a larger theta): then the
usual ones are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from posexport.graphs.attention.angles import Turning

    Array = np.ndarray[Any, np.dtype[np.float64]]

Parameters = dict[str, Any]

EXACT = 1e-6
"""Part of a frequency that may differ: graphs hold frequencies in float32, computed by operations of several kinds."""

HALF = 2.0**-8
"""Part of a number that rounding to bfloat16 may change."""

USUAL_THETA = 10_000.0
"""What frequencies without any progression are said to be divided by factors of."""

Fit = Callable[["Array", float], Iterator[Parameters]]
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


def rope_parameters(turning: Turning) -> Parameters | None:
    """The parameters of a RoPE over one axis with these frequencies, without its layout; None where none has them."""
    from posexport.graphs.fits.length import by_length

    if turning.edge is not None:
        return by_length(turning)
    return static_parameters(turning.frequencies[0], turning.amplitude, turning.tolerance)


def static_parameters(frequencies: Array, amplitude: float, slack: float) -> Parameters | None:
    """The same for frequencies that hold for rows of any length, and the factor on cosines and sines."""
    from posexport.graphs.fits.ramps import ramps

    plain = abs(amplitude - 1.0) <= EXACT
    fits: tuple[Fit, ...] = (_plain, _linear, _proportional)
    for fit in (*fits, *ramps(amplitude)) if plain else (*ramps(amplitude), *fits):
        for found in fit(frequencies, slack):
            rounding = slack + (_ramp_rounding(found, len(frequencies)) if "scaling" in found else 0.0)
            if agree(frequencies_of(found, len(frequencies)), frequencies, rounding):
                return _with_amplitude(found, amplitude, slack)
    return None


def _ramp_rounding(parameters: Parameters, pairs: int) -> Array:
    """What float32 may leave of a part r_i that is nearly 0, times the frequency that it is a part of."""
    ramp = parameters["scaling"] in ("yarn", "llama3")
    return np.asarray((2e-7 if ramp else 0.0) * parameters["theta"] ** (-np.arange(pairs) / pairs))


def frequencies_of(parameters: Mapping[str, Any], pairs: int) -> Array:
    """What posexport makes of parameters, in float64."""
    import torch

    from posexport.models.scaling import SCALINGS, UNSCALED

    scaling = SCALINGS.get(parameters.get("scaling", ""), UNSCALED)
    values = {name: parameters.get(name, default) for name, default in scaling.takes.items()}
    made = scaling.frequencies(parameters["theta"], 2 * pairs, torch.float64, **values)
    result: Array = made["frequencies"].numpy()
    return result


def _with_amplitude(parameters: Parameters, amplitude: float, slack: float) -> Parameters:
    """With the factor on cosines and sines, where it isn't that of the scaling."""
    from posexport.models.scaling import SCALINGS, UNSCALED

    scaling = SCALINGS.get(parameters.get("scaling", ""), UNSCALED)
    values = {name: parameters.get(name, default) for name, default in scaling.takes.items()}
    usual = scaling.attention_factor(**values)
    tolerance = max(EXACT, slack)
    if abs(amplitude - usual) <= tolerance * usual:
        return parameters
    return {**parameters, "attention_factor": shortest(amplitude, tolerance)}


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


def nearest_theta(frequencies: Array) -> tuple[float, float] | None:
    """The theta whose frequencies these are but for rounding to half precision, and how far they are from its own, as
    a part of them; None where they are far from any."""
    pairs = len(frequencies)
    if pairs < 3 or frequencies.min() <= 0:
        return None
    slope = np.polyfit(np.arange(pairs), np.log(frequencies), 1)[0]
    theta = shortest(float(np.exp(-slope * pairs)), HALF)
    difference = float(np.abs(frequencies / theta ** (-np.arange(pairs) / pairs) - 1).max())
    return (theta, float(f"{difference:.1e}")) if difference <= HALF else None


def _plain(frequencies: Array, slack: float) -> Iterator[Parameters]:
    if len(frequencies) == 1:  # any theta
        yield {"theta": USUAL_THETA}
    found = progression(frequencies, 2 * len(frequencies), slack)
    if found is not None and found[1] == 1.0:
        yield {"theta": found[0]}


def _linear(frequencies: Array, slack: float) -> Iterator[Parameters]:
    found = progression(frequencies, 2 * len(frequencies), slack)
    if found is not None and found[1] < 1.0:
        yield {"theta": found[0], "scaling": "linear", "factor": shortest(1 / found[1], EXACT)}


def _proportional(frequencies: Array, slack: float) -> Iterator[Parameters]:
    pairs = len(frequencies)
    turning = int((np.abs(frequencies) > slack).sum())
    if not 1 < turning < pairs:
        return
    found = progression(frequencies[:turning], 2 * pairs, slack)
    if found is not None and found[1] <= 1.0:
        parameters = {"theta": found[0], "scaling": "proportional", "partial_rotary_factor": turning / pairs}
        yield parameters if found[1] == 1.0 else {**parameters, "factor": shortest(1 / found[1], EXACT)}
