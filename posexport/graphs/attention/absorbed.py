"""Which nodes an attention may replace: those that do the same on all inputs as on the probe's inputs.

A probe shows that the nodes between two values only change the layout, or rotate pairs of features. Whether this holds
on all inputs depends on the operators and on the lengths that they are given. For example, a Clip changes only large
numbers, a Slice to the last 4096 keys cuts only long caches, and a Reshape to blocks of 256 tokens changes only long
rows. Such nodes are not replaced, and the attention begins after them. Lengths are compared as polynomials of the
graph's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, product
from operator import mul

import onnx_ir as ir

from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.uniform import number_of
from posexport.graphs.symbolic_sizes import ONE, Size


def keeps_numbers(flow: Dataflow, probe: Probe, node: ir.Node) -> bool:
    """Whether a node only changes the layout of content, or multiplies it by a fixed number, on all inputs."""
    content = [value for value in node.inputs if value in flow.content]
    others = [value for value in node.inputs if value is not None and value not in flow.content]
    if node.op_type in _LAYOUTS:
        return node.inputs[0] in flow.content and lays_out(probe, node)
    if node.op_type == "Neg":
        return True
    if node.op_type == "Concat":
        return not others and not any(_may_be_empty(probe, value) for value in content if value is not None)
    if node.op_type in ("Mul", "Div"):
        scaled = node.op_type == "Mul" or node.inputs[0] in flow.content
        return scaled and len(content) == 1 and all(value in probe.fixed for value in others)
    if node.op_type == "Where":
        return node.inputs[0] in probe.fixed and len(content) == 2
    return node.op_type == "ScatterND" and _places_alike(flow, probe, node)


def _places_alike(flow: Dataflow, probe: Probe, node: ir.Node) -> bool:
    """Whether a ScatterND writes content to fixed places of an axis of fixed length, among other content or zeros.

    torch exports an assignment to slices in this way.
    """
    data, indices, updates = node.inputs
    reduction = node.attributes.get_string("reduction", "none")
    if data is None or indices is None or indices not in probe.fixed or updates not in flow.content:
        return False
    if reduction != "none" or (data not in flow.content and number_of(probe, data) != 0.0):
        return False
    places = probe.get(indices)
    length = probe.shapes.of(data)[0]
    return places.dim() == 2 and places.shape[1] == 1 and length.is_fixed and len(places) == len(places.unique(dim=0))


def lays_out(probe: Probe, node: ir.Node) -> bool:
    """Whether a node gives numbers of its first input in another layout, in the same way on all inputs.

    It may give a part of them.
    """
    check = _LAYOUTS.get(node.op_type)
    return check is not None and check(probe, node)


def _always(probe: Probe, node: ir.Node) -> bool:
    return True


def _is_of_known_axes(probe: Probe, node: ir.Node) -> bool:
    return probe.shapes.axes(node) is not None


def _is_of_floats(probe: Probe, node: ir.Node) -> bool:
    """Whether a Cast gives floating-point numbers. `loses_digits` checks whether precision is lost."""
    return ir.DataType(node.attributes["to"].as_int()) in _DIGITS


def loses_digits(flow: Dataflow, source: ir.Value, target: ir.Value) -> bool:
    """Whether content between two values passes through a dtype with fewer digits, or a smaller range, than both.

    Values of unknown dtype are ignored. If the dtype of one of the two values is unknown, the answer is False.
    """
    between = {value for node in flow.between(source, target) for value in node.outputs if value in flow.content}
    ends, known = _known_digits((source, target)), _known_digits(between)
    return len(ends) == 2 and any(all(_lacks(one, end) for end in ends) for one in known)


def _lacks(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a dtype has fewer digits or a smaller range than another."""
    return one[0] < other[0] or one[1] < other[1]


def _known_digits(values: Iterable[ir.Value]) -> list[tuple[int, int]]:
    return [digits(dtype) for dtype in map(_dtype, values) if dtype is not None]


def digits(dtype: ir.DataType | None) -> tuple[int, int]:
    """The numbers of significand bits and exponent bits of a floating-point type; (0, 0) for other types."""
    return _DIGITS.get(dtype, (0, 0))


def _dtype(value: ir.Value) -> ir.DataType | None:
    """The dtype of a value; None if it is not known.

    If the graph doesn't state it, it is the dtype of what the value is computed from.
    """
    pending, seen = [value], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value.dtype is not None:
            return value.dtype
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        sources = node.inputs[1:3] if node.op_type in ("Where", "CastLike") else node.inputs[:1]
        pending += [source for source in reversed(sources) if source is not None]
    return None


_DIGITS: dict[ir.DataType | None, tuple[int, int]] = {
    ir.DataType.BFLOAT16: (8, 8),
    ir.DataType.FLOAT16: (11, 5),
    ir.DataType.FLOAT: (24, 8),
    ir.DataType.DOUBLE: (53, 11),
}
"""The floating-point types, with the bits of their significands and exponents."""


def _is_off(probe: Probe, node: ir.Node) -> bool:
    """Whether a Dropout drops nothing."""
    return len(node.inputs) < 3 or node.inputs[2] is None or probe.shapes.whole_numbers(node.inputs[2]) == [0]


def _ends(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    assert node.inputs[0] is not None
    return node.inputs[0], node.outputs[0]


def _groups_alike(probe: Probe, node: ir.Node) -> bool:
    """Whether a Reshape splits and merges axes in the same way for all lengths.

    If an axis of the input and an axis of the result end at the same element on the probe's inputs, they must do so on
    all inputs.
    """
    source, result = _ends(node)
    after = _elements(probe.shapes.actual(result), probe.shapes.of(result))
    return any(
        _end_alike(_elements(probe.shapes.actual(source), shape), after) for shape in _possible_shapes(probe, node)
    )


def _possible_shapes(probe: Probe, node: ir.Node) -> Iterator[tuple[Size, ...]]:
    """The shapes that the input of a Reshape may have.

    An axis that several lengths are broadcast to may have any of these lengths. An axis that is as long as a table that
    was cut may have the length that the size of the result implies: with another length, the Reshape fails.
    """
    source, result = _ends(node)
    shape, symbols = probe.shapes.of(source), probe.shapes.symbols
    yield shape
    numbers = probe.shapes.numbers(node.inputs[1])
    if numbers is None or Size(-1) in numbers:
        return
    meeting = [symbols.broadcast_of(size) or (size,) for size in shape]
    yield from product(*meeting) if math.prod(map(len, meeting)) <= _MOST_SHAPES else ()
    whole = reduce(mul, probe.shapes.of(result), ONE)
    for axis, size in enumerate(shape):
        length = (
            None if size.is_fixed else symbols.quotient(whole, reduce(mul, (*shape[:axis], *shape[axis + 1 :]), ONE))
        )
        if length is not None:
            yield *shape[:axis], length, *shape[axis + 1 :]


_MOST_SHAPES = 64

Ends = list[tuple[int, Size]]
"""The products of the lengths up to each axis, as numbers and as polynomials."""


def _end_alike(before: Ends, after: Ends) -> bool:
    for some, others in ((before, after), (after, before)):
        for number, elements in some:
            same = [other for count, other in others if count == number]
            if same and elements not in same:
                return False
    return before[-1:] == after[-1:]


def _elements(actual: Sequence[int], sizes: Sequence[Size]) -> Ends:
    kept = [(number, size) for number, size in zip(actual, sizes, strict=True) if size != ONE]
    return list(zip(accumulate((one for one, _ in kept), mul), accumulate((one for _, one in kept), mul), strict=True))


def _repeats_alike(probe: Probe, node: ir.Node) -> bool:
    """Whether Expand or Tile repeats each axis a fixed number of times.

    An axis of length 1 may be repeated as often as lengths say.
    """
    source, result = _ends(node)
    before, after = probe.shapes.of(source), probe.shapes.of(result)
    before = (ONE,) * (len(after) - len(before)) + before
    for size, larger, number in zip(before, after, probe.shapes.actual(result), strict=True):
        times = probe.shapes.symbols.quotient(larger, size)
        if (times is None or not times.is_fixed) and (size != ONE or number == 1):
            return False
    return True


def _divides_alike(probe: Probe, node: ir.Node) -> bool:
    """Whether each part of a Split has a fixed number of elements, or all but a fixed number."""
    source, _ = _ends(node)
    return all(_is_part(probe, source, part) for part in node.outputs)


def _cuts_alike(probe: Probe, node: ir.Node) -> bool:
    """Whether a Slice takes the same part of each axis on all inputs.

    A part begins at a fixed place and has a fixed number of elements, or all but a fixed number.
    """
    source, result = _ends(node)
    bounds = probe.shapes.bounds(node)
    if bounds is None or not _is_part(probe, source, result):
        return False
    starts = [start for start, _, _ in bounds.values()]
    return all(start.is_fixed for start in starts)


def _is_part(probe: Probe, source: ir.Value, part: ir.Value) -> bool:
    """Whether each axis of a part has a fixed number of elements, or all but a fixed number."""
    pairs = zip(probe.shapes.of(source), probe.shapes.of(part), strict=True)
    return all(size.is_fixed or probe.shapes.symbols.difference(whole, size).is_fixed for whole, size in pairs)


def _picks_alike(probe: Probe, node: ir.Node) -> bool:
    """Whether a Gather or a GatherND has fixed indices."""
    return all(value in probe.fixed for value in node.inputs[1:] if value is not None)


def _may_be_empty(probe: Probe, value: ir.Value) -> bool:
    """Whether a value without elements on the probe's inputs may have elements on other inputs."""
    shape = probe.shapes.of(value)
    return any(not number and not size.is_fixed for number, size in zip(probe.shapes.actual(value), shape, strict=True))


_LAYOUTS: dict[str, Callable[[Probe, ir.Node], bool]] = {
    **dict.fromkeys(("Identity", "Transpose", "Flatten"), _always),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _is_of_known_axes),
    **dict.fromkeys(("Expand", "Tile"), _repeats_alike),
    "Cast": _is_of_floats,
    "Dropout": _is_off,
    **dict.fromkeys(("Gather", "GatherND"), _picks_alike),
    "Reshape": _groups_alike,
    "Slice": _cuts_alike,
    "Split": _divides_alike,
}
"""Operators that change no numbers, each with the condition under which it does the same on all inputs."""


def layout_nodes(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    """The nodes that change a layout, without Cast."""
    return (node for node in nodes if node.op_type in _LAYOUTS and node.op_type != "Cast")
