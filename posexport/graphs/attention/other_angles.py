"""Whether a rotation turns by its cosines and sines whatever these are, not only by those of the probe.

A table whose halves are the same in its first rows may hold others further down, and a factor that is 1 on short rows
another number on long ones. So what the angles are computed from is replaced by random numbers, as far up as arithmetic
goes, each independent of the others: what the graph then makes of features must still be explained by the cosines and
sines that were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
import torch

from posexport.graphs.attention.absorbed import keeps_numbers, lays_out
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe
from posexport.graphs.symbolic_sizes import ONE

_SUMS = {"Add", "Sub", "Sum", "ReduceSum"}
_PRODUCTS = {"Mul", "MatMul", "Einsum"}

_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Neg", "Cos", "Sin", "Concat"}
"""Operators through which random numbers tell all there is to know: equal results of such are equal for all numbers."""


_MOST_COLUMNS = 4096
"""Columns of a table that are compared."""


def other_angles(
    flow: Dataflow, probe: Probe, nodes: Sequence[ir.Node]
) -> tuple[dict[ir.Value, torch.Tensor], set[ir.Node]] | None:
    """Random numbers by value, for what all that the nodes read beside content is computed from, and the nodes that
    compute it from these.

    None where a node is no linear operator on features, or adds something that is not fixed.
    """
    sources: dict[ir.Value, None] = {}
    arithmetic: set[ir.Node] = set()
    for node in nodes:
        if not keeps_numbers(flow, probe, node) and node.op_type not in _SUMS | _PRODUCTS:
            return None
        read = [value for value in node.inputs if value is not None and value not in flow.content]
        varying = [value for value in read if value not in probe.fixed]
        if varying and node.op_type in _SUMS:
            return None
        if node.op_type not in _SUMS | _PRODUCTS:
            continue
        for value in varying:
            _collect(probe, value, sources, arithmetic)
    return _draws(probe, sources), arithmetic


def _draws(probe: Probe, sources: Iterable[ir.Value]) -> dict[ir.Value, torch.Tensor]:
    """Random numbers for each value, the same for values that are computed in the same way."""
    drawn: dict[int, torch.Tensor] = {}
    for value in sources:
        key = probe.computations.key(value)
        if key not in drawn:
            drawn[key] = _drawn(probe, value)
    return {value: drawn[probe.computations.key(value)] for value in sources}


def _collect(probe: Probe, value: ir.Value, sources: dict[ir.Value, None], arithmetic: set[ir.Node]) -> None:
    """Add what a value is computed from by arithmetic and layouts, and the nodes of these."""
    node = value.producer()
    if value in probe.fixed or value in sources or node in arithmetic:
        return
    if node is None or not _is_passed(probe, node):
        sources[value] = None
        return
    arithmetic.add(node)
    for source in node.inputs if node.op_type in _ARITHMETIC else node.inputs[:1]:
        if source is not None:
            _collect(probe, source, sources, arithmetic)


def _is_passed(probe: Probe, node: ir.Node) -> bool:
    """Whether a node's inputs are drawn in its place: numbers that are cast from whole ones or from truth values are
    drawn themselves, since few such values say little of arithmetic."""
    read = node.inputs[:1] if node.op_type == "Cast" else []
    values = [value for value in (*read, node.outputs[0]) if value is not None]
    if not all(probe.dtype(value).is_floating_point for value in values):
        return False
    return node.op_type in _ARITHMETIC or node.op_type == "Cast" or lays_out(probe, node)


def _drawn(probe: Probe, value: ir.Value) -> torch.Tensor:
    """Random numbers; in rows that are taken from other values, columns are equal where they are in every row there."""
    random, columns = probe.random(value), _equal_columns(probe, value)
    return random if columns is None or random.shape[-1] != len(columns) else random[..., columns]


def _equal_columns(probe: Probe, value: ir.Value) -> list[int] | None:
    """For each column of what a value's rows are taken from the first column that is equal to it, whatever numbers that
    is computed from."""
    table = value
    while table not in probe.fixed and (source := _has_rows_of(probe, table)) is not None:
        table = source
    if table is value:
        return None
    if table in probe.fixed:
        array = probe.get(table)
    else:
        sources: dict[ir.Value, None] = {}
        arithmetic: set[ir.Node] = set()
        _collect(probe, table, sources, arithmetic)
        array = probe.replaced(_draws(probe, sources), [table], arithmetic)[0]
    if array.dim() < 2 or array.shape[-1] > _MOST_COLUMNS:
        return None
    first: dict[bytes, int] = {}
    columns = array.reshape(-1, array.shape[-1]).T.contiguous().numpy()
    return [first.setdefault(column.tobytes(), at) for at, column in enumerate(columns)]


def _has_rows_of(probe: Probe, value: ir.Value) -> ir.Value | None:
    """The value of which another one is rows, with all columns in their order; None where it is computed otherwise."""
    node = value.producer()
    source = None if node is None or node.op_type not in _ROWS else node.inputs[0]
    if node is None or source is None:
        return None
    before, after = probe.shapes.of(source), probe.shapes.of(value)
    if not before or not after or before[-1] != after[-1] or len(before) < 2:
        return None
    last = len(before) - 1
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) in (-1, last):
        return None
    if node.op_type == "GatherND":
        indices = probe.shapes.of_input(node, 1) or (ONE,)
        named = node.attributes.get_int("batch_dims", 0) + indices[-1].number
        return source if indices[-1].is_fixed and named <= last else None
    if node.op_type == "Slice":
        cut = (probe.shapes.bounds(node) or {last: (ONE, ONE, -1)}).get(last)
        return source if cut is None or cut[2] == 1 else None
    return source


_ROWS = {"Gather", "Slice", "GatherND", "Squeeze", "Unsqueeze", "Cast"}
"""Operators that may take rows of their first input."""
