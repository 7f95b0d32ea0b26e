"""Encodings whose scores mix content and position.

relative  logits q_i.k_j + q_i.W_r R(p_i - p_j) + u.k_j + v.W_r R(p_i - p_j), times scale (Transformer-XL: Dai et al.
          2019, arXiv:1901.02860, section 3.3). R(d) = [sin(d w_0), ..., sin(d w_n), cos(d w_0), ..., cos(d w_n)], w_f =
          theta^(-2f/D). With `table=learned`, R(d) is row clip(d, -max_distance, max_distance) + max_distance of a
          trained table. The paper's shift trick needs consecutive positions. It is used if a spec promises them.
shaw      logits scale q_i.(k_j + K[r]), outputs sum_j a_ij (v_j + V[r]), r = clip(p_j - p_i), K and V trained rows that
          all heads share (Shaw et al. 2018, arXiv:1803.02155, eq. 3 to 5)
deberta   logits (q_i.k_j + q_i.K[b] + k_j.Q[b]) / sqrt(3 head_dim). K and Q are projections of one table of 2k rows.
          b = clip(p_i - p_j) + k, or b is a bucket; buckets grow with the logarithm of the distance (DeBERTa: He et
          al. 2021, arXiv:2006.03654, eq. 4; v2 and v3: its code). As in the code, both terms read the row of p_i - p_j.
cope      logits q_i.(k_j + e[c]), c = the sum of the gates sigmoid(q_i.k_t) from j to i (CoPE: Golovneva et al. 2024,
          arXiv:2405.18719, eq. 3 to 5). As in its listing, gates read scaled logits and e is not scaled.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from posexport import custom_ops
from posexport.models.angles import angle_constant, cos_sin, frequencies_and_turns, inexact, progression
from posexport.spec import fields
from posexport.spec.encoding import AttentionContext, Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


def by_head(table: Tensor, spec: Spec) -> Tensor:
    """Reshape [num_heads*head_dim, rows] to [num_heads, rows, head_dim]."""
    made: Tensor = table.unflatten(0, (spec.num_heads, -1)).transpose(1, 2)
    return made


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a table [rows, D] at an index [...]: [..., D]."""
    made: Tensor = table.index_select(0, index.flatten()).unflatten(0, index.shape)
    return made


def heads_of(spec: Spec) -> dict[str, Any]:
    """Return the attributes that operators for scores by difference share."""
    return {"num_heads": spec.num_heads, "scale": spec.scale, "causal": spec.causal}


@attrs.frozen(kw_only=True)
class Relative(Encoding):
    name = "relative"
    summary = "Transformer-XL: content and distance mix in four terms"
    source = "Dai et al. 2019, arXiv:1901.02860, section 3.3"
    angular = True
    base_properties = ("shift", "permutation", "prefix", "finite")
    table: str = fields.choice("sinusoidal", ("sinusoidal", "learned"), "vectors of distances: computed or trained")
    theta: float = fields.positive(10_000.0, "base of the wavelengths (table=sinusoidal)")
    max_distance: int | None = fields.integer(None, "larger distances share a row (table=learned; default: 128)")

    def __attrs_post_init__(self) -> None:
        if self.table == "learned" and self.max_distance is None:
            object.__setattr__(self, "max_distance", 128)

    def problems(self, spec: Spec) -> Iterator[str]:
        if self.table == "sinusoidal" and self.max_distance is not None:
            yield "max_distance needs table=learned: sinusoids reach any distance."
        if self.table == "learned" and self.theta != 10_000.0:
            yield "theta needs table=sinusoidal: a learned table has no wavelengths."
        if self.table == "sinusoidal" and spec.hidden_size % 2:
            yield f"hidden_size {spec.hidden_size} is odd: relative pairs a sine with a cosine, so give an even one."
        yield from inexact(spec, self.theta)

    def has_angles(self) -> bool:
        return self.table == "sinusoidal"

    def saturation_distance(self) -> int | None:
        return self.max_distance

    def rounding(self, spec: Spec, position: int, keys: int) -> float:
        # ONNX Runtime computes angles of distances for one query. Otherwise angles are differences of two rounded
        # positions.
        rounded = self.has_angles() and spec.angles == "parity" and not spec.consecutive
        return keys * 2.0**-23 if rounded else 0.0

    def slides(self, spec: Spec) -> bool:
        return self.table == "sinusoidal"

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
        q_content = custom_ops.add_head_bias(q, state["content_bias"])
        if context.ahead is not None:
            return q_content, self._by_difference(state, q, context.ahead)
        positions, scale = context.positions(), state.spec.scale
        weights = state["position_bias"], state["r_proj.weight"]
        if self.max_distance is not None:
            return q_content, custom_ops.relative_table_score(q, *positions, *weights, state["weight"], scale)
        frequencies, turns = frequencies_and_turns(state["frequencies"])
        return q_content, custom_ops.relative_score(q, *positions, *weights, frequencies, turns, scale)

    def _by_difference(self, state: State, q: Tensor, ahead: Tensor) -> Tensor:
        """Compute terms (b) and (d) for consecutive positions."""
        from posexport.custom_ops.difference_relative import coarse_and_fine

        spec, weights = state.spec, (state["position_bias"], state["r_proj.weight"])
        coarse, fine = (cos_sin(at, state["frequencies"]) for at in coarse_and_fine(ahead))
        inputs = (q, ahead, *coarse, *fine, *weights)
        return custom_ops.difference_relative_score(*inputs, scale=spec.scale, causal=spec.causal)

    def seeded(self, name: str, values: Tensor) -> Tensor:
        return values * values.shape[1] ** -0.5 if name == "r_proj.weight" else values


@attrs.frozen(kw_only=True)
class Shaw(Encoding):
    name = "shaw"
    summary = "trained vectors for each distance, added to keys and values"
    source = "Shaw et al. 2018, arXiv:1803.02155, eq. 3 to 5"
    base_properties = ("shift", "permutation", "prefix", "finite")
    max_distance: int = fields.integer(16, "larger distances share a row", at_most=2**20)
    max_distance_ahead: int = fields.integer(
        None, "the same for keys ahead of the query (default: max_distance)", at_least=0, at_most=2**20
    )
    relative_values: bool = fields.flag(True, "values have vectors too, not only keys")

    def __attrs_post_init__(self) -> None:
        if self.max_distance_ahead is None:
            object.__setattr__(self, "max_distance_ahead", self.max_distance)

    def saturation_distance(self) -> int | None:
        return max(self.max_distance, self.max_distance_ahead)

    def slides(self, spec: Spec) -> bool:
        return spec.causal

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        rows = (self.max_distance + self.max_distance_ahead + 1, spec.head_dim)
        return {"keys.weight": rows, **({"values.weight": rows} if self.relative_values else {})}

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        if context.ahead is not None:
            table = state["keys.weight"].unsqueeze(0)
            return q, custom_ops.difference_score(q, table, self._rows(context.ahead), **heads_of(state.spec))
        distances = (self.max_distance, self.max_distance_ahead)
        return q, custom_ops.offset_score(q, *context.positions(), state["keys.weight"], *distances, state.spec.scale)

    def _rows(self, ahead: Tensor) -> Tensor:
        """Return the table row of each difference of consecutive positions."""
        return ahead.clamp(-self.max_distance, self.max_distance_ahead) + self.max_distance

    def values(
        self, state: State, q: Tensor, keys: Tensor, context: AttentionContext, bias: Tensor | None
    ) -> Tensor | None:
        if not self.relative_values:
            return None
        if context.ahead is not None:
            table = state["values.weight"][: self.max_distance + 1]  # no query sees keys ahead of it
            others = (bias, context.mask, context.sinks, context.write_indices, table)
            return custom_ops.difference_values(q, keys, *others, **state.spec.attention_attributes())
        inputs = (bias, context.mask, context.sinks, context.write_indices)
        return custom_ops.offset_values(
            q,
            keys,
            *inputs,
            *context.positions(),
            state["values.weight"],
            behind=self.max_distance,
            ahead=self.max_distance_ahead,
            **state.spec.attention_attributes(),
        )


def log_bucket_ends(buckets: int, max_position: int) -> list[int]:
    """Return the largest distance of each of DeBERTa v2's buckets, from bucket buckets // 2 to the last in the table.

    With m = buckets // 2, a distance d > m has the bucket m + ceil(log(d / m) / log((max_position - 1) / m) (m - 1)).
    The code decides with integers. If that quotient is nearly a whole number, ceil of the rounded quotient may be off
    by one.
    """
    middle, furthest = buckets // 2, max_position - 1
    intervals = middle - 1
    ends = []
    for step in range(buckets - middle):
        # d is in bucket m + step or an earlier one <=> d^intervals m^step <= furthest^step m^intervals
        end = middle * (furthest / middle) ** (step / intervals)  # correct to 1e-8 for positions up to 2^20
        nearest = round(end)
        if abs(end - nearest) > 1e-6:
            ends.append(math.floor(end))
        else:
            bound = furthest**step * middle**intervals
            ends.append(nearest if nearest**intervals * middle**step <= bound else nearest - 1)
    return ends


def log_buckets(buckets: int, max_position: int) -> list[int]:
    """Return the row of each query position minus key position from -n to n in a table of 2 * `buckets` rows.

    n is the first distance from which on all distances have the last row.
    """
    ends = log_bucket_ends(buckets, max_position)
    middle, reach = buckets // 2, ends[-1] + 1
    sizes = [distance if distance <= middle else middle + bisect_left(ends, distance) for distance in range(reach + 1)]
    return [buckets - size for size in sizes[:0:-1]] + [min(buckets + size, 2 * buckets - 1) for size in sizes]


MAX_REACH = 2**21
"""The largest distance in a table of buckets."""


@attrs.frozen(kw_only=True)
class Deberta(Encoding):
    name = "deberta"
    summary = "DeBERTa: content to position and position to content, through one table of distances"
    source = "He et al. 2021, arXiv:2006.03654, eq. 4"
    base_properties = ("shift", "permutation", "prefix", "finite")
    max_relative_positions: int = fields.integer(512, "distances in the table, on either side", at_most=2**20)
    position_buckets: int | None = fields.integer(
        None,
        "rows on either side, growing with the logarithm of the distance (v2; default: a row each)",
        at_least=4,
        at_most=4096,
    )
    pos_att_type: str = fields.choice("c2p|p2c", ("c2p|p2c", "c2p", "p2c"), "terms besides content to content")
    pos_bias: bool = fields.flag(False, "the projections of the table have biases (v2)")

    def default_scale(self, head_dim: int) -> float:
        return float((head_dim * (1 + len(self.pos_att_type.split("|")))) ** -0.5)

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.num_kv_heads != spec.num_heads:
            yield (
                f"num_kv_heads is {spec.num_kv_heads} with {spec.num_heads} heads: deberta scores keys of each head, "
                "so give as many key heads as query heads."
            )
        if self.position_buckets is None:
            return
        if self.position_buckets // 2 >= self.max_relative_positions - 1:
            yield (
                f"position_buckets is {self.position_buckets} with max_relative_positions "
                f"{self.max_relative_positions}: half of the buckets are exact distances, so raise the latter."
            )
        elif log_bucket_ends(self.position_buckets, self.max_relative_positions)[-1] >= MAX_REACH:
            yield (
                f"position_buckets is {self.position_buckets} with max_relative_positions "
                f"{self.max_relative_positions}: its last bucket begins at distances beyond {MAX_REACH}, so give an "
                "even number of buckets."
            )

    def slides(self, spec: Spec) -> bool:
        return True

    def span(self) -> int:
        """Return the number of rows of the table on either side."""
        return self.position_buckets or self.max_relative_positions

    def saturation_distance(self) -> int | None:
        if self.position_buckets is None:
            return self.max_relative_positions
        return log_bucket_ends(self.position_buckets, self.max_relative_positions)[-1] + 1

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
        if self.position_buckets is not None:
            return {"buckets": log_buckets(self.position_buckets, self.max_relative_positions)}
        reach = self.max_relative_positions
        return {"buckets": [min(row, 2 * reach - 1) for row in range(2 * reach + 1)]}

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        def table(name: str) -> Tensor:
            rows = state[f"{name}.weight"] @ state["weight"].T
            return rows + state[f"{name}.bias"].unsqueeze(-1) if self.pos_bias else rows

        projected = {name: table(name) for name in self._projections()}
        keys, queries = projected.get("pos_key_proj"), projected.get("pos_query_proj")
        score = self._by_difference if context.ahead is not None else self._by_position
        return self._with_last(state, q, queries), score(state, q, context, keys, queries)

    def _with_last(self, state: State, q: Tensor, queries: Tensor | None) -> Tensor:
        """Add the second term of far keys to the queries. Scores are smaller by this amount
        (custom_ops.disentangled_score)."""
        if queries is None or state.spec.softcap:  # the cap applies to the product of queries and keys
            return q
        last = queries.index_select(1, state["buckets"][-1:])
        return custom_ops.add_head_bias(q, last.reshape(state.spec.num_heads, -1))

    def _by_position(
        self, state: State, q: Tensor, context: AttentionContext, keys: Tensor | None, queries: Tensor | None
    ) -> Tensor:
        inputs = (context.k, *context.positions(), state["buckets"], keys, queries, context.past, context.write_indices)
        spec, whole = state.spec, bool(state.spec.softcap)
        return custom_ops.disentangled_score(q, *inputs, num_heads=spec.num_heads, scale=spec.scale, whole=whole)

    def _by_difference(
        self, state: State, q: Tensor, context: AttentionContext, keys: Tensor | None, queries: Tensor | None
    ) -> Tensor:
        """Compute the terms for consecutive positions."""
        spec, reach = state.spec, state["buckets"].shape[0] // 2
        # only keys that are seen: with causal, half of the table
        nearest, first = (reach, self.span()) if spec.causal else (0, 0)
        rows = state["buckets"][nearest:] - first
        queries, keys = (None if table is None else by_head(table[:, first:], spec) for table in (queries, keys))
        if queries is not None:
            cache = context.past, context.write_indices
            options = heads_of(spec) | {"whole": bool(spec.softcap)}
            return custom_ops.difference_disentangled_score(q, context.k, rows, queries, keys, *cache, **options)
        assert keys is not None and context.ahead is not None  # there is at least one term
        distances = (-context.ahead).clamp(nearest - reach, reach) + (reach - nearest)
        return custom_ops.difference_score(q, keys, rows_at(rows, distances), **heads_of(spec))


@attrs.frozen(kw_only=True)
class Cope(Encoding):
    name = "cope"
    summary = "contextual positions: a query counts the keys for which its gates open"
    source = "Golovneva et al. 2024, arXiv:2405.18719, eq. 3 to 5"
    axes = 0
    npos_max: int = fields.integer(64, "number of distinct positions", at_least=2, at_most=2**20)

    def problems(self, spec: Spec) -> Iterator[str]:
        if not spec.causal:
            yield "cope was given without causal: it counts keys up to the query, so add causal."

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"pos_emb": (spec.head_dim, self.npos_max)}

    def lengths(self) -> tuple[int, ...]:
        return (self.npos_max,)

    def rounding(self, spec: Spec, position: int, keys: int) -> float:
        # A place is a sum of up to npos_max with a rounding for each key. torch adds in double precision, other
        # runtimes do not. Rows of the table differ by several times 1.
        return float(keys**0.5 * min(keys, self.npos_max) * 2.0**-21)

    def seeded(self, name: str, values: Tensor) -> Tensor:
        return values * float(values.shape[0] ** -0.5)

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        attributes = state.spec.attention_attributes()
        del attributes["softcap"]  # its logits have no cap
        inputs = (context.mask, context.write_indices, state["pos_emb"])
        keys = context.k
        if context.past is not None:
            keys = custom_ops.cached_keys(context.past, keys, context.write_indices, state.spec.num_kv_heads)
        return q, custom_ops.contextual_score(q, keys, *inputs, **attributes)
