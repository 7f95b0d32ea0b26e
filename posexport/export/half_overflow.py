"""What some models do against overflow in fp16, as graphs can say it.

    if hidden.dtype == torch.float16 and not torch.isfinite(hidden).all():
        hidden = torch.clamp(hidden, min=-largest, max=largest)

torch can't export a branch on numbers. Clamping always is the same but for numbers between `largest`, 1000 below the
largest of fp16, and that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NotAllFinite:
    """What stands for the truth values of a tensor that may hold numbers that are not finite."""

    def all(self) -> bool:
        return False


class ClampsAlways(TorchFunctionMode):
    """Inside, numbers in fp16 count as not all finite."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.isfinite, torch.Tensor.isfinite) and args and args[0].dtype == torch.float16:
            return _NotAllFinite()
        return func(*args, **kwargs or {})
