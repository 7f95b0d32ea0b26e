"""Encodings whose scores mix content and position, other than Transformer-XL (posexport.models.relative).

shaw      logits scale q_i.(k_j + K[r]), outputs sum_j a_ij (v_j + V[r]), r = clip(p_j - p_i), K and V trained rows that
          all heads share (Shaw et al. 2018, arXiv:1803.02155, eq. 3 to 5)
deberta   logits (q_i.k_j + q_i.K[b] + k_j.Q[b]) / sqrt(3 head_dim), K and Q projections of one table of 2k rows, b =
          clip(p_i - p_j) + k, or buckets that grow with the logarithm (DeBERTa: He et al. 2021, arXiv:2006.03654,
          eq. 4; v2 and v3: its code). As in the code, both terms read the row of p_i - p_j.
cope      logits q_i.(k_j + e[c]), c = how many gates sigmoid(q_i.k_t) open from j to i (CoPE: Golovneva et al. 2024,
          arXiv:2405.18719, eq. 3 to 5). As in its listing, gates read scaled logits and e is not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.spec import fields
from posexport.spec.encoding import AttentionContext, Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


@attrs.frozen(kw_only=True)
class Shaw(Encoding):
    """Trained vectors for each distance, added to keys and to values."""

    name: ClassVar[str] = "shaw"
    summary: ClassVar[str] = "trained vectors for each distance, added to keys and values"
    source: ClassVar[str] = "Shaw et al. 2018, arXiv:1803.02155, eq. 3 to 5"
    hook: ClassVar[str] = "score"
    base_properties: ClassVar[tuple[str, ...]] = ("shift", "permutation", "prefix", "finite")
    reads_keys: ClassVar[bool] = True
    max_distance: int = fields.integer(16, "larger distances share a row", at_most=2**20)
    max_distance_ahead: int = fields.integer(
        None, "the same for keys ahead of the query (default: max_distance)", at_least=0, at_most=2**20, optional=True
    )
    relative_values: bool = fields.flag(True, "values have vectors too, not only keys")

    def __attrs_post_init__(self) -> None:
        if self.max_distance_ahead is None:
            object.__setattr__(self, "max_distance_ahead", self.max_distance)

    def saturation_distance(self) -> int | None:
        return max(self.max_distance, self.max_distance_ahead)

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        rows = (self.max_distance + self.max_distance_ahead + 1, spec.head_dim)
        return {"keys.weight": rows, **({"values.weight": rows} if self.relative_values else {})}

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        distances, scale = (self.max_distance, self.max_distance_ahead), state.spec.scale
        return q, custom_ops.offset_score(q, *context.positions(), state["keys.weight"], *distances, scale)

    def values(self, state: State, q: Tensor, context: AttentionContext, bias: Tensor | None) -> Tensor | None:
        if not self.relative_values:
            return None
        inputs = (context.k, bias, context.mask, context.sinks, context.write_indices, *context.positions())
        distances = (self.max_distance, self.max_distance_ahead)
        attributes = state.spec.attention_attributes()
        return custom_ops.offset_values(q, *inputs, state["values.weight"], *attributes, *distances)


def log_bucket(distance: int, buckets: int, max_position: int) -> int:
    """DeBERTa v2's bucket of a distance: the distance up to half of `buckets`, then growing with its logarithm."""
    middle, size = buckets // 2, abs(distance)
    if size <= middle:
        return distance
    bucket = math.ceil(math.log(size / middle) / math.log((max_position - 1) / middle) * (middle - 1)) + middle
    return bucket if distance > 0 else -bucket


@attrs.frozen(kw_only=True)
class Deberta(Encoding):
    """Disentangled attention: content to position, position to content, and content to content."""

    name: ClassVar[str] = "deberta"
    summary: ClassVar[str] = "DeBERTa: content to position and position to content, through one table of distances"
    source: ClassVar[str] = "He et al. 2021, arXiv:2006.03654, eq. 4"
    hook: ClassVar[str] = "score"
    base_properties: ClassVar[tuple[str, ...]] = ("shift", "permutation", "prefix", "finite")
    reads_keys: ClassVar[bool] = True
    max_relative_positions: int = fields.integer(512, "distances in the table, on either side", at_most=2**20)
    position_buckets: int | None = fields.integer(
        None,
        "rows on either side, growing with the logarithm of the distance (v2; default: a row each)",
        at_least=4,
        at_most=2**20,
        optional=True,
    )
    pos_att_type: str = fields.choice("c2p|p2c", ("c2p|p2c", "c2p", "p2c"), "terms besides content to content")
    pos_bias: bool = fields.flag(False, "the projections of the table have biases (v2)")

    def default_scale(self, head_dim: int) -> float:
        return float((head_dim * (1 + len(self.pos_att_type.split("|")))) ** -0.5)

    def check(self, spec: Spec) -> None:
        if spec.num_kv_heads != spec.num_heads:
            raise RequestError(
                f"num_kv_heads is {spec.num_kv_heads} with {spec.num_heads} heads: deberta scores keys of each head, "
                "so give as many key heads as query heads."
            )
        if self.position_buckets is not None and self.position_buckets // 2 >= self.max_relative_positions - 1:
            raise RequestError(
                f"position_buckets is {self.position_buckets} with max_relative_positions "
                f"{self.max_relative_positions}: half of the buckets are exact distances, so raise the latter."
            )

    def span(self) -> int:
        """Rows of the table on either side."""
        return self.position_buckets or self.max_relative_positions

    def saturation_distance(self) -> int | None:
        return self.max_relative_positions

    def _projections(self) -> list[str]:
        names = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        return [name for kind, name in names.items() if kind in self.pos_att_type.split("|")]

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        width = spec.num_heads * spec.head_dim
        shapes: dict[str, tuple[int, ...]] = {"weight": (2 * self.span(), spec.hidden_size)}
        for name in self._projections():
            shapes[f"{name}.weight"] = (width, spec.hidden_size)
            if self.pos_bias:
                shapes[f"{name}.bias"] = (width,)
        return shapes

    def seeded(self, name: str, values: Tensor) -> Tensor:
        if name.endswith("_proj.weight"):
            return values * float(values.shape[1] ** -0.5)
        return super().seeded(name, values)

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        span, reach = self.span(), self.max_relative_positions

        def row(distance: int) -> int:
            if self.position_buckets is not None:
                distance = log_bucket(distance, self.position_buckets, self.max_relative_positions)
            return min(max(distance + span, 0), 2 * span - 1)

        return {"buckets": [row(distance) for distance in range(-reach, reach + 1)]}

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        def table(name: str) -> Tensor:
            rows = state[f"{name}.weight"] @ state["weight"].T
            return rows + state[f"{name}.bias"].unsqueeze(-1) if self.pos_bias else rows

        tables = {name: table(name) for name in self._projections()}
        return q, custom_ops.disentangled_score(
            q,
            context.k,
            *context.positions(),
            state["buckets"],
            tables.get("pos_key_proj"),
            tables.get("pos_query_proj"),
            state.spec.num_heads,
            state.spec.scale,
        )


@attrs.frozen(kw_only=True)
class Cope(Encoding):
    """Contextual positions: a query counts the keys for which its gates open, and reads no `position_ids`."""

    name: ClassVar[str] = "cope"
    summary: ClassVar[str] = "contextual positions: a query counts the keys for which its gates open"
    source: ClassVar[str] = "Golovneva et al. 2024, arXiv:2405.18719, eq. 3 to 5"
    axes: ClassVar[int] = 0
    hook: ClassVar[str] = "score"
    reads_keys: ClassVar[bool] = True
    npos_max: int = fields.integer(64, "number of distinct positions", at_least=2, at_most=2**20)

    def check(self, spec: Spec) -> None:
        if not spec.causal:
            raise RequestError("cope was given without causal: it counts keys up to the query, so add causal.")

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"pos_emb": (spec.head_dim, self.npos_max)}

    def seeded(self, name: str, values: Tensor) -> Tensor:
        return values * float(values.shape[0] ** -0.5)

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        *attributes, _ = state.spec.attention_attributes()  # its logits have no softcap
        inputs = (q, context.k, context.mask, context.write_indices, state["pos_emb"])
        return q, custom_ops.contextual_score(*inputs, *attributes)
