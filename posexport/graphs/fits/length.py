"""Frequencies of RoPE that depend on the length n = largest position + 1 of a row, beyond the trained length L.

longrope   v_i / long_factor_i if n > L, else v_i / short_factor_i, v_i = theta^(-2i/dim); cosines and sines times
           sqrt(1 + ln s / ln L) (Ding et al. 2024, arXiv:2402.13753). Only v_i / f_i can be measured, so theta is the
           one that makes the short factors 1, or the usual one
dynamic    theta (s n / L - (s - 1))^(dim/(dim-2)) in place of theta (Peng et al. 2023, arXiv:2309.00071, appendix B)
"""

from __future__ import annotations

import math

import numpy as np

from posexport.graphs.attention.angles import Turning
from posexport.graphs.fits.progressions import EXACT, USUAL_THETA, Parameters, progression, shortest
from posexport.graphs.fits.ramps import ROUND


def by_length(turning: Turning) -> Parameters | None:
    """The parameters of longrope or dynamic, without a layout; None if neither has these frequencies."""
    assert turning.edge is not None and turning.long is not None and turning.longest is not None
    slack = max(turning.tolerance, 1e-12)
    short, pairs = turning.frequencies[0], turning.frequencies.shape[1]
    plain = progression(short, 2 * pairs, slack)
    theta = plain[0] if plain is not None and plain[1] == 1.0 else None
    if np.abs(turning.long - turning.longest).max() <= slack:
        return _longrope(turning, theta or USUAL_THETA)
    return None if theta is None else _dynamic(turning, theta, slack)


def _longrope(turning: Turning, theta: float) -> Parameters | None:
    short, long = turning.frequencies[0], turning.long
    assert turning.edge is not None and long is not None
    if min(short.min(), long.min()) <= 0:
        return None
    steps = theta ** (-np.arange(len(short)) / len(short))
    factors = {"short_factor": steps / short, "long_factor": steps / long}
    found: Parameters = {"theta": theta, "scaling": "longrope"}
    found |= {name: [shortest(float(one), EXACT) for one in values] for name, values in factors.items()}
    found["original_max_position_embeddings"] = turning.edge
    grown = math.exp(min((turning.amplitude**2 - 1) * math.log(turning.edge), 100.0))
    if turning.amplitude < 1 - EXACT:
        return {**found, "factor": 1.0, "attention_factor": shortest(turning.amplitude, EXACT)}
    return {**found, "factor": shortest(max(grown, 1.0), 10 * EXACT * math.log(turning.edge))}


def _dynamic(turning: Turning, theta: float, slack: float) -> Parameters | None:
    assert turning.edge is not None and turning.long is not None and turning.longest is not None
    pairs, edge = turning.frequencies.shape[1], turning.edge
    thetas = [progression(values, 2 * pairs, slack) for values in (turning.long, turning.longest)]
    if pairs < 2 or None in thetas:
        return None
    grown = [(one[0] / theta) ** ((pairs - 1) / pairs) for one in thetas if one is not None]
    lengths = (edge + 1, turning.reach + 1)
    factor = shortest((grown[1] - grown[0]) / (lengths[1] - lengths[0]) * edge, ROUND)
    if any(
        abs(one - (factor * length / edge - factor + 1)) > ROUND * one
        for one, length in zip(grown, lengths, strict=True)
    ):
        return None
    found: Parameters = {"theta": theta, "scaling": "dynamic", "factor": factor}
    return {**found, "original_max_position_embeddings": edge}
