"""A stack computed with the weights of one layer in memory at a time: the reference for blocks larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posexport.models.block import InputEmbedding, inner_name, make_layer
from posexport.models.weights import layer_shapes, weight_shapes
from posexport.spec.contract import graph_outputs
from posexport.spec.spec import Spec

M = TypeVar("M", bound=nn.Module)


class Streamed:
    """The block of `spec` in `dtype` on `device`, whose `weights` are looked up as layers need them.

    The same numbers as those of `build_block`'s: each layer is its module, given its weights when its turn comes.
    """

    def __init__(
        self, spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.spec, self._weights, self._dtype, self._device = spec, weights, dtype, device or torch.device("cpu")
        self._kinds = [self._placed(make_layer(kind, dtype)) for kind in spec.kinds()]
        self._shapes = [layer_shapes(kind) for kind in spec.kinds()]

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[dict[str, Tensor]]:
        """Every output by name for each set of inputs, all sets carried through a layer before the next is read.

        Inputs are the tensors of `graph_inputs(spec)` in their order, on the device and in the dtype of the block.
        """
        with torch.inference_mode():
            states = list(self._enter(inputs))
            presents: list[list[Tensor]] = [[] for _ in states]
            for index in range(self.spec.layers):
                kind = index % len(self._kinds)
                prefix = f"layers.{index}." if self.spec.layers > 1 else ""
                own = {name: self._get(prefix + name) for name in self._shapes[kind]}
                for at, (x_BSD, around, pairs) in enumerate(states):
                    x_BSD, present = torch.func.functional_call(self._kinds[kind], own, (x_BSD, around, pairs[index]))
                    presents[at] += present or ()
                    states[at] = x_BSD, around, pairs
                own.clear()  # before the next layer's are read
        names = list(graph_outputs(self.spec))
        return [dict(zip(names, (state[0], *made), strict=True)) for state, made in zip(states, presents, strict=True)]

    def _enter(self, inputs: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Any, Any]]:
        front = self._placed(InputEmbedding(self.spec, self._dtype))
        names = [name for name in weight_shapes(self.spec) if inner_name(self.spec, name) in front.state_dict()]
        own = {name: self._get(name) for name in names if name != "embed_tokens.weight"}
        if self.spec.vocab_size is not None:  # looked up as it is stored: a table in float64 may be gigabytes
            own["embed_tokens.weight"] = self._weights["embed_tokens.weight"].to(self._device)
        front.load_state_dict(own, strict=True, assign=True)
        for each in inputs:
            yield front.requires_grad_(False).enter(*each)

    def _get(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def _placed(self, module: M) -> M:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part.register_buffer(name, buffer.to(self._device), persistent=False)
        return module.requires_grad_(False).eval()
