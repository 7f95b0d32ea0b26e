"""TensorRT's convolutions and poolings, in float64: layers with a window that moves over the last axes.

An image is [batch, channels, *sizes]. Kernels are [out, in / groups, *window]; those of a deconvolution are [in, out /
groups, *window].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from posexport.runtimes.tensorrt.values import CannotEvaluate, read_weights

Tensor = torch.Tensor

_CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
_DECONVOLUTIONS = {
    1: torch.nn.functional.conv_transpose1d,
    2: torch.nn.functional.conv_transpose2d,
    3: torch.nn.functional.conv_transpose3d,
}


def convolution(layer: Any, x: Tensor, kernel: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """A convolution. Kernel and bias are the layer's own unless they are inputs."""
    window, dilation = tuple(layer.kernel_size_nd), tuple(layer.dilation_nd)
    kernel = read_weights(layer.kernel, (layer.num_output_maps, -1, *window)) if kernel is None else kernel
    x = _padded(
        x, _padding(layer, x, [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]), 0.0
    )
    function = _CONVOLUTIONS[len(window)]
    return function(x, kernel, _bias(layer, bias), tuple(layer.stride_nd), 0, dilation, layer.num_groups)


def deconvolution(layer: Any, x: Tensor, kernel: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """A transposed convolution; the padding is cut off the result."""
    if layer.padding_mode.name not in ("EXPLICIT_ROUND_DOWN", "EXPLICIT_ROUND_UP"):
        raise CannotEvaluate(f"its padding is {layer.padding_mode.name}")
    window = tuple(layer.kernel_size_nd)
    kernel = read_weights(layer.kernel, (x.shape[1], -1, *window)) if kernel is None else kernel
    function = _DECONVOLUTIONS[len(window)]
    whole = function(x, kernel, None, tuple(layer.stride_nd), 0, 0, layer.num_groups, tuple(layer.dilation_nd))
    cut = [(-before, -after) for before, after in zip(layer.pre_padding, layer.post_padding, strict=True)]
    whole, added = _padded(whole, cut, 0.0), _bias(layer, bias)
    return whole if added is None else whole + added.reshape(-1, *[1] * len(window))


def pooling(layer: Any, x: Tensor) -> Tensor:
    """The largest value or the mean of each window."""
    window, stride, kind = tuple(layer.window_size_nd), tuple(layer.stride_nd), layer.type.name
    if kind not in ("MAX", "AVERAGE"):
        raise CannotEvaluate(f"the operation {kind} is not known")
    padding = _padding(layer, x, window)
    if kind == "MAX":
        return _windows(_padded(x, padding, -math.inf), window, stride).amax(-1)
    if layer.padding_mode.name == "EXPLICIT_ROUND_UP":
        raise CannotEvaluate("how it counts what is behind the padding is not known")
    sums = _windows(_padded(x, padding, 0.0), window, stride).sum(-1)
    counts = torch.full_like(sums, math.prod(window))
    if layer.average_count_excludes_padding:
        counts = _windows(_padded(torch.ones_like(x), padding, 0.0), window, stride).sum(-1)
    return sums / counts


def _windows(x: Tensor, window: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The elements of each window, [batch, channels, *places, elements of a window]."""
    for axis, (size, step) in enumerate(zip(window, stride, strict=True), 2):
        x = x.unfold(axis, size, step)
    return x.flatten(-len(window))


def _padding(layer: Any, x: Tensor, window: Sequence[int]) -> list[tuple[int, int]]:
    """Elements before and after each of the last axes, with what windows need after the axis if they are rounded up."""
    mode, found = layer.padding_mode.name, list[tuple[int, int]]()
    if mode.startswith("EXPLICIT"):
        found = list(zip(layer.pre_padding, layer.post_padding, strict=True))
        if mode == "EXPLICIT_ROUND_DOWN":
            return found
    for axis, (size, step) in enumerate(zip(window, layer.stride_nd, strict=True)):
        length = x.shape[2 + axis]
        if mode == "EXPLICIT_ROUND_UP":
            before, after = found[axis]
            found[axis] = (before, after + -(length + before + after - size) % step)
        else:
            total = max((math.ceil(length / step) - 1) * step + size - length, 0)
            found.append((total - total // 2, total // 2) if mode == "SAME_LOWER" else (total // 2, total - total // 2))
    return found


def _padded(x: Tensor, padding: Sequence[tuple[int, int]], value: float) -> Tensor:
    flat = [size for pair in reversed(padding) for size in pair]
    return torch.nn.functional.pad(x, flat, value=value) if any(flat) else x


def _bias(layer: Any, bias: Tensor | None) -> Tensor | None:
    own = layer.bias
    if bias is not None or own is None or not (own.size if hasattr(own, "size") else len(own)):
        return bias
    return read_weights(own, [-1])
