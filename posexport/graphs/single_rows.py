"""Products of attention of a single sequence without axes of rows and heads, written with such axes.

    scores [S, T] = queries [S, D] keys [D, T]

Attention is then recognised in one way. Products with two axes are also written as Gemm, with a factor and a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from posexport.graphs.operators import Call, Unexpanded

_FACTORS = ("alpha", "beta", "transA", "transB")


def matmul(call: Call) -> ir.Value:
    """The product of two operands with two axes."""
    left, right = call.input(0), call.input(1)
    assert left is not None and right is not None
    return _product(call, left, right)


def gemm(call: Call) -> Sequence[ir.Value]:
    """Gemm of two operands that are no weights: alpha A B + beta C."""
    call.check(_FACTORS, 3)
    nodes, added = call.nodes, call.input(2)
    operands = []
    for index, name in enumerate(("transA", "transB")):
        value = call.input(index)
        if value is None:
            raise Unexpanded("it lacks an input")
        operands.append(nodes.one("Transpose", value, perm=[1, 0]) if call.integer(name) else value)
    product = _times(call, _product(call, *operands), call.number("alpha", 1.0))
    return [product if added is None else nodes.one("Add", product, _times(call, added, call.number("beta", 1.0)))]


def _product(call: Call, left: ir.Value, right: ir.Value) -> ir.Value:
    if any(value.is_initializer() or value.const_value is not None for value in (left, right)):
        raise Unexpanded("one of its operands is a weight")
    nodes, axes = call.nodes, call.nodes.constant([0, 1])
    wide = (nodes.one("Unsqueeze", value, axes) for value in (left, right))
    return nodes.one("Squeeze", nodes.one("MatMul", *wide), axes)


def _times(call: Call, value: ir.Value, factor: float) -> ir.Value:
    if factor == 1.0:
        return value
    number = call.nodes.one("CastLike", call.nodes.constant(factor, ir.DataType.FLOAT), value)
    return call.nodes.one("Mul", value, number)
