"""Ids that a graph compares its tokens with, such as that of padding: masks and positions may depend on them.

Equal(ids, 1), ids > 0, Cast(ids, bool), Sign(ids)

Some ids decide how many values there are, or where others go, such as those for the parts of a picture. They are left
out: at random places, they fit no picture.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from posexport.graphs.node_arguments import input_of

_SAME = {"Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Transpose", "Slice", "Gather"}
"""Operators whose output contains all or some of the numbers of their first input."""

_ORDERED = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual"}

_DECIDED = {*_SAME, "Not", "And", "Or", "Xor", "Where", "Mul", "Add", "Sub", "CumSum", "ReduceSum", "Tile", "Concat"}
_DECIDED |= {"GatherElements", "GatherND", "Equal", *_ORDERED, "Neg", "Div", "Max", "Min", "Clip", "CastLike"}
"""Operators through which booleans about tokens are followed."""

_LOOKUPS = {"Gather", "GatherElements", "GatherND"}

_PLACING = {"NonZero", "Compress", "ScatterND", "ScatterElements", "ArgMax", "ArgMin"}
_PLACING |= {"TopK", "If", "Loop", "Scan", "Range", "Pad", "SequenceInsert", "Resize"}

_STEPS = 200
"""The most values that are followed."""


def compared_ids(tokens: ir.Value, rows: int | None) -> tuple[int, ...]:
    """The ids that an input of tokens is compared with, in rising order. `rows` is the size of the vocabulary."""
    found: set[int] = set()
    pending, seen = [(tokens, 0)], {tokens}
    while pending and len(seen) <= _STEPS:
        value, offset = pending.pop()
        for node, place in value.uses():
            if node.domain not in ("", "ai.onnx"):
                continue
            ids = [number - offset for number in _compared(node, place)]
            if ids and not _places(node.outputs[0]):
                found.update(ids)
            moved = _moved(node, place)
            if moved is not None and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append((node.outputs[0], offset + moved))
    return tuple(sorted(one for one in found if one >= 0 and (rows is None or one < rows)))


def _compared(node: ir.Node, place: int) -> Iterator[int]:
    """The numbers that a node compares its input at this place with; for an order, also their neighbours."""
    if node.op_type == "Sign" or _makes_truths(node):
        yield 0
    elif node.op_type in ("Equal", *_ORDERED) and len(node.inputs) == 2:
        number = _number(node.inputs[1 - place])
        if number is not None:
            yield from (number,) if node.op_type == "Equal" else (number - 1, number, number + 1)


def _makes_truths(node: ir.Node) -> bool:
    """Whether a node casts numbers to booleans, so that it compares with 0."""
    return node.op_type == "Cast" and node.attributes.get_int("to", 0) == ir.DataType.BOOL


def _moved(node: ir.Node, place: int) -> int | None:
    """What a node adds to the numbers at this place; None if its output has other numbers."""
    if node.op_type in _SAME and place == 0:
        return 0
    if node.op_type in ("Add", "Sub") and len(node.inputs) == 2 and not (node.op_type == "Sub" and place == 1):
        number = _number(node.inputs[1 - place])
        return None if number is None else number if node.op_type == "Add" else -number
    return None


def _number(value: ir.Value | None) -> int | None:
    """The integer that all elements of a constant have. The constant may be expanded to another shape."""
    for _ in range(8):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        node = None if value is None else value.producer()
        if tensor is None and node is not None and node.op_type == "ConstantOfShape":
            attribute = node.attributes.get("value")
            tensor = None if attribute is None else attribute.as_tensor()
        if tensor is not None and tensor.dtype == ir.DataType.STRING:
            return None
        if tensor is not None:
            numbers = tensor.numpy().reshape(-1)
            same = 0 < numbers.size < 1_000_000 and bool((numbers == numbers[0]).all())
            return int(numbers[0]) if same and float(numbers[0]).is_integer() else None
        if node is None or node.op_type not in _SAME or node.op_type == "Gather":
            return None
        value = input_of(node, 0)
    return None


def _places(start: ir.Value) -> bool:
    """Whether booleans about tokens decide how many values there are, or where others go."""
    pending, seen = [start], {start}
    while pending and len(seen) <= _STEPS:
        for node, place in pending.pop().uses():
            looked_up = node.op_type in _LOOKUPS and place == 1
            if node.op_type in _PLACING or (looked_up and not _is_stored(input_of(node, 0))):
                return True
            if node.op_type in _DECIDED and not looked_up:
                new = [one for one in node.outputs if one not in seen]
                seen.update(new)
                pending += new
    return bool(pending)


def _is_stored(table: ir.Value | None) -> bool:
    """Whether a table is a constant, or a constant in another shape."""
    while table is not None:
        if table.is_initializer() or ir.convenience.get_const_tensor(table) is not None:
            return True
        node = table.producer()
        if node is None or node.op_type not in _SAME or node.op_type == "Gather":
            return False
        table = input_of(node, 0)
    return False
