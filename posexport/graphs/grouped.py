"""Products of attention with two axes of heads (key heads, and query heads that share one), written with one such axis.

    scores [B, K, G, S, T] = queries [B, K, G, S, D] keys [B, K, 1, D, T],   heads of query k*G + g

MatMul with five axes, and Einsum whose result has five, become a product with four axes between two reshapes. Attention
is then recognised in one way. Windows of an image before the heads are folded into the heads in the same way. If the
inputs' lengths determine their number, as in the triangles of AlphaFold, [B, R, N, S, T], they are folded into rows.
Einsum with four axes becomes MatMul if its keys or values have one head for all queries, without an axis for it:

    scores [B, N, S, T] = queries [B, N, S, D] keys [B, T, D]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from posexport.graphs import folded_heads, single_rows
from posexport.graphs.attention.softmaxes import softmax_of
from posexport.graphs.equations import ELLIPSIS, equation_of, letters_of
from posexport.graphs.nearest import nearest_first
from posexport.graphs.operators import Call, Unexpanded

PRODUCTS = {"MatMul", "Einsum", "Gemm"}

_AROUND = {"Add", "Sub", "Mul", "Div", "Where", "Max", "Tanh", "Cast", "Identity", "Dropout", "Softmax", "Transpose"}
_AROUND |= {"Reshape", "Flatten", "Slice", "Concat"}
"""Operators between a product of attention and its softmax."""

_DEPTH = 12


def around_softmaxes(graph: ir.Graph) -> Iterator[tuple[ir.Value, list[ir.Node], list[ir.Node]]]:
    """The scores of each softmax, and the products before it and after it."""
    for node in graph:
        softmax = softmax_of(node)
        if softmax is not None:
            yield softmax.logits, _before(softmax.logits), _behind(softmax.node.outputs[0])


def may_have_five(scores: ir.Value) -> bool:
    """Whether scores may have five axes. Flattened scores may: Softmax had two axes before opset 13."""
    return scores.shape is None or len(scores.shape) not in (3, 4)


def may_be_written_out(node: ir.Node, scores: ir.Value) -> bool:
    """Whether a product around these scores may be one that `matmul` or `einsum` expands.

    It may have two axes of heads, keys and values of one head without an axis, or axes without letters.
    """
    if node.op_type != "Einsum" or may_have_five(scores):
        return may_have_five(scores)
    operands, _, result = equation_of(node).partition("->")
    return ELLIPSIS in operands or (sorted(map(len, operands.split(","))), len(result)) == ([3, 4], 4)


def _before(scores: ir.Value) -> list[ir.Node]:
    """The products that scores come from, nearest first."""

    def onward(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        sources = () if node is None or node.op_type not in _AROUND else node.inputs
        return [source for source in sources if source is not None]

    nodes = (value.producer() for value in nearest_first(scores, onward, _DEPTH))
    return [node for node in nodes if node is not None and node.op_type in PRODUCTS]


def _behind(weights: ir.Value) -> list[ir.Node]:
    """The products that read weights, nearest first."""

    graph = weights.graph

    def readers(value: ir.Value) -> list[ir.Node]:
        return [use.node for use in value.uses() if use.node.graph is graph]  # not in a branch

    def onward(value: ir.Value) -> list[ir.Value]:
        return [node.outputs[0] for node in readers(value) if node.op_type in _AROUND - {"Softmax"}]

    nodes = (node for value in nearest_first(weights, onward, _DEPTH) for node in readers(value))
    return list(dict.fromkeys(node for node in nodes if node.op_type in PRODUCTS))


def matmul(call: Call) -> Sequence[ir.Value]:
    """MatMul with five axes, with two, or with heads that are folded into tokens."""
    if call.fold is not None:
        return folded_heads.matmul(call, call.fold)
    left, right = call.input(0), call.input(1)
    ranks = {len(call.shape(value)) for value in (left, right) if value is not None}
    if ranks == {2}:
        return [single_rows.matmul(call)]
    if left is None or right is None or ranks != {5}:
        raise Unexpanded("its operands don't have two or five axes")
    if any(call.varies(value, 1) for value in (left, right)):
        return [_of_more_rows(call, left, right)]
    for value in (left, right):
        call.check_fixed(value, 1, 2)
    return [_product(call, (left, call.shape(left)), (right, call.shape(right)))]


def einsum(call: Call) -> Sequence[ir.Value]:
    """Einsum of two operands whose result has five axes, or four of which one operand lacks the second.

    Five axes are rows, heads, groups and those of the product. Other equations get letters in place of an ellipsis.
    """
    values = [value for value in call.node.inputs if value is not None]
    letters = letters_of(call.node, [len(call.shape(value)) for value in values])
    if letters is None or len(values) != 2:
        raise Unexpanded("its axes are not known")
    parts, result = letters
    axes = len(result)
    if axes != 5 and (sorted(map(len, parts)), axes) != ([3, 4], 4):
        return [call.nodes.one("Einsum", *values, equation=f"{','.join(parts)}->{result}")]
    if any(len(set(part)) != len(part) for part in (*parts, result)):
        raise Unexpanded("it takes a diagonal")
    sizes: dict[str, int] = {}
    for part, value in zip(parts, values, strict=True):
        sizes |= zip(part, call.shape(value), strict=True)
    shared = [letter for letter in result if all(letter in part for part in parts)]
    summed = [letter for letter in parts[0] if letter in parts[1] and letter not in result]
    own = [[letter for letter in result if letter in part and letter not in shared] for part in parts]
    if (len(shared), sorted(map(len, own)), len(summed)) not in ((axes - 3, [1, 2], 1), (axes - 2, [1, 1], 1)):
        raise Unexpanded("it is no product of matrices")
    if {*parts[0], *parts[1]} - {*shared, *summed, *result}:
        raise Unexpanded("it sums over more than one axis")
    fixed = {
        letter
        for part, value in zip(parts, values, strict=True)
        for axis, letter in enumerate(part)
        if not call.varies(value, axis)
    }
    pairs = ((two, one) for two, one in (own, own[::-1]) if len(two) == 2)
    group = next((_group(two, sizes, [*one, *summed], fixed) for two, one in pairs), None)
    heads = [letter for letter in result if letter in shared or letter == group]
    for part, value in zip(parts, values, strict=True):
        call.check_fixed(value, *(part.index(letter) for letter in heads[1:] if letter in part))
    rows, columns = ([letter for letter in one if letter != group] for one in own)
    left, right = (
        _turned(call, value, part, [*heads, *last], sizes)
        for value, part, last in zip(values, parts, ([*rows, *summed], [*summed, *columns]), strict=True)
    )
    product = _product(call, left, right) if axes == 5 else call.nodes.one("MatMul", left[0], right[0])
    order = [*heads, *rows, *columns]
    perm = [order.index(letter) for letter in result]
    return [product if perm == sorted(perm) else call.nodes.one("Transpose", product, perm=perm)]


def _group(own: Sequence[str], sizes: Mapping[str, int], others: Sequence[str], fixed: Collection[str]) -> str:
    """Which of the two axes that only queries have is that of the query heads that share a key head.

    It is the axis whose length is `fixed`. Otherwise the axis of tokens is the one that is as long as the keys or, if
    that doesn't tell, the second of the two.
    """
    alike = [letter for letter in own if letter in fixed]
    if len(alike) == 1:
        return alike[0]
    tokens = [letter for letter in own if any(sizes[letter] == sizes[other] for other in others)]
    return own[0] if len(tokens) != 1 or tokens[0] == own[1] else own[1]


def _turned(
    call: Call, value: ir.Value, part: str, order: Sequence[str], sizes: Mapping[str, int]
) -> tuple[ir.Value, list[int]]:
    """An operand with its axes in this order, and its shape. Missing axes get the size 1."""
    perm = [part.index(letter) for letter in order if letter in part]
    value = value if perm == sorted(perm) else call.nodes.one("Transpose", value, perm=perm)
    missing = [axis for axis, letter in enumerate(order) if letter not in part]
    if missing:
        value = call.nodes.one("Unsqueeze", value, call.nodes.constant(missing))
    return value, [sizes[letter] if letter in part else 1 for letter in order]


def _product(call: Call, left: tuple[ir.Value, Sequence[int]], right: tuple[ir.Value, Sequence[int]]) -> ir.Value:
    """The product of operands with five axes, with the second and third axis joined."""
    nodes = call.nodes
    heads = [max(sizes) for sizes in zip(left[1][1:3], right[1][1:3], strict=True)]
    if left[1][0] != right[1][0]:
        raise Unexpanded("its operands have different rows")
    product = nodes.one("MatMul", *(_folded(call, *operand, heads) for operand in (left, right)))
    return _reshaped(call, product, heads, 2)


def _of_more_rows(call: Call, left: ir.Value, right: ir.Value) -> ir.Value:
    """The product of operands [B, R, N, ...] whose second axis has a length that depends on inputs.

    The second axis contains rows of a table or blocks of tokens. It becomes part of the first axis.
    """
    nodes, shapes = call.nodes, (call.shape(left), call.shape(right))
    if shapes[0][:3] != shapes[1][:3]:
        raise Unexpanded("its operands have different rows")
    heads = call.size(left, 2)
    call.check_fixed(right, 2)
    operands = (
        nodes.one("Reshape", one, nodes.one("Concat", nodes.constant([-1, heads]), nodes.length(one, 3, 5), axis=0))
        for one in (left, right)
    )
    product = nodes.one("MatMul", *operands)
    lengths = nodes.length(left, 0, 2), nodes.constant([heads]), nodes.length(product, 2, 4)
    return nodes.one("Reshape", product, nodes.one("Concat", *lengths, axis=0))


def _folded(call: Call, value: ir.Value, shape: Sequence[int], heads: Sequence[int]) -> ir.Value:
    if [*shape[1:3]] != [*heads]:
        value = call.nodes.one("Expand", value, call.nodes.constant([1, *heads, 1, 1]))
    return _reshaped(call, value, [heads[0] * heads[1]], 3)


def _reshaped(call: Call, value: ir.Value, middle: Sequence[int], last: int) -> ir.Value:
    """The value with other axes between the first axis and the axes from `last` on."""
    nodes = call.nodes
    first = nodes.length(value, 0)
    behind = nodes.length(value, last, last + 2)
    return nodes.one("Reshape", value, nodes.one("Concat", first, nodes.constant([*middle]), behind, axis=0))
