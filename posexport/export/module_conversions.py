"""Modules that convert their weights when they run, as routers of experts do:

    self.classifier = self.classifier.to(torch.float32)

torch writes the converted values into the weights themselves, which is impossible for weights that it traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor, nn


@contextmanager
def traced_conversions() -> Iterator[None]:
    """A context for torch.export in which a converted module gets the converted tensors in place of its weights.

    So the graph converts them. torch.export restores the weights afterwards.
    """
    with mock.patch.object(nn.Module, "_apply", _apply):
        yield


def _apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for child in module.children():
            _apply(child, convert)
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = convert(tensor)  # type: ignore[assignment]
    return module
