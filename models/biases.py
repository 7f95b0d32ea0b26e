"""Encodings that add a bias to the logits before softmax. The bias depends only on the positions of query and key.

alibi     -m_h |p_i - p_j|, m_h = 2^(-8h/n) for h = 1 ... n (Press et al. 2022, arXiv:2108.12409, section 3). If n is
          not a power of two: the slopes of the next lower power c, then every other slope of 2c (the authors' rule)
alibi2d   -m_h d(p_i, p_j) on a grid, d Euclidean (CROMA: Fuller et al. 2023, arXiv:2311.00566, section 3.1) or
          manhattan (data2vec 2.0: Baevski et al. 2022, arXiv:2212.07525)
t5        W[bucket(p_j - p_i), h] (Raffel et al. 2020, arXiv:1910.10683, section 2.1). For each direction, half of the
          buckets are exact distances and half grow with the logarithm up to max_distance
kerple    -r1 log(1 + r2 |p_i - p_j|) or -r1 |p_i - p_j|^r2, both trained per head (Chi et al. 2022, arXiv:2205.09921,
          section 4, and its code, whose lower bound of 0.01 is kept)
sandwich  n/(8h) sum over f of cos((p_i - p_j) w_f), w_f = theta^(-2f/dim) (Chi et al. 2023, arXiv:2212.10356, section 5
          and the listing in its appendix)
fire      f(log(1 + |c (p_i - p_j)|) / log(1 + |c max(L, p_i)|)), f an MLP with one hidden layer and a bias per head,
          c and L trained (Li et al. 2024, arXiv:2310.04418, section 3, and the listing in its appendix)
swin      B[(p_i - p_j)_y, (p_i - p_j)_x], trained (Liu et al. 2021, arXiv:2103.14030, eq. 4)
swinv2    16 sigmoid(MLP(offsets on a log scale)). Logits are cosines of queries and keys times a trained factor per
          head (Liu et al. 2022, arXiv:2111.09883, eq. 2 to 4)

For swin and swinv2, positions are (x = column, y = row) in a window. The batch contains windows, as in Swin's code:
[batch * windows, window_size^2 tokens, hidden_size].
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from posexport import custom_ops
from posexport.models.angles import angle_constant, frequencies_and_turns, inexact, progression
from posexport.spec import fields
from posexport.spec.encoding import Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slopes of Press et al. for any number of heads. All are positive."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    finer = [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + finer[: num_heads - power]


def t5_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> list[int]:
    """Return the bucket of each key position minus query position from -max_distance to max_distance.

    The code uses only integer arithmetic. With an fp32 logarithm, the bucket of a distance at the edge of a bucket
    depends on rounding.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    wide = side - exact
    edges = []  # the smallest distance of each bucket after the first that is not exact
    for step in range(1, wide):
        # floor(log(d/exact) / log(max/exact) * wide) >= step  <=>  d^wide >= exact^(wide-step) * max^step
        bound = exact ** (wide - step) * max_distance**step
        guess = round(exact * (max_distance / exact) ** (step / wide))  # at most 1 away from the edge
        edges.append(bisect_left(range(max_distance + 1), bound, guess - 1, guess + 1, key=lambda d: d**wide))
    by_distance = [d if d < exact else exact + bisect_right(edges, d) for d in range(max_distance + 1)]
    later = [side + bucket for bucket in by_distance[1:]] if bidirectional else [0] * max_distance
    return by_distance[::-1] + later


def slopes_of(given: tuple[float, ...] | None, spec: Spec) -> list[float]:
    """Return the slopes of all heads: the given ones, or the authors'."""
    return [*(given or alibi_slopes(spec.num_heads))]


def wrong_slopes(name: str, slopes: tuple[float, ...] | None, spec: Spec) -> Iterator[str]:
    """Yield a problem if the number of slopes is not the number of heads."""
    if slopes is not None and len(slopes) != spec.num_heads:
        yield f"{name} has {len(slopes)} numbers: it must have one for each of {spec.num_heads} heads."


@attrs.frozen(kw_only=True)
class Alibi(Encoding):
    """Attention with linear biases: the score falls with the distance.

    In a block that is not causal, keys ahead of the query have the same slopes, unless `slopes_ahead` is given.
    """

    name = "alibi"
    summary = "logits fall linearly with distance, at a slope per head"
    source = "Press et al. 2022, arXiv:2108.12409, section 3"
    base_properties = ("shift", "permutation", "prefix", "finite")
    slopes: tuple[float, ...] | None = fields.numbers("slope of each head (default: the authors')")
    slopes_ahead: tuple[float, ...] | None = fields.numbers("slopes for keys ahead of the query (default: the same)")

    def problems(self, spec: Spec) -> Iterator[str]:
        yield from wrong_slopes("slopes", self.slopes, spec)
        yield from wrong_slopes("slopes_ahead", self.slopes_ahead, spec)
        if self.slopes_ahead is not None and spec.causal:
            yield "slopes_ahead was given with causal: no query sees a key ahead of it, so drop it."

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        constants = {"slopes": slopes_of(self.slopes, spec)}
        return constants if self.slopes_ahead is None else {**constants, "slopes_ahead": [*self.slopes_ahead]}

    def steepness(self, spec: Spec) -> float:
        return max(map(abs, (*slopes_of(self.slopes, spec), *(self.slopes_ahead or ()))))

    def slides(self, spec: Spec) -> bool:
        return False  # a product for each pair of tokens is faster than laying out the numbers of all heads

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        ahead = None if self.slopes_ahead is None else state["slopes_ahead"]
        return custom_ops.alibi_bias(q_positions, k_positions, state["slopes"], ahead)


ON_A_GRID = "positions on a grid have no order by which those of cached keys could be computed"


@attrs.frozen(kw_only=True)
class Alibi2d(Encoding):
    name = "alibi2d"
    summary = "logits fall linearly with the distance on a grid, at a slope per head"
    source = "Fuller et al. 2023, arXiv:2311.00566, section 3.1"
    axes = 2
    base_properties = ("shift", "permutation", "prefix", "finite")
    no_cache_reason = ON_A_GRID
    slopes: tuple[float, ...] | None = fields.numbers("slope of each head (default: the authors')")
    distance: str = fields.choice("euclidean", ("euclidean", "manhattan"), "how far two cells are apart")

    def problems(self, spec: Spec) -> Iterator[str]:
        yield from wrong_slopes("slopes", self.slopes, spec)

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        return {"slopes": slopes_of(self.slopes, spec)}

    def steepness(self, spec: Spec) -> float:
        return max(map(abs, slopes_of(self.slopes, spec)))

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        return custom_ops.grid_bias(q_positions, k_positions, state["slopes"], self.distance == "euclidean")


@attrs.frozen(kw_only=True)
class T5(Encoding):
    """A trained bias per bucket of distance and head. It has buckets for both directions unless the block is causal."""

    name = "t5"
    summary = "trained bias per bucket of distance and head"
    source = "Raffel et al. 2020, arXiv:1910.10683, section 2.1"
    base_properties = ("shift", "buckets", "permutation", "prefix", "finite")
    in_cross = True  # as in T5's decoder: its cross-attention gets no bias
    num_buckets: int = fields.integer(32, "rows of the table", at_least=2, at_most=4096)
    max_distance: int = fields.integer(128, "distance from which on all share the last bucket", at_most=2**20)

    def problems(self, spec: Spec) -> Iterator[str]:
        divisor, when = (2, "when causal") if spec.causal else (4, "when not causal")
        exact, remainder = divmod(self.num_buckets, divisor)
        if remainder:
            yield f"num_buckets is {self.num_buckets}: it must be divisible by {divisor} {when}."
        if self.max_distance <= exact:
            yield f"max_distance is {self.max_distance}: it must be above {exact}, the distances with a bucket each."

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"relative_attention_bias.weight": (self.num_buckets, spec.num_heads)}

    def saturation_distance(self) -> int | None:
        return self.max_distance

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        return {"buckets": t5_buckets(self.num_buckets, self.max_distance, not spec.causal)}

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        table = state["relative_attention_bias.weight"]
        return custom_ops.relative_bias(q_positions, k_positions, table, state["buckets"], self.max_distance)


@attrs.frozen(kw_only=True)
class Kerple(Encoding):
    name = "kerple"
    summary = "trained logarithm or power of the distance per head"
    source = "Chi et al. 2022, arXiv:2205.09921, section 4"
    base_properties = ("shift", "permutation", "prefix", "finite")
    kernel: str = fields.choice("log", ("log", "power"), "-r1 log(1 + r2 d), or -r1 d^r2")

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"r1": (spec.num_heads,), "r2": (spec.num_heads,)}

    def seeded(self, name: str, values: Tensor) -> Tensor:
        return values.abs()

    def steepness(self, spec: Spec) -> float:
        return 1.0  # for the power kernel; r1 and r2 are trained

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        return custom_ops.kerple_bias(q_positions, k_positions, state["r1"], state["r2"], self.kernel == "power")


@attrs.frozen(kw_only=True)
class Sandwich(Encoding):
    name = "sandwich"
    summary = "product of sinusoidal embeddings as a bias, at a ratio per head"
    source = "Chi et al. 2023, arXiv:2212.10356, section 5"
    angular = True
    base_properties = ("shift", "permutation", "prefix", "finite")
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    dim: int = fields.integer(128, "width of the embeddings", at_least=2, at_most=65536)

    def problems(self, spec: Spec) -> Iterator[str]:
        if self.dim % 2:
            yield f"dim is {self.dim}: sandwich pairs a sine with a cosine, so give an even one."
        yield from inexact(spec, self.theta)

    def rounding(self, spec: Spec, position: int, keys: int) -> float:
        # The bias is a sum of dim terms that nearly cancel for near keys. ONNX Runtime adds the terms one by one, so
        # its error may be ten times that of torch, which adds them in parts. For one query, it computes angles of
        # distances. Otherwise angles are differences of two rounded positions.
        rounded = spec.angles == "parity" and not spec.consecutive
        return 8 * self.dim * 2.0**-24 + (keys * 2.0**-24 if rounded else 0.0)

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        frequencies = angle_constant(spec, dtype, progression(self.dim, self.theta))
        return {"frequencies": frequencies, "rates": [spec.num_heads / (8.0 * h) for h in range(1, spec.num_heads + 1)]}

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        frequencies, turns = frequencies_and_turns(state["frequencies"])
        # Softmax ignores a constant, and masks in half precision need small values. With sinks, the constant matters.
        below_zero = not state.spec.sinks
        return custom_ops.cosine_bias(q_positions, k_positions, state["rates"], frequencies, turns, below_zero)

    def ahead_bias(self, state: State, ahead: Tensor) -> Tensor:
        """Compute the bias for each difference in `ahead` from a coarse and a fine part.

        Queries get the coarse parts as positions and keys the fine parts. A few of each give all differences.
        """
        from posexport.custom_ops.difference_relative import coarse_and_fine

        coarse, fine = coarse_and_fine(ahead)
        by_block = self.bias(state, coarse, fine.expand(coarse.shape[0], -1))
        assert by_block is not None
        return by_block.flatten(2).unsqueeze(2)[..., : ahead.shape[1]]


@attrs.frozen(kw_only=True)
class Fire(Encoding):
    name = "fire"
    summary = "MLP of the distance relative to the query's position, on a log scale"
    source = "Li et al. 2024, arXiv:2310.04418, section 3"
    mlp_width: int = fields.integer(32, "width of the hidden layer", at_most=65536)
    init_L: float = fields.positive(512.0, "threshold that L_multiplier multiplies")

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {
            "c": (),
            "L_multiplier": (),
            "mlp.0.weight": (self.mlp_width, 1),
            "mlp.0.bias": (self.mlp_width,),
            "mlp.2.weight": (spec.num_heads, self.mlp_width),
            "mlp.2.bias": (spec.num_heads,),
        }

    def seeded(self, name: str, values: Tensor) -> Tensor:
        starts = {"c": 0.1, "L_multiplier": 1.0}
        if name in starts:
            return (values * 0.1 + 1) * starts[name]
        return values * 0.3 if values.ndim == 2 and values.shape[1] > 1 else values

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        c, multiplier, w1, b1, w2, b2 = (state[name] for name in self.weights(state.spec))
        return custom_ops.fire_bias(q_positions, k_positions, c, multiplier, w1, b1, w2, b2, init_l=self.init_L)


@attrs.frozen(kw_only=True)
class Swin(Encoding):
    name = "swin"
    summary = "trained bias per offset within a window, and head"
    source = "Liu et al. 2021, arXiv:2103.14030, eq. 4"
    axes = 2
    base_properties = ("shift", "permutation", "prefix", "finite")
    no_cache_reason = ON_A_GRID
    window_size: int = fields.integer(7, "columns and rows of a window", at_most=1024)

    def position_limits(self) -> tuple[int, ...] | None:
        return (self.window_size, self.window_size)

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"relative_position_bias_table": ((2 * self.window_size - 1) ** 2, spec.num_heads)}

    def table(self, state: State) -> Tensor:
        """Return the bias of each offset and head, [(2 window_size - 1)^2, N]."""
        return state["relative_position_bias_table"]

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        return custom_ops.window_bias(q_positions, k_positions, self.table(state), self.window_size)

    def slides(self, spec: Spec) -> bool:
        return False

    def order_bias(self, state: State, q: Tensor) -> Tensor | None:
        return custom_ops.window_order_bias(self.table(state), q, self.window_size)


MLP_WIDTH = 512


@attrs.frozen(kw_only=True)
class SwinV2(Swin):
    name = "swinv2"
    summary = "bias from an MLP of log-spaced offsets within a window, and cosine attention"
    source = "Liu et al. 2022, arXiv:2111.09883, eq. 2 to 4"
    window_size: int = fields.integer(8, "columns and rows of a window", at_least=2, at_most=1024)
    pretrained_window_size: int | None = fields.integer(
        None, "window_size in the training of the MLP (default: window_size)", at_least=2
    )

    def default_scale(self, head_dim: int) -> float:
        return 1.0

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.scale != 1.0:
            yield f"scale is {spec.scale:g} with swinv2: its trained logit_scale replaces the scale, so drop it."
        if spec.qk_norm:
            yield "qk_norm was given with swinv2, which takes cosines of queries and keys: drop it."

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {
            "continuous_position_bias_mlp.0.weight": (MLP_WIDTH, 2),
            "continuous_position_bias_mlp.0.bias": (MLP_WIDTH,),
            "continuous_position_bias_mlp.2.weight": (spec.num_heads, MLP_WIDTH),
            "logit_scale": (spec.num_heads, 1, 1),
        }

    def seeded(self, name: str, values: Tensor) -> Tensor:
        if name == "logit_scale":
            return values * 0.1 + math.log(10.0)
        return values * 0.05 if values.shape[-1] == MLP_WIDTH and values.ndim == 2 else values

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        import torch

        reach = self.window_size - 1
        offsets = torch.arange(-reach, reach + 1, dtype=torch.int64).to(dtype)
        rows = torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"), -1).flatten(0, 1)
        rows = rows / ((self.pretrained_window_size or self.window_size) - 1) * 8
        return {"coordinates": torch.sign(rows) * torch.log2(torch.abs(rows) + 1.0) / math.log2(8)}

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        head_dim = state.spec.head_dim
        return custom_ops.cosine_heads(q, state["logit_scale"], head_dim), custom_ops.cosine_heads(k, None, head_dim)

    def table(self, state: State) -> Tensor:
        layers = [state[f"continuous_position_bias_mlp.{name}"] for name in ("0.weight", "0.bias", "2.weight")]
        return custom_ops.window_table(state["coordinates"], *layers)
