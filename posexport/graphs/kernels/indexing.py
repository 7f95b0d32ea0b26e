"""Operators that gather and scatter by index."""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.graphs.kernels.registry import Call, integers, kernel

_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def positive(indices: Tensor, length: int) -> Tensor:
    """The indices, counted from the start. Raises IndexError if one is out of range."""
    indices = indices.to(torch.int64)
    if indices.numel() and not (-length <= int(indices.min()) and int(indices.max()) < length):
        raise IndexError(f"an index is outside a dimension of size {length}")
    return torch.where(indices < 0, indices + length, indices)


@kernel("Gather")
def gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """Whole slices along `axis`."""
    axis = call.get("axis", 0) % x.dim()
    taken = x.index_select(axis, positive(indices, x.shape[axis]).flatten())
    return taken.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@kernel("GatherElements")
def gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """One element for each index."""
    axis = call.get("axis", 0)
    return torch.gather(x, axis, positive(indices, x.shape[axis]))


@kernel("GatherND")
def gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """Slices addressed by the last dimension of the indices, after the first `batch_dims` dimensions."""
    batch = call.get("batch_dims", 0)
    lead, depth = x.shape[:batch], indices.shape[-1]
    flat = x.reshape(-1, *x.shape[batch:])
    rows = indices.reshape(flat.shape[0], -1, depth)
    at = tuple(positive(rows[..., axis], x.shape[batch + axis]) for axis in range(depth))
    taken = flat[(torch.arange(flat.shape[0])[:, None], *at)]
    return taken.reshape(*lead, *indices.shape[batch:-1], *x.shape[batch + depth :])


@kernel("ScatterElements", "Scatter")
def scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """One element for each index, written or reduced."""
    axis, reduction = call.get("axis", 0), call.get("reduction", "none")
    at = positive(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, at, updates)
    return x.scatter_reduce(axis, at, updates, _REDUCED[reduction], include_self=True)


@kernel("ScatterND")
def scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Slices addressed by the last dimension of the indices, written or reduced."""
    depth, reduction = indices.shape[-1], call.get("reduction", "none")
    at = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    for axis in range(depth):
        at = at * x.shape[axis] + positive(indices[..., axis], x.shape[axis])
    flat = x.reshape(-1, *x.shape[depth:]).clone()
    at, slices = at.flatten(), updates.reshape(at.numel(), *x.shape[depth:])
    if reduction == "none":
        flat[at] = slices
    else:
        rows = at.reshape(-1, *[1] * (slices.dim() - 1)).expand(slices.shape)
        flat = flat.scatter_reduce(0, rows, slices, _REDUCED[reduction], include_self=True)
    return flat.reshape(x.shape)


@kernel("TensorScatter")
def tensor_scatter(call: Call, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    """Write a step into a cache [batch, ..., max length, ...] from each row's start; circular mode wraps around."""
    axis, length = call.get("axis", -2) % past.dim(), update.shape[call.get("axis", -2)]
    first = torch.zeros(past.shape[0], dtype=torch.int64) if starts is None else starts
    at = first[:, None] + torch.arange(length)
    if call.get("mode", "linear") == "circular":
        at = at % past.shape[axis]
    result = past.movedim(axis, 1).clone()
    result[torch.arange(past.shape[0])[:, None], positive(at, past.shape[axis])] = update.movedim(axis, 1)
    return result.movedim(1, axis)


@kernel("OneHot")
def one_hot(call: Call, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    """`values` = [off, on]. Indices out of range give off."""
    axis, count = call.get("axis", -1), integers(depth)[0]
    at = indices.to(torch.int64)
    at = torch.where(at < 0, at + count, at)
    axis = axis + indices.dim() + 1 if axis < 0 else axis
    places = torch.arange(count).reshape([-1 if dim == axis else 1 for dim in range(indices.dim() + 1)])
    return torch.where(at.unsqueeze(axis) == places, values[1], values[0])


@kernel("Compress")
def compress(call: Call, x: Tensor, condition: Tensor) -> Tensor:
    """Slices where the condition is true."""
    axis = call.get("axis")
    x, axis = (x.flatten(), 0) if axis is None else (x, axis)
    return x.index_select(axis, torch.nonzero(condition).flatten())


@kernel("Unique")
def unique(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, first places, inverse and counts; sorted or in order of appearance."""
    axis = call.get("axis")
    x, axis = (x.flatten(), 0) if axis is None else (x, axis)
    values, inverse, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True, dim=axis)
    first = torch.full((counts.numel(),), inverse.numel(), dtype=torch.int64)
    first = first.scatter_reduce(0, inverse, torch.arange(inverse.numel()), "amin")
    if not call.get("sorted", 1):
        order = torch.argsort(first)
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return values, first, inverse, counts
