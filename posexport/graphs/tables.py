"""What a graph tells about its inputs' values: the table that integers are looked up in, and the patches of images.

The nodes between an input and its first Gather or Conv tell the rows of the table and the stride of the convolution
that divides an image into patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from posexport.graphs.node_arguments import input_of, keeps_order

_CARRIED = {"Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Expand", "Transpose", "Slice", "Tile"}
_CARRIED |= {"Concat", "Clip", "Where", "Add", "Sub", "Gather", "Max", "Min", "Split", "Mul", "CumSum"}
"""Operators whose output has the values of an input, or an input's values combined with a constant."""

_LOOKUPS = {
    ("", "Gather"): {1: 0},
    ("", "GatherElements"): {1: 0},
    ("", "GatherND"): {1: 0},
    ("", "RotaryEmbedding"): {3: 1},
    ("com.microsoft", "RotaryEmbedding"): {1: 2},
    ("com.microsoft", "GatherBlockQuantized"): {1: 0},
    ("com.microsoft", "EmbedLayerNormalization"): {0: 2, 1: 4, 8: 3},
}
"""(domain, operator) to {place of the indices: place of the table}."""

_UNCHANGED = ("Cast", "Identity", "Expand", "Tile", "Unsqueeze", "QuantizeLinear", "DequantizeLinear")
"""Operators between a constant table and its lookup: leading axes may be added and become longer."""

_WINDOWED = {"Conv", "MaxPool", "AveragePool"}
"""Operators that need several frames of their first input for one frame of their output."""

_MIXING = {"MatMul", "Gemm", "Einsum", "Shape", "Size"}
"""Operators after which frames are tokens."""

_WAVEFORM = 2
"""The axes of a sound that is not divided into frames yet: rows and samples."""

_STEPS = 64
"""The most values that are followed."""


def rows_of(value: ir.Value) -> int | None:
    """The number of values that integers of this input may have: the rows of the smallest table for their lookup."""
    limits = list(_limits(value))
    return min(limits) if limits else None


def _limits(start: ir.Value) -> Iterator[int]:
    pending, seen = [(start, 0)], {start}
    while pending and len(seen) <= _STEPS:
        value, offset = pending.pop()
        for node, place in value.uses():
            table = _LOOKUPS.get((_domain(node), node.op_type), {}).get(place)
            if table is not None:
                rows = _table_rows(node, table)
                if rows is not None:
                    yield max(rows - offset, 1)
            elif node.op_type in _CARRIED and not (node.op_type == "CumSum" and place == 1):
                moved = offset + _added(node, place)
                for output in node.outputs:
                    if output not in seen:
                        seen.add(output)
                        pending.append((output, moved))


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _table_rows(node: ir.Node, place: int) -> int | None:
    """The rows of a node's constant table.

    None if it has no constant there, or if several indices select its rows.
    """
    if node.op_type == "GatherND" and not _has_one_index(node):
        return None
    table = first = input_of(node, place)
    while table is not None and (maker := table.producer()) is not None and _keeps_rows(maker):
        table = input_of(maker, 0)
    shape = None if table is None else _constant_shape(table)
    if first is None or shape is None or len(shape) < 2:
        return None
    axis = (node.attributes.get_int("axis", 0) or 0) if "Gather" in node.op_type else 0
    if table is not first and axis >= 0:  # axes may have been added in front; the last axis is that of the features
        axis -= len(first.shape) if first.shape is not None else max(len(shape), axis + 2)
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    return size if isinstance(size, int) and size > 1 else None


def _keeps_rows(node: ir.Node) -> bool:
    """Whether a node's output has the rows of its first input. A Transpose that changes nothing counts."""
    return node.op_type in _UNCHANGED or keeps_order(node)


def _has_one_index(node: ir.Node) -> bool:
    """Whether a GatherND takes whole rows of the first axis: the last axis of its indices has length 1."""
    indices = input_of(node, 1)
    if indices is None or node.attributes.get_int("batch_dims", 0) != 0:
        return False
    if indices.shape is not None:
        return len(indices.shape) > 0 and indices.shape[-1] == 1
    maker = indices.producer()
    axes = None if maker is None or maker.op_type != "Unsqueeze" else input_of(maker, 1)
    tensor = None if axes is None else ir.convenience.get_const_tensor(axes)
    return tensor is not None and tensor.numpy().reshape(-1).tolist() == [-1]


def lengths_of_tables(graph: ir.Graph) -> set[int]:
    """The lengths of constants from which as many rows are read as there are tokens.

    The constant is cut to the number of tokens (Slice), or looked up at counted indices (Gather, GatherND of a Range).
    """
    lengths = set[int]()
    for node in graph:
        if node.op_type not in ("Slice", "Gather", "GatherND") or _domain(node) or len(node.inputs) < 2:
            continue
        if node.op_type == "Slice":
            table, ends = node.inputs[0], input_of(node, 2)
            shape, axes = None if table is None else _constant_shape(table), input_of(node, 3)
            tensor = None if axes is None else ir.convenience.get_const_tensor(axes)
            place = 0 if tensor is None or tensor.size != 1 else int(tensor.numpy().item())
            if shape and -len(shape) <= place < len(shape) and _is_counted(ends):
                size = shape[place]
                lengths |= {size} if isinstance(size, int) else set()
        elif _is_counted(node.inputs[1]) and (rows := _table_rows(node, 0)) is not None:
            lengths.add(rows)
    return lengths


def _is_counted(value: ir.Value | None) -> bool:
    """Whether a value is computed only from lengths of inputs and from constants."""
    pending, seen, counted = [value], {value}, False
    while pending and len(seen) <= _STEPS:
        value = pending.pop()
        node = None if value is None else value.producer()
        if value is None or (node is None and ir.convenience.get_const_tensor(value) is not None):
            continue
        if node is None:
            return False
        if node.op_type == "Shape":
            counted = True
            continue
        new = [source for source in node.inputs if source not in seen]
        seen.update(new)
        pending += new
    return counted and not pending


def _constant_shape(value: ir.Value) -> list[object] | None:
    """The shape of a weight or a constant; None for a computed value."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return list(tensor.shape)
    return list(value.shape) if value.is_initializer() and value.shape is not None else None


def _added(node: ir.Node, place: int) -> int:
    """The integer that an Add or Sub adds to the value at `place`."""
    if node.op_type not in ("Add", "Sub") or place > 1:
        return 0
    other = input_of(node, 1 - place)
    tensor = None if other is None else ir.convenience.get_const_tensor(other)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_integer():
        return 0
    number = int(tensor.numpy().item())
    return -number if node.op_type == "Sub" else number


def required_sizes(value: ir.Value, rank: int) -> dict[int, int]:
    """Sizes of axes, by their place, that the first readers of an input need.

    They are the sizes of what it is concatenated with, the channels of a Conv, and the features of a product with
    weights.
    """
    sizes: dict[int, int] = {}
    for node, place in value.uses():
        weight = _weight_shape(node) if place == 0 and node.op_type in ("Conv", "MatMul", "Gemm") else None
        if weight is not None and node.op_type == "Conv":
            sizes[1] = weight[1] * (node.attributes.get_int("group", 1) or 1)
        elif weight is not None and not node.attributes.get_int("transA", 0):
            sizes[rank - 1] = weight[-1 if node.attributes.get_int("transB", 0) else -2]
        elif node.op_type == "Concat":
            axis = (node.attributes.get_int("axis", 0) or 0) % max(rank, 1)
            for other in node.inputs:
                if other is not None and other is not value and other.shape is not None and len(other.shape) == rank:
                    dims = enumerate(other.shape)
                    sizes |= {at: dim for at, dim in dims if isinstance(dim, int) and dim > 0 and at != axis}
    return sizes


def _weight_shape(node: ir.Node) -> list[int] | None:
    """The shape of the weights of a Conv or a product, with at least two axes; None if they are computed."""
    weight = input_of(node, 1)
    shape = [] if weight is None else _constant_shape(weight) or []
    sizes = [size for size in shape if isinstance(size, int)]
    return sizes if len(sizes) == len(shape) > 1 else None


def strides_of(value: ir.Value) -> tuple[int, ...] | None:
    """The strides of the first Conv that reads an input, through casts and arithmetic; None if there is none."""
    pending, seen = [value], {value}
    while pending and len(seen) <= _STEPS:
        for node, _ in pending.pop().uses():
            if node.op_type == "Conv":
                strides = node.attributes.get_ints("strides")
                return tuple(strides) if strides is not None else None
            if node.op_type in _CARRIED or node.op_type == "Div":
                new = [output for output in node.outputs if output not in seen]
                seen.update(new)
                pending += new
    return None


def frames_of(model: ir.Model, sound: ir.Value) -> tuple[int, int]:
    """The frames of sound that one token needs, and the frames from one token to the next.

    Convolutions and pools after an input decide them; both are 1 if there are none. A waveform that is first divided
    into frames is read in whole frames.
    """
    reached = {sound: (1, 1)}
    for node in model.graph:
        found = [
            reached[value] for value in node.inputs[: 1 if node.op_type in _WINDOWED else None] if value in reached
        ]
        if not found or node.op_type in _MIXING:
            continue
        length, step = max(length for length, _ in found), max(step for _, step in found)
        if node.op_type in _WINDOWED:
            kernel, stride, dilation = (
                max(node.attributes.get_ints(name) or (1,)) for name in ("kernel_shape", "strides", "dilations")
            )
            filters = input_of(node, 1) if node.op_type == "Conv" else None
            weight = None if filters is None else _constant_shape(filters)
            kernel = max([kernel, *(size for size in (weight or ())[2:] if isinstance(size, int))])
            length, step = length + (kernel - 1) * dilation * step, stride * step
        elif node.op_type == "Reshape" and (length, step) == (1, 1) and len(sound.shape or ()) == _WAVEFORM:
            length = step = _cut(node)
        reached |= dict.fromkeys(node.outputs, (length, step))
    return max(length for length, _ in reached.values()), max(step for _, step in reached.values())


def _cut(node: ir.Node) -> int:
    """The last size of a Reshape if it is a number and the size before it is -1; otherwise 1."""
    shape = input_of(node, 1)
    made = None if shape is None else shape.producer()
    parts = [shape] if made is None or made.op_type != "Concat" else [*made.inputs]
    sizes: list[int | None] = []
    for part in parts:
        tensor = None if part is None else ir.convenience.get_const_tensor(part)
        sizes += [None] if tensor is None else [int(size) for size in tensor.numpy().reshape(-1)]
    return max(sizes[-1] or 1, 1) if len(sizes) > 1 and sizes[-2] == -1 else 1


def patches_of(model: ir.Model) -> int | None:
    """The patches along each side of a square image; None if they are not known.

    They follow from a table of positions [1, patches + special tokens, features] that is added, or looked up at
    constant places.
    """
    for node in model.graph:
        for value in node.inputs if node.op_type == "Add" else ():
            count = 0 if value is None else _places(value)
            for special in (1, 0, 2, 5) if count > 5 else ():
                if (side := math.isqrt(count - special)) ** 2 == count - special:
                    return side
    return None


def _places(value: ir.Value) -> int:
    """The rows of a constant [1, rows, features], or the number of constant indices into a table; 0 for others."""
    node = value.producer()
    if node is not None and node.op_type == "Gather" and len(node.inputs) == 2 and None not in node.inputs:
        table, places = (_constant_shape(each) for each in node.inputs if each is not None)
        known = table is not None and places is not None and len(table) == 2 and all(isinstance(d, int) for d in places)
        return math.prod(int(str(dim)) for dim in places) if known and places is not None else 0
    shape = _constant_shape(value)
    if shape is None or len(shape) != 3 or shape[0] != 1 or not isinstance(shape[1], int):
        return 0
    return shape[1]
