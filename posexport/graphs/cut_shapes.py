"""The shapes of parts of values, by Slice, Split and from sequences.

Lengths are polynomials of the dimensions of a graph's inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from posexport.graphs.node_arguments import input_of
from posexport.graphs.symbolic_sizes import Shape, Size

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes

WHOLE = 2**31 - 1
"""A Slice with an end of at least this takes all up to the end of the axis."""


def of_sequence(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """An element of a sequence from SplitToSequence, which splits an axis of fixed length into parts of one length."""
    split = None if node.inputs[0] is None else node.inputs[0].producer()
    place = shapes.whole_numbers(node.inputs[1])
    if split is None or split.op_type != "SplitToSequence" or place is None:
        return None
    shape, sizes = shapes.of_input(split, 0), shapes.whole_numbers(input_of(split, 1))
    axis = split.attributes.get_int("axis", 0)
    if not shape or not shape[axis].is_fixed or sizes is None or shapes.of_input(split, 1):
        return None
    parts = range(0, shape[axis].number, max(sizes[0], 1))
    if not 0 <= place[0] < len(parts):
        return None
    size = min(sizes[0], shape[axis].number - parts[place[0]])
    axis %= len(shape)
    return (*shape[:axis], Size(size), *shape[axis + 1 :])


def part(shapes: SymbolicShapes, node: ir.Node, at: int) -> Shape | None:
    shape = shapes.of_input(node, 0)
    if not shape:
        return None
    axis = node.attributes.get_int("axis", 0) % len(shape)
    attribute = node.attributes.get("split")
    sizes = tuple(map(Size, attribute.as_ints())) if attribute is not None else shapes.numbers(input_of(node, 1))
    if sizes is None and input_of(node, 1) is None and shape[axis].is_fixed:
        step = -(-shape[axis].number // len(node.outputs))
        sizes = tuple(Size(min(step, shape[axis].number - step * one)) for one in range(len(node.outputs)))
    size = sizes[at] if sizes is not None and at < len(sizes) else None
    if size is None:
        size = shapes.symbols.quotient(shape[axis], Size(len(node.outputs)))
    return None if size is None else (*shape[:axis], size, *shape[axis + 1 :])


def cut(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    shape, bounds = shapes.of_input(node, 0), shapes.bounds(node)
    if shape is None or bounds is None:
        return None
    sizes = list(shape)
    for axis, (start, end, step) in bounds.items():
        sizes[axis] = _taken(shapes, shape[axis], (start, end, step))
    return tuple(sizes)


def _taken(shapes: SymbolicShapes, size: Size, bounds: tuple[Size, Size, int]) -> Size:
    """The length of what a Slice takes of an axis."""
    start, end, step = bounds
    if size.is_fixed and start.is_fixed and end.is_fixed:
        return Size(len(range(size.number)[start.number : end.number : step]))
    first, last = _place(shapes, start, size), _place(shapes, end, size)
    if step == 1 and first is not None and last is not None:
        taken = shapes.symbols.difference(last, first)
        least = shapes.symbols.least(taken)
        if least is not None and least >= 0:
            return taken
    most, between = [size], shapes.symbols.difference(end, start)
    known = [shapes.symbols.least(one) for one in (start, between)]
    if step == 1 and all(least is not None and least >= 0 for least in known):
        most.append(between)
    return shapes.symbols.bounded("Slice", size, start, end, step, most=most)


def _place(shapes: SymbolicShapes, bound: Size, size: Size) -> Size | None:
    """The place of a Slice's bound on an axis; None if it may lie outside."""
    if bound == size or (bound.is_fixed and bound.number >= WHOLE):
        return size
    least = shapes.symbols.least(size)
    if bound.is_fixed:
        inside = least is not None and abs(bound.number) <= least
        return None if not inside else bound if bound.number >= 0 else shapes.symbols.total([size, bound])
    left, low = shapes.symbols.least(shapes.symbols.difference(size, bound)), shapes.symbols.least(bound)
    return bound if left is not None and left >= 0 and low is not None and low >= 0 else None
