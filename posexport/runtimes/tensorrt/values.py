"""Values of TensorRT's tensors in torch: floats as float64, integers as int64, bools as bool."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from posexport.runtimes.tensors import to_torch

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}
"""torch's dtypes for TensorRT's; quantised ones are not evaluated."""


class CannotEvaluate(Exception):
    """The meaning of a layer is not certain; the text is a clause that says why."""


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as float64, int64 or bool."""
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def fits(value: torch.Tensor, tensor: Any) -> bool:
    """Whether a value has the type of TensorRT's `tensor`, and its shape in the fixed dimensions."""
    if tensor.dtype.name not in DTYPES or value.dtype != widened(torch.empty(0, dtype=DTYPES[tensor.dtype.name])).dtype:
        return False
    dims = tuple(tensor.shape)
    return value.ndim == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, value.shape, strict=True))


def cast(value: torch.Tensor, to: str) -> torch.Tensor:
    """The value cast to the type `to`; floats are truncated to integers.

    Of floats, only whole numbers, such as positions, are rounded. Rounded biases and logits would be off by more than
    torch's, whose errors partly cancel. Beyond the type's range, a float becomes infinite, an integer wraps, and a
    float cast to an integer is clamped.
    """
    if to not in DTYPES:
        raise CannotEvaluate(f"it casts to {to}")
    dtype = DTYPES[to]
    if dtype == torch.bool:
        return value != 0
    if dtype.is_floating_point:
        wide = value.to(torch.float64)
        narrow = wide.to(dtype).to(torch.float64)
        return narrow if bool((wide == wide.round()).all()) else torch.where(narrow.isinf(), narrow, wide)
    if not value.is_floating_point():
        return value.to(dtype).to(torch.int64)
    limits = torch.iinfo(dtype)
    whole = value.nan_to_num(0.0, float(limits.max), float(limits.min)).trunc()
    inside = whole.clamp(float(limits.min), float(limits.max)).to(torch.int64)
    return torch.where(whole >= float(limits.max), limits.max, inside)  # float64 can't represent 2^63 - 1


def ints(value: torch.Tensor) -> list[int]:
    """A vector or a scalar of integers, as a list."""
    return [int(number) for number in value.reshape(-1).tolist()]


def bits(mask: int) -> list[int]:
    """The axes that a bitmask names."""
    return [axis for axis in range(32) if mask >> axis & 1]


def read_weights(weights: Any, shape: Sequence[int]) -> torch.Tensor:
    """Weights of a layer, widened. TensorRT gives them as numpy arrays, except bf16, which numpy lacks."""
    array = weights if isinstance(weights, np.ndarray) else _read_bf16(weights)
    if array.dtype.name not in ("float32", "float16", "bfloat16", "int32", "int64", "bool"):
        raise CannotEvaluate(f"its weights are {array.dtype.name}")
    return widened(to_torch(array)).reshape(tuple(shape))


def _read_bf16(weights: Any) -> np.ndarray[Any, Any]:
    """bf16 weights, read at their address, which the Python API does not expose."""
    if weights.dtype.name != "BF16":
        raise CannotEvaluate(f"its weights are {weights.dtype.name}")
    if not weights.size:
        return np.empty(0, ml_dtypes.bfloat16)
    probe = np.array([1.0, 2.0], np.float32)
    if _address(type(weights)(probe))[1:] != (probe.ctypes.data, 2) or _address(weights)[2] != weights.size:
        raise CannotEvaluate("its bf16 weights can't be read from this version's Python API")
    raw = ctypes.string_at(_address(weights)[1], 2 * weights.size)
    return np.frombuffer(raw, ml_dtypes.bfloat16)


def _address(weights: Any) -> tuple[int, int, int]:
    """(type, address, count) of a `Weights` object.

    pybind11 keeps the address of the C++ struct after the header of the Python object. The struct is {int32 type; const
    void* values; int64 count}.
    """
    struct = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value or 0
    kind = ctypes.c_int32.from_address(struct).value
    values = ctypes.c_void_p.from_address(struct + 8).value or 0
    return kind, values, ctypes.c_int64.from_address(struct + 16).value
