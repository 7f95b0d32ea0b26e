"""Rotary encodings: queries and keys are turned, pair by pair, by angles that are linear in the position.

rope     pair i of a head turns by p * theta^(-2i/rotary_dim) (Su et al. 2021, arXiv:2104.09864, eq. 34)
rope2d   the first half of a head turns by x (column), the second by y (row), pair i of each half by
         p * theta^(-4i/head_dim) (Heo et al. 2024, arXiv:2403.13298, eq. 12 and 13, "RoPE-Axial")

A pair is (2i, 2i+1) in the `interleaved` layout and (i, i + n/2) of the n rotated features in the `half` layout
(for rope2d: of each half).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops, fields
from posexport.errors import RequestError
from posexport.models.encoding import Constant, Encoding, State
from posexport.models.frequencies import inverse_frequencies
from posexport.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("interleaved", "half")


@attrs.frozen(kw_only=True)
class Rope(Encoding):
    """Rotary position embedding over one axis, of the whole head or of its first `rotary_dim` features."""

    name: ClassVar[str] = "rope"
    summary: ClassVar[str] = "rotary: queries and keys turn by angles linear in the position"
    source: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864, eq. 34"
    touches: ClassVar[str] = "rotate"
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    layout: str = fields.choice("interleaved", LAYOUTS, "pairs (2i, 2i+1), or (i, i + rotary_dim/2)")
    rotary_dim: int | None = fields.integer(None, "features of a head that turn (default: all)", optional=True)

    def check(self, spec: Spec) -> None:
        rotary_dim = self.rotary_dim or spec.head_dim
        if rotary_dim % 2 or rotary_dim > spec.head_dim:
            raise RequestError(
                f"rotary_dim is {rotary_dim} with head_dim {spec.head_dim}: it must be even and at most head_dim."
            )

    def constants(self, spec: Spec) -> Mapping[str, Constant]:
        return {"frequencies": inverse_frequencies(self.rotary_dim or spec.head_dim, self.theta)}

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = custom_ops.sinusoids(positions, state["frequencies"])
        head_dim, interleaved = state.spec.head_dim, self.layout == "interleaved"
        return (
            custom_ops.rotate(q, cos, sin, head_dim, interleaved, 1),
            custom_ops.rotate(k, cos, sin, head_dim, interleaved, 1),
        )


@attrs.frozen(kw_only=True)
class Rope2d(Encoding):
    """Axial rotary embedding over (x = column, y = row). Positions are data: any grid, any order, dropped tokens."""

    name: ClassVar[str] = "rope2d"
    summary: ClassVar[str] = "rotary over columns and rows: half of each head turns by x, half by y"
    source: ClassVar[str] = "Heo et al. 2024, arXiv:2403.13298, eq. 12 and 13"
    axes: ClassVar[int] = 2
    touches: ClassVar[str] = "rotate"
    theta: float = fields.positive(100.0, "base of the wavelengths")
    layout: str = fields.choice("interleaved", LAYOUTS, "pairs (2i, 2i+1), or (i, i + head_dim/4) in each half")

    def check(self, spec: Spec) -> None:
        if spec.head_dim % 4:
            raise RequestError(
                f"head_dim is {spec.head_dim}: rope2d gives pairs to two axes, so it must be divisible by 4."
            )

    def constants(self, spec: Spec) -> Mapping[str, Constant]:
        axis = inverse_frequencies(spec.head_dim // 2, self.theta)
        rest = [0.0] * len(axis)
        return {"frequencies": [axis + rest, rest + axis]}

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = custom_ops.sinusoids(positions, state["frequencies"])
        head_dim, interleaved = state.spec.head_dim, self.layout == "interleaved"
        groups = 1 if interleaved else 2
        return (
            custom_ops.rotate(q, cos, sin, head_dim, interleaved, groups),
            custom_ops.rotate(k, cos, sin, head_dim, interleaved, groups),
        )
