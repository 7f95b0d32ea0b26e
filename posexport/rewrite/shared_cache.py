"""Turns caches that grow into buffers of a fixed length, into which new keys and values are written.

`past` [B, K, P, D] becomes a buffer [B, K, M, D], M at least P + S, of which the first P places are full. `present` is
the buffer with the new rows after them. P is the length of the attention mask minus that of the tokens, or the new
input `past_sequence_length` [1] if the graph has no such mask. All rows have the same P: shorter ones are padded on the
left. Whatever the graph computes from the length of a cache is computed from P.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx_ir as ir

from posexport.errors import RequestError, shown
from posexport.graphs.attention.attention import Attention
from posexport.graphs.axes import BATCH, PAST, SEQ, TOTAL
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.function_bodies import DOMAIN, free_name
from posexport.graphs.node_arguments import is_copy
from posexport.graphs.nodes import Nodes
from posexport.graphs.roles import Role
from posexport.rewrite.site import SharedCache

LENGTH_INPUT = "past_sequence_length"
BUFFER_DIM = "max_sequence_length"


@attrs.frozen(kw_only=True)
class Lengths:
    """Values of the graph: `past` P, `seq` S and `total` P + S, each [1], and `batch` [1]."""

    past: ir.Value
    seq: ir.Value
    total: ir.Value
    batch: ir.Value


def lengths_of(model: ir.Model, roles: Mapping[str, Role], nodes: Nodes) -> Lengths:
    """The lengths, from the inputs that have them; adds the input `past_sequence_length` if none has P."""
    inputs = {value.name: value for value in model.graph.inputs}

    def length(axis: str, kinds: Sequence[str]) -> ir.Value | None:
        for name, role in roles.items():
            if role.kind in kinds and axis in role.axes:
                return nodes.length(inputs[name], role.axes.index(axis))
        return None

    tokens = ("token_ids", "features", "position_ids", "cache_position")
    seq, batch = length(SEQ, tokens), length(BATCH, ("token_ids", "features", "position_ids", "past"))
    if seq is None or batch is None:
        raise RequestError("no input tells the number of new tokens, so its caches can't be shared: drop --kv-cache.")
    total = length(TOTAL, ("attention_mask",))
    if total is not None:
        past = nodes.one("Sub", total, seq)
        past.shape = ir.Shape([1])
        return Lengths(past=past, seq=seq, total=total, batch=batch)
    _check_one_length(roles)
    name = free_name(LENGTH_INPUT, _names(model), 1)
    past = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    model.graph.inputs.append(past)
    return Lengths(past=past, seq=seq, total=nodes.one("Add", past, seq), batch=batch)


def _names(model: ir.Model) -> set[str]:
    """The names of a graph's values."""
    read = [value for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs)]
    values = (*model.graph.inputs, *model.graph.initializers.values(), *read)
    return {str(value.name) for value in values if value is not None}


def _check_one_length(roles: Mapping[str, Role]) -> None:
    """Raise RequestError if caches have lengths with different names, and no mask says that they are equal."""
    lengths = {
        str(role.shape[role.axes.index(PAST)]): name
        for name, role in roles.items()
        if role.kind == "past" and PAST in role.axes
    }
    if len(lengths) > 1:
        (first, one), (second, other) = list(lengths.items())[:2]
        raise RequestError(
            f"the caches {shown(one)} and {shown(other)} have lengths of their own, {shown(first)} and "
            f"{shown(second)}, and shared ones have one: drop --kv-cache, or export the model with one name for both."
        )


def shared_cache(nodes: Nodes, lengths: Lengths, past: ir.Value) -> SharedCache:
    """What a site needs to write into the buffer `past`."""
    return SharedCache(write_indices=nodes.one("Expand", lengths.past, lengths.batch), length=nodes.length(past, 2))


class OtherReader(RequestError):
    """A cache that something besides its attention reads, so that no cache can be shared."""


def check_own(attention: Attention, presents: Collection[ir.Value]) -> None:
    """OtherReader if keys or values are one of these caches, but not the attention's own: a buffer has places without
    keys."""
    for side in (attention.k, attention.v):
        value: ir.Value | None = side.source.value if side.cache is None else None
        while value is not None and value not in presents:
            node = value.producer()
            value = node.inputs[0] if node is not None and node.op_type in _LAYOUTS else None
        if value is not None:
            name = shown(value.name or "")
            raise OtherReader(f"it reads {name}, the cache of another attention, which can't be shared then.")


_LAYOUTS = {"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity", "Cast"}


def redirect(
    model: ir.Model, attentions: Sequence[Attention], nodes: Nodes, lengths: Lengths
) -> dict[str, RequestError]:
    """Make readers of the length of a cache read P or P + S.

    Returns an OtherReader by the name of each attention whose cache something else reads: the model is then unusable.
    The sites must be in the graph, but not lowered; `nodes` are theirs, and new ones are added.
    """
    values = {value.name: value for value in model.graph.inputs}
    values |= {value.name: value for node in model.graph for value in node.outputs}
    new, added = {*nodes.nodes}, len(nodes.nodes)
    refused: dict[str, RequestError] = {}
    for attention in attentions:
        for side in (attention.k, attention.v):
            if side.cache is None:
                continue
            for name, length in ((side.cache.name, lengths.past), (side.cache.present.name, lengths.total)):
                reader = _redirect(values[name], length, nodes, new)
                if reader is not None:
                    text = f"{reader.op_type} {shown(reader.name or '')} reads its cache {shown(name)} too"
                    refused[attention.name] = OtherReader(f"{text}, which can't be shared then.")
            for name in (side.cache.name, side.cache.present.name):
                value = values[name]
                if value.shape is not None:
                    value.shape = ir.Shape([BUFFER_DIM if axis == 2 else dim for axis, dim in enumerate(value.shape)])
    model.graph.extend(nodes.nodes[added:])
    model.graph.sort()
    return refused


def _redirect(value: ir.Value, length: ir.Value, nodes: Nodes, new: set[ir.Node]) -> ir.Node | None:
    """Make nodes that read the shape of a buffer read that of its first `length` places. Returns a node that reads
    more."""
    reader = None
    for node in [use.node for use in value.uses()]:
        if node.domain == DOMAIN or node in new:
            continue
        if is_copy(node):
            reader = reader or _redirect(node.outputs[0], length, nodes, new)
        elif node.op_type == "Shape":
            _give_shape(node, value, length, nodes)
        else:
            reader = reader or node
    return reader


def _give_shape(node: ir.Node, value: ir.Value, length: ir.Value, nodes: Nodes) -> None:
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else 4
    first, last = (at + 4 if at < 0 else min(at, 4) for at in (start, end))
    if not first <= 2 < last:
        return
    before = nodes.length(value, first, 2) if first < 2 else None
    after = nodes.length(value, 3, last) if last > 3 else None
    parts = [part for part in (before, length, after) if part is not None]
    shape = nodes.one("Concat", *parts, axis=0) if len(parts) > 1 else length
    ir.convenience.replace_all_uses_with(node.outputs[0], shape)


def buffered(case: DrawnInputs, pasts: Iterable[str], model: ir.Model) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs of a graph with grown caches for `model` with buffers, whose empty places have large numbers."""
    arrays = dict(case.arrays)
    room = case.sizes[SEQ] + SPARE
    for name in pasts:
        batch, heads, _, size = arrays[name].shape
        empty = np.full((batch, heads, room, size), 1000.0, arrays[name].dtype)
        arrays[name] = np.concatenate((arrays[name], empty), 2)
    given = [value.name or "" for value in model.graph.inputs if not value.is_initializer()]
    added = [name for name in given if name not in case.arrays]
    arrays |= {name: np.array([case.sizes[PAST]], np.int64) for name in added}  # past_sequence_length
    return arrays


SPARE = 3
"""Places of a buffer that stay empty in a test."""
