"""Whether a rotation uses its cosines and sines whatever their values are, not only those of the probe.

A table whose halves are equal in its first rows may differ further down. A factor that is 1 on short rows may be
another number on long ones. So random numbers, independent of each other, replace the values that the angles are
computed from, as far up as arithmetic goes. The cosines and sines that were found must still explain what the graph
makes of features.
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

_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Neg", "Reciprocal", "Exp", "Cos", "Sin", "Concat", "MatMul", "Einsum"}
"""Arithmetic operators. If results of these are equal on random numbers, they are equal on all numbers."""


_MOST_COLUMNS = 4096
"""The most columns of a table that are compared."""


def other_angles(
    flow: Dataflow, probe: Probe, nodes: Sequence[ir.Node]
) -> tuple[dict[ir.Value, torch.Tensor], set[ir.Node]] | None:
    """Random numbers for the values that the nodes' inputs besides content are computed from, and the nodes in between.

    None if a node is not a linear operator on features, or adds something that is not fixed.
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
    """Random numbers for each value. Values that are computed in the same way get the same numbers."""
    drawn: dict[int, torch.Tensor] = {}
    for value in sources:
        key = probe.computations.key(value)
        if key not in drawn:
            drawn[key] = _drawn(probe, value)
    return {value: drawn[probe.computations.key(value)] for value in sources}


def _collect(probe: Probe, value: ir.Value, sources: dict[ir.Value, None], arithmetic: set[ir.Node]) -> None:
    """Add to `sources` what a value is computed from by arithmetic and layouts, and the nodes to `arithmetic`."""
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
    """Whether random numbers replace the inputs of a node instead of its result.

    If numbers are cast from integers or truth values, the result of the Cast is drawn: random values of so few kinds
    would tell little about arithmetic.
    """
    read = node.inputs[:1] if node.op_type == "Cast" else []
    values = [value for value in (*read, node.outputs[0]) if value is not None]
    if not all(probe.dtype(value).is_floating_point for value in values):
        return False
    return node.op_type in _ARITHMETIC or node.op_type == "Cast" or lays_out(probe, node)


def _drawn(probe: Probe, value: ir.Value) -> torch.Tensor:
    """Random numbers for a value. If its rows come from another value, columns that are equal there stay equal."""
    random, columns = probe.random(value), _equal_columns(probe, value)
    return random if columns is None or random.shape[-1] != len(columns) else random[..., columns]


def _equal_columns(probe: Probe, value: ir.Value) -> list[int] | None:
    """For each column of the value that `value` takes its rows from, the first column that is always equal to it.

    Columns are compared on random numbers. None if the rows don't come from another value.
    """
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
    """The value that another value takes rows of, with all columns in order; None if it is computed in another way."""
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
