"""Frequencies of sinusoids: the one home of the geometric progression that every rotary and sinusoidal scheme uses.

omega_i = 1 / theta^(2i/dim) for i = 0 ... dim/2 - 1 (Vaswani et al. 2017, section 3.5; Su et al. 2021, eq. 15).

They are evaluated in the dtype that is asked for, float32 for every graph and float64 for the reference, operation by
operation as transformers does in float32: a frequency that is one unit in the last place off is an angle that is wrong
by 6e-3 at position 100,000.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def inverse_frequencies(dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """The dim/2 angular frequencies, in radians per position, highest first."""
    import torch

    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype)
    found: torch.Tensor = 1.0 / theta ** (steps / dim)
    return found


def turns(frequencies: torch.Tensor) -> torch.Tensor:
    """int64 [2, ...]: how far 4096 positions, and one position, turn, in the units of `custom_ops.exact_sinusoids`,
    whole turns left out; from frequencies in float64."""
    import torch

    from posexport.custom_ops.angles import HALF_TURN, SPLIT

    assert frequencies.dtype == torch.float64
    whole = 2 * HALF_TURN
    low = torch.round(torch.remainder(frequencies / (2 * math.pi), 1.0) * whole).to(torch.int64) % whole
    return torch.stack((low * SPLIT % whole, low))
