"""Dimensions of inputs that can have only one size, although the file says that they vary.

A graph was found to take only one size (posexport.graphs.baked). Each of these shows that no other size is possible:

- a Reshape to a number of elements that a constant says,
- axes that are broadcast together, none of which can be 1,
- an axis of an output that always has one length, and whose name is that of a dimension of an input.

Otherwise a size is not known to be fixed: for example, a graph may take all squares of which only one was tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING

import onnx_ir as ir

from posexport.graphs.symbolic_sizes import ONE, Size

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes


def forced(
    shapes: SymbolicShapes, outputs: Collection[ir.Value], taken: Mapping[Size, int], above_one: Collection[Size]
) -> dict[Size, int]:
    """The dimensions that must have the size that was taken.

    `above_one` are dimensions that can't be 1: the graph was seen to fail if only such a dimension is 1.
    """
    found: dict[Size, int] = {}
    for one, other in _equal(shapes, outputs, above_one):
        solution = shapes.symbols.solution(one, other)
        if solution is not None and taken.get(solution[0]) == solution[1]:
            found[solution[0]] = solution[1]
    return found


def _equal(
    shapes: SymbolicShapes, outputs: Collection[ir.Value], above_one: Collection[Size]
) -> Iterator[tuple[Size, Size]]:
    """Lengths that are equal on all inputs that the graph takes."""
    yield from shapes.equal
    for sizes in shapes.met:
        largest = [size for size in sizes if size in above_one or shapes.symbols.is_above_one(size)]
        yield from combinations(largest, 2)
    for value in outputs:
        stated = () if value.shape is None or not shapes.knows(value) else value.shape
        for dim, size in zip(stated, shapes.of(value) if stated else (), strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None and size != ONE:
                yield shapes.symbols.dimension(dim.value), size
