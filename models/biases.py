"""Encodings that add a bias to the logits, before softmax, from the positions of query and key alone.

alibi   -m_h |p_i - p_j|, m_h = 2^(-8h/n) for h = 1 ... n (Press et al. 2022, arXiv:2108.12409, section 3); for n no
        power of two: the slopes of the next lower power c, then every other slope of 2c (the authors' rule)
t5      W[bucket(p_j - p_i), h] (Raffel et al. 2020, arXiv:1910.10683, section 2.1): of the buckets for one
        direction, half are exact distances and half grow with the logarithm up to max_distance
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops, fields
from posexport.errors import RequestError
from posexport.models.encoding import Constant, Encoding, State
from posexport.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of Press et al. for any number of heads, all positive."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    finer = [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + finer[: num_heads - power]


def t5_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> list[int]:
    """The bucket of key position minus query position, for each of -max_distance ... max_distance.

    Integer arithmetic throughout: a logarithm rounded in fp32 puts a distance at a bucket's edge on either side.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    wide = side - exact
    edges = []  # the smallest distance of each bucket after the first that is not exact
    for step in range(1, wide):
        # floor(log(d/exact) / log(max/exact) * wide) >= step  <=>  d^wide >= exact^(wide-step) * max^step
        least, edge = (
            exact ** (wide - step) * max_distance**step,
            round(exact * (max_distance / exact) ** (step / wide)),
        )
        while (edge - 1) ** wide >= least:
            edge -= 1
        while edge**wide < least:
            edge += 1
        edges.append(edge)
    by_distance = [d if d < exact else exact + bisect_right(edges, d) for d in range(max_distance + 1)]
    later = [side + bucket for bucket in by_distance[1:]] if bidirectional else [0] * max_distance
    return by_distance[::-1] + later


@attrs.frozen(kw_only=True)
class Alibi(Encoding):
    """Attention with linear biases: distance lowers the score, symmetrically where the block is not causal."""

    name: ClassVar[str] = "alibi"
    summary: ClassVar[str] = "logits fall linearly with distance, at a slope per head"
    source: ClassVar[str] = "Press et al. 2022, arXiv:2108.12409, section 3"
    touches: ClassVar[str] = "bias"

    def constants(self, spec: Spec) -> Mapping[str, Constant]:
        return {"slopes": alibi_slopes(spec.num_heads)}

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        bias: Tensor = custom_ops.alibi_bias(q_positions, k_positions, state["slopes"])
        return bias


@attrs.frozen(kw_only=True)
class T5(Encoding):
    """A trained bias per bucket of distance and head; bidirectional unless the block is causal."""

    name: ClassVar[str] = "t5"
    summary: ClassVar[str] = "trained bias per bucket of distance and head"
    source: ClassVar[str] = "Raffel et al. 2020, arXiv:1910.10683, section 2.1"
    touches: ClassVar[str] = "bias"
    in_cross: ClassVar[bool] = True  # as in T5's decoder, where cross-attention has no bias
    num_buckets: int = fields.integer(32, "rows of the table", at_least=2, at_most=4096)
    max_distance: int = fields.integer(128, "distance from which all share the last bucket", at_most=2**20)

    def check(self, spec: Spec) -> None:
        exact = self.num_buckets // (2 if spec.causal else 4)
        if self.num_buckets % (2 if spec.causal else 4):
            raise RequestError(
                f"num_buckets is {self.num_buckets}: it must be divisible by "
                f"{'2 when causal' if spec.causal else '4 when not causal'}."
            )
        if self.max_distance <= exact:
            raise RequestError(
                f"max_distance is {self.max_distance}: it must be above {exact}, the distances with a bucket each."
            )

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"relative_attention_bias.weight": (self.num_buckets, spec.num_heads)}

    def reach(self) -> int | None:
        return self.max_distance

    def constants(self, spec: Spec) -> Mapping[str, Constant]:
        return {"buckets": t5_buckets(self.num_buckets, self.max_distance, not spec.causal)}

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        table = state["relative_attention_bias.weight"]
        bias: Tensor = custom_ops.relative_bias(q_positions, k_positions, table, state["buckets"], self.max_distance)
        return bias
