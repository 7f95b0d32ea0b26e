"""What some models do against overflow in fp16, in a form that can be exported.

    if hidden.dtype == torch.float16 and not torch.isfinite(hidden).all():
        hidden = torch.clamp(hidden, min=-largest, max=largest)

torch can't export a branch that depends on values. Clamping always gives the same result, except for numbers between
`largest`, which is 1000 below the largest fp16 number, and that number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NotAllFinite:
    """Stands for the booleans of a tensor that may contain numbers that are not finite."""

    def all(self) -> bool:
        return False


class ClampsAlways(TorchFunctionMode):
    """A context in which fp16 tensors count as not all finite."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.isfinite, torch.Tensor.isfinite) and args and args[0].dtype == torch.float16:
            return _NotAllFinite()
        return func(*args, **kwargs or {})
