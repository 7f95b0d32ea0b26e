"""The two products of attention, queries with keys and weights with values, as MatMul or Einsum write them.

The axes of an operand are letters: b batch, h heads, s queries, t keys, d features. A product of three axes has batch
and heads merged, `(bh)`.
"""

from __future__ import annotations

import attrs
import onnx_ir as ir

SCORES = ("bhsd", "bhdt", "bhst")
"""The axes of queries, keys and scores in MatMul."""

WEIGHTED = ("bhst", "bhtd", "bhsd")
"""The axes of weights, values and results in MatMul."""

PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "Einsum")
"""The operators that may be such a product."""

_TRANSPOSING = ("FusedMatMul", "Gemm")
"""Products that may transpose their operands.

Operands of Gemm have two axes. So attention with Gemm is always left as it is, and what Gemm adds is not read.
"""


@attrs.frozen(kw_only=True)
class Product:
    """One product: its node, operands and result, with the axes of each."""

    node: ir.Node
    left: ir.Value
    right: ir.Value
    result: ir.Value
    axes: tuple[str, str, str]


def product_of(node: ir.Node, axes: tuple[str, str, str], *, weights: ir.Value | None = None) -> Product | None:
    """The product that a node computes; None for other nodes. `axes` are those of left, right and result in MatMul.

    `weights`, if given, must be one of the operands.
    """
    if node.op_type in ("MatMul", *_TRANSPOSING) and len(node.inputs) >= 2:
        left, right = node.inputs[0], node.inputs[1]
        if left is None or right is None or (weights is not None and weights not in (left, right)):
            return None
        behind = weights is not None and left is not weights
        if behind:  # values [B, N, D, T] times weights [B, N, T, S]: the product of the transposed operands
            of_right, of_left, of_result = map(_turned, axes)
        else:
            of_left, of_right, of_result = axes
        if node.op_type in _TRANSPOSING:
            of_left, of_right = _given(node, of_left, "A"), _given(node, of_right, "B")
        sides = (left, of_left), (right, of_right)
        (first, of_first), (second, of_second) = sides[::-1] if behind else sides
        result = node.outputs[0]
        return Product(node=node, left=first, right=second, result=result, axes=(of_first, of_second, of_result))
    if node.op_type == "Einsum" and len(node.inputs) == 2:
        return _einsum(node, axes, weights)
    return None


def with_keys_at(product: Product, axis: int) -> Product | None:
    """The product with keys on this axis of its result; None if it is not an axis of tokens.

    If the axis is that of queries, queries and keys exchange their names.
    """
    letter = product.axes[2][axis]
    if letter != "s":
        return product if letter == "t" else None
    of_keys, of_queries, of_result = (axes.translate(str.maketrans("st", "ts")) for axes in product.axes)
    return attrs.evolve(product, left=product.right, right=product.left, axes=(of_queries, of_keys, of_result))


def with_heads_first(product: Product) -> Product:
    """The product with heads on the first axis of its operands and rows on the second."""
    left, right, result = (axes.translate(str.maketrans("bh", "hb")) for axes in product.axes)
    return attrs.evolve(product, axes=(left, right, result))


def _turned(axes: str) -> str:
    """The axes with the last two exchanged."""
    return axes[:-2] + axes[-1] + axes[-2]


def _given(node: ir.Node, axes: str, side: str) -> str:
    """The axes of an operand of Gemm or com.microsoft FusedMatMul, which may transpose it.

    FusedMatMul may transpose the batch too: [S, B, N, D] for [B, N, S, D].
    """
    if node.attributes.get_int(f"trans{side}", 0):
        axes = _turned(axes)
    return axes[-2] + axes[:-2] + axes[-1] if node.attributes.get_int(f"transBatch{side}", 0) else axes


def _einsum(node: ir.Node, axes: tuple[str, str, str], weights: ir.Value | None) -> Product | None:
    attribute = node.attributes.get("equation")
    equation = "" if attribute is None else attribute.as_string().replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if not arrow or len(parts) != 2 or any(len(part) not in (3, 4) for part in (*parts, output)) or "." in equation:
        return None
    operands = list(zip(parts, node.inputs, strict=True))
    if weights is None and output[-1] in parts[0]:  # the last axis of scores is that of keys
        operands.reverse()
    if weights is not None and operands[0][1] is not weights:
        operands.reverse()
    (left, left_value), (right, right_value) = operands
    if left_value is None or right_value is None or (weights is not None and left_value is not weights):
        return None
    summed = [letter for letter in left if letter in right and letter not in output]
    shared = [letter for letter in left if letter in right and letter in output]
    only_left = [letter for letter in left if letter not in right and letter in output]
    only_right = [letter for letter in right if letter not in left and letter in output]
    if not (len(summed) == len(only_left) == len(only_right) == 1 and 1 <= len(shared) <= 2):
        return None
    names = dict(zip(shared, "bh" if len(shared) == 2 else "b", strict=True))
    names |= {only_left[0]: axes[2][-2], only_right[0]: axes[2][-1], summed[0]: axes[0][-1]}
    if not {*left, *right, *output} <= names.keys():  # an axis of one operand is summed: not a product of matrices
        return None
    written = tuple("".join(names[letter] for letter in part) for part in (left, right, output))
    return Product(
        node=node, left=left_value, right=right_value, result=node.outputs[0], axes=(written[0], written[1], written[2])
    )
