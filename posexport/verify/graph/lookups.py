"""Rows of tables that no case reads, but that are equal to a checkpoint's: a large vocabulary can't be read whole.

If only lookups of rows in constant tables read the numbers of an input, these numbers have no other effect. If all rows
of such a table equal those of one tensor of the checkpoint, in the dtype of the file, then the unread rows are right
like those that were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx_ir as ir
import torch

from posexport.models.checkpoints.tensors import Tensors
from posexport.runtimes.tensors import to_torch

ROWS = 4096
"""The number of rows that are compared at a time."""

_MOVED = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
"""Operators that pass whole numbers on unchanged, whatever they do to the shape."""


def checkpoint_tables(model: ir.Model, inputs: Iterable[str], folder: Path) -> Mapping[str, str]:
    """The inputs of a graph whose tables are tensors of the checkpoint in `folder`, with the names of these tensors.

    Functions of the graph are inlined. Several names are joined into one text.
    """
    values = {value.name: value for value in model.graph.inputs}
    tensors, found = Tensors(folder), dict[str, str]()
    for name in inputs:
        tables = _tables(values[name]) if name in values else []
        names = [_equal_tensor(table, tensors) for table in tables]
        if names and all(names):
            found[name] = " and ".join(dict.fromkeys(filter(None, names)))
    return found


def _tables(value: ir.Value) -> list[ir.TensorProtocol]:
    """The constant tables in which a value looks up rows; none if anything else reads its numbers."""
    tables: list[ir.TensorProtocol] = []
    pending, seen = [value], {value}
    while pending:
        for node, place in pending.pop().uses():
            kind = node.op_type if node.domain in ("", "ai.onnx") else ""
            if kind in ("Shape", "Size"):
                continue
            if kind in _MOVED and place == 0:
                new = [output for output in node.outputs if output not in seen]
                seen.update(new)
                pending += new
                continue
            table = node.inputs[0] if kind == "Gather" and place == 1 else None
            tensor = None if table is None else ir.convenience.get_const_tensor(table)
            if tensor is None or node.attributes.get_int("axis", 0) != 0:
                return []
            tables.append(tensor)
    return tables


def _equal_tensor(table: ir.TensorProtocol, tensors: Tensors) -> str | None:
    """The first tensor of a checkpoint that has the values of a table; None if there is none."""
    array = to_torch(table.numpy())
    for name in tensors.of_shape(tuple(array.shape)):
        parts = tensors.parts(name, ROWS)
        if all(torch.equal(part.to(array.dtype), array[start : start + ROWS]) for start, part in parts):
            return name
    return None
