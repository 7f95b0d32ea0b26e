"""What lengths do above angles: how many numbers there are is theirs, what numbers they are must not be.

    fixed    the same for all inputs
    cut      numbers that are the same for all inputs, as many as some length says, from the first: table[:length]
    length   numbers that lengths decide, such as frequencies that are chosen where a row is long

Angles that follow positions may be computed from numbers of the first two kinds; from the third only by operators that
take sizes from them, as Reshape, Expand and Slice do. Everything that isn't known to give cut numbers gives lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import LENGTHS, outer_values
from posexport.graphs.view import View

_SIZES = {"Reshape": (1,), "Expand": (1,), "Tile": (1,), "ConstantOfShape": (0,), "Slice": (2,), "Range": (1,)}
"""Inputs that say how many numbers there are, by operator."""

_KEEP = {
    *("Add", "Sub", "Mul", "Div", "Neg", "Pow", "Exp", "Reciprocal", "Cos", "Sin", "Sqrt", "Abs", "Mod", "Where"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Floor", "Round", "Min", "Max"),
    *("Cast", "Identity", "Squeeze", "Unsqueeze", "Transpose", "Reshape", "Expand", "Tile", "ConstantOfShape"),
}
"""Operators whose results are cut where their data are."""

_COUNT = {
    *("Range", "Add", "Sub", "Mul", "Cast", "Identity", "Squeeze", "Unsqueeze", "Transpose", "Reshape", "Expand"),
    *("Gather", "Slice", "Concat"),
}
"""Operators that give polynomials of lengths and places of such: other than Where and Min, on all lengths the same."""

_ROOM = 2**16
"""Numbers that a Range has where its length is left out."""


class Lengths:
    """The kinds of numbers above angles, told in the order of the graph."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._cut, self._length, self._counted = (set[ir.Value]() for _ in range(3))
        self.whole: dict[str, torch.Tensor] = {}
        """Cut numbers as they are where nothing is cut off, by name of the value."""

    def tell(self, value: ir.Value) -> None:
        """Note of what kind a value is; those that it is computed from were told before."""
        node = value.producer()
        if node is None or value in self._view.probe.fixed:
            return
        if self._is_cut(node):
            self._cut.add(value)
            self._keep_whole(value, node)
        else:
            self._length.add(value)
        if node.op_type in LENGTHS or (node.op_type in _COUNT and all(map(self._is_counted, node.inputs))):
            self._counted.add(value)

    def decide(self, value: ir.Value) -> bool:
        """Whether a value has numbers that lengths decide."""
        return value in self._length

    def read(self, node: ir.Node, followed: Collection[ir.Value]) -> list[ir.Value]:
        """What a node reads for its numbers, not for how many there are. Rows of `followed` ones may be taken by
        numbers that are counted: were they others than tokens, it would show on the first inputs that are tried."""
        if node.op_type == "Gather" and node.inputs[0] in followed and self._is_counted(node.inputs[1]):
            return _data(node)[:1]
        return _data(node)

    def _is_counted(self, value: ir.Value | None) -> bool:
        return value is None or value in self._counted or value in self._view.probe.fixed

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
        """Whether one factor is cut, and nothing is summed over what is cut of it."""
        shapes = self._view.probe.shapes
        if node.op_type == "Einsum":
            letters = shapes.letters(node)
            result = node.attributes["equation"].as_string().partition("->")[2]
            summed = None if letters is None else [letters[one][0] for one in letters if one not in result]
        else:
            summed = [
                shapes.of(one)[-1 if at == 0 else -2] for at, one in enumerate(node.inputs[:2]) if one is not None
            ]
        return len(cut) <= 1 and summed is not None and all(size.is_fixed for size in summed)

    def _counts(self, node: ir.Node, cut: list[ir.Value]) -> bool:
        return not cut

    def _numbers(self, node: ir.Node, at: int, default: int) -> list[int]:
        value = node.inputs[at] if at < len(node.inputs) else None
        return [default] if value is None else [int(one) for one in self._view.probe.get(value).reshape(-1).tolist()]

    def _keep_whole(self, value: ir.Value, node: ir.Node) -> None:
        """Note numbers without their cut, where that is made here."""
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
"""Operators whose results are cut under a condition, given those of their data that are."""


def _data(node: ir.Node) -> list[ir.Value]:
    """What a node reads but for sizes."""
    sizes = _SIZES.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
    read = [value for at, value in enumerate(node.inputs) if value is not None and at not in sizes]
    return read + outer_values(node)
