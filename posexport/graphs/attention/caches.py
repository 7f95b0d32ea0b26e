"""The cache of an attention: its inputs and outputs in the graph, and whether it grows or is written into."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.heads import Side, side_of
from posexport.graphs.attention.layouts import Layout, Sizes, layouts_of
from posexport.graphs.axes import SLOTS
from posexport.graphs.view import View

_STEPS = 400
"""The most values that are looked at above keys or values."""

_CACHES = ("past", "encoder_past")


def cache_of(view: View, attention: Attention, stops: Collection[ir.Value]) -> dict[str, Any] | None:
    """The `kind` of the cache and, for key and value, the names of its `inputs` and `outputs`; None without a cache.

    New keys are appended to a `grown` cache and written into a `shared` one. A `static` cache, such as that of an
    encoder, gets no new keys. `other`: keys or values don't come from exactly one cache.

    The search ends at the values `stops`, which are results of other attentions.
    """
    found = {"key": attention.k.cache, "value": attention.v.cache}
    known = {name: cache for name, cache in found.items() if cache is not None}
    if len(known) == len(found):
        return {
            "kind": "grown",
            "inputs": {name: cache.name for name, cache in known.items()},
            "outputs": {name: _output(cache.present) for name, cache in known.items()},
        }
    sides = {"key": attention.k.source.value, "value": attention.v.source.value}
    above = {name: _above(view, value, stops) for name, value in sides.items()}
    inputs = {name: _inputs(view, values) for name, values in above.items()}
    if any(len(names) != 1 for names in inputs.values()):
        whole = {name: _inputs(view, _above(view, value, stops, projections=True)) for name, value in sides.items()}
        names = sorted({one for found in whole.values() for one in found})
        return {"kind": "other", "inputs": names, "outputs": []} if names else None
    static = not any(_is_joined(view, value) for values in above.values() for value in values)
    shared = any(SLOTS in view.roles[names[0]].axes for names in inputs.values())
    written = {name: _written(view, values, stops) for name, values in above.items()}
    return {
        "kind": "static" if static else "shared" if shared else "grown",
        "inputs": {name: names[0] for name, names in inputs.items()},
        "outputs": {name: names[0] if len(names) == 1 else "" for name, names in written.items()},
    }


def _is_joined(view: View, value: ir.Value) -> bool:
    """Whether a value is computed from several content values, for example by appending new keys to others."""
    node = value.producer()
    return node is not None and len(view.flow.feature_inputs(node)) > 1


def _output(present: ir.Value) -> str:
    """The name of the graph output that is a value or a copy of it; empty if there is none."""
    if present.is_graph_output():
        return present.name or ""
    copies = [use.node.outputs[0] for use in present.uses() if use.node.op_type in ("Identity", "Cast")]
    return next((copy.name or "" for copy in copies if copy.is_graph_output()), "")


def _written(view: View, values: Collection[ir.Value], stops: Collection[ir.Value]) -> list[str]:
    """The graph outputs that are one of these values, or a copy of one, and are computed from a cache."""
    outputs = ((value, _output(value)) for value in values)
    found = [name for value, name in outputs if name and _inputs(view, _above(view, value, stops))]
    return list(dict.fromkeys(found))


def written_keys(view: View, attention: Attention, stops: Collection[ir.Value]) -> Side | None:
    """The new keys that are written into a cache; None if they are not found. Their rotation is that of all keys."""
    rows, heads, queries = _sizes(view, attention)
    sizes = (rows, heads, queries, attention.head_dim)
    for value in _above(view, attention.k.source.value, stops):
        if math.prod(view.probe.shape(value)) != math.prod(sizes) or _inputs(view, _above(view, value, stops)):
            continue
        for layout in layouts_of(view.probe.shape(value), sizes):
            try:
                side = side_of(view.flow, view.probe, value, partial(_to_heads, layout, sizes), sizes, rotated=True)
            except LookupError:
                continue
            if side.rotary is not None:
                return side
    return None


def _to_heads(layout: Layout, sizes: Sizes, value: torch.Tensor) -> torch.Tensor:
    return layout.to_heads(value, sizes)


def _sizes(view: View, attention: Attention) -> tuple[int, int, int]:
    """Rows, key heads and queries."""
    queries = attention.queries(view.probe.shape(attention.logits))
    result = math.prod(view.probe.shape(attention.output.value))
    return result // (attention.num_heads * attention.value_dim * queries), attention.num_kv_heads, queries


def _inputs(view: View, values: Collection[ir.Value]) -> list[str]:
    """The names of the graph inputs among these values that are caches."""
    return [one.name or "" for one in values if one.is_graph_input() and _role(view, one) in _CACHES]


def _role(view: View, value: ir.Value) -> str:
    role = view.roles.get(value.name or "")
    return "" if role is None else role.kind


def _above(view: View, start: ir.Value, stops: Collection[ir.Value], *, projections: bool = False) -> list[ir.Value]:
    """The content that a value is computed from, starting with the value itself.

    The search ends at `stops` and, unless `projections` is set, at products with weights.
    """
    seen = {start: None}
    pending = [start]
    while pending and len(seen) < _STEPS:
        value = pending.pop(0)
        node = value.producer()
        if node is None or value in stops:
            continue
        content = view.flow.feature_inputs(node)
        if node.op_type in ("MatMul", "Gemm") and len(content) == 1 and not projections:
            continue
        for source in content:
            if source not in seen:
                seen[source] = None
                pending.append(source)
    return list(seen)
