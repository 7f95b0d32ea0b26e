"""Queries that grow with the logarithm of their position, so that attention stays sharp over long contexts.

temperature  q_i (1 + attn_scale log(1 + floor((p_i + 1) / floor_scale))): what Llama 4 has in the layers without RoPE
             (Meta 2025, its code; after Nakanishi 2025, arXiv:2501.19399, eq. 1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.spec import fields
from posexport.spec.encoding import Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class Temperature(Encoding):
    """Attention temperature tuning: a factor on each query instead of a position."""

    name: ClassVar[str] = "temperature"
    summary: ClassVar[str] = "queries grow with the logarithm of their position (Llama 4's layers without RoPE)"
    source: ClassVar[str] = "Meta 2025 (Llama 4), after Nakanishi 2025, arXiv:2501.19399, eq. 1"
    hook: ClassVar[str] = "rotate"
    base_properties: ClassVar[tuple[str, ...]] = ("norms", "permutation", "prefix", "finite")
    floor_scale: int = fields.integer(8192, "positions that share a factor")
    attn_scale: float = fields.positive(0.1, "weight of the logarithm")

    def check(self, spec: Spec) -> None:
        if spec.qk_norm_type == "l2":
            raise RequestError(
                "qk_norm_type l2 was given with temperature, whose factor such a norm removes: drop one of them."
            )

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return custom_ops.position_temperature(q, positions, self.floor_scale, self.attn_scale), k
