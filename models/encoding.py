"""What an encoding is: parameters, the weights it owns, constants it needs, and four points where it touches a block.

An encoding overrides the hooks it uses; every other hook is a no-op. The classes are pure data until a hook runs:
importing this folder's table must not import torch, so hooks reach tensors only through `posexport.custom_ops`
(which loads itself on first use) and the methods of the tensors they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from posexport.spec.spec import EncodingParams, Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Constant = Tensor | list[Any]
    """A constant: a tensor, or nested lists of float or of int (int64)."""


class State(Protocol):
    """What a hook sees of the block: its spec, and the encoding's weights and constants by name."""

    spec: Spec

    def __getitem__(self, name: str) -> Tensor: ...


@attrs.define(kw_only=True)  # not frozen: torch.compile can't follow how attrs fills a frozen one
class AttentionContext:
    """What the queries of a layer look at: keys `k` [B, T, K*head_dim] (with a cache [B, K, T, head_dim], None where
    the encoding doesn't read them), positions of both sides, and what attention takes beside; None where absent."""

    k: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    write_indices: Tensor | None

    def positions(self) -> tuple[Tensor, Tensor]:
        """Those of queries and keys, where the encoding has any."""
        assert self.q_positions is not None and self.k_positions is not None
        return self.q_positions, self.k_positions


@attrs.frozen(kw_only=True)
class Encoding(EncodingParams):
    """Base of the rows of ENCODINGS. Shapes: B batch, S queries, T keys, D hidden_size, N query heads, K key heads."""

    hook: ClassVar[str] = ""
    """Which hook it uses: embed, rotate, bias or score."""
    reads_keys: ClassVar[bool] = False
    """Whether its scores read the keys themselves, those of a cache too."""

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        """Trained tensors: name (after `encoding.`) to shape."""
        return {}

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        """What follows from the parameters, evaluated in `dtype`: float32, or float64 for the reference."""
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

    def score(self, state: State, q: Tensor, scene: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """The query of the content term, and logits [B, N, S, T] where position and content mix, or None."""
        return q, None

    def values(self, state: State, q: Tensor, scene: AttentionContext, bias: Tensor | None) -> Tensor | None:
        """What is added to what attention gives, [B, S, N*head_dim]; `bias` is all that is added to the logits."""
        return None

    def seeded(self, name: str, values: Tensor) -> Tensor:
        """A weight of this encoding from unit normal values: as a trained one may be."""
        return values * 0.1 if values.ndim == 1 else values
