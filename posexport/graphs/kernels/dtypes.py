"""ONNX element types in torch: the dtype for each, and the conversion of tensors."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx_ir as ir
import torch

FLOATS = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ir.DataType.FLOAT8E5M2: torch.float8_e5m2,
    ir.DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    ir.DataType.FLOAT8E8M0: torch.float8_e8m0fnu,
}
"""Floating-point types. In wide evaluation, all of them are float64."""

OTHERS = {
    ir.DataType.BOOL: torch.bool,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.INT4: torch.int8,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.INT2: torch.int8,
    ir.DataType.UINT2: torch.uint8,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
}
"""The other types. Integers of fewer than 8 bits are held in 8 bits."""

BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT2: 2, ir.DataType.UINT2: 2}
"""The bits of integers that are held in 8 bits."""


def torch_dtype(kind: ir.DataType, wide: bool) -> torch.dtype:
    """The torch dtype for an element type. Raises ValueError if there is none (strings, and float4 unless `wide`)."""
    if wide and (kind in FLOATS or kind == ir.DataType.FLOAT4E2M1):
        return torch.float64
    if kind in FLOATS:
        return FLOATS[kind]
    if kind not in OTHERS:
        raise ValueError(f"element type {kind.name} can't be evaluated")
    dtype = OTHERS[kind]
    return torch.complex128 if wide and dtype.is_complex else dtype


def widened(tensor: torch.Tensor, wide: bool) -> torch.Tensor:
    """The tensor; in wide evaluation, floating-point tensors become float64 and complex ones complex128."""
    if not wide:
        return tensor
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def to_torch(stored: ir.TensorProtocol, wide: bool, rows: torch.Tensor | None = None) -> torch.Tensor:
    """A stored tensor, or the rows of it that an index of any shape names, copied once.

    External data is read here and not kept. Raises ValueError if the element type has no dtype, and IndexError if a row
    doesn't exist.
    """
    copied = _copied(stored, wide, rows)
    if isinstance(stored, ir.ExternalTensor):
        with contextlib.suppress(BufferError):  # raised if something else is reading it
            stored.release()  # otherwise the pages of all weights stay in memory
    return copied


def _copied(stored: ir.TensorProtocol, wide: bool, rows: torch.Tensor | None) -> torch.Tensor:
    dtype = torch_dtype(stored.dtype, wide)
    array = stored.numpy()
    if rows is not None:
        array = array[rows.numpy()]
    if stored.dtype == ir.DataType.BFLOAT16:  # numpy's bfloat16 converts slowly
        bits = torch.from_numpy(np.array(array).view(np.uint16).reshape(array.shape))
        return bits.view(torch.bfloat16).to(dtype)
    if not wide and dtype.is_floating_point and dtype.itemsize == 1:  # numpy and torch share no 8-bit floats
        return torch.from_numpy(array.astype(np.float32)).to(dtype)
    target = np.dtype(str(dtype).removeprefix("torch."))
    return torch.from_numpy(np.array(array, dtype=target, order="C"))


def wrapped(x: torch.Tensor, kind: ir.DataType) -> torch.Tensor:
    """Integers in 8 bits, wrapped to the 4 or 2 bits of their type."""
    bits = BITS.get(kind)
    if bits is None:
        return x
    low = torch.bitwise_and(x.to(torch.int64), (1 << bits) - 1)
    negative = torch.zeros_like(low) if kind.name.startswith("U") else torch.bitwise_right_shift(low, bits - 1)
    return (low - negative * (1 << bits)).to(x.dtype)
