"""The shapes of what an If gives: those lengths that are the same in both of its branches, or in the one that runs.

A branch may never run. So what its operators say about lengths of the graph around it is not kept, only which lengths
its own results have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from posexport.graphs.branches import BRANCHES, body_of
from posexport.graphs.symbolic_sizes import Shape, Size

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes

_Lengths = tuple["Size | None", ...]


def chosen(shapes: SymbolicShapes, node: ir.Node, at: int) -> Shape | None:
    """The shape of an output of an If; None if its branches have other numbers of axes, or if one isn't known.

    If the condition is the same on all inputs, only the branch that runs counts.
    """
    condition = shapes.whole_numbers(node.inputs[0])
    names = BRANCHES if condition is None or len(condition) != 1 else (BRANCHES[not condition[0]],) * 2
    found = [_lengths(shapes, body_of(node, name).outputs[at]) for name in names]
    if any(one is None for one in found):
        return None
    first, second = (one for one in found if one is not None)
    if len(first) != len(second):
        return None
    return tuple(
        size if size is not None and size == other else shapes.symbols.other("shape", node.outputs[at].name, axis)
        for axis, (size, other) in enumerate(zip(first, second, strict=True))
    )


def _lengths(shapes: SymbolicShapes, value: ir.Value) -> _Lengths | None:
    """The lengths of a branch's output, None for those that aren't known: the file may state some."""
    if shapes.knows(value):
        return shapes.of(value)
    if value.shape is None:
        return None
    return tuple(Size(dim) if isinstance(dim, int) and dim > 0 else None for dim in value.shape)
