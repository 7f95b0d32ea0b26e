"""The torch block of a spec: the reference that every artifact is held against, and what is exported."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posexport import custom_ops
from posexport.models.attention import Attention, Cache, EncodingState, SharedInputs, TransformerLayer
from posexport.models.encoding import Encoding
from posexport.models.weights import TORCH_DTYPES
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec


class InputEmbedding(nn.Module):
    """What stands before the layers of a spec: the token embedding, and the encoding where it acts at the input."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.embed_tokens = (
            nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device="meta", _freeze=True)
            if spec.vocab_size is not None
            else None
        )
        assert isinstance(spec.encoding, Encoding)
        self.encoding = EncodingState(spec, dtype) if spec.encoding.at_input else None

    def enter(self, *inputs: Tensor) -> tuple[Tensor, SharedInputs, list[Cache | None]]:
        """The tensors of `graph_inputs(spec)` as what the first layer takes, what all share, and the caches of each."""
        given = dict(zip(graph_inputs(self.spec), inputs, strict=True))
        x_BSD = next(iter(given.values()))
        if self.embed_tokens is not None:
            x_BSD = self.embed_tokens(x_BSD)
            if x_BSD.dtype != self.dtype:  # of a table that is kept as it is stored
                x_BSD = x_BSD.to(self.dtype)
            if self.spec.scale_embedding:
                x_BSD = x_BSD * self.spec.hidden_size**0.5
        positions = given.get("position_ids")
        if self.encoding is not None:
            assert positions is not None
            x_BSD = self.encoding.encoding.embed(self.encoding, x_BSD, positions)
        caches = [value for name, value in given.items() if name.startswith("past_")]
        pairs: list[Cache | None] = list(zip(caches[::2], caches[1::2], strict=True)) or [None] * self.spec.layers
        return x_BSD, self._surroundings(given, positions, caches), pairs

    def _surroundings(
        self, given: Mapping[str, Tensor], positions: Tensor | None, caches: list[Tensor]
    ) -> SharedInputs:
        mask, write_indices = given.get("attention_mask"), given.get("write_indices")
        k_positions = None
        encodings = [kind.encoding for kind in self.spec.kinds() if kind.encoding.axes]
        hook = {encoding.hook for encoding in encodings if isinstance(encoding, Encoding)}
        if caches and positions is not None and hook & {"bias", "score"}:
            k_positions = custom_ops.key_positions(positions, caches[0], write_indices, mask)
        return SharedInputs(positions, k_positions, mask, given.get("encoder_hidden_states"), write_indices)


class Block(InputEmbedding):
    """All layers of a spec, with what stands before them.

    forward takes the tensors of `graph_inputs(spec)` in their order and gives those of `graph_outputs(spec)`: one
    tensor [B, S, hidden_size], or with a cache a tuple of it and the present keys and values of each layer.
    """

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        self.layers = nn.ModuleList([make_layer(spec.layer(index), dtype) for index in range(spec.layers)])

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        x_BSD, around, pairs = self.enter(*inputs)
        made: list[Tensor] = []
        for layer, past in zip(self.layers, pairs, strict=True):
            x_BSD, present = layer(x_BSD, around, past)
            made += present or ()
        return (x_BSD, *made) if made else x_BSD


def make_layer(spec: Spec, dtype: torch.dtype) -> Attention:
    """One layer of a block, without weights."""
    return (Attention if spec.block == "attention" else TransformerLayer)(spec, dtype)


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
