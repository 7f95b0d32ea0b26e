"""The torch block of a spec: the reference that every artifact is held against, and what is exported."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posexport.models.attention import Attention, EncodingState, TransformerLayer
from posexport.models.encoding import Encoding
from posexport.models.weights import TORCH_DTYPES
from posexport.spec import Spec


class Block(nn.Module):
    """All layers of a spec, with the token embedding and the absolute encoding in front where it has them.

    forward: `hidden_states` [B, S, hidden_size] (or `input_ids` [B, S] int64 with a vocabulary), `position_ids`
    [B, S] or [B, S, axes] int64 (absent for an encoding without positions); returns [B, S, hidden_size].
    """

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = (
            nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device="meta", _freeze=True)
            if spec.vocab_size is not None
            else None
        )
        assert isinstance(spec.encoding, Encoding)
        self.encoding = EncodingState(spec, dtype) if spec.encoding.at_input else None
        layer = Attention if spec.block == "attention" else TransformerLayer
        self.layers = nn.ModuleList([layer(spec, dtype) for _ in range(spec.layers)])

    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x_BSD = hidden_states
        if self.embed_tokens is not None:
            x_BSD = self.embed_tokens(hidden_states)
            if self.spec.scale_embedding:
                x_BSD = x_BSD * self.spec.hidden_size**0.5
        if self.encoding is not None:
            assert position_ids is not None
            x_BSD = self.encoding.encoding.embed(self.encoding, x_BSD, position_ids)
        for layer in self.layers:
            x_BSD = layer(x_BSD, position_ids)
        return x_BSD


def build_block(spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Block:
    """The block of `spec` in eval mode; `weights` go in as they are, by their public names, without a copy.

    `dtype` defaults to the spec's; torch.float64 gives the reference ("the truth"): the same rounded weights, with
    frequencies and slopes in double precision.
    """
    dtype = dtype or getattr(torch, TORCH_DTYPES[spec.dtype])
    block = Block(spec, dtype)
    own = {inner_name(spec, name): tensor.to(dtype) for name, tensor in weights.items()}
    block.load_state_dict(own, strict=True, assign=True)
    return block.requires_grad_(False).eval()


def inner_name(spec: Spec, name: str) -> str:
    """The name inside `Block` of a weight's public name: with one layer the public one has no `layers.0.`."""
    at_input = name.startswith("embed_tokens.") or (
        name.startswith("encoding.") and isinstance(spec.encoding, Encoding) and spec.encoding.at_input
    )
    return name if spec.layers > 1 or at_input else f"layers.0.{name}"
