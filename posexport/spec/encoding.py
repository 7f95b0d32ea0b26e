"""The base class of all positional encodings: parameters, owned weights, constants, and the hooks that a block calls.

An encoding overrides the hooks that it uses; every other hook does nothing. The classes are pure data until a hook
runs: importing them must not import torch, so a hook reaches tensors only through `posexport.custom_ops`, which loads
on first use, and through the methods of its arguments.
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


@attrs.define(kw_only=True)  # not frozen: torch.compile can't follow how attrs fills a frozen class
class AttentionContext:
    """Everything except the queries that attention of one layer reads; None where the block has no such input.

    `k` is [B, S, K*head_dim], the new keys, or [B, T, K*head_dim] of an encoder; `past` [B, K, P, head_dim], the keys
    of a cache before them. Positions are int64 [B, S] and [B, T], with a last dimension for several axes. `mask` is
    int64 [B, T], `sinks` [N], `write_indices` int64 [B]. `ahead`, int64 [B|1, L], holds the differences of consecutive
    positions for which numbers are laid out by a slide (`Encoding.slides`, posexport.custom_ops.differences); None
    elsewhere.
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
        """Positions of queries and keys; ValueError in a block that has none."""
        if self.q_positions is None or self.k_positions is None:
            raise ValueError("this block takes no positions")
        return self.q_positions, self.k_positions


@attrs.frozen(kw_only=True)
class Encoding:
    """The parameters and hooks of one positional encoding; a subclass is one row of the ENCODINGS table.

    Shapes: B batch, S queries, T keys, D hidden_size, N query heads, K key heads.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    axes: ClassVar[int] = 1
    """How many numbers make one position: 0 (the encoding ignores positions), 1, or more."""
    hook: ClassVar[str] = ""
    """The main hook that it overrides: embed, bias, score or rotate; empty for none."""
    at_input: ClassVar[bool] = False
    """Whether it acts once, before the first layer, instead of in every layer: its hook is embed."""
    in_cross: ClassVar[bool] = False
    """Whether cross-attention can have it: it acts at the input, or not at all in cross-attention."""
    angular: ClassVar[bool] = False
    """Whether it takes cosines and sines of angles that are linear in integer positions."""
    base_properties: ClassVar[tuple[str, ...]] = ("permutation", "prefix", "finite")
    """The properties (posexport.verify.properties) that it has with any parameters."""
    takes_prefix: ClassVar[bool] = False
    """Whether `prefix_tokens` can exempt the first tokens from it."""
    ordered: ClassVar[bool] = False
    """Whether positions must not decrease along the sequence."""
    negative_positions: ClassVar[bool] = True
    """Whether positions may be negative, where any position is allowed."""
    no_cache_reason: ClassVar[str | None] = None
    """Why it can't be used with a cache, as the end of a sentence; None where it can."""
    in_order: ClassVar[bool] = False
    """Whether consecutive tokens can be cells of a grid of its own, in the order of reading: it has `order_bias`."""

    def __init_subclass__(cls) -> None:
        hooks = ("embed", "bias", "score", "rotate")
        cls.hook = next((hook for hook in hooks if getattr(cls, hook) is not getattr(Encoding, hook)), "")
        cls.at_input = cls.hook == "embed"
        cls.in_order = cls.order_bias is not Encoding.order_bias
        cls.in_cross = cls.in_cross or cls.hook in ("", "embed")

    def problems(self, spec: Spec) -> Iterator[str]:
        """A sentence for everything in which these parameters don't fit `spec`."""
        return iter(())

    def default_scale(self, head_dim: int) -> float:
        """The factor on the logits where none is given."""
        return float(head_dim**-0.5)

    def properties(self, spec: Spec) -> tuple[str, ...]:
        """Names of the properties (posexport.verify.properties) that hold for any weights."""
        return self.base_properties

    def by_difference(self, spec: Spec) -> bool:
        """Whether positions act through their differences alone in a layer of this spec."""
        return not self.axes or ("shift" in self.properties(spec) and not spec.prefix_tokens)

    def can_be_consecutive(self) -> bool:
        """Whether a spec can promise consecutive positions: on one axis, or in a grid of its own."""
        return self.axes < 2 or self.in_order

    def slides(self, spec: Spec) -> bool:
        """Whether what it adds to the logits at consecutive positions is computed once for each difference, and then
        laid out for all queries: where that is faster (docs/results/positions.md)."""
        return self.hook == "bias" and spec.causal

    def has_angles(self) -> bool:
        """Whether it takes cosines and sines of angles with these parameters, so that `angles` concerns it."""
        return self.angular

    def uses_fp32_products(self) -> bool:
        """Whether its angles are fp32 products of positions and frequencies, inexact at large positions."""
        return self.has_angles()

    def rounding(self, spec: Spec, position: int, keys: int) -> float:
        """How far fp32 results of its own may lie apart from one runtime to another in a layer of this spec, as a part
        of their size, for positions up to `position` and so many keys: 0 where runtimes compute them with the same
        operations."""
        return 0.0

    def steepness(self, spec: Spec) -> float:
        """What its bias may change by from one position to the next, where that can matter in half precision."""
        return 0.0

    def query_factor(self, position: int) -> float:
        """What queries at `position` are multiplied by."""
        return 1.0

    def saturation_distance(self) -> int | None:
        """The distance from which on all pairs of tokens are treated alike; None where there is no such distance."""
        return None

    def lengths(self) -> tuple[int, ...]:
        """Numbers of keys that its parameters name, at which a graph of it may go wrong."""
        distance = self.saturation_distance()
        return () if distance is None else (distance,)

    def position_limits(self) -> tuple[int, ...] | None:
        """The number of positions for which it is defined along each axis, in the order of `position_ids`; None where
        any position is."""
        return None

    def position_limit(self) -> int | None:
        """The same along every axis."""
        limits = self.position_limits()
        return None if limits is None else min(limits)

    def position_edges(self) -> tuple[int, ...]:
        """Positions from which on it is computed in another way, such as a trained length."""
        return ()

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        """Trained tensors: name (after `encoding.`) to shape."""
        return {}

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        """Constants by name, computed from the parameters in `dtype`: float32, or float64 for the reference."""
        return {}

    def embed(self, state: State, x_BSD: Tensor, positions: Tensor) -> Tensor:
        """Add to the input."""
        return x_BSD

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, S, N*head_dim] and keys [B, S, K*head_dim]."""
        return q, k

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """A float32 tensor [B, N, S, T] that is added to the logits, or None."""
        return None

    def ahead_bias(self, state: State, ahead: Tensor) -> Tensor | None:
        """The bias of keys so far ahead of their query, int64 [B|1, L], float32 [B|1, N, 1, L]: that of a `slides`."""
        return self.bias(state, ahead.new_zeros((ahead.shape[0], 1)), ahead)

    def order_bias(self, state: State, q: Tensor) -> Tensor | None:
        """The same, [1, N, S, S], for the first S cells of a grid in the order of reading."""
        return None

    def score(self, state: State, q: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """The query of the content term, and logits [B, N, S, T] where position and content mix, or None."""
        return q, None

    def values(self, state: State, q: Tensor, context: AttentionContext, bias: Tensor | None) -> Tensor | None:
        """A term [B, S, N*head_dim] that is added to the result of attention, or None; `bias` is the sum of all terms
        that are added to the logits."""
        return None

    def seeded(self, name: str, values: Tensor) -> Tensor:
        """Scale unit normal `values` to the size that this weight has after training."""
        return values * 0.1 if values.ndim == 1 else values
