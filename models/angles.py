"""Frequencies, cosines and sines of positions, for every encoding with angles.

omega_i = 1 / theta^(2i/dim) for i = 0 ... dim/2 - 1 (Vaswani et al. 2017, section 3.5; Su et al. 2021, eq. 15).

Frequencies are computed with the operations of transformers. An error of one unit in the last place of a frequency near
1 gives an error of 6e-3 in the angle at position 100,000.

`--angles parity` (the default) multiplies fp32 positions by fp32 frequencies. It gives the angles of PyTorch models bit
for bit. The error of these angles grows with the position (2e-3 at position 100,000). `--angles exact` first reduces
the angle in integers. Its cosines and sines are within 2.5e-7 of those of float64 at every position from 0 to
2^24, and within 1e-6 at negative positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def inverse_frequencies(dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return the dim/2 angular frequencies in radians per position, highest first. float64 is for the reference."""
    import torch

    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype)
    return torch.as_tensor(1.0 / theta ** (steps / dim))


def progression(dim: int, theta: float) -> Callable[[torch.dtype], Tensor]:
    """Return `inverse_frequencies` as a function of the dtype, for `angle_constant`."""
    return lambda dtype: inverse_frequencies(dim, theta, dtype)


def angle_constant(spec: Spec, dtype: torch.dtype, frequencies: Callable[[torch.dtype], Tensor]) -> Tensor:
    """Return the constant that `cos_sin` takes.

    This is `frequencies` in radians per position, in `dtype`. With exact angles it is `exact_turns` of them, except in
    the float64 reference.
    """
    import torch

    if spec.angles != "exact" or dtype == torch.float64:
        return frequencies(dtype)
    exact = frequencies(torch.float64)
    if float(exact.max()) > FASTEST:
        raise RequestError(
            f"the fastest pair turns by {float(exact.max()):.3g} radians per position with angles exact: at most 1 "
            "is supported, so give a theta or factors of 1 or more."
        )
    return exact_turns(exact)


FASTEST = 1.001
"""The largest number of radians per position that exact angles support."""


def exact_turns(frequencies: Tensor) -> Tensor:
    """Convert float64 `frequencies` [...] in radians per position to int64 [2, ...] for `custom_ops.exact_sinusoids`.

    The two rows are the angles of 4096 positions and of one position, without whole turns, in the units of that
    operator.
    """
    import torch

    from posexport.custom_ops.angles import HALF_TURN, SPLIT

    whole = 2 * HALF_TURN
    low = torch.round(torch.remainder(frequencies / (2 * math.pi), 1.0) * whole).to(torch.int64) % whole
    return torch.stack((low * SPLIT % whole, low))


def cos_sin(positions: Tensor, constant: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scale * cos and scale * sin of the angles of positions [B, S] or [B, S, axes]: two tensors [B, S, P]."""
    operator = custom_ops.sinusoids if constant.is_floating_point() else custom_ops.exact_sinusoids
    return operator(positions, constant, scale)


def frequencies_and_turns(constant: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the constant of `angle_constant` as frequencies or as exact turns; the other is None."""
    return (constant, None) if constant.is_floating_point() else (None, constant)


def inexact(spec: Spec, theta: float) -> Iterator[str]:
    """Yield a problem if angles are exact and `theta` gives frequencies above one radian per position."""
    if spec.angles == "exact" and theta < 1.0:
        yield (
            f"theta is {theta:g} with angles exact: at most one radian per position is supported, so give a theta of 1 "
            "or more."
        )
