"""Frequencies of sinusoids: the one home of the geometric progression that every rotary and sinusoidal scheme uses.

omega_i = theta^(-2i/dim) for i = 0 ... dim/2 - 1 (Vaswani et al. 2017, section 3.5; Su et al. 2021, eq. 15).
"""

from __future__ import annotations


def inverse_frequencies(dim: int, theta: float) -> list[float]:
    """The dim/2 angular frequencies, in radians per position, highest first; computed in double precision."""
    return [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
