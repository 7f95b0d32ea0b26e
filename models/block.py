"""The torch block of a spec: what is exported, and in float64 the reference for every artifact."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posexport import custom_ops
from posexport.models.attention import Attention, Cache, EncodingState, SharedInputs, TransformerLayer
from posexport.models.weights import TORCH_DTYPES
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec


class InputEmbedding(nn.Module):
    """The part of a block before its layers: the token embedding, and the encoding where it acts at the input."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.embed_tokens = (
            nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device="meta", _freeze=True)
            if spec.vocab_size is not None
            else None
        )
        self.encoding = EncodingState(spec, dtype) if spec.encoding.at_input else None

    def prepare(self, *tensors: Tensor) -> tuple[Tensor, SharedInputs, list[Cache | None]]:
        """The first layer's input, the inputs that all layers share, and each layer's cache, from the tensors of
        `graph_inputs(spec)` in their order."""
        inputs = dict(zip(graph_inputs(self.spec), tensors, strict=True))
        x_BSD = tensors[0]
        if self.embed_tokens is not None:
            x_BSD = self.embed_tokens(x_BSD)
            if x_BSD.dtype != self.dtype:  # a table that is kept in its stored dtype
                x_BSD = x_BSD.to(self.dtype)
            if self.spec.scale_embedding:
                x_BSD = x_BSD * self.spec.hidden_size**0.5
        if self.encoding is not None:
            x_BSD = self.encoding.encoding.embed(self.encoding, x_BSD, inputs["position_ids"])
        caches = [tensor for name, tensor in inputs.items() if name.startswith("past_")]
        pairs: list[Cache | None] = list(zip(caches[::2], caches[1::2], strict=True)) or [None] * self.spec.layers
        return x_BSD, self._shared(inputs, caches), pairs

    def _shared(self, inputs: Mapping[str, Tensor], caches: list[Tensor]) -> SharedInputs:
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        write_indices = inputs.get("write_indices")
        encodings = [layer.encoding for layer in self.spec.distinct_layers()]
        reads_k_positions = any(encoding.axes and encoding.hook in ("bias", "score") for encoding in encodings)
        k_positions = None
        if caches and positions is not None and reads_k_positions:
            k_positions = custom_ops.key_positions(positions, caches[0], write_indices, mask)
        return SharedInputs(positions, k_positions, mask, inputs.get("encoder_hidden_states"), write_indices)


class Block(InputEmbedding):
    """All layers of a spec, and the input embedding before them.

    forward takes the tensors of `graph_inputs(spec)` in their order and returns those of `graph_outputs(spec)`: one
    tensor [B, S, hidden_size], or with a cache a tuple of it and the present keys and values of each layer.
    """

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        self.layers = nn.ModuleList([make_layer(spec.layer(index), dtype) for index in range(spec.layers)])

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        x_BSD, shared, caches = self.prepare(*inputs)
        presents: list[Tensor] = []
        for layer, past in zip(self.layers, caches, strict=True):
            x_BSD, present = layer(x_BSD, shared, past)
            presents += present or ()
        return (x_BSD, *presents) if presents else x_BSD


def make_layer(spec: Spec, dtype: torch.dtype) -> Attention:
    """One layer of a block, without weights."""
    return (Attention if spec.block == "attention" else TransformerLayer)(spec, dtype)


def build_block(spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Block:
    """The block of `spec` in eval mode; `weights` by their public names are used without a copy.

    `dtype` defaults to the spec's; torch.float64 gives the float64 reference: the same rounded weights, with
    frequencies and slopes in double precision.
    """
    dtype = dtype or getattr(torch, TORCH_DTYPES[spec.dtype])
    block = Block(spec, dtype)
    state = {inner_name(spec, name): tensor.to(dtype) for name, tensor in weights.items()}
    block.load_state_dict(state, strict=True, assign=True)
    return block.requires_grad_(False).eval()


def inner_name(spec: Spec, name: str) -> str:
    """The name inside `Block` of a weight's public name, which lacks `layers.0.` in a block of one layer."""
    at_input = name.startswith("embed_tokens.") or (name.startswith("encoding.") and spec.encoding.at_input)
    return name if spec.layers > 1 or at_input else f"layers.0.{name}"
