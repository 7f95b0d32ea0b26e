"""Which operators keep a number for each token of each row, so that it depends only on the position of the token.

    elementwise        always, also with numbers that are the same for all rows and tokens
    layout             if axes of varying lengths stay whole and in order, or are merged into one and split again
    Gather             a row of a table for each position; from numbers by token only if lengths alone choose them
    products and sums  over axes of fixed lengths

A sum over tokens, a running sum, and tokens in another order are not among them: their results may begin to differ on
inputs that are longer than all that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir

from posexport.graphs.node_arguments import input_of
from posexport.graphs.symbolic_shapes import SymbolicShapes
from posexport.graphs.symbolic_sizes import Size, product
from posexport.rewrite.angles.lengths import ELEMENTWISE, Lengths, summed_sizes, varying


class Followed:
    """The values that follow positions: they have a number for each token of each row."""

    def __init__(
        self, shapes: SymbolicShapes, lengths: Lengths, positions: ir.Value, batch: int | None, tokens: int
    ) -> None:
        """`batch` and `tokens` are the axes of rows and of tokens in the positions."""
        shape = shapes.of(positions)
        self._shapes, self._lengths, self._tokens = shapes, lengths, shape[tokens]
        self._varying = [shape[axis] for axis in (batch, tokens) if axis is not None and not shape[axis].is_fixed]
        self.values = {positions}

    def follows(self, node: ir.Node) -> bool:
        """Whether a node that reads following values gives following values; if so, they are noted."""
        if node.domain not in ("", "ai.onnx") or (len(node.outputs) != 1 and node.op_type != "Split"):
            return False
        rule = _RULES.get(node.op_type)
        if not (node.op_type in _ALWAYS or (rule is not None and rule(self, node))):
            return False
        for value in node.outputs:
            if not self._tokens.is_fixed and self._shapes.of(value).count(self._tokens) > 1:
                return False  # numbers of two tokens were combined
        self.values.update(node.outputs)
        return True

    def may_meet(self, node: ir.Node, numbers: Collection[ir.Value]) -> bool:
        """Whether these other numbers are the same for all rows and tokens. The rows of a table may differ."""
        table = node.inputs[0] if node.op_type in _LOOK_UPS and node.inputs[1] in self.values else None
        return all(
            one in self.values or self._lengths.is_even(one) or (one is table and self._is_table(node, one))
            for one in numbers
        )

    def _is_table(self, node: ir.Node, table: ir.Value) -> bool:
        shape = self._shapes.of(table)
        axis = node.attributes.get_int("axis", 0) % len(shape)
        return all(size.is_fixed for at, size in enumerate(shape) if at != axis)

    def _reshapes(self, node: ir.Node) -> bool:
        before, after = (varying(self._shapes.of(value)) for value in (node.inputs[0], node.outputs[0]) if value)
        return before == after or after == [product(before)] or (after == self._varying and before == [product(after)])

    def _slices(self, node: ir.Node) -> bool:
        """Features may be cut out, but all rows and tokens must be kept."""
        bounds = self._shapes.bounds(node)
        source = self._of_first(node)
        if bounds is None or source is None:
            return False
        after = self._shapes.of(node.outputs[0])
        return all(
            new.is_fixed if old.is_fixed else axis not in bounds or (new == old and bounds[axis][2] == 1)
            for axis, (old, new) in enumerate(zip(source, after, strict=True))
        )

    def _gathers(self, node: ir.Node) -> bool:
        data, indices = node.inputs[0], node.inputs[1]
        if data not in self.values:
            return True
        source = self._of_first(node)
        if source is None or indices is None or indices in self.values:
            return False
        by_feature = source[node.attributes.get_int("axis", 0)].is_fixed
        return self._lengths.is_even(indices) if by_feature else self._lengths.counts_tokens(indices)

    def _looks_up(self, node: ir.Node) -> bool:
        """GatherElements takes its other axes in order, and so does GatherND with batch_dims: these must not be axes of
        tokens."""
        data, indices, source = node.inputs[0], node.inputs[1], self._of_first(node)
        if data in self.values or indices is None or source is None or node.attributes.get_int("batch_dims", 0) != 0:
            return False
        if node.op_type == "GatherND":
            return True
        axis = node.attributes.get_int("axis", 0) % len(source)
        by_axis = zip(source, self._shapes.of(indices), strict=True)
        return all(at == axis or index.is_fixed or not size.is_fixed for at, (size, index) in enumerate(by_axis))

    def _joins(self, node: ir.Node) -> bool:
        return self._shapes.of(node.outputs[0])[node.attributes.get_int("axis", 0)].is_fixed

    def _parts(self, node: ir.Node) -> bool:
        source = self._of_first(node)
        return source is not None and source[node.attributes.get_int("axis", 0)].is_fixed

    def _repeats(self, node: ir.Node) -> bool:
        return varying(self._of_first(node) or ()) == varying(self._shapes.of(node.outputs[0]))

    def _sums(self, node: ir.Node) -> bool:
        sizes = summed_sizes(self._shapes, node)
        return sizes is not None and all(size.is_fixed for size in sizes)

    def _reduces(self, node: ir.Node) -> bool:
        source, axes = self._of_first(node), self._shapes.axes(node)
        if source is None:
            return False
        if "axes" not in node.attributes and input_of(node, 1) is None:
            axes = [*range(len(source))]
        return axes is not None and all(source[axis].is_fixed for axis in axes)

    def _of_first(self, node: ir.Node) -> tuple[Size, ...] | None:
        return self._shapes.of_input(node, 0)


_LOOK_UPS = {"Gather", "GatherElements", "GatherND"}

_ALWAYS = ELEMENTWISE | {"Squeeze", "Unsqueeze", "Transpose", "Expand"}

_RULES: dict[str, Callable[[Followed, ir.Node], bool]] = {
    "Reshape": Followed._reshapes,
    "Flatten": Followed._reshapes,
    "Slice": Followed._slices,
    "Gather": Followed._gathers,
    "GatherElements": Followed._looks_up,
    "GatherND": Followed._looks_up,
    "Concat": Followed._joins,
    "Split": Followed._parts,
    "Tile": Followed._repeats,
    "MatMul": Followed._sums,
    "Einsum": Followed._sums,
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), Followed._reduces),
}
"""Operators that keep numbers by token under a condition."""
