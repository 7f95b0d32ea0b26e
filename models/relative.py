"""Relative positions that mix with content, as in Transformer-XL (Dai et al. 2019, arXiv:1901.02860, section 3.3).

logits_ij = q_i.k_j  +  q_i.W_r R(p_i - p_j)  +  u.k_j  +  v.W_r R(p_i - p_j)      (a) + (b) + (c) + (d), times scale

R(d) = [sin(d w_0), ..., sin(d w_n), cos(d w_0), ..., cos(d w_n)], w_f = theta^(-2f/D), or with `table=learned` row
clip(d, -max_distance, max_distance) + max_distance of a trained table. Positions are data, so the paper's shift trick,
which needs consecutive ones, is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.models.angles import angle_constant, check_exact, cos_sin
from posexport.models.frequencies import progression
from posexport.spec import fields
from posexport.spec.encoding import AttentionContext, Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


@attrs.frozen(kw_only=True)
class Relative(Encoding):
    """Transformer-XL's four terms, on sinusoids of the distance or on a trained table of distances."""

    name: ClassVar[str] = "relative"
    summary: ClassVar[str] = "Transformer-XL: content and distance mix in four terms"
    source: ClassVar[str] = "Dai et al. 2019, arXiv:1901.02860, section 3.3"
    angular: ClassVar[bool] = True
    hook: ClassVar[str] = "score"
    base_properties: ClassVar[tuple[str, ...]] = ("shift", "permutation", "prefix", "finite")
    table: str = fields.choice("sinusoidal", ("sinusoidal", "learned"), "vectors of distances: computed or trained")
    theta: float = fields.positive(10_000.0, "base of the wavelengths (table=sinusoidal)")
    max_distance: int | None = fields.integer(
        None, "larger distances share a row (table=learned; default: 128)", optional=True
    )

    def __attrs_post_init__(self) -> None:
        if self.table == "learned" and self.max_distance is None:
            object.__setattr__(self, "max_distance", 128)

    def check(self, spec: Spec) -> None:
        if self.table == "sinusoidal" and self.max_distance is not None:
            raise RequestError("max_distance needs table=learned: sinusoids reach any distance.")
        if self.table == "learned" and self.theta != 10_000.0:
            raise RequestError("theta needs table=sinusoidal: a learned table has no wavelengths.")
        if self.table == "sinusoidal" and spec.hidden_size % 2:
            raise RequestError(
                f"hidden_size {spec.hidden_size} is odd: relative pairs a sine with a cosine, so give an even one."
            )
        if self.table == "learned" and spec.angles == "exact":
            raise RequestError("angles exact needs table=sinusoidal: a learned table has no angles.")
        check_exact(spec, self.theta)

    def uses_fp32_products(self) -> bool:
        return self.table == "sinusoidal"

    def saturation_distance(self) -> int | None:
        return self.max_distance

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        width, heads = spec.num_heads * spec.head_dim, (spec.num_heads, spec.head_dim)
        shapes = {"r_proj.weight": (width, spec.hidden_size), "content_bias": heads, "position_bias": heads}
        if self.max_distance is not None:
            shapes["weight"] = (2 * self.max_distance + 1, spec.hidden_size)
        return shapes

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        if self.table == "learned":
            return {}
        return {"frequencies": angle_constant(spec, dtype, progression(spec.hidden_size, self.theta))}

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        q_positions, k_positions = context.positions()
        q_content = custom_ops.add_head_bias(q, state["content_bias"])
        position_bias, r_proj = state["position_bias"], state["r_proj.weight"]
        scale = state.spec.scale
        if self.max_distance is not None:
            return q_content, custom_ops.relative_table_score(
                q, q_positions, k_positions, position_bias, r_proj, state["weight"], scale
            )
        (q_cos, q_sin), (k_cos, k_sin) = (cos_sin(p, state["frequencies"]) for p in (q_positions, k_positions))
        return q_content, custom_ops.relative_score(q, q_cos, q_sin, k_cos, k_sin, position_bias, r_proj, scale)

    def seeded(self, name: str, values: Tensor) -> Tensor:
        return values * values.shape[1] ** -0.5 if name == "r_proj.weight" else values
