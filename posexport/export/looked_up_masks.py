"""A mask of tokens that transformers looks up by the numbers of all rows and columns, `mask[rows, columns]`.

torch exports this as a GatherND with a dozen nodes for its indices. The result is the mask itself, with other axes.
"""

from __future__ import annotations

import attrs
import onnx_ir as ir

from posexport.graphs.node_arguments import keeps_order, maker_of, numbers_of
from posexport.graphs.nodes import Nodes

FARTHEST = 2**31 - 1
"""The end of a Slice that takes all up to the end of the axis; a larger end does the same."""


@attrs.frozen
class _Counted:
    """0, 1, 2, ... up to `end` (exclusive), a number without axes, along one `axis` of `rank`."""

    end: ir.Value
    axis: int
    rank: int


def looked_up(node: ir.Node, nodes: Nodes) -> ir.Value | None:
    """The result of a GatherND whose indices count along the axes of a graph's input; None for any other node."""
    source, indices = (_plain(value) for value in node.inputs)
    given = None if source is None else _input_of(source)
    if source is None or given is None or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    counted = _counted(indices)
    if len(counted) != len(given.shape or ()) or len({one.rank for one in counted}) != 1:
        return None
    axes = [one.axis for one in counted]
    if axes != sorted({*axes}):
        return None
    new = source
    for axis, one in enumerate(counted):
        if not _is_length(one.end, given, axis):
            end = nodes.shaped(one.end, 1)
            new = nodes.one("Slice", new, nodes.constant([0]), end, nodes.constant([axis]))
    return nodes.one("Unsqueeze", new, nodes.constant([axis for axis in range(counted[0].rank) if axis not in axes]))


def _counted(indices: ir.Value | None) -> list[_Counted]:
    """The parts of indices, each along its own axis; empty if they are something else."""
    joined = maker_of(indices, "Concat")
    if joined is None or joined.attributes.get_int("axis", 0) != -1:
        return []
    parts, shapes = list[ir.Value | None](), set[ir.Value | None]()
    for value in joined.inputs:
        last = maker_of(value, "Unsqueeze")
        spread = None if last is None or numbers_of(last.inputs[1]) != [-1] else maker_of(last.inputs[0], "Expand")
        if spread is None:
            return []
        parts.append(_plain(spread.inputs[0]))
        shapes.add(spread.inputs[1])
    (shape, *others) = shapes
    lengths = None if others else maker_of(shape, "Shape")
    joint = None if lengths is None or lengths.attributes.get_int("start", 0) != 0 else lengths.inputs[0]
    together = None if joint is None or (lengths is not None and "end" in lengths.attributes) else joint.producer()
    if together is None or together.op_type not in ("Max", "Add") or together.domain:
        return []
    if {_plain(value) for value in together.inputs} != {*parts}:
        return []
    counted = [_along(part) for part in parts]
    return [one for one in counted if one is not None] if None not in counted else []


def _along(value: ir.Value | None) -> _Counted | None:
    """A Range from 0 in steps of 1, with other axes before and after it; None for any other value."""
    made = maker_of(value, "Unsqueeze")
    if made is not None:
        inner, axes = _along(_plain(made.inputs[0])), numbers_of(made.inputs[1])
        if inner is None or not axes:
            return None
        rank = inner.rank + len(axes)
        new = {axis % rank for axis in axes}
        kept = [axis for axis in range(rank) if axis not in new]
        return _Counted(inner.end, kept[inner.axis], rank)
    counted = maker_of(value, "Range")
    if counted is None or (numbers_of(counted.inputs[0]), numbers_of(counted.inputs[2])) != ([0], [1]):
        return None
    end = counted.inputs[1]
    return None if end is None else _Counted(end, 0, 1)


def _input_of(value: ir.Value) -> ir.Value | None:
    """The graph input that a value is, or is a cast of, if its axes are known; None otherwise."""
    cast = maker_of(value, "Cast")
    source = value if cast is None else cast.inputs[0]
    return source if source is not None and source.is_graph_input() and source.shape is not None else None


def _is_length(end: ir.Value, given: ir.Value, axis: int) -> bool:
    """Whether a number is the length of an axis of an input: both dimensions have the same name."""
    squeezed = maker_of(end, "Squeeze")
    lengths = None if squeezed is None else maker_of(squeezed.inputs[0], "Shape")
    other = None if lengths is None else lengths.inputs[0]
    if lengths is None or other is None or not other.is_graph_input() or other.shape is None or given.shape is None:
        return False
    start = lengths.attributes.get_int("start", 0)
    if lengths.attributes.get_int("end", len(other.shape)) - start != 1:
        return False
    name, own = other.shape[start], given.shape[axis]
    return isinstance(own, ir.SymbolicDim) and own.value is not None and name == own


def _plain(value: ir.Value | None) -> ir.Value | None:
    """The source of a value, without nodes that change nothing."""
    while value is not None and (node := value.producer()) is not None and not node.domain and _changes_nothing(node):
        value = node.inputs[0]
    return value


def _changes_nothing(node: ir.Node) -> bool:
    if node.op_type == "Identity" or keeps_order(node):
        return True
    if node.op_type == "Slice":
        starts, ends, *others = (numbers_of(value) for value in node.inputs[1:])
        steps = others[1] if len(others) > 1 else [1]
        return starts == [0] and steps == [1] and ends is not None and len(ends) == 1 and ends[0] >= FARTHEST
    if node.op_type == "Add":
        added = node.inputs[1]
        tensor = None if added is None else ir.convenience.get_const_tensor(added)
        return tensor is not None and not tensor.shape.numpy() and numbers_of(added) == [0]
    return False
