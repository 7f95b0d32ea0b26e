"""The output shapes of convolutions, poolings and Resize, as polynomials of the dimensions of a graph's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from posexport.graphs.symbolic_sizes import ONE, Shape, Size

if TYPE_CHECKING:
    from posexport.graphs.symbolic_shapes import SymbolicShapes

CONVOLUTIONS = (
    *("Conv", "FusedConv", "ConvTranspose", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool"),
    *("LpPool", "QLinearAveragePool", "GlobalAveragePool", "GlobalMaxPool", "QLinearGlobalAveragePool"),
    *("Resize", "Upsample"),
)
_FILTERS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Where a convolution reads its weights [channels, ...]."""

_POOLINGS = ("MaxPool", "AveragePool", "LpPool", "QLinearAveragePool")


def convolved(shapes: SymbolicShapes, node: ir.Node) -> Shape | None:
    """The shape of the output: the rows of the input, a channel for each filter, and the lengths of the other axes."""
    shape, weights = shapes.of_input(node, 0), shapes.of_input(node, _FILTERS.get(node.op_type, 1))
    here = shapes.tensor(node.outputs[0])
    if not shape or here is None or len(shape) != here.dim():
        return None
    sizes = [
        _strided(shapes, node, at, size, length)
        for at, (size, length) in enumerate(zip(shape[2:], here.shape[2:], strict=True))
    ]
    channels = weights[0] if node.op_type in _FILTERS and weights else shape[1]
    if node.op_type == "ConvTranspose" and weights:
        channels = weights[1] * Size(node.attributes.get_int("group", 1))
    return (shape[0], channels, *sizes)


def _strided(shapes: SymbolicShapes, node: ir.Node, at: int, size: Size, length: int) -> Size:
    """The output length of an axis of a convolution, a pooling or Resize; it is `length` in the probe."""
    if node.op_type in ("Resize", "Upsample"):
        return shapes.symbols.other(node.op_type, at, size, node.outputs[0].name)
    if size.is_fixed:
        return Size(length)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    weights = shapes.of_input(node, _FILTERS.get(node.op_type, 1)) or ()
    kernels = weights[2:] if node.op_type in _FILTERS else _window(node, attributes)
    if kernels and kernels[at].is_fixed and attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        axes = len(kernels)
        stride = (attributes.get("strides") or [1] * axes)[at]
        dilation = (attributes.get("dilations") or [1] * axes)[at]
        pads = attributes.get("pads") or [0] * 2 * axes
        reach = dilation * (kernels[at].number - 1) + 1
        left = shapes.symbols.total([size, Size(pads[at] + pads[at + axes] - reach)])
        taken = shapes.symbols.total([shapes.symbols.floor_quotient(left, stride), ONE])
        shapes.symbols.assume(taken, 1)  # otherwise the filter or the window doesn't fit
        return taken
    return shapes.symbols.other(node.op_type, at, size, repr(sorted(attributes.items())), weights)


def _window(node: ir.Node, attributes: Mapping[str, Any]) -> Shape:
    """The window of a pooling; empty if it is not one, or if its output length is rounded up."""
    if node.op_type not in _POOLINGS or attributes.get("ceil_mode", 0):
        return ()
    return tuple(map(Size, attributes.get("kernel_shape", ())))
