"""The weights of a checkpoint as tensors of a graph. They are read and converted only when the file is written."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from posexport.artifact import onnx_file
from posexport.errors import RequestError, shown
from posexport.models.pretrained import Pretrained
from posexport.models.weights import check_values


class CheckpointTensors:
    """The tensors of a checkpoint. `names` are those of its weights, and of its buffers, which begin with `model.`."""

    def __init__(self, pretrained: Pretrained) -> None:
        self._pretrained, self._buffers = pretrained, dict(pretrained.model.named_buffers())
        self.names = {*pretrained.weights, *(f"model.{name}" for name in self._buffers)}

    def fill(self, model: ir.Model) -> None:
        """Give the initializers of a traced model the names of the checkpoint's weights, and their tensors.

        A weight with two names is in the graph only once.
        """
        weights, first = self._pretrained.weights, dict[int, ir.Value]()
        for name, value in list(model.graph.initializers.items()):
            plain = name.removeprefix("model.")
            if plain not in weights:
                continue
            known = first.setdefault(id(weights[plain]), value)
            if known is not value:
                value.replace_all_uses_with(known)
                model.graph.initializers.pop(name)
                continue
            value.name = plain
            value.const_value = self.of(plain, value)

    def of(self, name: str, like: ir.Value) -> ir.TensorProtocol:
        """The tensor with this name in the dtype of `like`.

        Making its bytes raises RequestError for values that are not finite, or that the dtype can't hold.
        """
        weights = self._pretrained.weights
        if name not in weights:
            return ir.tensor_adapters.TorchTensor(self._buffers[name.removeprefix("model.")], name=name)
        weight: Tensor = weights[name]
        dtype = like.dtype
        if dtype is None:
            raise AssertionError(f"{name} has no dtype")

        def make() -> ir.TensorProtocol:
            check_values(weight, f"{str(self._pretrained.folder)!r}: tensor {shown(name)}")
            converted = weight.to(ir.tensor_adapters.to_torch_dtype(dtype))
            changed = converted.dtype != weight.dtype
            if changed and (beyond := weight[converted.isinf() & weight.isfinite()]).numel():
                raise RequestError(
                    f"{shown(name)} has the value {float(beyond[0]):.4g}, and {converted.dtype} ends at "
                    f"{torch.finfo(converted.dtype).max:.4g}: give another --dtype."
                )
            return ir.tensor_adapters.TorchTensor(converted, name=name)

        return onnx_file.lazy(name, tuple(weight.shape), dtype, make)
