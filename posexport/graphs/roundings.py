"""Roundings that are part of what a graph computes: conversions to a dtype that nothing else in the file has, of values
that follow from whole numbers and vectors of constants alone, as slopes times positions do.

Such a value is the same in every run, so float64 rounds it too. What follows from weights or from inputs of floats may
lie on either side of a rounding, and stays as it is in float64.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
import torch

from posexport.artifact.passing_dtypes import passing_dtypes
from posexport.graphs.frames import Override
from posexport.graphs.kernels.dtypes import FLOATS

_SIZES = ("Shape", "Size")
"""Operators that read no values."""

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def roundings(model: ir.Model) -> dict[str, Override]:
    """For each such value, by name, what rounds it in float64."""
    graph = model.graph
    values = (int(value.dtype) for value in (*graph.inputs, *graph.outputs) if value.dtype is not None)
    weights = [
        (int(tensor.dtype), [int(size) for size in tensor.shape.numpy()])
        for value in graph.initializers.values()
        if (tensor := value.const_value) is not None
    ]
    passing = passing_dtypes(values, weights)
    if not any(node.op_type == "Cast" and _target(node) in passing for node in graph):
        return {}
    drawn, kinds = _drawn(graph), _passing_values(graph, passing)
    return {
        str(value.name): partial(_rounded, dtype=FLOATS[ir.DataType(kind)])
        for value, kind in kinds.items()
        if value not in drawn and value.name
    }


def _target(node: ir.Node) -> int:
    return node.attributes.get_int("to", 1)


def _passing_values(graph: ir.Graph, passing: frozenset[int]) -> dict[ir.Value, int]:
    """The values of these dtypes: what is converted to one, and what is computed from such values until another
    conversion."""
    found: dict[ir.Value, int] = {}
    for node in graph:
        if node.op_type == "Cast":
            kind = _target(node) if _target(node) in passing else None
        else:
            kind = next((found[value] for value in node.inputs if value in found), None)
        if kind is not None:
            found.update(dict.fromkeys(node.outputs, kind))
    return found


def _drawn(graph: ir.Graph) -> set[ir.Value]:
    """The values that follow from inputs of floats or from matrices."""
    found = {value for value in graph.inputs if value.dtype is None or value.dtype.is_floating_point()}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or (tensor.dtype.is_floating_point() and sum(size > 1 for size in tensor.shape.numpy()) > 1):
            found.add(value)
    for node in graph:
        bodies = any(attribute.type in _BODIES for attribute in node.attributes.values())
        if bodies or (node.op_type not in _SIZES and any(value in found for value in node.inputs)):
            found.update(node.outputs)
    return found


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
