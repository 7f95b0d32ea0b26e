"""Frequencies of RoPE as the parameters that give them: theta, and the scalings of posexport.models.scaling.

With v_i = theta^(-2i/dim), the frequencies of pairs i = 0 ... dim/2 - 1 are one of

    v_i · v_i / s (linear) · v_i, then 0 (proportional) · slow pairs v_i / s, fast pairs v_i, a ramp between (yarn,
    llama3: posexport.graphs.fits.ramps) · v_i / f_i (longrope) · v_i of a theta that grows with the length
    (dynamic)

Parameters are solved for, and then rounded to the shortest numbers within the measuring error. They must give the
measured frequencies. If different parameters give the same frequencies (ntk is a larger theta), the usual ones are
named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from posexport.graphs.fits.length import by_length
from posexport.graphs.fits.progressions import (
    EXACT,
    USUAL_THETA,
    Array,
    Fit,
    Parameters,
    agree,
    frequencies_of,
    progression,
    shortest,
)
from posexport.graphs.fits.ramps import ramps

if TYPE_CHECKING:
    from posexport.graphs.attention.angles import Turning

HALF = 2.0**-8
"""The part of a number that rounding to bfloat16 may change."""


def rope_parameters(turning: Turning) -> Parameters | None:
    """The parameters of a RoPE over one axis with these frequencies, without its layout; None if none has them."""
    if turning.edge is not None:
        return by_length(turning)
    return static_parameters(turning.frequencies[0], turning.amplitude, turning.tolerance)


def static_parameters(frequencies: Array, amplitude: float, slack: float) -> Parameters | None:
    """The parameters of frequencies that hold for rows of any length; `amplitude` is the factor on cos and sin."""
    plain = abs(amplitude - 1.0) <= EXACT
    fits: tuple[Fit, ...] = (_plain, _linear, _proportional)
    for fit in (*fits, *ramps(amplitude)) if plain else (*ramps(amplitude), *fits):
        for found in fit(frequencies, slack):
            rounding = slack + (_ramp_rounding(found, len(frequencies)) if "scaling" in found else 0.0)
            if agree(frequencies_of(found, len(frequencies)), frequencies, rounding):
                return _with_amplitude(found, amplitude, slack)
    return None


def _ramp_rounding(parameters: Parameters, pairs: int) -> Array:
    """The float32 error of an r_i near 0, times the frequency v_i; 0 for scalings without a ramp."""
    ramp = parameters["scaling"] in ("yarn", "llama3")
    return np.asarray((2e-7 if ramp else 0.0) * parameters["theta"] ** (-np.arange(pairs) / pairs))


def _with_amplitude(parameters: Parameters, amplitude: float, slack: float) -> Parameters:
    """The parameters with the factor on cosines and sines, if it isn't that of the scaling."""
    from posexport.models.scaling import SCALINGS, UNSCALED

    scaling = SCALINGS.get(parameters.get("scaling", ""), UNSCALED)
    values = {name: parameters.get(name, default) for name, default in scaling.takes.items()}
    usual = scaling.attention_factor(**values)
    tolerance = max(EXACT, slack)
    if abs(amplitude - usual) <= tolerance * usual:
        return parameters
    return {**parameters, "attention_factor": shortest(amplitude, tolerance)}


def nearest_theta(frequencies: Array) -> tuple[float, float] | None:
    """The theta whose frequencies these are within rounding to bfloat16, and the largest relative difference.

    None if they are far from those of any theta.
    """
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
