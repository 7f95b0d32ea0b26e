"""The base class of all positional encodings: parameters, owned weights, constants, and the hooks that a block calls.

An encoding overrides the hooks that it uses. The other hooks do nothing. The classes are pure data until a hook runs,
because importing them must not import torch. A hook uses tensors only through `posexport.custom_ops`, which loads on
first use, and through the methods of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.spec import Spec

    Constant = Tensor | list[Any]
    """A constant: a tensor, or nested lists of float or of int (int64)."""


class State(Protocol):
    """What a hook sees of the block: its spec, and the encoding's weights and constants by name."""

    spec: Spec

    def __getitem__(self, name: str) -> Tensor: ...


@attrs.define(kw_only=True)  # not frozen: torch.compile cannot trace how attrs fills a frozen class
class AttentionContext:
    """Everything that attention of one layer reads, except the queries. A field is None if the block has no such input.

    `k` are the new keys [B, S, K*head_dim], or an encoder's keys [B, T, K*head_dim]. `past` [B, K, P, head_dim] are the
    cached keys before them. Positions are int64 [B, S] and [B, T], with a last dimension for several axes. `mask` is
    int64 [B, T], `sinks` [N], `write_indices` int64 [B].

    `ahead`, int64 [B|1, L], contains the differences of consecutive positions if numbers are laid out by a slide
    (`Encoding.slides`, posexport.custom_ops.differences). Otherwise it is None.
    """

    k: Tensor
    q_positions: Tensor | None
    k_positions: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    write_indices: Tensor | None
    past: Tensor | None = None
    ahead: Tensor | None = None

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys. ValueError in a block that has none."""
        if self.q_positions is None or self.k_positions is None:
            raise ValueError("this block takes no positions")
        return self.q_positions, self.k_positions


@attrs.frozen(kw_only=True)
class Encoding:
    """The parameters and hooks of one positional encoding. A subclass is one row of the ENCODINGS table.

    Shapes: B batch, S queries, T keys, D hidden_size, N query heads, K key heads.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    axes: ClassVar[int] = 1
    """The number of integers in one position: 0 (the encoding ignores positions), 1, or more."""
    hook: ClassVar[str] = ""
    """The main hook that it overrides: embed, bias, score or rotate. Empty if it overrides none."""
    at_input: ClassVar[bool] = False
    """Whether it acts once, before the first layer, and not in every layer. Its hook is then embed."""
    in_cross: ClassVar[bool] = False
    """Whether a block with cross-attention can have it. It then acts at the input, or not at all in cross-attention."""
    angular: ClassVar[bool] = False
    """Whether it uses cosines and sines of angles that are linear in integer positions."""
    base_properties: ClassVar[tuple[str, ...]] = ("permutation", "prefix", "finite")
    """The properties (posexport.verify.properties) that it has with any parameters."""
    takes_prefix: ClassVar[bool] = False
    """Whether `prefix_tokens` can exclude the first tokens from it."""
    ordered: ClassVar[bool] = False
    """Whether positions must not decrease along the sequence."""
    negative_positions: ClassVar[bool] = True
    """Whether positions may be negative if they have no limit."""
    no_cache_reason: ClassVar[str | None] = None
    """Why it cannot be used with a cache, as the end of a sentence. None if it can."""
    in_order: ClassVar[bool] = False
    """Whether consecutive tokens can be the cells of its own grid in reading order. It then has `order_bias`."""

    def __init_subclass__(cls) -> None:
        hooks = ("embed", "bias", "score", "rotate")
        cls.hook = next((hook for hook in hooks if getattr(cls, hook) is not getattr(Encoding, hook)), "")
        cls.at_input = cls.hook == "embed"
        cls.in_order = cls.order_bias is not Encoding.order_bias
        cls.in_cross = cls.in_cross or cls.hook in ("", "embed")

    def problems(self, spec: Spec) -> Iterator[str]:
        """Yield a sentence for everything in these parameters that does not fit `spec`."""
        return iter(())

    def default_scale(self, head_dim: int) -> float:
        """Return the factor on the logits if none is given."""
        return float(head_dim**-0.5)

    def properties(self, spec: Spec) -> tuple[str, ...]:
        """Return the names of the properties (posexport.verify.properties) that hold for any weights."""
        return self.base_properties

    def by_difference(self, spec: Spec) -> bool:
        """Whether only differences of positions matter in a layer of this spec."""
        return not self.axes or ("shift" in self.properties(spec) and not spec.prefix_tokens)

    def can_be_consecutive(self) -> bool:
        """Whether a spec can promise consecutive positions: on one axis, or in a grid of the encoding's own."""
        return self.axes < 2 or self.in_order

    def slides(self, spec: Spec) -> bool:
        """Whether its part of the logits at consecutive positions is computed once for each difference, and then laid
        out.

        It is True if this is faster (docs/results/positions.md).
        """
        return self.hook == "bias" and spec.causal

    def has_angles(self) -> bool:
        """Whether it uses cosines and sines of angles with these parameters, so that `angles` applies to it."""
        return self.angular

    def uses_fp32_products(self) -> bool:
        """Whether its angles are fp32 products of positions and frequencies, which are inexact at large positions."""
        return self.has_angles()

    def rounding(self, spec: Spec, position: int, keys: int) -> float:
        """Return how much its fp32 results may differ between runtimes in a layer of this spec, relative to their size.

        It holds for positions up to `position` and for `keys` keys. It is 0 if runtimes compute the results with the
        same operations.
        """
        return 0.0

    def steepness(self, spec: Spec) -> float:
        """Return how much its bias may change from one position to the next, if this can matter in half precision."""
        return 0.0

    def query_factor(self, position: int) -> float:
        """Return the factor on queries at `position`."""
        return 1.0

    def saturation_distance(self) -> int | None:
        """Return the distance from which on all pairs of tokens are treated alike, or None."""
        return None

    def lengths(self) -> tuple[int, ...]:
        """Return numbers of keys that its parameters name, at which a graph may go wrong."""
        distance = self.saturation_distance()
        return () if distance is None else (distance,)

    def position_limits(self) -> tuple[int, ...] | None:
        """Return the number of positions for which it is defined along each axis, in the order of `position_ids`.

        None if it is defined for any position.
        """
        return None

    def position_limit(self) -> int | None:
        """Return the smallest of the position limits of all axes, or None."""
        limits = self.position_limits()
        return None if limits is None else min(limits)

    def position_edges(self) -> tuple[int, ...]:
        """Return the positions from which on it is computed in another way, such as a trained length."""
        return ()

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of trained tensors by name (the part after `encoding.`)."""
        return {}

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        """Return constants by name, computed from the parameters in `dtype`: float32, or float64 for the reference."""
        return {}

    def embed(self, state: State, x_BSD: Tensor, positions: Tensor) -> Tensor:
        """Add to the input."""
        return x_BSD

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, S, N*head_dim] and keys [B, S, K*head_dim]."""
        return q, k

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """Return a float32 tensor [B, N, S, T] that is added to the logits, or None."""
        return None

    def ahead_bias(self, state: State, ahead: Tensor) -> Tensor | None:
        """Return the bias for the differences `ahead` = p_j - p_i, int64 [B|1, L]: float32 [B|1, N, 1, L]."""
        return self.bias(state, ahead.new_zeros((ahead.shape[0], 1)), ahead)

    def order_bias(self, state: State, q: Tensor) -> Tensor | None:
        """Return the bias, [1, N, S, S], for the first S cells of a grid in reading order."""
        return None

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """Return the query of the content term, and logits [B, N, S, T] that mix position and content, or None."""
        return q, None

    def values(
        self, state: State, q: Tensor, keys: Tensor, context: AttentionContext, bias: Tensor | None
    ) -> Tensor | None:
        """Return a term [B, S, N*head_dim] that is added to the result of attention, or None.

        `keys` are all keys, [B, T, K*head_dim], or with a cache [B, K, T, head_dim]. `bias` is the sum of all terms
        that are added to the logits.
        """
        return None

    def seeded(self, name: str, values: Tensor) -> Tensor:
        """Scale unit normal `values` to the size that this weight has after training."""
        return values * 0.1 if values.ndim == 1 else values
