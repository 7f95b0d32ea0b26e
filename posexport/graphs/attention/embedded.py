"""Position encodings that are added to the input of the first layer: rows of a table, or sines and cosines.

x_s + W[p_s] (learned), or x_s + sines and cosines of p_s w_i, w_i = theta^(-2i/D) (sinusoidal; Vaswani et al. 2017)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir

from posexport.errors import RequestError
from posexport.graphs.attention.dataflow import constant_of
from posexport.graphs.attention.measure import Measure
from posexport.graphs.attention.projection import varies_by_token
from posexport.graphs.axes import BATCH, is_token_first
from posexport.graphs.fits.progressions import progression
from posexport.graphs.node_arguments import input_of
from posexport.graphs.view import View

ROW = 16
"""The length of the row on which sines and cosines are looked for."""

EXACT = 2e-6
"""How much a table may differ from exact sines and cosines: tables are float32."""

_SKIPS = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
"""Operators of ONNX Runtime that normalise the sum of their first two inputs."""

_SUMS = {"Add", "Sum", *_SKIPS}

_STEPS = 3000
"""The most values that are looked at above an attention."""


def embedded(view: View, measure: Measure, start: ir.Value, stops: Collection[ir.Value]) -> dict[str, Any] | None:
    """The position encoding that is added above `start` but not above the values `stops`; None if there is none."""
    seen, pending = {start}, [start]
    while pending and len(seen) < _STEPS:
        value = pending.pop()
        node = value.producer()
        if node is None or value in stops:
            continue
        if node.op_type == "EmbedLayerNormalization" and (table := _table_of(node)) is not None:
            return _in_operator(view, table, input_of(node, 8))
        if node.op_type in _SUMS and (added := _added(view, node)) is not None:
            return _named(measure, *added)
        sources = {one for one in node.inputs if one is not None and one in view.flow.content} - seen
        seen |= sources
        pending += sources
    return None


def _table_of(node: ir.Node) -> ir.Value | None:
    """The table of position embeddings of com.microsoft EmbedLayerNormalization."""
    return input_of(node, 3)


def _in_operator(view: View, table: ir.Value, places: ir.Value | None) -> dict[str, Any] | None:
    """The encoding that an operator adds from a table of positions; None if it adds the same in all places."""
    rows = view.probe.get(table)
    if places is not None and len(view.probe.get(places).unique()) < 2:
        return None
    if table not in view.flow.constant or rows.dim() != 2:
        return {"name": "absolute", "max_positions": None}
    if not varies_by_token(rows, len(rows)):
        return None
    return _sines(rows[:ROW].numpy()) or {"name": "learned", "max_positions": len(rows)}


def _added(view: View, node: ir.Node) -> tuple[ir.Value, int] | None:
    """The value that an Add adds to content, if it differs from token to token, and its axis of tokens, from the end.

    None if the value differs only from feature to feature.
    """
    operands = [one for one in (node.inputs[:2] if node.op_type in _SKIPS else node.inputs) if one is not None]
    others = [one for one in operands if one not in view.flow.content]
    shape = view.probe.shape(node.outputs[0])
    if len(operands) != 2 or len(others) != 1 or len(shape) != 3:
        return None
    value = view.probe.get(others[0])
    if value.dim() < 2 or not value.shape[-1] == shape[-1] > 1:
        return None
    first = any(is_token_first(role.axes) for role in view.roles.values())
    for at in (-3, -2) if first else (-2,):  # the axis of tokens is before that of rows, or after it
        rows = shape[-2 if at == -3 else -3]
        by_token = value.transpose(-3, -2) if at == -3 and value.dim() == 3 else value
        if rows == view.inputs.sizes[BATCH] and value.dim() >= -at and varies_by_token(by_token, shape[at]):
            return others[0], at
    return None


def _named(measure: Measure, added: ir.Value, axis: int) -> dict[str, Any]:
    rows = _table_rows(added)
    try:
        positions = [[place] for place in range(ROW)] if measure.axes_of([added]) == 1 else None
        (tensor,), _ = measure.run([added], seq=ROW, positions=positions)
    except RequestError:
        return {"name": "absolute", "max_positions": rows}
    tensor = tensor.transpose(axis, -2)
    values = tensor.reshape(-1, *tensor.shape[-2:])[0].numpy()
    sines = _sines(values)
    if sines is not None:
        return sines
    return {"name": "learned", "max_positions": rows if rows is not None else len(values)}


def _table_rows(value: ir.Value) -> int | None:
    """The number of rows of the table that a value is looked up in; None if no such table is found.

    The table is [rows, features], [1, rows, features] or [rows, 1, features]. It is looked for above the first input of
    each node.
    """
    for _ in range(8):
        node = value.producer()
        stored = constant_of(value)
        if stored is not None and len(stored.shape) >= 2:
            sizes = [int(size) for size in stored.shape.numpy()]
            more = [size for size in sizes[:-1] if size != 1]
            return more[0] if len(more) == 1 else None
        if node is None or not node.inputs or node.inputs[0] is None:
            return None
        value = node.inputs[0]
    return None


def _sines(values: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """The parameters of sines and cosines [S, D] of the positions 0, 1, 2, ...; None for other values."""
    tokens, width = values.shape
    if tokens < 4 or width % 2 or width < 4:
        return None
    halves = {
        "interleaved": (values[:, 0::2], values[:, 1::2]),
        "half": (values[:, : width // 2], values[:, width // 2 :]),
    }
    for layout, (first, second) in halves.items():
        for order, (sine, cosine) in {"sin-cos": (first, second), "cos-sin": (second, first)}.items():
            turns = cosine + 1j * sine
            if np.abs(np.abs(turns) - 1).max() > EXACT or np.abs(turns[0] - 1).max() > EXACT:
                continue
            frequencies = np.angle(turns[1])
            if np.abs(turns - np.exp(1j * np.arange(tokens)[:, None] * frequencies)).max() > tokens * EXACT:
                continue
            found = progression(frequencies, width, EXACT)
            known = {} if found is None or found[1] != 1.0 else {"theta": found[0]}
            listed = {} if known else {"frequencies": [float(one) for one in frequencies]}
            return {"name": "sinusoidal", **known, "order": order, "layout": layout, **listed}
    return None
