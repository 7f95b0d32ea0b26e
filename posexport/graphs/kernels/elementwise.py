"""Operators that act on each element: arithmetic, comparisons, logic, activations, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels import dtypes
from posexport.graphs.kernels.registry import KERNELS, Call, kernel

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_REPLACED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def signed(tensor: Tensor) -> Tensor:
    """The tensor in a signed type if it is uint16, uint32 or uint64, with which torch computes little."""
    return tensor.to(_REPLACED[tensor.dtype]) if tensor.dtype in _UNSIGNED else tensor


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() or a.is_complex() else torch.div(a, b, rounding_mode="trunc")


def _power(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point() or not b.is_floating_point():
        return torch.pow(a, b.to(a.dtype) if not a.is_floating_point() else b).to(a.dtype)
    return torch.pow(a.double(), b).to(a.dtype)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": _divide,
    "Pow": _power,
    "PRelu": _prelu,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}
"""Functions of two operands. The result has the dtype of the first."""

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Equal": torch.eq,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Neg": torch.neg,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Tanh": torch.tanh,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Erf": torch.erf,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Not": torch.logical_not,
    "BitwiseNot": lambda x: torch.bitwise_not(signed(x)).to(x.dtype),
    "Identity": lambda x: x,
}

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "LeakyRelu": lambda x, alpha=0.01: torch.where(x < 0, alpha * x, x),
    "Elu": lambda x, alpha=1.0: torch.where(x < 0, alpha * torch.expm1(x), x),
    "Celu": lambda x, alpha=1.0: torch.clamp(x, min=0) + torch.clamp(alpha * torch.expm1(x / alpha), max=0),
    "Selu": lambda x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875: (
        gamma * torch.where(x > 0, x, alpha * torch.expm1(x))
    ),
    "ThresholdedRelu": lambda x, alpha=1.0: torch.where(x > alpha, x, torch.zeros_like(x)),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: torch.clamp(alpha * x + beta, 0, 1),
    "Shrink": lambda x, bias=0.0, lambd=0.5: torch.where(
        x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x))
    ),
    "Swish": lambda x, alpha=1.0: x * torch.sigmoid(alpha * x),
}
"""Functions of one input. Attributes are their other arguments, with the defaults of the specification."""

for _name, _two in ARITHMETIC.items():

    def _arithmetic(call: Call, a: Tensor, b: Tensor, _two: Callable[[Tensor, Tensor], Tensor] = _two) -> Tensor:
        a, b = _legacy_broadcast(call, a, b)
        return _two(signed(a), signed(b)).to(a.dtype)

    KERNELS["", _name] = _arithmetic

for _name, _two in COMPARISONS.items():

    def _comparison(call: Call, a: Tensor, b: Tensor, _two: Callable[[Tensor, Tensor], Tensor] = _two) -> Tensor:
        return _two(signed(a), signed(b))

    KERNELS["", _name] = _comparison

for _name, _one in UNARY.items():

    def _unary(call: Call, x: Any, _one: Callable[[Tensor], Tensor] = _one) -> Any:
        return _one(x)

    KERNELS["", _name] = _unary

for _name, _function in ACTIVATIONS.items():

    def _activation(call: Call, x: Tensor, _function: Callable[..., Tensor] = _function) -> Tensor:
        return _function(x, **call.attributes)

    KERNELS["", _name] = _activation


def _legacy_broadcast(call: Call, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands, with the second aligned to `axis` of the first, as before opset 7."""
    axis = call.attributes.get("axis")
    if axis is not None and call.version < 7:
        b = b.reshape(b.shape + (1,) * (a.dim() - axis - b.dim()))
    return a, b


@kernel("Mod")
def mod(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """The result has the sign of the divisor, or with fmod=1 that of the dividend."""
    return (torch.fmod if call.get("fmod", 0) else torch.remainder)(signed(a), signed(b)).to(a.dtype)


@kernel("BitShift")
def bit_shift(call: Call, x: Tensor, by: Tensor) -> Tensor:
    """Shift unsigned numbers to the left or right."""
    shift = torch.bitwise_left_shift if call.get("direction") == "LEFT" else torch.bitwise_right_shift
    return shift(signed(x), signed(by)).to(x.dtype)


@kernel("Where")
def where(call: Call, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Choose by condition."""
    return torch.where(condition, x, y)


@kernel("Clip")
def clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Before opset 11, the limits are attributes. If they cross, the upper one wins."""
    if call.version < 11:
        return torch.clamp(x, call.get("min"), call.get("max"))
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


@kernel("IsInf")
def is_inf(call: Call, x: Tensor) -> Tensor:
    """Infinities of both signs, or of one."""
    positive = torch.isposinf(x) & bool(call.get("detect_positive", 1))
    return positive | (torch.isneginf(x) & bool(call.get("detect_negative", 1)))


@kernel("Cast")
def cast(call: Call, x: Tensor) -> Tensor:
    """To integers by truncation. In wide evaluation, casts between floating-point types do nothing."""
    kind = ir.DataType(call.get("to"))
    return dtypes.wrapped(to_dtype(x, call.dtype(kind.value), bool(call.get("saturate", 1))), kind)


@kernel("CastLike")
def cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    """Cast to the dtype of another tensor."""
    y = to_dtype(x, like.dtype, bool(call.get("saturate", 1)))
    kind = call.type_of(1)
    return y if kind is None else dtypes.wrapped(y, kind)


def to_dtype(x: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """Cast. Floats become integers through int64. With `saturate`, 8-bit floats are at most the largest finite one."""
    if dtype == x.dtype:
        return x
    if dtype in _FLOAT8:
        x, most = x.to(torch.float32), torch.finfo(dtype).max
        if saturate:
            x = x.clamp(-most, most)
        elif dtype == torch.float8_e4m3fn:  # it has no infinity, and torch saturates
            x = torch.where(x.abs() > most + 16, torch.nan, x)
        return x.to(dtype)
    if x.dtype in _FLOAT8:
        x = x.to(torch.float32)
    if x.is_floating_point() and not dtype.is_floating_point and dtype not in (torch.bool, torch.int64):
        return x.to(torch.int64).to(dtype)  # wraps; a direct cast is undefined
    return x.to(dtype)


@kernel("Sum", "Mean", "Max", "Min")
def variadic(call: Call, *values: Tensor) -> Tensor:
    """Any number of operands."""
    two = {"Max": torch.maximum, "Min": torch.minimum}.get(call.op_type, torch.add)
    result = signed(values[0])
    for value in values[1:]:
        result = two(result, signed(value))
    return (result / len(values) if call.op_type == "Mean" else result).to(values[0].dtype)


@kernel("Gelu")
def gelu(call: Call, x: Tensor) -> Tensor:
    """x Φ(x), or its tanh approximation."""
    return F.gelu(x, approximate=call.get("approximate", "none"))


@kernel("Dropout")
def dropout(
    call: Call, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Inference: the input unchanged."""
    if training is not None and bool(training) and (ratio is None or float(ratio) > 0):
        raise ValueError("Dropout in training draws random numbers")
    return x, torch.ones_like(x, dtype=torch.bool)
