"""Loops over the experts that have tokens, in a form that can be exported.

    chosen = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert in chosen:
        rank, token = torch.where(mask[expert].squeeze(0))
        result.index_add_(0, token, ...)

torch can't export a loop over indices that depend on values. A loop over all experts gives the same result: an expert
without tokens adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_TOPK, _SUM, _NONZERO = (torch.topk, Tensor.topk), (torch.sum, Tensor.sum), (torch.nonzero, Tensor.nonzero)
_GREATER = (torch.greater, torch.gt, Tensor.greater, Tensor.gt, Tensor.__gt__)


class LoopsOverAllExperts(TorchFunctionMode):
    """A context in which a loop over the indices of sums above zero becomes a loop over all indices.

    What is selected in the loop counts as not empty, because some models have a branch for that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranked: list[tuple[Tensor, int]] = []
        self._sums: list[Tensor] = []
        self._positive: list[Tensor] = []
        self._chosen: list[tuple[Tensor, int]] = []
        self._experts: int | None = None
        self._in_loop = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.unbind and (count := _of(args[0], self._chosen)) is not None:
            return self._all(count)
        if func is Tensor.__format__ and self._in_loop and args[0].dim() == 0:  # for the name of an expert's module
            return format(args[0].item(), *args[1:])
        made = func(*args, **kwargs or {})
        if func in _TOPK:
            self._ranked.append((made[1], args[0].shape[-1]))
        elif func is functional.one_hot:  # some models count one expert more than they have
            self._experts = _of(args[0], self._ranked)
        elif func in _SUM:
            self._sums.append(made)
        elif func in _GREATER and len(args) == 2 and _is_zero(args[1]) and any(args[0] is one for one in self._sums):
            self._positive.append(made)
        elif func in _NONZERO and any(args[0] is one for one in self._positive) and args[0].dim() == 1:
            size = args[0].shape[0]
            if isinstance(size, int) and isinstance(made, Tensor):
                self._chosen.append((made, min(size, self._experts or size)))
        elif func is torch.where and len(args) == 1 and self._in_loop:
            torch._check(made[0].shape[0] > 0)
        return made

    def _all(self, count: int) -> Iterator[Tensor]:
        self._in_loop = True
        try:
            yield from (torch.tensor([index]) for index in range(count))
        finally:
            self._in_loop = False


def _of(tensor: Any, numbers: list[tuple[Tensor, int]]) -> int | None:
    """The number that belongs to a tensor in a list of pairs."""
    return next((number for one, number in numbers if one is tensor), None)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0
