"""TensorRT's layers that move elements: reshapes, slices, gathers and scatters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from posexport.runtimes.tensorrt.values import CannotEvaluate, bits, ints

Tensor = torch.Tensor


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector as a tensor of `rank` axes; all other axes have size 1."""
    return values.reshape([-1 if other == axis else 1 for other in range(rank)])


def shuffle(layer: Any, x: Tensor, shape: Tensor | None = None) -> Tensor:
    """A transposition, a reshape and a second transposition, as far as the layer has them."""
    x = x.permute(list(layer.first_transpose)[: x.ndim])
    dims = layer.reshape_dims if shape is None else ints(shape)
    if dims is not None:
        declared = layer.get_output(0).shape
        back = list(layer.second_transpose)[: len(declared)]
        sizes = {axis: declared[at] for at, axis in enumerate(back)}
        x = x.reshape(_resolved(list(dims), x, layer.zero_is_placeholder, sizes))
    return x.permute(list(layer.second_transpose)[: x.ndim])


def _resolved(dims: list[int], x: Tensor, placeholder: bool, declared: dict[int, int]) -> list[int]:
    """Sizes with -1 (inferred) replaced, and 0 replaced by the input's size of that axis if 0 is a placeholder."""
    if placeholder:
        dims = [x.shape[axis] if size == 0 else size for axis, size in enumerate(dims)]
    if -1 in dims:
        at, others = dims.index(-1), math.prod(size for size in dims if size != -1)
        if not others and declared[at] < 0:
            raise CannotEvaluate("it infers a size of a tensor without elements")
        dims[at] = x.numel() // others if others else declared[at]
    return dims


def squeeze(layer: Any, x: Tensor, removed: Tensor | None = None) -> Tensor:
    """Removes the axes in `removed`, all of size 1; without it, every axis of size 1."""
    if removed is None:
        if -1 in tuple(layer.get_input(0).shape):
            raise CannotEvaluate("the axes to remove are not given")
        return x.squeeze()
    axes = {axis % x.ndim for axis in ints(removed)}
    if any(x.shape[axis] != 1 for axis in axes):
        raise ValueError(f"sizes {list(x.shape)} are not 1 at {sorted(axes)}")
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in axes])


def unsqueeze(layer: Any, x: Tensor, inserted: Tensor) -> Tensor:
    """Inserts axes of size 1 at the indices `inserted`, which count axes of the output."""
    rank = x.ndim + len(ints(inserted))
    for axis in sorted(axis % rank for axis in ints(inserted)):
        x = x.unsqueeze(axis)
    return x


def _mirrored(at: Tensor, size: int) -> Tensor:
    if size == 1:
        return torch.zeros_like(at)
    turn = at.abs() % (2 * size - 2)
    return torch.where(turn >= size, 2 * size - 2 - turn, turn)


_OUTSIDE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "WRAP": lambda at, size: at % size,
    "CLAMP": lambda at, size: at.clamp(0, size - 1),
    "FILL": lambda at, size: at.clamp(0, size - 1),
    "REFLECT": _mirrored,
}
"""Replaces coordinates outside an axis, by the mode of a slice; `slice_` fills the elements of FILL later."""


def slice_(
    layer: Any,
    x: Tensor,
    start: Tensor | None = None,
    size: Tensor | None = None,
    stride: Tensor | None = None,
    filler: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    """The elements at start + stride * index along each axis, for `size` indices.

    Start, stride and size are attributes or inputs. In the mode FILL, elements outside are the fill value (default 0).
    """
    mode = layer.mode.name
    parts = [
        list(attribute) if given is None else ints(given)
        for given, attribute in ((start, layer.start), (size, layer.shape), (stride, layer.stride))
    ]
    attribute = getattr(layer, "axes", None)
    on = ints(axes) if axes is not None else list(range(x.ndim)) if attribute is None else list(attribute)
    inside = torch.ones((), dtype=torch.bool)
    for axis, first, count, step in zip(on, *parts, strict=True):
        at = first + step * torch.arange(count)
        length = x.shape[axis]
        outside = (at < 0) | (at >= length)
        if bool(outside.any()):
            if mode not in _OUTSIDE:
                raise ValueError(f"index {int(at[outside][0])} is outside of axis {axis} with size {length}")
            if not length:
                raise CannotEvaluate("it reads outside of an axis without elements")
            at = _OUTSIDE[mode](at, length)
            if mode == "FILL":
                inside = inside & ~along(outside, axis, x.ndim)
        x = _taken(x, axis, at)
    if bool(inside.all()):
        return x
    return torch.where(inside, x, torch.zeros((), dtype=x.dtype) if filler is None else filler)


def _taken(x: Tensor, axis: int, at: Tensor) -> Tensor:
    """The elements at indices along an axis, without a copy for consecutive or equal indices."""
    if len(at) and torch.equal(at, torch.arange(len(at)) + at[0]):
        return x.narrow(axis, int(at[0]), len(at))
    if len(at) and bool((at == at[0]).all()):
        return x.narrow(axis, int(at[0]), 1).expand([len(at) if other == axis else -1 for other in range(x.ndim)])
    return x.index_select(axis, at)


def _indices(indices: Tensor, size: int, declared: int) -> tuple[Tensor, Tensor]:
    """(indices into an axis with those outside set to 0, which of them lie inside).

    A negative index counts from the end if TensorRT knows the axis' size (`declared`), and is not defined otherwise.
    """
    if declared < 0 and bool((indices < 0).any()):
        raise CannotEvaluate("a negative index into an axis of a size known only at run time is not defined")
    indices = torch.where(indices < 0, indices + size, indices)
    inside = (indices >= 0) & (indices < size)
    return torch.where(inside, indices, 0), inside


def gather(layer: Any, x: Tensor, indices: Tensor) -> Tensor:
    """Elements by index, along one axis (DEFAULT, ELEMENT) or several (ND); 0 for an index outside."""
    declared, mode, together = layer.get_input(0).shape, layer.mode.name, layer.num_elementwise_dims
    if mode == "ND":
        return _gather_nd(x, indices, list(declared), together)
    if together or mode not in ("DEFAULT", "ELEMENT"):
        raise CannotEvaluate(f"the mode {mode} with {together} axes in common is not known")
    axis = layer.axis
    at, inside = _indices(indices, x.shape[axis], declared[axis])
    if not x.shape[axis]:
        if at.numel():
            raise CannotEvaluate("it reads from an axis without elements")
        return x.new_zeros(at.shape if mode == "ELEMENT" else (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]))
    if mode == "ELEMENT":
        return torch.where(inside, x.gather(axis, at), torch.zeros((), dtype=x.dtype))
    elements = x.index_select(axis, at.reshape(-1)).reshape((*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]))
    if bool(inside.all()):
        return elements
    inside = inside.reshape((*[1] * axis, *inside.shape, *[1] * (x.ndim - axis - 1)))
    return torch.where(inside, elements, torch.zeros((), dtype=x.dtype))


def _gather_nd(x: Tensor, indices: Tensor, declared: list[int], together: int) -> Tensor:
    """Elements by tuples of indices in the last axis of `indices`; the first `together` axes are common to both."""
    depth = indices.shape[-1]
    rows = [along(torch.arange(size), axis, indices.ndim - 1) for axis, size in enumerate(x.shape[:together])]
    for number in range(depth):
        axis = together + number
        at, inside = _indices(indices[..., number], x.shape[axis], declared[axis])
        if not bool(inside.all()):
            raise CannotEvaluate("it gathers from outside of an axis")
        rows.append(at)
    elements: Tensor = x[tuple(rows)]
    return elements


def scatter(layer: Any, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`x` with the updates written at the indices, along one axis (ELEMENT) or several (ND)."""
    axes = [layer.axis] if layer.mode.name == "ELEMENT" else list(range(indices.shape[-1]))
    sizes = torch.tensor([x.shape[axis] for axis in axes])
    if layer.mode.name not in ("ELEMENT", "ND") or bool(((indices < 0) | (indices >= sizes)).any()):
        raise CannotEvaluate("it writes at negative indices, or outside of an axis")
    if layer.mode.name == "ELEMENT":
        grid = list(torch.meshgrid(*[torch.arange(size) for size in indices.shape], indexing="ij"))
        grid[layer.axis] = indices
        places = torch.stack([index.reshape(-1) for index in grid], -1)
    else:
        places = indices.reshape(-1, len(axes))
    if len(torch.unique(places, dim=0)) != len(places):
        raise CannotEvaluate("it writes to one place twice")
    at = places.unbind(-1)
    return x.index_put(at, updates.reshape((len(places), *x.shape[len(at) :])))


def one_hot(layer: Any, indices: Tensor, values: Tensor, size: Tensor) -> Tensor:
    """The second of two values at the index along a new axis of that size, and the first value elsewhere."""
    (off, on), depth = values, int(size)
    if bool(((indices < 0) | (indices >= depth)).any()):
        raise CannotEvaluate(f"an index is not in [0, {depth})")
    axis = layer.axis % (indices.ndim + 1)
    return torch.where(indices.unsqueeze(axis) == along(torch.arange(depth), axis, indices.ndim + 1), on, off)


def top_k(layer: Any, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) along one axis, in order, and their indices."""
    axes = bits(layer.axes)
    count = layer.k if k is None else int(k)
    if len(axes) != 1 or layer.op.name not in ("MAX", "MIN"):
        raise CannotEvaluate(f"its axes are {axes} and its operation is {layer.op.name}")
    values, indices = torch.sort(x, dim=axes[0], descending=layer.op.name == "MAX", stable=True)
    if count < 1 or count > x.shape[axes[0]]:
        raise ValueError(f"{count} of {x.shape[axes[0]]} elements are requested")
    near = values.narrow(axes[0], 0, min(count + 1, x.shape[axes[0]]))
    if bool((near.diff(dim=axes[0]) == 0).any()):
        raise CannotEvaluate("elements are equal, and which comes first is not defined")
    return values.narrow(axes[0], 0, count), indices.narrow(axes[0], 0, count)
