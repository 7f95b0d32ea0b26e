"""Operators that reduce, sort or normalise along axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posexport.graphs.kernels.registry import KERNELS, Call, integers, kernel

REDUCTIONS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "ReduceSum": lambda x, axes: x.sum(axes, keepdim=True),
    "ReduceMean": lambda x, axes: x.mean(axes, keepdim=True) if x.is_floating_point() else _whole_mean(x, axes),
    "ReduceMax": lambda x, axes: _extreme(x, axes, torch.amax, lowest=True),
    "ReduceMin": lambda x, axes: _extreme(x, axes, torch.amin, lowest=False),
    "ReduceProd": lambda x, axes: _product(x, axes),
    "ReduceL1": lambda x, axes: x.abs().sum(axes, keepdim=True),
    "ReduceL2": lambda x, axes: x.square().sum(axes, keepdim=True).sqrt(),
    "ReduceSumSquare": lambda x, axes: x.square().sum(axes, keepdim=True),
    "ReduceLogSum": lambda x, axes: x.sum(axes, keepdim=True).log(),
    "ReduceLogSumExp": lambda x, axes: torch.logsumexp(x.double(), axes, keepdim=True),
}
"""Functions of a tensor and its axes. They keep the dimensions."""


def _whole_mean(x: Tensor, axes: list[int]) -> Tensor:
    return torch.div(x.sum(axes, keepdim=True), torch.tensor(x[0:0].numel() + _count(x, axes)), rounding_mode="trunc")


def _count(x: Tensor, axes: list[int]) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


def _extreme(x: Tensor, axes: list[int], function: Callable[..., Tensor], lowest: bool) -> Tensor:
    if _count(x, axes):
        return function(x, axes, keepdim=True)
    shape = [1 if axis in {at % x.dim() for at in axes} else length for axis, length in enumerate(x.shape)]
    if x.is_floating_point():
        limit: float = float("-inf") if lowest else float("inf")
    elif x.dtype == torch.bool:
        limit = not lowest
    else:
        limit = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
    return torch.full(shape, limit, dtype=x.dtype)


def _product(x: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        x = x.prod(axis, keepdim=True)
    return x


for _name, _function in REDUCTIONS.items():

    def _reduce(
        call: Call, x: Tensor, given: Tensor | None = None, _function: Callable[[Tensor, list[int]], Tensor] = _function
    ) -> Tensor:
        axes = list(call.get("axes", ())) if given is None else integers(given)
        if not axes and call.get("noop_with_empty_axes", 0):
            return x
        axes = axes or list(range(x.dim()))
        result = _function(x, axes).to(x.dtype) if axes else _function(x.reshape(1), [0]).to(x.dtype).reshape(())
        if call.get("keepdims", 1):
            return result
        return result.squeeze(tuple(axes)) if axes else result

    KERNELS["", _name] = _reduce


@kernel("ArgMax", "ArgMin")
def arg_extreme(call: Call, x: Tensor) -> Tensor:
    """The index of the first (or last) largest or smallest value."""
    axis, last = call.get("axis", 0), call.get("select_last_index", 0)
    x = x.flip(axis) if last else x
    best = (torch.amax if call.op_type == "ArgMax" else torch.amin)(x, axis, keepdim=True)
    index = (x == best).to(torch.int8).argmax(axis, keepdim=bool(call.get("keepdims", 1)))  # the first of equal ones
    return x.shape[axis] - 1 - index if last else index


@kernel("TopK")
def top_k(call: Call, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values and indices. Of equal values, the earlier one comes first."""
    count = call.get("k") if k is None else integers(k)[0]
    axis = call.get("axis", -1)
    values, order = torch.sort(x, dim=axis, descending=bool(call.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), order.narrow(axis, 0, count)


@kernel("CumSum", "CumProd")
def cumulate(call: Call, x: Tensor, axis: Tensor) -> Tensor:
    """Running sums or products. `exclusive` leaves out the element itself, and `reverse` begins at the end."""
    at, product = integers(axis)[0], call.op_type == "CumProd"
    x = x.flip(at) if call.get("reverse", 0) else x
    result = (torch.cumprod if product else torch.cumsum)(x, at).to(x.dtype)
    if call.get("exclusive", 0):
        first = torch.full_like(result.narrow(at, 0, 1), 1 if product else 0)
        result = torch.cat([first, result.narrow(at, 0, result.shape[at] - 1)], at)
    return result.flip(at) if call.get("reverse", 0) else result


@kernel("Softmax", "LogSoftmax", "Hardmax")
def softmax(call: Call, x: Tensor) -> Tensor:
    """Along one axis; before opset 13, over all axes from `axis` on."""
    shape, axis = x.shape, call.get("axis", -1 if call.version >= 13 else 1)
    if call.version < 13:
        axis = axis % max(1, x.dim())
        lead = 1
        for length in shape[:axis]:
            lead *= length
        x, axis = x.reshape(lead, -1), 1
    if call.op_type == "Hardmax":
        index = (x == x.amax(axis, keepdim=True)).to(torch.int8).argmax(axis, keepdim=True)
        return torch.zeros_like(x).scatter(axis, index, 1).reshape(shape)
    return (torch.softmax if call.op_type == "Softmax" else torch.log_softmax)(x, axis).reshape(shape)


@kernel("LpNormalization")
def lp_normalization(call: Call, x: Tensor) -> Tensor:
    """x / |x|_p along an axis; zero if the norm is zero."""
    norm = torch.linalg.vector_norm(x, call.get("p", 2), call.get("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)
