"""What some models do against overflow in fp16, in a form that can be exported.

    if hidden.dtype == torch.float16 and not torch.isfinite(hidden).all():
        hidden = torch.clamp(hidden, min=-largest, max=largest)

    if hidden.dtype == torch.float16 and torch.isinf(hidden).any():
        hidden = torch.clamp(hidden, min=-largest, max=largest)

torch can't export a branch that depends on values. Clamping always gives the same result, except for numbers between
`largest`, which is 1000 below the largest fp16 number, and that number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _NotAllFinite:
    """Stands for the booleans of a tensor that may contain numbers that are not finite."""

    def all(self) -> bool:
        return False


class ClampsAlways(TorchFunctionMode):
    """A context in which fp16 tensors count as not all finite where a model branches.

    Whether any number is infinite stays a tensor: only a branch takes it for true.
    """

    def __init__(self) -> None:
        super().__init__()
        self._infinite: list[Tensor] = []
        self._any_infinite: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.isfinite, Tensor.isfinite) and args and args[0].dtype == torch.float16:
            return _NotAllFinite()
        if func is Tensor.__bool__ and _is_among(args[0], self._any_infinite):
            return True
        made = func(*args, **kwargs or {})
        if func in (torch.isinf, Tensor.isinf) and args and args[0].dtype == torch.float16:
            self._infinite.append(made)
        elif func in (torch.any, Tensor.any) and len(args) == 1 and _is_among(args[0], self._infinite):
            self._any_infinite.append(made)
        return made


def _is_among(tensor: Any, tensors: list[Tensor]) -> bool:
    return any(tensor is one for one in tensors)
