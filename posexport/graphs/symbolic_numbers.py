"""Integers and booleans that graphs compute from lengths, as polynomials of the dimensions of their inputs.

Numbers are known one by one for values with at most one axis. A result that arithmetic can't tell is a symbol for the
operator and its operands. So two computations of the same give the same symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import constant_of
from posexport.graphs.symbolic_sizes import ONE, Size, Symbols, product

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes

Numbers = tuple[Size, ...]

MOST_NUMBERS = 64
"""The most numbers of a value that are known one by one."""

ZERO = Size(0)

_Binary = Callable[[Symbols, Size, Size], "Size | None"]
"""An operator on two numbers; None if the result is a symbol of its own."""


def of_constant(value: ir.Value) -> Numbers | None:
    """The numbers of an initializer or a Constant; None if they are too many, or not integers."""
    tensor = constant_of(value)
    if tensor is None or tensor.size > MOST_NUMBERS or len(tensor.shape) > 1:
        return None
    numbers = tensor.numpy().reshape(-1).tolist()
    return tuple(Size(int(number)) for number in numbers) if all(map(_is_whole, numbers)) else None


def _is_whole(number: Any) -> bool:
    return abs(float(number)) < 2.0**64 and float(number).is_integer()


def of_node(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    """The numbers of an operator's first output, or all numbers that a Split divides; None if they aren't known."""
    binary = _BINARY.get(node.op_type)
    rule = partial(_by_elements, binary=binary) if binary is not None else _RULES.get(node.op_type)
    found = None if rule is None else rule(shapes, node)
    bounds = _BOUNDS.get(shapes.dtype(node.outputs[0]))
    if found is None or bounds is None:
        return found
    symbols = shapes.symbols
    return tuple(
        one if symbols.is_within(one, *bounds) else symbols.other("overflow", node.outputs[0].name, at)
        for at, one in enumerate(found)
    )


_BOUNDS: dict[torch.dtype | None, tuple[int, int]] = {torch.int32: (2**16, 2**30), torch.int64: (2**40, 2**62)}
"""The largest factor of lengths and the largest number added to them, by dtype.

With larger numbers and long rows, the dtype may overflow. Products of only lengths never overflow: no tensor has more
elements.
"""


def _by_elements(shapes: SymbolicShapes, node: ir.Node, binary: _Binary) -> Numbers | None:
    operands = [shapes.numbers(value) for value in node.inputs]
    if len(operands) != 2 or operands[0] is None or operands[1] is None:
        return None
    rows = _rows([operands[0], operands[1]])
    if rows is None:
        return None
    found = []
    for one, other in rows:
        number = binary(shapes.symbols, one, other)
        if number is None and not shapes.is_whole(node.outputs[0]):
            return None
        found.append(shapes.symbols.other(node.op_type, one, other) if number is None else number)
    return tuple(found)


def _rows(operands: Sequence[Numbers]) -> list[tuple[Size, ...]] | None:
    """The numbers of several values, element by element; None if their counts don't match."""
    count = max(map(len, operands)) if all(operands) else 0
    if any(len(operand) not in (1, count) for operand in operands):
        return None
    return list(zip(*(operand * (count // len(operand)) if count else () for operand in operands), strict=True))


def _quotient(symbols: Symbols, one: Size, other: Size) -> Size | None:
    exact = symbols.quotient(one, other)
    if exact is not None or not (one.is_fixed and other.is_fixed and other.number):
        return exact
    return None if one.number % other.number else Size(one.number // other.number)


def _quotient_of_whole(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if one.is_fixed and other.is_fixed and other.number:
        return Size(int(one.number / other.number))
    least = symbols.least(one)  # below 0, ONNX rounds up
    if other.is_fixed and other.number > 0 and least is not None and least >= 0:
        return symbols.floor_quotient(one, other.number)
    return symbols.quotient(one, other)


def _divided(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    return _by_elements(shapes, node, _quotient_of_whole if shapes.is_whole(node.outputs[0]) else _quotient)


def _fixed(of: Callable[[int, int], int]) -> _Binary:
    """An operator that is computed only for two fixed numbers."""
    return lambda symbols, one, other: Size(of(one.number, other.number)) if one.is_fixed and other.is_fixed else None


def _extreme(of: Callable[[int, int], int]) -> _Binary:
    return lambda symbols, one, other: one if one == other else _fixed(of)(symbols, one, other)


def _remainder(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if other.number and symbols.quotient(one, other) is not None:
        return ZERO
    return Size(one.number % other.number) if one.is_fixed and other.is_fixed and other.number else None


def _difference_is_at_least(symbols: Symbols, one: Size, other: Size, bound: int) -> bool:
    least = symbols.least(symbols.difference(one, other))
    return least is not None and least >= bound


def _equal(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if one == other:
        return ONE
    differ = _difference_is_at_least(symbols, one, other, 1) or _difference_is_at_least(symbols, other, one, 1)
    return ZERO if differ else None


def _less(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if _difference_is_at_least(symbols, other, one, 1):
        return ONE
    return ZERO if _difference_is_at_least(symbols, one, other, 0) else None


def _at_most(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if _difference_is_at_least(symbols, other, one, 0):
        return ONE
    return ZERO if _difference_is_at_least(symbols, one, other, 1) else None


def _and(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if ZERO in (one, other):
        return ZERO
    return other if one == ONE else one if ONE in (other, one) or one == other else None


def _or(symbols: Symbols, one: Size, other: Size) -> Size | None:
    if ONE in (one, other):
        return ONE
    return other if one == ZERO else one if other in (ZERO, one) else None


def _swapped(binary: _Binary) -> _Binary:
    return lambda symbols, one, other: binary(symbols, other, one)


_BINARY: dict[str, _Binary] = {
    "Add": lambda symbols, one, other: symbols.total([one, other]),
    "Sub": lambda symbols, one, other: symbols.difference(one, other),
    "Mul": lambda symbols, one, other: one * other,
    "Mod": _remainder,
    "Min": _extreme(min),
    "Max": _extreme(max),
    "Equal": _equal,
    "Less": _less,
    "Greater": _swapped(_less),
    "LessOrEqual": _at_most,
    "GreaterOrEqual": _swapped(_at_most),
    "And": _and,
    "Or": _or,
    "Xor": _fixed(lambda one, other: int(one != other)),
}


def _chosen(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    operands = [shapes.numbers(value) for value in node.inputs]
    known = [operand for operand in operands if operand is not None]
    rows = _rows(known) if len(known) == 3 else None
    if rows is None:
        return None
    other = shapes.symbols.other
    return tuple(
        (one if condition.number else two)
        if condition.is_fixed
        else (one if one == two else other("Where", condition, one, two))
        for condition, one, two in rows
    )


def _of_each(of: Callable[[Symbols, Size], Size]) -> Callable[[SymbolicShapes, ir.Node], Numbers | None]:
    def rule(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
        numbers = shapes.numbers(node.inputs[0])
        return None if numbers is None else tuple(of(shapes.symbols, number) for number in numbers)

    return rule


def _negated(symbols: Symbols, one: Size) -> Size:
    return Size(-one.number, one.symbols)


def _not(symbols: Symbols, one: Size) -> Size:
    return Size(int(not one.number)) if one.is_fixed else symbols.other("Not", one)


def _sign(symbols: Symbols, one: Size) -> Size:
    if one.is_fixed:
        return Size((one.number > 0) - (one.number < 0))
    least = symbols.least(one)
    return ONE if least is not None and least > 0 else symbols.other("Sign", one)


def _cast(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    numbers = shapes.numbers(node.inputs[0])
    to = ir.DataType(node.attributes["to"].as_int())
    if numbers is None or to in _WIDE:
        return numbers
    if to == ir.DataType.BOOL:
        numbers = tuple(Size(int(one.number != 0)) if one.is_fixed else one for one in numbers)
    other = shapes.symbols.other
    return tuple(one if one.is_fixed else other("Cast", to.name, one) for one in numbers)


_WIDE = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE}
"""Dtypes that can represent every length."""


def _lengths(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    shape = shapes.of_input(node, 0)
    if shape is None:
        return None
    bounds = {name: attribute.as_int() for name, attribute in node.attributes.items() if name in ("start", "end")}
    return tuple(shape[bounds.get("start", 0) : bounds.get("end", len(shape))])


def _picked(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    data, indices = shapes.numbers(node.inputs[0]), shapes.whole_numbers(node.inputs[1])
    if data is None or indices is None or not all(-len(data) <= one < len(data) for one in indices):
        return None
    return tuple(data[one] for one in indices)


def _cut(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    data, bounds = shapes.numbers(node.inputs[0]), shapes.bounds(node)
    if data is None or not bounds:
        return None
    (start, end, step), *_ = bounds.values()
    return data[slice(start.number, end.number, step)] if start.is_fixed and end.is_fixed else None


def _joined(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    parts = [shapes.numbers(value) for value in node.inputs]
    known = [part for part in parts if part is not None]
    return tuple(size for part in known for size in part) if len(known) == len(parts) else None


def _repeated(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    """Expand: the same numbers as before, or one number repeated."""
    data, shape = shapes.numbers(node.inputs[0]), shapes.numbers(node.inputs[1])
    if data is None or shape is None or len(shape) > 1:
        return None
    count = shape[0] if shape else ONE
    if count in (ONE, Size(len(data))):
        return data
    return data * count.number if len(data) == 1 and count.is_fixed and 0 < count.number <= MOST_NUMBERS else None


def _filled(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    counts = shapes.whole_numbers(node.inputs[0])
    if counts is None or len(counts) > 1 or (counts and not 0 <= counts[0] <= MOST_NUMBERS):
        return None
    attribute = node.attributes.get("value")
    number = attribute.as_tensor().numpy().reshape(-1).tolist()[0] if attribute is not None else 0
    return (Size(int(number)),) * (counts[0] if counts else 1) if _is_whole(number) else None


def _counted(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    bounds = [shapes.whole_numbers(value) for value in node.inputs]
    known = [one[0] for one in bounds if one is not None and len(one) == 1]
    if len(known) < 3 or not known[2]:
        return None
    counted = range(*known)
    return tuple(map(Size, counted)) if len(counted) <= MOST_NUMBERS else None


def _multiplied(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    numbers = shapes.numbers(node.inputs[0])
    return None if numbers is None else (product(numbers),)


def _added(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    numbers = shapes.numbers(node.inputs[0])
    return None if numbers is None else (shapes.symbols.total(numbers),)


def _same(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    return shapes.numbers(node.inputs[0])


def _size(shapes: SymbolicShapes, node: ir.Node) -> Numbers | None:
    shape = shapes.of_input(node, 0)
    return None if shape is None else (product(shape),)


_RULES: dict[str, Callable[[SymbolicShapes, ir.Node], Numbers | None]] = {
    "Cast": _cast,
    "Concat": _joined,
    "ConstantOfShape": _filled,
    "Div": _divided,
    "Expand": _repeated,
    "Gather": _picked,
    "Neg": _of_each(_negated),
    "Not": _of_each(_not),
    "Range": _counted,
    "ReduceProd": _multiplied,
    "ReduceSum": _added,
    "Shape": _lengths,
    "Sign": _of_each(_sign),
    "Size": _size,
    "Slice": _cut,
    "Where": _chosen,
    **dict.fromkeys(("Identity", "Squeeze", "Unsqueeze", "Reshape", "Split"), _same),
}
