"""Replaces parts that SequenceAt takes from a split sequence by parts that Slice takes.

    SequenceAt(SplitToSequence(x, 32), 1)            =  x[32:64]
    SequenceAt(SplitToSequence(x, [32, 16, 16]), 1)  =  x[32:48]

torch writes chunk and split in this way if its graphs aren't optimised. Sizes and places must be constants; other
sequences stay. A part that doesn't exist becomes empty; before, it was an error.
"""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.attention.dataflow import constant_of
from posexport.graphs.node_arguments import input_of, maker_of
from posexport.graphs.replacements import new_node, replace_node

_WHOLE = 2**31 - 1
"""A Slice with this end takes all up to the end of the axis."""


def without_sequences(graph: ir.Graph) -> None:
    """Replace the sequences of a graph that are split and read at constant places by parts."""
    for node in [*graph]:
        split = maker_of(node.inputs[0], "SplitToSequence") if node.op_type == "SequenceAt" else None
        made = _part(split, node) if split is not None and split.graph is graph else []
        if split is None or not made:
            continue
        replace_node(node, made)
        if not split.outputs[0].uses() and not split.outputs[0].is_graph_output():
            graph.remove(split, safe=True)


def _part(split: ir.Node, node: ir.Node) -> list[ir.Node]:
    """The nodes that replace a SequenceAt, the last one with its value; empty if the part is not known."""
    place, sizes = _numbers(input_of(node, 1)), _numbers(input_of(split, 1))
    if place is None or len(place[1]) != 1 or (sizes is None and input_of(split, 1) is not None):
        return []
    axis, name, index = split.attributes.get_int("axis", 0), f"{node.outputs[0].name}/part", place[1][0]
    if sizes is None and not split.attributes.get_int("keepdims", 1):
        where = _constant(f"{name}/place", index)
        return [where, new_node("Gather", name, [split.inputs[0], where.outputs[0]], axis=axis)]
    bounds = _bounds(index, ((), [1]) if sizes is None else sizes)
    if bounds is None:
        return []
    numbers = zip(("start", "end", "axis"), (*bounds, axis), strict=True)
    constants = [_constant(f"{name}/{what}", [number]) for what, number in numbers]
    return [*constants, new_node("Slice", name, [split.inputs[0], *(one.outputs[0] for one in constants)])]


def _bounds(index: int, sizes: tuple[tuple[int, ...], list[int]]) -> tuple[int, int] | None:
    """Start and end of the part at a place; None if they depend on the length of the axis."""
    shape, numbers = sizes
    if shape:
        if not -len(numbers) <= index < len(numbers):
            return None
        start = sum(numbers[: index % len(numbers)])
        return start, start + numbers[index]
    (size,) = numbers
    if size == 1:  # from the end too
        return index, index + 1 if index != -1 else _WHOLE
    return (index * size, (index + 1) * size) if index >= 0 and size > 0 else None


def _numbers(value: ir.Value | None) -> tuple[tuple[int, ...], list[int]] | None:
    """The shape and the numbers of a constant of integers."""
    tensor = constant_of(value)
    if tensor is None or not tensor.dtype.is_integer() or tensor.size > 4096:
        return None
    return tuple(tensor.numpy().shape), [int(number) for number in tensor.numpy().reshape(-1)]


def _constant(name: str, number: int | list[int]) -> ir.Node:
    return new_node("Constant", name, [], value=ir.tensor(number, dtype=ir.DataType.INT64))
