"""Modules that convert their weights where they run, as routers of experts do:

    self.classifier = self.classifier.to(torch.float32)

torch puts the converted values into the weights themselves, which it can't do with those that it traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor, nn


@contextmanager
def traced_conversions() -> Iterator[None]:
    """torch.export traces inside: a module that is converted has the converted tensors in place of its weights, so that
    the graph converts them. torch.export gives it its weights again."""
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
