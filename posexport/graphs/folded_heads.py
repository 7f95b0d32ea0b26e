"""Multi-query attention whose query heads are folded into the axis of tokens: gives the heads an axis of their own.

    scores [B, N*S, T] = queries [B, N*S, D] keys [B, D, T],   or [B, S*N, T], and with an axis of 1 for the key head

Exporters write multi-query attention in this way, for example that of GPTBigCode. Its two products become products with
four axes between reshapes, so that attention is recognised in one way. The Reshape that splits features [..., N*D]
tells the number of heads. The order of the numbers in the product's operand tells the order of heads and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from posexport.graphs.operators import Call, Fold, Shapes, Unexpanded

Array = np.ndarray[Any, np.dtype[np.int64]]

_COPIES = {"Cast", "Identity", "Dropout", "RotaryEmbedding", "Mul", "Div", "Add"}
_MOVES = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose"}
"""Operators between the features of queries and their product.

_COPIES keep each number in its place (a rotation in one of its operands); _MOVES don't.
"""

_MOST_VALUES = 40

Products = Sequence[tuple[Sequence[ir.Node], Sequence[ir.Node]]]
"""For each softmax, the products before it and after it."""


def values_above(products: Products) -> list[ir.Value]:
    """The values whose shapes tell whether heads are folded in these products."""
    found: dict[ir.Value, None] = {}
    for before, behind in products:
        found |= dict.fromkeys(value for node in behind for value in node.inputs if value is not None)
        for node in before:
            found |= dict.fromkeys([*(value for value in node.inputs if value is not None), *_above(node.inputs[0])])
    return list(found)


def folds_of(products: Products, shapes: Shapes) -> dict[ir.Node, Fold]:
    """The products with folded heads."""
    found: dict[ir.Node, Fold] = {}
    for before, behind in products:
        for node in (one for one in before if one.op_type == "MatMul"):
            fold = _fold(node, shapes)
            if fold is not None:
                found[node] = fold
                found |= {one: fold for one in behind if one.op_type == "MatMul" and _has_one_key_head(one, shapes)}
    return found


def matmul(call: Call, fold: Fold) -> list[ir.Value]:
    """The product of queries with keys or of weights with values, with an axis for the heads."""
    left, right = call.input(0), call.input(1)
    if left is None or right is None:
        raise Unexpanded("it has one operand")
    nodes, rank = call.nodes, len(call.shape(left))
    parts = [nodes.constant([fold.heads]), nodes.constant([-1])]
    shape = (nodes.length(left, 0), *(parts if fold.heads_first else parts[::-1]), nodes.length(left, rank - 1))
    split = nodes.one("Reshape", left, nodes.one("Concat", *shape, axis=0))
    keys = right if rank == 4 else nodes.one("Unsqueeze", right, nodes.constant([1]))
    product = _turned(call, nodes.one("MatMul", _turned(call, split, fold), keys), fold)
    ends = (nodes.length(left, 0, rank - 1), nodes.length(right, rank - 1))
    return [nodes.one("Reshape", product, nodes.one("Concat", *ends, axis=0))]


def _turned(call: Call, value: ir.Value, fold: Fold) -> ir.Value:
    """[B, N, S, ...] from [B, S, N, ...] and back."""
    return value if fold.heads_first else call.nodes.one("Transpose", value, perm=[0, 2, 1, 3])


def _has_one_key_head(node: ir.Node, shapes: Shapes) -> bool:
    """Whether the operands of a product are [B, R, C] or [B, 1, R, C]."""
    sizes = [shapes.get(value.name or "", ()) for value in node.inputs if value is not None]
    if len(sizes) != 2 or len(sizes[0]) != len(sizes[1]):
        return False
    return sizes[0][:-2] == sizes[1][:-2] and sizes[0][1:-2] in ((), (1,)) and len(sizes[0]) > 2


def _fold(node: ir.Node, shapes: Shapes) -> Fold | None:
    """How heads are folded in the queries of a product; None if they are not."""
    queries = node.inputs[0]
    if queries is None or not _has_one_key_head(node, shapes):
        return None
    shape = shapes[queries.name or ""]
    rows, rest, size = shape[0], shape[-2], shape[-1]
    for value, passed in _above(queries).items():
        before = shapes.get(value.name or "", ())
        if not before or math.prod(before) != math.prod(shape) or before[-1] <= size or before[-1] % size:
            continue
        heads = before[-1] // size
        moved = None if rest % heads else _moved(np.arange(math.prod(before)).reshape(before), passed, shapes)
        if moved is None:
            continue
        by_tokens = np.arange(moved.size).reshape(rows, rest // heads, heads, size)
        for heads_first, expected in ((False, by_tokens), (True, by_tokens.swapaxes(1, 2))):
            if (moved.reshape(-1) == expected.reshape(-1)).all():
                return Fold(heads=heads, heads_first=heads_first)
    return None


def _above(value: ir.Value | None) -> dict[ir.Value, tuple[ir.Node, ...]]:
    """The values above a value, each with the nodes in between; the first of these reads it."""
    found: dict[ir.Value, tuple[ir.Node, ...]] = {}
    pending: list[tuple[ir.Value | None, tuple[ir.Node, ...]]] = [(value, ())]
    while pending and len(found) < _MOST_VALUES:
        one, passed = pending.pop(0)
        if one is None or one in found:
            continue
        found[one] = passed
        node = one.producer()
        if node is not None and node.op_type in _COPIES | _MOVES:
            sources = node.inputs if node.op_type in ("Mul", "Div", "Add") else node.inputs[:1]
            pending += [(source, (node, *passed)) for source in sources]
    return found


def _moved(numbers: Array, nodes: Iterable[ir.Node], shapes: Shapes) -> Array | None:
    """The numbers after these nodes move them; None if a node is not known to keep all numbers."""
    for node in nodes:
        shape = shapes.get(node.outputs[0].name or "")
        if shape is None or math.prod(shape) != numbers.size:
            return None
        if node.op_type == "Transpose":
            perm = node.attributes.get("perm")
            numbers = numbers.transpose(None if perm is None else perm.as_ints())
        elif node.op_type in _MOVES:
            numbers = numbers.reshape(shape)
        elif numbers.shape != shape:
            return None
    return numbers
