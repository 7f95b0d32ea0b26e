"""The torch block of a spec. It is what is exported. In float64 it is the reference for every artifact.

`Block` holds all weights. `Streamed` holds the weights of one layer at a time, for blocks larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from posexport.models.attention import Attention, Cache, EncodingState, SharedInputs, TransformerLayer
from posexport.models.positions import token_positions
from posexport.models.weights import TORCH_DTYPES, layer_shapes, weight_shapes
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

M = TypeVar("M", bound=nn.Module)

_State = tuple[Tensor, SharedInputs, list[Cache | None], list[Tensor]]
"""A set of inputs between two layers: what enters the next one, what all of them share, each layer's cache, and the
caches that layers have made so far."""


class InputEmbedding(nn.Module):
    """The part of a block before its layers: the token embedding, and the encoding if it acts at the input."""

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
        """Return the first layer's input, the inputs that all layers share, and each layer's cache.

        `tensors` are those of `graph_inputs(spec)` in their order.
        """
        inputs = dict(zip(graph_inputs(self.spec), tensors, strict=True))
        x_BSD = tensors[0]
        if self.embed_tokens is not None:
            x_BSD = self.embed_tokens(x_BSD)
            if x_BSD.dtype != self.dtype:  # the table is kept in its stored dtype
                x_BSD = x_BSD.to(self.dtype)
            if self.spec.scale_embedding:
                x_BSD = x_BSD * self.spec.hidden_size**0.5
        caches = [tensor for name, tensor in inputs.items() if name.startswith("past_")]
        pairs: list[Cache | None] = list(zip(caches[::2], caches[1::2], strict=True)) or [None] * self.spec.layers
        positions, k_positions = token_positions(self.spec, inputs, tensors[0], caches[0] if caches else None)
        if self.encoding is not None and positions is not None:
            x_BSD = self.encoding.encoding.embed(self.encoding, x_BSD, positions)
        others = (inputs.get(name) for name in ("attention_mask", "encoder_hidden_states", "write_indices"))
        return x_BSD, SharedInputs(x_BSD, positions, k_positions, *others), pairs


class Block(InputEmbedding):
    """All layers of a spec, and the input embedding before them.

    forward takes the tensors of `graph_inputs(spec)` in their order and returns the tensors of `graph_outputs(spec)`.
    Without a cache this is one tensor [B, S, hidden_size]. With a cache it is a tuple of that tensor and the present
    keys and values of each layer.
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
    """Make one layer of a block, without weights."""
    return (Attention if spec.block == "attention" else TransformerLayer)(spec, dtype)


def build_block(spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Block:
    """Build the block of `spec` in eval mode. It uses `weights`, given by their public names.

    `dtype` defaults to the spec's. Weights that already have it are not copied. torch.float64 gives the float64
    reference: the same rounded weights, with frequencies and slopes in double precision.
    """
    dtype = dtype or getattr(torch, TORCH_DTYPES[spec.dtype])
    block = Block(spec, dtype)
    state = {inner_name(spec, name): tensor.to(dtype) for name, tensor in weights.items()}
    block.load_state_dict(state, strict=True, assign=True)
    return block.requires_grad_(False).eval()


def inner_name(spec: Spec, name: str) -> str:
    """Return the name inside `Block` of a weight. Its public name lacks `layers.0.` in a block of one layer."""
    at_input = name.startswith("embed_tokens.") or (name.startswith("encoding.") and spec.encoding.at_input)
    return name if spec.layers > 1 or at_input else f"layers.0.{name}"


class Streamed:
    """The block of `spec` in `dtype` on `device`. It looks up `weights` when a layer needs them.

    It gives the same numbers as the block of `build_block`. There is one module for each kind of layer. It gets the
    weights of each layer in turn.
    """

    def __init__(
        self, spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.spec, self._weights, self._dtype, self._device = spec, weights, dtype, device or torch.device("cpu")
        layers = spec.distinct_layers()
        self._modules = [self._placed(make_layer(layer, dtype)) for layer in layers]
        self._shapes = [layer_shapes(layer) for layer in layers]

    @torch.inference_mode()
    def run(self, inputs: Iterable[Sequence[Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Every output by name for each set of inputs, as the last layer makes them; all sets pass a layer before the
        next layer is read.

        Inputs are the tensors of `graph_inputs(spec)` in their order, on the device and in the dtype of the block; a
        block of one layer takes a set when the outputs of the one before were taken.
        """
        names = list(graph_outputs(self.spec))
        states: Iterable[_State] = self._prepare(inputs)
        for index in range(self.spec.layers - 1):
            states = list(self._through(index, states))
        for x_BSD, _, _, presents in self._through(self.spec.layers - 1, states):
            yield dict(zip(names, (x_BSD, *presents), strict=True))

    def _through(self, index: int, states: Iterable[_State]) -> Iterator[_State]:
        """The states behind the layer of this number, whose weights are held until the last one was taken."""
        kind = index % len(self._modules)
        prefix = f"layers.{index}." if self.spec.layers > 1 else ""
        weights = {name: self._get(prefix + name) for name in self._shapes[kind]}
        for x_BSD, shared, caches, presents in states:
            arguments = (x_BSD, shared, caches[index])
            x_BSD, present = torch.func.functional_call(self._modules[kind], weights, arguments)
            yield x_BSD, shared, caches, [*presents, *(present or ())]

    def _prepare(self, inputs: Iterable[Sequence[Tensor]]) -> Iterator[_State]:
        embedding = self._placed(InputEmbedding(self.spec, self._dtype))
        names = [name for name in weight_shapes(self.spec) if inner_name(self.spec, name) in embedding.state_dict()]
        weights = {name: self._get(name) for name in names if name != "embed_tokens.weight"}
        if self.spec.vocab_size is not None:  # in its stored dtype: in float64, a table may have gigabytes
            weights["embed_tokens.weight"] = self._weights["embed_tokens.weight"].to(self._device)
        embedding.load_state_dict(weights, strict=True, assign=True)
        embedding.requires_grad_(False)
        for tensors in inputs:
            yield *embedding.prepare(*tensors), []

    def _get(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def _placed(self, module: M) -> M:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part.register_buffer(name, buffer.to(self._device), persistent=False)
        return module.requires_grad_(False).eval()
