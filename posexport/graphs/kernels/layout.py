"""Operators that move elements or make tensors: shapes, slices, joins, paddings and constants."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels.elementwise import signed
from posexport.graphs.kernels.registry import Call, integers, kernel


@kernel("Constant")
def constant(call: Call) -> Tensor:
    """A stored tensor, or numbers in attributes."""
    if "value" in call.attributes:
        return call.tensor(call.attributes["value"])
    for name, number in (("value_float", 1), ("value_floats", 1), ("value_int", 7), ("value_ints", 7)):
        if name in call.attributes:
            return torch.tensor(call.attributes[name], dtype=call.dtype(number))
    raise ValueError(f"a constant of {', '.join(call.attributes) or 'nothing'} can't be evaluated")


@kernel("ConstantOfShape")
def constant_of_shape(call: Call, shape: Tensor) -> Tensor:
    """One value everywhere, by default float 0."""
    stored = call.get("value")
    value = torch.zeros(1, dtype=call.dtype(1)) if stored is None else call.tensor(stored)
    return value.reshape(()).expand(integers(shape)).clone()


@kernel("Shape")
def shape(call: Call, x: Tensor) -> Tensor:
    """Sizes of the dimensions from `start` to `end`."""
    return torch.tensor(list(x.shape)[slice(call.get("start"), call.get("end"))], dtype=torch.int64)


@kernel("Size")
def size(call: Call, x: Tensor) -> Tensor:
    """Number of elements."""
    return torch.tensor(x.numel())


@kernel("Reshape")
def reshape(call: Call, x: Tensor, to: Tensor | None = None) -> Tensor:
    """A size of 0 keeps the dimension, unless `allowzero` is set."""
    sizes = list(call.get("shape")) if to is None else integers(to)
    if not call.get("allowzero", 0):
        sizes = [x.shape[at] if wanted == 0 else wanted for at, wanted in enumerate(sizes)]
    if -1 in sizes and x.numel() == 0:  # torch finds that ambiguous
        others = math.prod(wanted for wanted in sizes if wanted != -1)
        sizes = [(0 if others == 0 else x.numel() // others) if wanted == -1 else wanted for wanted in sizes]
    return x.reshape(sizes)


@kernel("Flatten")
def flatten(call: Call, x: Tensor) -> Tensor:
    """Two dimensions, split before `axis`."""
    axis = call.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@kernel("Transpose")
def transpose(call: Call, x: Tensor) -> Tensor:
    """Reversed dimensions by default."""
    return x.permute(tuple(call.get("perm", tuple(reversed(range(x.dim()))))))


def _axes(call: Call, given: Tensor | None) -> list[int] | None:
    """`axes` as an input (newer opsets) or as an attribute."""
    if given is not None:
        return integers(given)
    axes = call.get("axes")
    return None if axes is None else list(axes)


@kernel("Squeeze")
def squeeze(call: Call, x: Tensor, given: Tensor | None = None) -> Tensor:
    """Drop dimensions of size 1."""
    axes = _axes(call, given)
    if axes is None:
        return x.squeeze()
    if any(x.shape[axis] != 1 for axis in axes):
        raise ValueError(f"axes {axes} of shape {list(x.shape)} are not all of size 1")
    return x.squeeze(tuple(axes))


@kernel("Unsqueeze")
def unsqueeze(call: Call, x: Tensor, given: Tensor | None = None) -> Tensor:
    """Insert dimensions of size 1. The axes are those of the result."""
    axes = _axes(call, given) or []
    rank = x.dim() + len(axes)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


@kernel("Concat")
def concat(call: Call, *values: Tensor) -> Tensor:
    """Join along `axis`. Ranks are checked: torch would accept an empty vector among tensors of any rank."""
    if len({value.dim() for value in values}) > 1:
        raise ValueError("its inputs have different ranks")
    return torch.cat(values, dim=call.get("axis", 1))


@kernel("Split")
def split(call: Call, x: Tensor, given: Tensor | None = None) -> tuple[Tensor, ...]:
    """Parts of stated sizes, or of equal sizes with a smaller last one."""
    axis = call.get("axis", 0)
    sizes = list(call.get("split", ())) if given is None else integers(given)
    if not sizes:
        parts = call.get("num_outputs", len(call.wanted))
        step = -(-x.shape[axis] // parts)
        sizes = [max(0, min(step, x.shape[axis] - step * part)) for part in range(parts)]
    return torch.split(x, sizes, dim=axis)


@kernel("Slice")
def slice_(
    call: Call,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """Slices as in Python, which clamps as the specification does. Steps other than 1 use indices."""
    begin = list(call.get("starts", ())) if starts is None else integers(starts)
    end = list(call.get("ends", ())) if ends is None else integers(ends)
    at = _axes(call, axes) or list(range(len(begin)))
    step = [1] * len(begin) if steps is None else integers(steps)
    for axis, first, last, by in zip(at, begin, end, step, strict=True):
        length = x.shape[axis]
        if by < 0 and last < -length:  # before the first element, for which Python has no number
            indices = range(*slice(first, None, by).indices(length))
        else:
            indices = range(*slice(first, last, by).indices(length))
        if by == 1:
            x = x.narrow(axis, indices.start, len(indices)) if len(indices) else x.narrow(axis, 0, 0)
        else:
            x = x.index_select(axis, torch.tensor(list(indices), dtype=torch.int64))
    return x


@kernel("Expand")
def expand(call: Call, x: Tensor, to: Tensor) -> Tensor:
    """Broadcast in both directions."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(integers(to))))


@kernel("Tile")
def tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    """Copies next to each other."""
    if repeats.numel() != x.dim():
        raise ValueError("it needs one repeat for each dimension")
    return x.repeat(integers(repeats))


@kernel("Range")
def range_(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """start + i*delta. For floating-point numbers, runtimes count the steps in float64."""
    if start.is_floating_point():
        length = math.ceil((float(limit) - float(start)) / float(delta))
    else:
        length = -((int(limit) - int(start)) // -int(delta))
    return (start.reshape(()) + torch.arange(max(0, length)).to(start.dtype) * delta.reshape(())).to(start.dtype)


@kernel("EyeLike")
def eye_like(call: Call, x: Tensor) -> Tensor:
    """Ones on the k-th diagonal."""
    dtype = x.dtype if call.get("dtype") is None else call.dtype(call.get("dtype"))
    diagonal = torch.arange(x.shape[1])[None, :] - torch.arange(x.shape[0])[:, None]
    return torch.eq(diagonal, int(call.get("k", 0))).to(dtype)


@kernel("Trilu")
def trilu(call: Call, x: Tensor, k: Tensor | None = None) -> Tensor:
    """The upper or lower triangle."""
    diagonal = 0 if k is None else int(k)
    rows, columns = x.shape[-2:]
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    keep = distance >= diagonal if call.get("upper", 1) else distance <= diagonal
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype))


@kernel("Pad")
def pad(
    call: Call, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    """The modes constant, edge, reflect and wrap. Negative pads cut."""
    sizes = list(call.get("pads", call.get("paddings", ()))) if pads is None else integers(pads)
    fill = call.get("value", 0.0) if value is None else value.reshape(()).item()
    at = range(x.dim()) if axes is None else integers(axes)
    mode, count = call.get("mode", "constant"), len(sizes) // 2
    for axis, before, after in zip(at, sizes[:count], sizes[count:], strict=True):
        length = x.shape[axis]
        if mode == "constant":
            last = axis + x.dim() if axis < 0 else axis
            x = F.pad(x, [0, 0] * (x.dim() - 1 - last) + [before, after], value=fill)
            continue
        index = torch.arange(-before, length + after)
        if mode == "edge":
            index = index.clamp(0, length - 1)
        elif mode == "reflect":
            turn = max(1, 2 * (length - 1))
            index = index.remainder(turn)
            index = torch.where(index >= length, turn - index, index)
        else:
            index = index.remainder(length)
        x = x.index_select(axis, index)
    return x


@kernel("DepthToSpace")
def depth_to_space(call: Call, x: Tensor) -> Tensor:
    """Channels to blocks of pixels, DCR or CRD."""
    block, (batch, channels, height, width) = call.get("blocksize"), x.shape
    inner = channels // block**2
    if call.get("mode", "DCR") == "DCR":
        x = x.reshape(batch, block, block, inner, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(batch, inner, block, block, height, width).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, inner, height * block, width * block)


@kernel("SpaceToDepth")
def space_to_depth(call: Call, x: Tensor) -> Tensor:
    """Blocks of pixels to channels."""
    block, (batch, channels, height, width) = call.get("blocksize"), x.shape
    x = x.reshape(batch, channels, height // block, block, width // block, block)
    x = x.permute(0, 3, 5, 1, 2, 4) if call.get("mode", "DCR") == "DCR" else x.permute(0, 1, 3, 5, 2, 4)
    return x.reshape(batch, channels * block**2, height // block, width // block)


@kernel("ReverseSequence")
def reverse_sequence(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    """The first entries of each batch row in reverse order."""
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    moved = x.movedim((batch, time), (0, 1))
    steps = torch.arange(moved.shape[1])[None]
    index = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return moved[torch.arange(moved.shape[0])[:, None], index].movedim((0, 1), (batch, time))


@kernel("NonZero")
def non_zero(call: Call, x: Tensor) -> Tensor:
    """The indices [rank, count] of nonzero elements."""
    return torch.nonzero(signed(x).reshape(x.shape or (1,))).T[: max(1, x.dim())]
