"""Convolutions and pooling over any number of spatial dimensions."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels.registry import Call, kernel

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _pads(call: Call, sizes: list[int], kernel_shape: list[int], strides: list[int], dilations: list[int]) -> list[int]:
    """The pads before and after each spatial dimension: [before..., after...]."""
    automatic, count = call.get("auto_pad", "NOTSET"), len(sizes)
    if automatic == "NOTSET":
        return list(call.get("pads", [0] * 2 * count))
    if automatic == "VALID":
        return [0] * 2 * count
    before, after = [], []
    for size, width, stride, dilation in zip(sizes, kernel_shape, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size)
        small = total // 2
        before.append(small if automatic == "SAME_UPPER" else total - small)
        after.append(total - small if automatic == "SAME_UPPER" else small)
    return before + after


def padded(x: Tensor, pads: list[int], value: float = 0.0) -> Tensor:
    """Constant padding of the spatial dimensions; `pads` is [before..., after...]."""
    count = len(pads) // 2
    pairs = [side for at in reversed(range(count)) for side in (pads[at], pads[at + count])]
    return F.pad(x, pairs, value=value) if any(pairs) else x


@kernel("Conv")
def conv(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Cross-correlation, in groups."""
    count = x.dim() - 2
    strides = list(call.get("strides", [1] * count))
    dilations = list(call.get("dilations", [1] * count))
    x = padded(x, _pads(call, list(x.shape[2:]), list(w.shape[2:]), strides, dilations))
    return _CONVOLUTIONS[count](x, w, bias, strides, 0, dilations, call.get("group", 1))


@kernel("ConvTranspose")
def conv_transpose(call: Call, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The whole transposed convolution, cut at the pads. If `output_shape` is given, it decides the pads."""
    count = x.dim() - 2
    strides = list(call.get("strides", [1] * count))
    dilations = list(call.get("dilations", [1] * count))
    extra = list(call.get("output_padding", [0] * count))
    y = _TRANSPOSED[count](x, w, None, strides, 0, 0, call.get("group", 1), dilations)
    y = padded(y, [0] * count + extra)
    automatic, wanted = call.get("auto_pad", "NOTSET"), call.get("output_shape")
    if wanted is None and automatic in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    if wanted is None:
        pads = list(call.get("pads", [0] * 2 * count)) if automatic == "NOTSET" else [0] * 2 * count
    else:
        totals = [max(0, have - want) for have, want in zip(y.shape[2:], list(wanted)[-count:], strict=True)]
        y = padded(y, [0] * count + [max(0, w - h) for h, w in zip(y.shape[2:], list(wanted)[-count:], strict=True)])
        small = [total // 2 for total in totals]
        large = [total - part for total, part in zip(totals, small, strict=True)]
        pads = small + large if automatic == "SAME_UPPER" else large + small
    for axis in range(count):
        y = y.narrow(axis + 2, pads[axis], y.shape[axis + 2] - pads[axis] - pads[axis + count])
    return y if bias is None else y + bias.reshape(1, -1, *[1] * count)


@attrs.frozen(kw_only=True)
class _Pooling:
    """The windows of a pooling over spatial dimensions.

    `pads` are the file's, `more` those that ceil_mode adds after them.
    """

    shape: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[int]
    more: list[int]

    @classmethod
    def of(cls, call: Call, sizes: list[int]) -> _Pooling:
        """The windows of a call. A last window that ceil_mode adds must start inside the input or the pad before it."""
        shape = list(call.get("kernel_shape"))
        count = len(shape)
        strides = list(call.get("strides", [1] * count))
        dilations = list(call.get("dilations", [1] * count))
        pads = _pads(call, sizes, shape, strides, dilations)
        more = [0] * 2 * count
        for at in range(count if call.get("ceil_mode", 0) else 0):
            whole = sizes[at] + pads[at] + pads[at + count]
            reach = (shape[at] - 1) * dilations[at] + 1
            last = -((whole - reach) // -strides[at]) * strides[at]
            if last < sizes[at] + pads[at]:
                more[at + count] = max(0, last + reach - whole)
        return cls(shape=shape, strides=strides, dilations=dilations, pads=pads, more=more)

    def windows(self, x: Tensor, fill: float, more_fill: float | None = None) -> Tensor:
        """Every window of x [batch, channels, sizes...]: [batch, channels, places..., elements]."""
        x = padded(padded(x, self.pads, fill), self.more, fill if more_fill is None else more_fill)
        for at, width in enumerate(self.shape):
            reach = (width - 1) * self.dilations[at] + 1
            x = x.unfold(at + 2, reach, self.strides[at])[..., :: self.dilations[at]]
        return x.flatten(2 + len(self.shape))


@kernel("MaxPool")
def max_pool(call: Call, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The largest values, and their places in the whole flattened input."""
    pooling = _Pooling.of(call, list(x.shape[2:]))
    windows = pooling.windows(x, float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min)
    values = windows.amax(-1, keepdim=True)
    if not call.wants(1):
        return values.squeeze(-1), None
    best = (windows == values).to(torch.int8).argmax(-1, keepdim=True)
    numbers = torch.arange(x.numel()).reshape(x.shape)
    if call.get("storage_order", 0):  # columns first, within each plane
        axes = list(range(2, x.dim()))
        numbers = numbers.reshape(*x.shape[:2], *reversed(x.shape[2:])).permute(0, 1, *reversed(axes))
    places = pooling.windows(numbers, -1)
    return values.squeeze(-1), places.gather(-1, best).squeeze(-1)


@kernel("AveragePool")
def average_pool(call: Call, x: Tensor) -> Tensor:
    """Means of windows. Pads count with `count_include_pad`; what ceil_mode adds never counts."""
    pooling = _Pooling.of(call, list(x.shape[2:]))
    count = pooling.windows(torch.ones_like(x[:1, :1]), float(call.get("count_include_pad", 0)), 0.0).sum(-1)
    return pooling.windows(x, 0.0).sum(-1) / count


@kernel("LpPool")
def lp_pool(call: Call, x: Tensor) -> Tensor:
    """The p-norm of each window."""
    p = call.get("p", 2)
    return _Pooling.of(call, list(x.shape[2:])).windows(x.abs().pow(p), 0.0).sum(-1).pow(1 / p)


@kernel("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(call: Call, x: Tensor) -> Tensor:
    """Pooling over all spatial dimensions."""
    axes = list(range(2, x.dim()))
    if call.op_type == "GlobalMaxPool":
        return x.amax(axes, keepdim=True)
    if call.op_type == "GlobalAveragePool":
        return x.mean(axes, keepdim=True)
    p = call.get("p", 2)
    return x.abs().pow(p).sum(axes, keepdim=True).pow(1 / p)
