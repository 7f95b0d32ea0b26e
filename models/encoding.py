"""What an encoding is: parameters, the weights it owns, constants it needs, and four points where it touches a block.

An encoding overrides the hooks it uses; every other hook is a no-op. The classes are pure data until a hook runs:
importing this folder's table must not import torch, so hooks reach tensors only through `posexport.custom_ops`
(which loads itself on first use) and the methods of the tensors they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from posexport.spec import EncodingParams, Spec

if TYPE_CHECKING:
    from torch import Tensor

Constant = list[Any]
"""A constant tensor as nested lists of float (kept in fp32, fp64 in the float64 reference) or of int (int64)."""


class State(Protocol):
    """What a hook sees of the block: its spec, and the encoding's weights and constants by name."""

    spec: Spec

    def __getitem__(self, name: str) -> Tensor: ...


@attrs.frozen(kw_only=True)
class Encoding(EncodingParams):
    """Base of the rows of ENCODINGS. Shapes: B batch, S queries, T keys, D hidden_size, N query heads, K key heads."""

    touches: ClassVar[str] = ""
    """Which hook it uses: embed, rotate, bias or score."""

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        """Trained tensors: name (after `encoding.`) to shape."""
        return {}

    def constants(self, spec: Spec) -> Mapping[str, Constant]:
        """Tensors that follow from the parameters."""
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

    def score(self, state: State, q: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The query of the content term, and logits [B, N, S, T] where position and content mix, or None."""
        return q, None
