"""Dimensions of inputs that can only be one number, although the file says that they vary: what its operators and its
outputs say of them.

A graph was seen to take one size alone (posexport.graphs.baked). That it can't take another one follows from

- a Reshape to as many elements as a constant says,
- axes that meet, of which none can be 1,
- an axis of an output that is always a number, and by its name as long as one of an input.

Sizes for which nothing of this holds are not known to be fixed: a graph may take all squares, and only one was tried.
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
    """Those of the dimensions that must be the number that was taken. `above_one` are those that were seen not to be 1
    where nothing else is changed."""
    found: dict[Size, int] = {}
    for one, other in _equal(shapes, outputs, above_one):
        solution = shapes.symbols.solution(one, other)
        if solution is not None and taken.get(solution[0]) == solution[1]:
            found[solution[0]] = solution[1]
    return found


def _equal(
    shapes: SymbolicShapes, outputs: Collection[ir.Value], above_one: Collection[Size]
) -> Iterator[tuple[Size, Size]]:
    """Lengths that are equal on all inputs which the graph takes."""
    yield from shapes.equal
    for sizes in shapes.met:
        largest = [size for size in sizes if size in above_one or shapes.symbols.is_above_one(size)]
        yield from combinations(largest, 2)
    for value in outputs:
        stated = () if value.shape is None or not shapes.knows(value) else value.shape
        for dim, size in zip(stated, shapes.of(value) if stated else (), strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None and size != ONE:
                yield shapes.symbols.dimension(dim.value), size
