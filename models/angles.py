"""Frequencies, cosines and sines of positions, for every encoding with angles.

omega_i = 1 / theta^(2i/dim) for i = 0 ... dim/2 - 1 (Vaswani et al. 2017, section 3.5; Su et al. 2021, eq. 15).

Frequencies are evaluated with the operations of transformers: an error of one unit in the last place of one gives an
error of 6e-3 in the angle at position 100,000.

`--angles parity` (the default) multiplies fp32 positions by fp32 frequencies and gives bit for bit the angles of
PyTorch models, whose error grows with the position (2e-3 at position 100,000). `--angles exact` reduces the angle in
integers first: within 2.5e-7 of float64's cosines and sines at every position up to 2^24.
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
    """The dim/2 angular frequencies, in radians per position, highest first: in float32 for graphs, in float64 for the
    reference."""
    import torch

    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype)
    return torch.as_tensor(1.0 / theta ** (steps / dim))


def progression(dim: int, theta: float) -> Callable[[torch.dtype], Tensor]:
    """`inverse_frequencies` as a function of the dtype, as `angle_constant` takes it."""
    return lambda dtype: inverse_frequencies(dim, theta, dtype)


def angle_constant(spec: Spec, dtype: torch.dtype, frequencies: Callable[[torch.dtype], Tensor]) -> Tensor:
    """The constant for `cos_sin`: `frequencies` in radians per position, in `dtype`; or with exact angles, except in
    the float64 reference, `exact_turns` of them."""
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
"""Radians per position that exact angles support."""


def exact_turns(frequencies: Tensor) -> Tensor:
    """Float64 `frequencies` [...] in radians per position as int64 [2, ...] in the units of
    `custom_ops.exact_sinusoids`: the angles of 4096 positions and of one position, without whole turns."""
    import torch

    from posexport.custom_ops.angles import HALF_TURN, SPLIT

    whole = 2 * HALF_TURN
    low = torch.round(torch.remainder(frequencies / (2 * math.pi), 1.0) * whole).to(torch.int64) % whole
    return torch.stack((low * SPLIT % whole, low))


def cos_sin(positions: Tensor, constant: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of the angles of positions [B, S] or [B, S, axes]: two tensors [B, S, P]."""
    operator = custom_ops.sinusoids if constant.is_floating_point() else custom_ops.exact_sinusoids
    return operator(positions, constant, scale)


def inexact(spec: Spec, theta: float) -> Iterator[str]:
    """The problem of exact angles with a `theta` whose frequencies are above one radian per position."""
    if spec.angles == "exact" and theta < 1.0:
        yield (
            f"theta is {theta:g} with angles exact: at most one radian per position is supported, so give a theta of 1 "
            "or more."
        )
