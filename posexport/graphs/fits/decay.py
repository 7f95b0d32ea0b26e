"""The decay of xpos: with each position, the amplitudes of rotated queries shrink, and those of keys grow.

ln z_i / scale_base per position, z_i = (2i/n + gamma) / (1 + gamma) (Sun et al. 2022, arXiv:2212.10554)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import brentq

from posexport.graphs.fits.progressions import EXACT, Parameters, shortest

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]


def xpos_decay(growth: Array) -> Parameters | None:
    """gamma and scale_base from the growth [P] of the logarithms of queries' amplitudes; None for other decays."""
    pairs = len(growth)
    if pairs < 2 or not (growth < 0).all():
        return None
    place = pairs // 2
    ratio = float(growth[place] / growth[0])

    def rates(gamma: float) -> Array:
        return np.asarray(np.log((np.arange(pairs) / pairs + gamma) / (1 + gamma)))

    def excess(gamma: float) -> float:
        made = rates(gamma)
        return float(made[place] / made[0]) - ratio

    low, high = 1e-6, 1e3
    if excess(low) * excess(high) > 0:
        return None
    gamma = shortest(float(brentq(excess, low, high, xtol=1e-14)), 10 * EXACT)
    scale_base = math.log(gamma / (1 + gamma)) / float(growth[0])
    whole = max(round(scale_base), 1)
    if np.abs(rates(gamma) / whole - growth).max() > 20 * EXACT * np.abs(growth).max():
        return None
    return {"scale_base": whole, "gamma": gamma}
