"""The geometric progression of frequencies that every rotary and sinusoidal encoding uses.

omega_i = 1 / theta^(2i/dim) for i = 0 ... dim/2 - 1 (Vaswani et al. 2017, section 3.5; Su et al. 2021, eq. 15).

It is evaluated in the given dtype, float32 for graphs and float64 for the reference, with the operations of
transformers: an error of one unit in the last place of a frequency gives an error of 6e-3 in the angle at position
100,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def inverse_frequencies(dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """The dim/2 angular frequencies, in radians per position, highest first."""
    import torch

    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype)
    return torch.as_tensor(1.0 / theta ** (steps / dim))


def progression(dim: int, theta: float) -> Callable[[torch.dtype], torch.Tensor]:
    """`inverse_frequencies` as a function of the dtype, as `angle_constant` takes it."""
    return lambda dtype: inverse_frequencies(dim, theta, dtype)


def turns(frequencies: torch.Tensor) -> torch.Tensor:
    """int64 [2, ...]: the angles of 4096 positions and of one position, without whole turns, in the units of
    `custom_ops.exact_sinusoids`; `frequencies` are float64."""
    import torch

    from posexport.custom_ops.angles import HALF_TURN, SPLIT

    whole = 2 * HALF_TURN
    low = torch.round(torch.remainder(frequencies / (2 * math.pi), 1.0) * whole).to(torch.int64) % whole
    return torch.stack((low * SPLIT % whole, low))
