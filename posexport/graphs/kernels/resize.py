"""Resize and Upsample, by a matrix [new length, old length] of interpolation weights for each axis; GridSample."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels.registry import Call, kernel


@kernel("Resize", "Upsample")
def resize(
    call: Call, x: Tensor, second: Tensor | None = None, third: Tensor | None = None, fourth: Tensor | None = None
) -> Tensor:
    """Nearest, linear or cubic. Upsample, and Resize of opset 10, have only scales and no coordinate modes."""
    old = call.op_type == "Upsample" or call.version < 11
    stated = torch.tensor(call.get("scales")) if old and second is None else None
    region, scales, sizes = (None, second if stated is None else stated, None) if old else (second, third, fourth)
    axes = [axis % x.dim() for axis in call.get("axes", range(x.dim()))]
    mode = {"bilinear": "linear"}.get(call.get("mode", "nearest"), call.get("mode", "nearest"))
    coordinates = "asymmetric" if old else call.get("coordinate_transformation_mode", "half_pixel")
    lengths, factors = _lengths(call, [x.shape[axis] for axis in axes], scales, sizes)
    outside: list[Tensor | None] = []
    y = x if mode == "nearest" else x.to(torch.float64) if not x.is_floating_point() else x
    for at, axis in enumerate(axes):
        ends = (
            (0.0, 1.0) if region is None or not region.numel() else (float(region[at]), float(region[at + len(axes)]))
        )
        places = _places(coordinates, x.shape[axis], lengths[at], factors[at], ends, mode == "nearest")
        beyond = (places < 0) | (places > x.shape[axis] - 1) if coordinates == "tf_crop_and_resize" else None
        outside.append(beyond)
        if lengths[at] == x.shape[axis] and factors[at] == 1 and coordinates != "tf_crop_and_resize":
            continue
        if mode == "nearest":
            default = "round_prefer_floor" if not old else "ceil" if factors[at] < 1 else "floor"
            y = y.index_select(axis, _nearest(call, places, default).clamp(0, x.shape[axis] - 1))
        else:
            weights = _weights(call, mode, places, x.shape[axis], factors[at]).to(y.dtype)
            y = torch.matmul(y.movedim(axis, -1), weights.T).movedim(-1, axis)
    for axis, beyond in zip(axes, outside, strict=True):
        if beyond is not None:
            mask = beyond.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])
            y = torch.where(mask, torch.tensor(call.get("extrapolation_value", 0.0), dtype=y.dtype), y)
    return y.to(x.dtype)


def _lengths(call: Call, old: list[int], scales: Tensor | None, sizes: Tensor | None) -> tuple[list[int], list[float]]:
    """New lengths and factors of the resized axes."""
    if scales is not None and scales.numel():
        factors = [float(scale) for scale in scales]
        products = torch.tensor(old, dtype=torch.float32) * scales.to(torch.float32)  # as runtimes round it
        return [math.floor(float(product)) for product in products], factors
    if sizes is None:
        raise ValueError("its scales and its sizes are both missing")
    lengths = [int(size) for size in sizes]
    policy = call.get("keep_aspect_ratio_policy", "stretch")
    factors = [new / was for new, was in zip(lengths, old, strict=True)]
    if policy != "stretch":
        factor = min(factors) if policy == "not_larger" else max(factors)
        factors = [factor] * len(old)
        lengths = [math.floor(factor * was + 0.5) for was in old]
    return lengths, factors


def _places(mode: str, old: int, new: int, factor: float, ends: tuple[float, float], narrow: bool) -> Tensor:
    """The place in the input of each place of the output.

    With `narrow`, it is computed in float32, as runtimes do to find the nearest place.
    """
    at = torch.arange(new, dtype=torch.float32 if narrow else torch.float64)
    if mode == "align_corners":
        return at * (old - 1) / (new - 1) if new > 1 else torch.zeros_like(at)
    if mode == "asymmetric":
        return at / factor
    if mode == "tf_half_pixel_for_nn":
        return (at + 0.5) / factor
    if mode == "tf_crop_and_resize":
        start, end = ends
        if new <= 1:
            return torch.full_like(at, 0.5 * (start + end) * (old - 1))
        return start * (old - 1) + at * (end - start) * (old - 1) / (new - 1)
    if mode == "pytorch_half_pixel" and new <= 1:
        return torch.zeros_like(at)
    shift = old / 2 * (1 - new / (factor * old)) if mode == "half_pixel_symmetric" else 0.0
    return shift + (at + 0.5) / factor - 0.5


def _nearest(call: Call, places: Tensor, default: str) -> Tensor:
    how: dict[str, Callable[[Tensor], Tensor]] = {
        "round_prefer_floor": lambda x: torch.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: torch.floor(x + 0.5),
        "floor": torch.floor,
        "ceil": torch.ceil,
    }
    return how[call.get("nearest_mode", default)](places).to(torch.int64)


def _weights(call: Call, mode: str, places: Tensor, old: int, factor: float) -> Tensor:
    """[new, old]: the weight of each input place in an output place. Places outside count as the edge."""
    stretch = min(1.0, factor) if call.get("antialias", 0) else 1.0
    a = call.get("cubic_coeff_a", -0.75)
    reach = math.ceil((1 if mode == "linear" else 2) / stretch)
    offsets = torch.arange(-reach, reach + 1)
    taps = torch.floor(places)[:, None].to(torch.int64) + offsets
    distance = (taps - places[:, None]).abs() * stretch
    if mode == "linear":
        weights = (1 - distance).clamp(min=0)
    else:
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weights = torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
    if call.get("exclude_outside", 0):
        weights = weights * ((taps >= 0) & (taps < old))
    weights = weights / weights.sum(1, keepdim=True)
    return torch.zeros(len(places), old, dtype=weights.dtype).scatter_add(1, taps.clamp(0, old - 1), weights)


@kernel("GridSample")
def grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    """Values of x at the places of a grid [batch, places..., dimensions], with coordinates from -1 to 1."""
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(call.get("mode", "linear"), call.get("mode", "linear"))
    outside = call.get("padding_mode", "zeros")
    return F.grid_sample(x, grid, mode, outside, align_corners=bool(call.get("align_corners", 0)))
