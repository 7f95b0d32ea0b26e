"""Windows over tokens, as models with convolutions of their own make them:

    windows = context.unfold(-1, kernel, 1)  # [..., tokens, kernel]

Both axes of the view have the same stride. Where torch orders axes by their strides, it then compares their sizes, and
a trace would be bound to fewer tokens than a window has. The axes of a copy have different strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CopiesWindows(TorchFunctionMode):
    """A context in which `unfold` gives a copy in place of a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **kwargs or {})
        return made.contiguous() if func is torch.Tensor.unfold else made
