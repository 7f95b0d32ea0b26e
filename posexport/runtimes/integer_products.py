"""Products of 8-bit integers that overflow: on x86 CPUs without VNNI, ONNX Runtime adds two of them in 16 bits.

Activations of 0 to 255 and weights of -128 to 127 give up to 2 * 255 * 128 = 65,280, and 32,767 is the largest number
of 16 bits. Weights of 7 bits can't overflow. Source: ONNX Runtime's documentation of quantization.
"""

from __future__ import annotations

from posexport.machine import instruction_sets

_PRODUCTS = {"MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "QGemm", "QAttention"}
_PRODUCTS |= {"MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
"""Operators of 8-bit products."""

_EXACT = {"AVX-512 VNNI", "AVX VNNI", "AMX INT8"}
"""Instruction sets that add such products in 32 bits."""

ADVICE = (
    "8-bit products overflow in ONNX Runtime on this CPU, which has no VNNI: quantize the weights to 7 bits "
    "(reduce_range=True)"
)


def overflows(operator: str, runtime: str) -> bool:
    """Whether an operator's products of 8-bit integers may overflow in a runtime on this CPU."""
    own = set(instruction_sets() or ())
    return runtime == "ort-cpu" and operator in _PRODUCTS and "AVX2" in own and not own & _EXACT
