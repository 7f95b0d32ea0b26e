"""Replaces choices that are written with products by Where.

    x m + k (1 - m)  =  Where(m, x, k), where m is 0 or 1 and k is a number

TensorFlow's converters write SelectV2 in this way, and GPT hides its keys by it. The results are the same unless x is
infinite or no number. Other sums stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np
import onnx_ir as ir

from posexport.graphs.attention.behind import PASSED, behind, stored_number
from posexport.graphs.attention.dataflow import constant_of
from posexport.graphs.nearest import nearest_first
from posexport.graphs.node_arguments import input_of
from posexport.graphs.replacements import new_node, replace_node
from posexport.spec.arrays import Array

_MOVES = {*PASSED, "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand", "Tile", "Slice", "Gather", "Trilu"}
"""Operators that give only numbers of their first input, in any order, and zeros."""


@attrs.frozen
class _Factor:
    """A factor that is 1 where `condition` is true, or where it is false if `turned`."""

    condition: ir.Value
    turned: bool


def with_selections(graph: ir.Graph) -> None:
    """Replace the sums before and after a softmax that choose between a value and a number."""
    for node in [*graph]:
        is_sum = node.op_type in ("Add", "Sub") and not node.domain
        # asked first, so that no large weights are read
        made = _selection(node) if is_sum and _is_by_a_softmax(node) else []
        if made:
            replace_node(node, made)


def _is_by_a_softmax(node: ir.Node) -> bool:
    """Whether a softmax reads a sum, or gives what is multiplied in it, with few operators in between."""

    def readers(value: ir.Value) -> list[ir.Node]:
        return [use.node for use in value.uses()]

    def onward(value: ir.Value) -> list[ir.Value]:
        return [after.outputs[0] for after in readers(value) if after.op_type in _BETWEEN]

    below = nearest_first(node.outputs[0], onward, _DEPTH)
    if any(after.op_type in _SOFTMAXES for value in below for after in readers(value)):
        return True
    products = [made for value in node.inputs if value is not None and (made := value.producer()) is not None]
    factors = (value for product in products for value in product.inputs if value is not None)
    sources = (behind(value, (*PASSED, "Dropout")).producer() for value in factors)
    return any(source is not None and source.op_type in _AFTER for source in sources)


_SOFTMAXES, _AFTER = {"Softmax", "LogSoftmax", "Exp", "ReduceMax"}, {"Softmax", "Div"}
"""Operators that a softmax begins with, and those that it ends with, also if it is written out."""

_BETWEEN = {*_MOVES, "Add", "Sub", "Mul", "Div", "Max", "Min", "Where", "Concat", "Pad"}
"""Operators between such a sum and its softmax."""

_DEPTH = 8


def _selection(node: ir.Node) -> list[ir.Node]:
    """The nodes that replace a sum, the last one with its value; empty if the sum is no such choice."""
    first, second = node.inputs[0], node.inputs[1]
    if first is None or second is None:
        return []
    orders = [(first, second)] if node.op_type == "Sub" else [(first, second), (second, first)]
    for product, other in orders:
        for value, factor in _products(product):
            number = _number_where_hidden(other, factor)
            if number is not None and constant_of(value) is None:
                return _where(node, value, factor, -number if node.op_type == "Sub" else number)
    return []


def _where(node: ir.Node, value: ir.Value, factor: _Factor, number: Array) -> list[ir.Node]:
    name, made, condition = node.name or f"{node.outputs[0].name}/chosen", list[ir.Node](), factor.condition
    if condition.dtype != ir.DataType.BOOL:
        made.append(new_node("Cast", f"{name}/condition", [condition], to=ir.DataType.BOOL))
        condition = made[-1].outputs[0]
    made.append(new_node("Constant", f"{name}/number", [], value=ir.tensor(number)))
    sides = [value, made[-1].outputs[0]]
    return [*made, new_node("Where", name, [condition, *(sides[::-1] if factor.turned else sides)])]


def _products(value: ir.Value) -> Iterator[tuple[ir.Value, _Factor]]:
    """The value and the factor, zero or one, of a product."""
    node = value.producer()
    if node is None or node.op_type != "Mul":
        return
    for one, other in _both_orders(node):
        factor = _factor(other)
        if factor is not None:
            yield one, factor


def _number_where_hidden(value: ir.Value, factor: _Factor) -> Array | None:
    """The number that a value is where a factor is zero, if it is zero where the factor is one."""
    node = value.producer()
    tensor = constant_of(value)
    if tensor is not None:
        return _number_of_table(tensor.numpy(), factor)
    if node is None or node.op_type not in ("Mul", "Neg"):
        return None
    if node.op_type == "Neg":
        number = None if node.inputs[0] is None else _number_where_hidden(node.inputs[0], factor)
        return None if number is None else -number
    for one, other in _both_orders(node):
        tensor, found = constant_of(one), _factor(other)
        same = found is not None and found.condition is factor.condition and found.turned != factor.turned
        if same and tensor is not None and tensor.size == 1 and tensor.dtype.is_floating_point():
            number = tensor.numpy().reshape(())
            return number if np.isfinite(number) else None
    return None


def _number_of_table(table: Array, factor: _Factor) -> Array | None:
    """The one number of a table where a factor that is a constant is zero, if the table is zero elsewhere."""
    mask = constant_of(factor.condition)
    if mask is None or table.dtype.kind != "f" or mask.numpy().shape != table.shape:
        return None
    hidden = (mask.numpy() != 0) == factor.turned
    numbers = np.unique(table[hidden])
    return numbers.reshape(()) if len(numbers) == 1 and np.isfinite(numbers[0]) and not table[~hidden].any() else None


def _factor(value: ir.Value) -> _Factor | None:
    """The condition of a value that is zero or one on all inputs; None for other values."""
    turned = False
    while (node := value.producer()) is not None and node.inputs and node.inputs[0] is not None:
        if node.op_type == "Not":
            turned = not turned
            value = node.inputs[0]
        elif node.op_type in PASSED and not _gives_truths(node):
            value = node.inputs[0]
        elif (
            node.op_type == "Sub" and stored_number(node.inputs[0]) == 1.0 and (right := input_of(node, 1)) is not None
        ):
            turned = not turned
            value = right
        else:
            break
    return _Factor(value, turned) if _is_binary(value) else None


def _is_binary(value: ir.Value) -> bool:
    """Whether a value has only truth values, or the numbers 0 and 1, on all inputs."""
    while True:
        node, tensor = value.producer(), constant_of(value)
        if value.dtype == ir.DataType.BOOL or (node is not None and _gives_truths(node)):
            return True
        if tensor is not None:
            numbers = tensor.numpy()
            return numbers.dtype.kind in "fiub" and bool(((numbers == 0) | (numbers == 1)).all())
        if node is None or node.op_type not in _MOVES or not node.inputs or node.inputs[0] is None:
            return False
        value = node.inputs[0]


def _gives_truths(node: ir.Node) -> bool:
    """Whether a node gives truth values whatever it reads."""
    return node.op_type in _TRUTHS or (node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.BOOL)


_TRUTHS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"}
"""Operators that give truth values."""


def _both_orders(node: ir.Node) -> Iterable[tuple[ir.Value, ir.Value]]:
    first, second = node.inputs[0], node.inputs[1]
    return [] if first is None or second is None else [(first, second), (second, first)]
