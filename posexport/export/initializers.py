"""Weights and constants of an exported graph: public names, values read during writing, no duplicate constants."""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx_ir as ir
import torch

from posexport.artifact import onnx_file
from posexport.errors import RequestError
from posexport.models.block import inner_name
from posexport.models.weights import TORCH_DTYPES, weight_shapes
from posexport.spec.spec import Spec


class Initializers:
    """The weights of a block as tensors of a graph. Their values are looked up when they are written."""

    def __init__(self, spec: Spec, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._shapes = weights, weight_shapes(spec)
        self._dtype = getattr(torch, TORCH_DTYPES[spec.dtype])
        self.names = set(self._shapes)
        self.filled = set[str]()
        """The names of the weights that `tensor` was called for."""
        for name in sorted(self.names ^ set(weights)):
            raise RequestError(
                f"the weights lack {name!r} {list(self._shapes[name])}: the spec needs it."
                if name in self.names
                else f"the weights hold {name!r}, which the spec has no place for: drop or rename it."
            )

    def tensor(self, name: str) -> ir.TensorProtocol:
        """The weight with a public name."""

        def make() -> ir.TensorProtocol:
            values, shape = self._weights[name].to(self._dtype), self._shapes[name]
            if tuple(values.shape) != shape:
                raise RequestError(f"weight {name!r} has shape {list(values.shape)}, the spec needs {list(shape)}.")
            return ir.tensor_adapters.TorchTensor(values, name=name)

        self.filled.add(name)
        return onnx_file.lazy(name, self._shapes[name], ir.tensor_adapters.from_torch_dtype(self._dtype), make)


def name_initializers(model: ir.Model, spec: Spec, weights: Initializers) -> None:
    """Give weights their values and public names, and let the layers share the constants of their encoding."""
    public = {inner_name(spec, name): name for name in weights.names}
    shared: dict[tuple[str, ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        if name in public:
            value.name = public[name]
            if public[name] not in weights.filled:
                value.const_value = weights.tensor(public[name])
            continue
        constant = value.const_value
        if constant is None:
            raise AssertionError(f"the initializer {name!r} has no value")
        plain = re.sub(r"^layers\.\d+\.", "", name)
        key = (plain, constant.dtype, tuple(map(int, constant.shape)), constant.tobytes())  # type: ignore[arg-type]
        first = shared.setdefault(key, value)
        if first is not value:
            value.replace_all_uses_with(first)
            model.graph.initializers.pop(name)
        elif plain not in model.graph.initializers:
            value.name = plain
    missing = weights.names - set(model.graph.initializers)
    if missing:
        raise AssertionError(f"export lost the weights {sorted(missing)}")
