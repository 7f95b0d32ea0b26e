"""How lengths affect angles: they may decide how many numbers there are, but not the numbers.

    fixed    the same for all inputs
    cut      numbers that are the same for all inputs, but only the first ones, as many as a length says: table[:length]
    length   numbers that lengths decide, such as frequencies that are chosen if a row is long

Angles that follow positions may be computed from numbers of the first two kinds. Numbers of the third kind may only be
read by operators that take sizes from them, as Reshape, Expand and Slice do. Everything that isn't known to give cut
numbers counts as giving lengths.

Cut numbers may still differ by row or token. Numbers that are *even* don't: they are the same along all axes of varying
lengths, such as frequencies that are repeated for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import LENGTHS, outer_values
from posexport.graphs.symbolic_shapes import SymbolicShapes
from posexport.graphs.symbolic_sizes import ONE, Size
from posexport.graphs.view import View

ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Reciprocal", "Cos", "Sin", "Sqrt", "Abs", "Mod"),
    *("Where", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not"),
    *("Floor", "Ceil", "Round", "Min", "Max", "Clip", "Cast", "CastLike", "Identity"),
}
"""Operators that compute each number from those in the same place."""

_SIZES = {"Reshape": (1,), "Expand": (1,), "Tile": (1,), "ConstantOfShape": (0,), "Slice": (2,), "Range": (1,)}
"""The inputs that say how many numbers there are, by operator."""

_KEEP = ELEMENTWISE | {"Squeeze", "Unsqueeze", "Transpose", "Reshape", "Expand", "Tile", "ConstantOfShape"}
"""Operators whose results are cut if their data are."""

_COUNT = {
    *("Range", "Add", "Sub", "Mul", "Cast", "Identity", "Squeeze", "Unsqueeze", "Transpose", "Reshape", "Expand"),
    *("Gather", "Slice", "Concat"),
}
"""Operators that compute polynomials of lengths, and elements of lists of such.

Unlike Where and Min, they give the same polynomial for all lengths.
"""

_COUNTS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""The dtypes that can hold lengths exactly."""

_EVEN = ELEMENTWISE | {"Squeeze", "Unsqueeze", "Transpose", "Expand", "ConstantOfShape", "Gather"}
"""Operators whose results are even if their data are."""

_ROOM = 2**16
"""The numbers that a Range gives if its length is left out."""


class Lengths:
    """The kinds of the numbers that angles are computed from, determined in the order of the graph."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._cut, self._length, self._counted, self._even = (set[ir.Value]() for _ in range(4))
        self.whole: dict[str, torch.Tensor] = {}
        """The cut numbers without the cut, by name of the value."""

    def tell(self, value: ir.Value) -> None:
        """Note the kind of a value. The values that it is computed from were noted before."""
        node = value.producer()
        if node is None or value in self._view.probe.fixed:
            return
        if self._is_cut(node):
            self._cut.add(value)
            self._keep_whole(value, node)
        else:
            self._length.add(value)
        if node.op_type in LENGTHS or (node.op_type in _COUNT and self._counts_all(node)):
            self._counted.add(value)
        if all(map(self.is_even, _data(node))) and self._keeps_even(node):
            self._even.add(value)

    def decide(self, value: ir.Value) -> bool:
        """Whether lengths decide the numbers of a value."""
        return value in self._length

    def is_even(self, value: ir.Value) -> bool:
        """Whether numbers are the same along all axes of varying lengths."""
        return value in self._even or value in self._view.probe.fixed

    def counts_tokens(self, value: ir.Value) -> bool:
        """Whether numbers are counted from lengths, and not the same on all inputs."""
        return value in self._counted and value not in self._view.probe.fixed

    def read(self, node: ir.Node, followed: Collection[ir.Value]) -> list[ir.Value]:
        """What a node reads for its numbers, not for how many there are.

        Counted numbers may choose rows of `followed` values: if they chose other than all tokens in order, the first
        inputs that are tried would show it.
        """
        if node.op_type == "Gather" and node.inputs[0] in followed and self._is_counted(node.inputs[1]):
            return _data(node)[:1]
        return _data(node)

    def _is_counted(self, value: ir.Value | None) -> bool:
        return value is None or value in self._counted or value in self._view.probe.fixed

    def _counts_all(self, node: ir.Node) -> bool:
        """Whether a node computes counted numbers only from counted numbers, which it takes whole and in order."""
        if not all(map(self._is_counted, node.inputs)):
            return False
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int()) in _COUNTS
        shapes = self._view.probe.shapes
        if node.op_type == "Slice":
            source, bounds = shapes.of_input(node, 0), shapes.bounds(node)
            return source is not None and bounds is not None and all(source[axis].is_fixed for axis in bounds)
        return node.op_type != "Concat" or shapes.of(node.outputs[0])[node.attributes.get_int("axis", 0)].is_fixed

    def _keeps_even(self, node: ir.Node) -> bool:
        shapes = self._view.probe.shapes
        if node.op_type in _EVEN:
            return True
        after, before = shapes.of(node.outputs[0]), shapes.of_input(node, 0)
        if before is None:
            return False
        if node.op_type == "Concat":
            return after[node.attributes.get_int("axis", 0)].is_fixed
        if node.op_type == "Slice":
            return len(varying(after)) <= len(varying(before))
        if node.op_type == "Tile":
            return len(after) == len(before) and all(
                new.is_fixed or old in (ONE, new) for old, new in zip(before, after, strict=True)
            )
        if node.op_type == "Reshape":
            return varying(after) == varying(before)
        summed = summed_sizes(shapes, node)
        return summed is not None and all(size.is_fixed for size in summed)

    def _is_cut(self, node: ir.Node) -> bool:
        data = _data(node)
        if node.op_type in LENGTHS or any(one in self._length for one in data) or outer_values(node):
            return False
        cut = [one for one in data if one in self._cut]
        return node.op_type in _KEEP or ((check := _CHECKS.get(node.op_type)) is not None and check(self, node, cut))

    def _is_slice_from_the_front(self, node: ir.Node, cut: list[ir.Value]) -> bool:
        return all(number >= 0 for number in self._numbers(node, 1, 0)) and self._has_steps(node)

    def _has_steps(self, node: ir.Node) -> bool:
        return all(number > 0 for number in self._numbers(node, 4, 1))

    def _joins_features(self, node: ir.Node, cut: list[ir.Value]) -> bool:
        axis = node.attributes["axis"].as_int()
        return axis in (-1, len(self._view.probe.shape(node.outputs[0])) - 1)

    def _picks_from_fixed(self, node: ir.Node, cut: list[ir.Value]) -> bool:
        return node.inputs[0] not in cut

    def _has_one(self, node: ir.Node, cut: list[ir.Value]) -> bool:
        """Whether at most one factor is cut, and no sum runs over its cut axes."""
        summed = summed_sizes(self._view.probe.shapes, node)
        return len(cut) <= 1 and summed is not None and all(size.is_fixed for size in summed)

    def _counts(self, node: ir.Node, cut: list[ir.Value]) -> bool:
        return not cut

    def _numbers(self, node: ir.Node, at: int, default: int) -> list[int]:
        value = node.inputs[at] if at < len(node.inputs) else None
        return [default] if value is None else [int(one) for one in self._view.probe.get(value).reshape(-1).tolist()]

    def _keep_whole(self, value: ir.Value, node: ir.Node) -> None:
        """Note numbers without their cut, if the cut is made here."""
        data, probe = node.inputs[0], self._view.probe
        if node.op_type == "Range":
            start, step = (probe.get(one) for one in (node.inputs[0], node.inputs[2]) if one is not None)
            self.whole[value.name or ""] = start + step * torch.arange(_ROOM, dtype=step.dtype)
        elif node.op_type == "Slice" and data is not None and data in probe.fixed and self._is_prefix(node):
            self.whole[value.name or ""] = probe.get(data)

    def _is_prefix(self, node: ir.Node) -> bool:
        return set(self._numbers(node, 1, 0)) == {0} and set(self._numbers(node, 4, 1)) == {1}


_CHECKS: dict[str, Callable[[Lengths, ir.Node, list[ir.Value]], bool]] = {
    "Slice": Lengths._is_slice_from_the_front,
    "Concat": Lengths._joins_features,
    "Gather": Lengths._picks_from_fixed,
    "MatMul": Lengths._has_one,
    "Einsum": Lengths._has_one,
    "Range": Lengths._counts,
}
"""Operators whose results are cut under a condition, given those of their data that are cut."""


def _data(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node, without sizes."""
    sizes = _SIZES.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
    read = [value for at, value in enumerate(node.inputs) if value is not None and at not in sizes]
    return read + outer_values(node)


def varying(shape: Sequence[Size]) -> list[Size]:
    """The lengths of a shape that aren't the same on all inputs."""
    return [size for size in shape if not size.is_fixed]


def summed_sizes(shapes: SymbolicShapes, node: ir.Node) -> list[Size] | None:
    """The lengths of the axes that a MatMul or an Einsum sums over; None if they aren't known, and for other
    operators."""
    if node.op_type == "Einsum":
        letters = shapes.letters(node)
        return None if letters is None else [letters[0][one][0] for one in letters[0] if one not in letters[1]]
    if node.op_type != "MatMul":
        return None
    operands = (shapes.of(one) for one in node.inputs if one is not None)
    return [shape[-1 if at == 0 or len(shape) < 2 else -2] for at, shape in enumerate(operands)]
