"""What every encoding with angles shares: its constants, and cosines and sines of positions by way of them.

`--angles parity` (the default) multiplies fp32 positions by fp32 frequencies, as PyTorch models do: bit for bit their
angles, which lose the fraction far out (2e-3 at position 100,000). `--angles exact` reduces the angle in integers
first: within 2.5e-7 of float64's cosines and sines at every position to 2^24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.models.frequencies import turns
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def angle_constant(spec: Spec, dtype: torch.dtype, frequencies: Callable[[torch.dtype], Tensor]) -> Tensor:
    """The constant that `cos_sin` takes: `frequencies` in radians per position, in `dtype`; or int64 turns where angles
    are exact, but for the float64 reference."""
    import torch

    if spec.angles == "exact" and dtype != torch.float64:
        exact = frequencies(torch.float64)
        if float(exact.max()) > 1.001:
            raise RequestError(
                f"the fastest pair turns by {float(exact.max()):.3g} radians a position with angles exact: they are "
                "exact for at most one, so give a theta or factors of 1 or more."
            )
        return turns(exact)
    return frequencies(dtype)


def cos_sin(positions: Tensor, constant: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of the angles of positions [B, S] or [B, S, axes]: two tensors [B, S, P]."""
    made: tuple[Tensor, Tensor]
    if constant.is_floating_point():
        made = custom_ops.sinusoids(positions, constant, scale)
    else:
        made = custom_ops.exact_sinusoids(positions, constant, scale)
    return made


def check_exact(spec: Spec, theta: float) -> None:
    """RequestError where exact angles are asked for and the frequencies of `theta` have none."""
    if spec.angles == "exact" and theta < 1.0:
        raise RequestError(
            f"theta is {theta:g} with angles exact: they are exact for at most a radian per position, so give a theta "
            "of 1 or more."
        )
