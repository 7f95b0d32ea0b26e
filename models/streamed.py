"""A stack evaluated with the weights of one layer in memory at a time: the reference for blocks larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from posexport.models.attention import Cache, SharedInputs
from posexport.models.block import InputEmbedding, inner_name, make_layer
from posexport.models.weights import layer_shapes, weight_shapes
from posexport.spec.contract import graph_outputs
from posexport.spec.spec import Spec

M = TypeVar("M", bound=nn.Module)


class Streamed:
    """The block of `spec` in `dtype` on `device`; `weights` are looked up when a layer needs them.

    Gives the same numbers as the block of `build_block`: one module for each kind of layer gets the weights of each
    layer in turn.
    """

    def __init__(
        self, spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.spec, self._weights, self._dtype, self._device = spec, weights, dtype, device or torch.device("cpu")
        layers = spec.distinct_layers()
        self._modules = [self._placed(make_layer(layer, dtype)) for layer in layers]
        self._shapes = [layer_shapes(layer) for layer in layers]

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[dict[str, Tensor]]:
        """Every output by name for each set of inputs; all sets pass a layer before the next layer is read.

        Inputs are the tensors of `graph_inputs(spec)` in their order, on the device and in the dtype of the block.
        """
        with torch.inference_mode():
            states = list(self._prepare(inputs))
            presents: list[list[Tensor]] = [[] for _ in states]
            for index in range(self.spec.layers):
                kind = index % len(self._modules)
                prefix = f"layers.{index}." if self.spec.layers > 1 else ""
                weights = {name: self._get(prefix + name) for name in self._shapes[kind]}
                for at, (x_BSD, shared, caches) in enumerate(states):
                    arguments = (x_BSD, shared, caches[index])
                    x_BSD, present = torch.func.functional_call(self._modules[kind], weights, arguments)
                    presents[at] += present or ()
                    states[at] = x_BSD, shared, caches
                weights.clear()  # before the next layer's are read
        names = list(graph_outputs(self.spec))
        outputs = ((state[0], *present) for state, present in zip(states, presents, strict=True))
        return [dict(zip(names, tensors, strict=True)) for tensors in outputs]

    def _prepare(self, inputs: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, SharedInputs, list[Cache | None]]]:
        embedding = self._placed(InputEmbedding(self.spec, self._dtype))
        names = [name for name in weight_shapes(self.spec) if inner_name(self.spec, name) in embedding.state_dict()]
        weights = {name: self._get(name) for name in names if name != "embed_tokens.weight"}
        if self.spec.vocab_size is not None:  # used in its stored dtype: a table in float64 may be gigabytes
            weights["embed_tokens.weight"] = self._weights["embed_tokens.weight"].to(self._device)
        embedding.load_state_dict(weights, strict=True, assign=True)
        embedding.requires_grad_(False)
        for tensors in inputs:
            yield embedding.prepare(*tensors)

    def _get(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def _placed(self, module: M) -> M:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part.register_buffer(name, buffer.to(self._device), persistent=False)
        return module.requires_grad_(False).eval()
