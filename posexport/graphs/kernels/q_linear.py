"""com.microsoft's operators on quantised tensors, which ONNX Runtime's static quantizer writes for files without QDQ.

Each dequantises its inputs, computes in float64, and quantises the result. ONNX Runtime rounds some of them in fixed
point, so that a result may differ by one step.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from posexport.graphs.kernels.convolutions import average_pool
from posexport.graphs.kernels.quantised import requantized
from posexport.graphs.kernels.reductions import softmax
from posexport.graphs.kernels.registry import MICROSOFT, Call, kernel


def dequantized(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """(x - zero) * scale in float64. A vector of scales has one for each column."""
    return (x.double() - (0 if zero is None else zero.double())) * scale.double()


_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"QLinearAdd": torch.add, "QLinearMul": torch.mul}


@kernel(*_PAIRS, domain=MICROSOFT)
def of_pairs(
    call: Call,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
) -> Tensor:
    """A sum or a product."""
    found = _PAIRS[call.op_type](dequantized(a, a_scale, a_zero), dequantized(b, b_scale, b_zero))
    return requantized(found, y_scale, _zero(y_zero, a))


_SINGLE: dict[str, Callable[[Call, Tensor], Tensor]] = {
    "QLinearAveragePool": average_pool,
    "QLinearGlobalAveragePool": lambda call, x: x.mean([*range(2, x.dim())], keepdim=True),
    "QLinearLeakyRelu": lambda call, x: torch.where(x < 0, x * call.get("alpha", 0.01), x),
    "QLinearSigmoid": lambda call, x: torch.sigmoid(x),
}


@kernel(*_SINGLE, domain=MICROSOFT)
def of_one(
    call: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, y_scale: Tensor, y_zero: Tensor | None = None
) -> Tensor:
    """A function of one tensor."""
    if call.get("channels_last", 0):
        raise ValueError("channels at the end can't be evaluated")
    return requantized(_SINGLE[call.op_type](call, dequantized(x, x_scale, x_zero)), y_scale, _zero(y_zero, x))


@kernel("QLinearSoftmax", domain=MICROSOFT)
def q_linear_softmax(
    call: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, y_scale: Tensor, y_zero: Tensor
) -> Tensor:
    """Softmax of the opset that the attribute `opset` states."""
    plain = attrs.evolve(call, op_type="Softmax", version=call.get("opset"))
    return requantized(softmax(plain, dequantized(x, x_scale, x_zero)), y_scale, y_zero)


@kernel("QLinearConcat", domain=MICROSOFT)
def q_linear_concat(call: Call, y_scale: Tensor, y_zero: Tensor, *parts: Tensor | None) -> Tensor:
    """Each part comes with its scale and its zero point."""
    found = [
        dequantized(x, scale, zero)
        for x, scale, zero in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        if x is not None and scale is not None
    ]
    return requantized(torch.cat(found, call.get("axis")), y_scale, y_zero)


@kernel("QLinearWhere", domain=MICROSOFT)
def q_linear_where(
    call: Call,
    condition: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    z_scale: Tensor,
    z_zero: Tensor,
) -> Tensor:
    """One of two tensors at each place."""
    found = torch.where(condition, dequantized(x, x_scale, x_zero), dequantized(y, y_scale, y_zero))
    return requantized(found, z_scale, z_zero)


@kernel("QGemm", domain=MICROSOFT)
def q_gemm(
    call: Call,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero: Tensor | None = None,
) -> Tensor:
    """alpha A B + C; C is in units of alpha and both scales. Without a scale, the result is of floating point."""
    left, right = a.T if call.get("transA", 0) else a, b.T if call.get("transB", 0) else b
    units = call.get("alpha", 1.0) * b_scale.double()
    found = dequantized(left, a_scale, a_zero) @ (right.double() - b_zero.double()) * units
    found = found if c is None else found + c.double() * units * a_scale.double()
    return found.to(a_scale.dtype) if y_scale is None else requantized(found, y_scale, _zero(y_zero, a))


def _zero(zero: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype) if zero is None else zero
