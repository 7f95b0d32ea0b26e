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

from posexport.custom_ops import cached_keys
from posexport.errors import RequestError
from posexport.graphs.attention.layouts import Layout
from posexport.graphs.axes import BATCH, PAST, SEQ, SLOTS, TOTAL
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.function_bodies import free_name
from posexport.graphs.node_arguments import is_copy
from posexport.graphs.nodes import Nodes, to_tokens
from posexport.graphs.roles import Role
from posexport.rewrite.site import SharedCache
from posexport.rewrite.writing import Shaped, Writing

HEADS_FIRST = Layout(groups=("b", "h", "s", "d"))
"""The layout of caches."""

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
    name = free_name(LENGTH_INPUT, _names(model), 1)
    past = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    model.graph.inputs.append(past)
    return Lengths(past=past, seq=seq, total=nodes.one("Add", past, seq), batch=batch)


def _names(model: ir.Model) -> set[str]:
    """The names of a graph's values."""
    read = [value for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs)]
    values = (*model.graph.inputs, *model.graph.initializers.values(), *read)
    return {str(value.name) for value in values if value is not None}


def shared_cache(nodes: Nodes, lengths: Lengths, past: ir.Value) -> SharedCache:
    """What a site needs to write into the buffer `past`."""
    return SharedCache(write_indices=nodes.one("Expand", lengths.past, lengths.batch), length=nodes.length(past, 2))


def grown_caches(roles: Mapping[str, Role]) -> list[str]:
    """The names of the inputs that are caches without a fixed length."""
    return [name for name, role in roles.items() if role.kind == "past" and SLOTS not in role.axes]


def joint_of(cache: ir.Value) -> ir.Node | None:
    """The Concat that appends new keys or values [B, K, S, D] to a cache [B, K, P, D], and whose result is an output of
    the graph; None if there is none. Casts may be before and after it: inputs and outputs of files that were converted
    to float16 may stay float32."""
    for node, at in cache.uses():
        if is_copy(node) or node.op_type == "Cast":
            found = joint_of(node.outputs[0])
        else:
            appends = node.op_type == "Concat" and len(node.inputs) == 2 and at == 0
            appends = appends and node.attributes["axis"].as_int() in (2, -2)
            found = node if appends and _returned(node.outputs[0]) else None
        if found is not None:
            return found
    return None


def returned_caches(model: ir.Model, caches: Collection[str]) -> dict[str, str]:
    """The cache that each output of a graph is, with new tokens appended, for these caches; both by name."""
    joints = {value.name or "": joint_of(value) for value in model.graph.inputs if value.name in caches}
    return {
        output: cache
        for cache, joint in joints.items()
        for output in ([] if joint is None else _returned(joint.outputs[0]))
    }


def _returned(value: ir.Value) -> list[str]:
    """The outputs of the graph that are a value or a copy of it, possibly in another dtype, by name."""
    readers = [node for node, _ in value.uses() if is_copy(node) or node.op_type == "Cast"]
    copies = [name for node in readers for name in _returned(node.outputs[0])]
    return [value.name or "", *copies] if value.is_graph_output() else copies


def append(writing: Writing, lengths: Lengths, cache: ir.Value, heads: int, dim: int) -> tuple[str, ir.Value]:
    """Write what is appended to `cache` [B, heads, P, dim] into a buffer: the name of `present`, and its new value.

    A cache of no features, such as the rotated part of keys that aren't rotated, is returned as it is: there is nothing
    to write, and a Reshape to 0 features would keep another axis.
    """
    joint, nodes = joint_of(cache), writing.nodes
    assert joint is not None and joint.inputs[1] is not None
    dtype = _dtype_of(joint.inputs[0])
    assert cache.dtype is not None and dtype is not None
    if dim == 0:
        return joint.outputs[0].name or "", nodes.cast(nodes.one("Identity", cache), dtype)
    new = to_tokens(nodes, joint.inputs[1], HEADS_FIRST, heads, dim)
    new.type = ir.TensorType(dtype)
    new = nodes.cast(new, cache.dtype)
    inputs: list[Shaped] = [
        (cache, ("batch", heads, "past", dim)),
        (new, ("batch", "seq", heads * dim)),
        (nodes.one("Expand", lengths.past, lengths.batch), ("batch",)),
    ]
    whole = writing.call(cached_keys, inputs, {"num_kv_heads": heads})[0]
    whole.type = cache.type
    return joint.outputs[0].name or "", nodes.cast(whole, dtype)


def _dtype_of(value: ir.Value | None) -> ir.DataType | None:
    """The dtype of a graph input after copies and Casts, whose results may have no stated dtype."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        value = node.inputs[0]
    return None if value is None else value.dtype


def redirect(model: ir.Model, caches: Iterable[tuple[str, str]], nodes: Nodes, lengths: Lengths) -> None:
    """Make readers of caches, given as names of `past` and `present`, read their first P or P + S places only.

    Readers of their shape read these lengths. The sites must be in the graph, but not lowered; `nodes` are theirs, and
    new ones are added.
    """
    values = {value.name: value for value in model.graph.inputs}
    values |= {value.name: value for node in model.graph for value in node.outputs}
    own, added = {*nodes.nodes}, len(nodes.nodes)
    for past, present in caches:
        _redirect(values[past], lengths.past, nodes, own)
        _redirect(values[present], lengths.total, nodes, ())
    model.graph.extend(nodes.nodes[added:])


def _redirect(value: ir.Value, length: ir.Value, nodes: Nodes, own: Collection[ir.Node]) -> None:
    """Make nodes that read a buffer read its first `length` places, except those that write into it (`own`)."""
    part = None
    if value.shape is not None:
        value.shape = ir.Shape([BUFFER_DIM if axis == 2 else dim for axis, dim in enumerate(value.shape)])
    for node, at in [*value.uses()]:
        if node in own:
            continue
        if is_copy(node) or (node.op_type == "Cast" and _returned(node.outputs[0])):
            _redirect(node.outputs[0], length, nodes, own)
        elif node.op_type == "Shape":
            _give_shape(node, value, length, nodes)
        else:
            if part is None:
                part = nodes.one("Slice", value, nodes.constant([0]), length, nodes.constant([2]))
                if value.shape is not None:
                    part.shape = ir.Shape([None if axis == 2 else dim for axis, dim in enumerate(value.shape)])
            node.replace_input_with(at, part)


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
