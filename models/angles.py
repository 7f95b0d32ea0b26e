"""Cosines and sines of positions, and their constants, for every encoding with angles.

`--angles parity` (the default) multiplies fp32 positions by fp32 frequencies and gives bit for bit the angles of
PyTorch models, whose error grows with the position (2e-3 at position 100,000). `--angles exact` reduces the angle in
integers first: within 2.5e-7 of float64's cosines and sines at every position up to 2^24.
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
    """The constant for `cos_sin`: `frequencies` in radians per position, in `dtype`; or int64 turns with exact angles,
    except in the float64 reference."""
    import torch

    if spec.angles == "exact" and dtype != torch.float64:
        exact = frequencies(torch.float64)
        if float(exact.max()) > 1.001:
            raise RequestError(
                f"the fastest pair turns by {float(exact.max()):.3g} radians per position with angles exact: at most 1 "
                "is supported, so give a theta or factors of 1 or more."
            )
        return turns(exact)
    return frequencies(dtype)


def cos_sin(positions: Tensor, constant: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of the angles of positions [B, S] or [B, S, axes]: two tensors [B, S, P]."""
    operator = custom_ops.sinusoids if constant.is_floating_point() else custom_ops.exact_sinusoids
    return operator(positions, constant, scale)


def check_exact(spec: Spec, theta: float) -> None:
    """RequestError for exact angles with a `theta` whose frequencies are above one radian per position."""
    if spec.angles == "exact" and theta < 1.0:
        raise RequestError(
            f"theta is {theta:g} with angles exact: at most one radian per position is supported, so give a theta of 1 "
            "or more."
        )
