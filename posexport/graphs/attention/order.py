"""Whether the order of tokens acts on queries and keys: if not, reordered tokens give them in the new order.

Random numbers replace the values that carry tokens into an attention (embeddings, features, results of other
attentions), once in order and once with the tokens reversed. This is not tried if tokens come from several inputs, or
from an input and other values: one of them may hold positions, such as cosines and sines beside the features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.heads import Source
from posexport.graphs.attention.layouts import EXACT, Sizes
from posexport.graphs.attention.probe import Probe

_WITH_POSITIONS = {"EmbedLayerNormalization"}
"""Operators that look up tokens and add positions to them."""


def acts_in_order(
    flow: Dataflow, probe: Probe, source: Source, sizes: Sizes, results: Mapping[ir.Value, Source]
) -> bool | None:
    """Whether tokens in another order give the queries or keys of `source` in that order; None if it can't be tried.

    `sizes` are the sizes of the side, `results` the results of the other attentions.
    """
    carriers = _carriers(flow, probe, source.value, sizes, results) if sizes[2] > 1 else None
    if not carriers:
        return None
    drawn = {value: probe.random_like(value) for value in carriers}
    turned = {value: _turned(drawn[value], axis, sizes) for value, axis in carriers.items()}
    try:
        before, after = (_heads(flow, probe, source, sizes, values) for values in (drawn, turned))
    except RequestError:
        return None
    if not bool(torch.isfinite(before).all()):
        return None
    return float((before.flip(2) - after).abs().max()) <= EXACT * max(float(before.abs().max()), 1e-30)


def _heads(
    flow: Dataflow, probe: Probe, source: Source, sizes: Sizes, values: Mapping[ir.Value, torch.Tensor]
) -> torch.Tensor:
    if source.value in values:
        return source.layout.to_heads(values[source.value], sizes)
    above = _above(flow, source.value, values)
    nodes = [node for value in above if (node := value.producer()) is not None and value not in values]
    return source.layout.to_heads(probe.replaced(values, [source.value], nodes)[0], sizes)


def _carriers(
    flow: Dataflow, probe: Probe, source: ir.Value, sizes: Sizes, results: Mapping[ir.Value, Source]
) -> dict[ir.Value, int] | None:
    """The farthest values above `source` that have its tokens, with their axis of tokens.

    None if one of them may hold positions. Values without tokens, such as a time that is the same for all tokens, are
    not replaced.
    """
    above = _above(flow, source, results)
    if any(node is not None and node.op_type in _WITH_POSITIONS for node in (value.producer() for value in above)):
        return None
    found: dict[ir.Value, int] = {}
    below: set[ir.Value] = set()  # values that carry tokens, or are computed from them
    for value in sorted(above, key=flow.depth):
        if any(one in below for one in above[value]):
            below.add(value)
        elif (axis := _axis(probe, value, sizes, results.get(value))) is not None:
            below.add(value)
            found[value] = axis
    inputs = [value for value in found if value.is_graph_input()]
    others = [value for value in found if value not in results and value not in inputs]
    return None if len(inputs) > 1 or (inputs and others) else found


def _above(flow: Dataflow, source: ir.Value, stops: Collection[ir.Value]) -> dict[ir.Value, list[ir.Value]]:
    """The content from `source` up to `stops`, each value with the content that it is computed from."""
    found: dict[ir.Value, list[ir.Value]] = {}
    pending = [source]
    while pending:
        value = pending.pop()
        if value in found:
            continue
        node = value.producer()
        found[value] = [] if node is None or value in stops else flow.content_inputs(node)
        pending += found[value]
    return found


_MERGED = -1
"""In place of an axis of tokens: rows and tokens are merged in the first axis."""


def _axis(probe: Probe, value: ir.Value, sizes: Sizes, result: Source | None) -> int | None:
    """The axis of tokens of a value [rows, tokens, ...], or of the result of an attention in its layout."""
    rows, _, tokens, _ = sizes
    try:
        shape = probe.shape(value)
    except RequestError:
        return None
    if result is not None:
        groups = result.layout.groups
        at = _MERGED if groups[0] == "bs" else groups.index("s") if "s" in groups else None
        fits = at is not None and shape[at if at >= 0 else 0] == (tokens if at >= 0 else rows * tokens)
        return at if fits else None
    if len(shape) == 2:
        return _MERGED if shape[0] == rows * tokens else None
    if len(shape) < 3 or {*shape[:2]} != {rows, tokens}:
        return None
    return 1 if shape[:2] == (rows, tokens) else 0


def _turned(tensor: torch.Tensor, axis: int, sizes: Sizes) -> torch.Tensor:
    """The tensor with its tokens in reverse order."""
    if axis != _MERGED:
        return tensor.flip(axis)
    return tensor.reshape(sizes[0], sizes[2], *tensor.shape[1:]).flip(1).reshape(tensor.shape)
