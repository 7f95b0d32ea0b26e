"""Quantisation to few bits, dequantisation, and products of quantised tensors."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from posexport.graphs.kernels import dtypes
from posexport.graphs.kernels.convolutions import conv
from posexport.graphs.kernels.elementwise import signed
from posexport.graphs.kernels.registry import KERNELS, MICROSOFT, Call, kernel

_Type = ir.DataType
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def limits(kind: ir.DataType) -> tuple[int, int]:
    """The smallest and largest integer of an element type."""
    bits = dtypes.BITS.get(kind) or 8 * torch.empty(0, dtype=dtypes.OTHERS[kind]).element_size()
    return (0, 2**bits - 1) if kind.name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def rounded_float(x: Tensor, kind: ir.DataType, saturate: bool) -> Tensor:
    """x rounded to a floating-point type of 8 or 4 bits, in the dtype of x."""
    if kind == _Type.FLOAT4E2M1:
        grid = torch.tensor(_FLOAT4, dtype=x.dtype)
        size = x.abs().clamp(max=6.0)
        above = torch.searchsorted(grid, size.contiguous()).clamp(max=7)
        below = (above - 1).clamp(min=0)
        middle = (grid[above] + grid[below]) / 2
        up = (size > middle) | ((size == middle) & (above % 2 == 0))
        return torch.copysign(torch.where(up, grid[above], grid[below]), x)
    dtype = dtypes.FLOATS[kind]
    if saturate and dtype != torch.float8_e8m0fnu:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(torch.float32).to(dtype).to(x.dtype)


def _over(values: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Scales or zero points expanded over x: one for all, one for each place of the axis, or one for each block."""
    if values.numel() == 1 and values.dim() <= 1:
        return values.reshape(())
    if block:
        return values.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return values.reshape([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])


@kernel("QuantizeLinear")
def quantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """saturate(round(x / scale) + zero)."""
    stated = call.get("output_dtype", 0)
    kind = ir.DataType(stated) if stated else call.type_of(2) or _stored(zero)
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    precision = call.get("precision", 0)
    inside = call.dtype(precision) if precision else scale.dtype
    y = x.to(inside) / _over(scale, x, axis, block).to(inside)
    if kind in dtypes.FLOATS or kind == _Type.FLOAT4E2M1:
        y = y if zero is None else y + _over(zero, x, axis, block).to(y.dtype)
        return rounded_float(y, kind, bool(call.get("saturate", 1))).to(call.dtype(kind.value))
    y = torch.round(y.double())
    y = y if zero is None else y + _over(signed(zero), x, axis, block)
    return y.clamp(*limits(kind)).to(torch.int64).to(call.dtype(kind.value))


def _stored(zero: Tensor | None) -> ir.DataType:
    kinds = [kind for kind, dtype in dtypes.OTHERS.items() if zero is not None and dtype == zero.dtype]
    return kinds[0] if kinds else _Type.UINT8


@kernel("DequantizeLinear")
def dequantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """(x - zero) * scale."""
    axis, block, stated = call.get("axis", 1), call.get("block_size", 0), call.get("output_dtype", 0)
    target = call.dtype(stated) if stated else scale.dtype
    x = (x if x.is_floating_point() else signed(x).to(torch.int64)).to(torch.float64)
    x = x if zero is None else x - _over(signed(zero).to(torch.float64), x, axis, block)
    return x.to(target) * _over(scale, x, axis, block).to(target)


@kernel("DynamicQuantizeLinear")
def dynamic_quantize(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To uint8 over the range of x and 0; also gives the scale and the zero point."""
    most, least = (torch.clamp(x.amax(), min=0), torch.clamp(x.amin(), max=0)) if x.numel() else (x.sum(), x.sum())
    span = most - least
    scale = torch.where(span == 0, torch.ones_like(span), span) / 255
    zero = torch.round((-least / scale).clamp(0, 255))
    y = (torch.round(x / scale) + zero).clamp(0, 255)
    return y.to(torch.uint8), scale, zero.to(torch.uint8)


def _centred(x: Tensor, zero: Tensor | None, column: bool) -> Tensor:
    """x - zero in float64, in which products of 8-bit numbers are exact. A vector has one for each row (or column)."""
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    zero = zero.to(torch.float64)
    return wide - (zero[..., None] if zero.dim() == 1 and zero.numel() > 1 and not column else zero)


@kernel("MatMulInteger")
def matmul_integer(
    call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    """(A - a_zero) (B - b_zero) in int32."""
    return torch.matmul(_centred(a, a_zero, False), _centred(b, b_zero, True)).to(torch.int64).to(torch.int32)


@kernel("ConvInteger")
def conv_integer(
    call: Call, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    """A convolution of integers in int32. Pads hold the zero point, which is 0 after centring."""
    w_zero = None if w_zero is None else w_zero.reshape(-1, *[1] * (w.dim() - 1))
    return conv(call, _centred(x, x_zero, True), _centred(w, w_zero, True)).to(torch.int64).to(torch.int32)


@kernel("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    call: Call,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """MatMulInteger times both scales. B has one scale, or one for each column."""
    product = matmul_integer(call, a, b, a_zero, b_zero).to(a_scale.dtype) * (a_scale * b_scale)
    return product if bias is None else product + bias


@kernel("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(
    call: Call, a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """MatMulIntegerToFloat of A as DynamicQuantizeLinear gives it."""
    whole, a_scale, a_zero = dynamic_quantize(call, a)
    return matmul_integer_to_float(call, whole, b, a_scale, b_scale, a_zero, b_zero, bias)


def requantized(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Values divided by the output's scale, rounded, and saturated in the zero point's type."""
    least, most = torch.iinfo(zero.dtype).min, torch.iinfo(zero.dtype).max
    return (torch.round(values / scale.double()) + zero).clamp(least, most).to(torch.int64).to(zero.dtype)


@kernel("QLinearMatMul")
def q_linear_matmul(
    call: Call,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    """MatMul of dequantised tensors, quantised again."""
    a_scale = a_scale[..., None] if a_scale.dim() == 1 and a_scale.numel() > 1 else a_scale
    left = _centred(a, a_zero, False) * a_scale.double()
    return requantized(torch.matmul(left, _centred(b, b_zero, True) * b_scale.double()), y_scale, y_zero)


@kernel("QLinearConv")
def q_linear_conv(
    call: Call,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Conv of dequantised tensors, quantised again. The bias is in units of the product of both scales."""
    channels = [-1] + [1] * (w.dim() - 1)
    product = conv(call, _centred(x, x_zero, True), _centred(w, w_zero.reshape(channels), True))
    product = product if bias is None else product + bias.double().reshape(1, *channels[:-1])
    units = x_scale.double() * w_scale.double().reshape(1, *channels[:-1])
    return requantized(product * units, y_scale, y_zero)


KERNELS[MICROSOFT, "QuantizeLinear"] = quantize
KERNELS[MICROSOFT, "DequantizeLinear"] = dequantize
