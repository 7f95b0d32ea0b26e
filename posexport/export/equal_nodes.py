"""Makes equal nodes of a graph one, such as those that the layers of a stack share."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

MOST_NUMBERS = 2**16
"""Constants with more numbers are not compared. Slopes, frequencies and indices of heads have fewer."""


def merge_equal_nodes(model: ir.Model) -> None:
    """Replace nodes that have the same operator, inputs and attributes by one, and drop nodes that nothing reads."""
    common.CommonSubexpressionEliminationPass(size_limit=MOST_NUMBERS)(model)
    common.RemoveUnusedNodesPass()(model)
