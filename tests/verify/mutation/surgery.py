"""Changes of ONNX graphs: they insert or replace nodes in the main graph or in a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]
Holder = onnx.GraphProto | onnx.FunctionProto

LOWEST = -3.0e38
"""A logit for keys that a query doesn't see."""

_numbers = itertools.count()


@attrs.define
class Nodes:
    """New nodes, in order. Each method appends nodes and returns the name of the new value."""

    made: list[onnx.NodeProto] = attrs.field(factory=list)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"fault_{next(_numbers)}"
        self.made.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"fault_{next(_numbers)}"
        tensor = numpy_helper.from_array(np.asarray(value, dtype))
        self.made.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    def like(self, name: str, value: Any) -> str:
        """A constant in the dtype of the value `name`."""
        return self.op("CastLike", self.const(value, np.float32), name)

    def size(self, name: str, axis: int) -> str:
        """One dimension of a value, as a scalar."""
        end = {"end": axis + 1} if axis != -1 else {}
        return self.op("Squeeze", self.op("Shape", name, start=axis, **end))

    def steps(self, length: str) -> str:
        """0, 1, ..., length - 1."""
        return self.op("Range", self.const(0), length, self.const(1))

    def all_of(self, *conditions: str) -> str:
        made = conditions[0]
        for condition in conditions[1:]:
            made = self.op("And", made, condition)
        return made

    def column(self, length: str, rank: int, axis: int) -> str:
        """0, 1, ..., length - 1 along one axis of a tensor of this rank, whose other axes have size 1."""
        axes = [other for other in range(rank) if other != axis % rank]
        return self.op("Unsqueeze", self.steps(length), self.const(axes))


Change = Callable[[Nodes, str], str]
"""Adds nodes that read a value. Returns the name of the value that replaces it."""


def holders(model: onnx.ModelProto) -> list[Holder]:
    """The main graph and each function."""
    return [model.graph, *model.functions]


def sites(model: onnx.ModelProto, *kinds: str) -> Iterator[tuple[Holder, int, onnx.NodeProto]]:
    """(holder, index, node) of each node with one of these operators, or of all nodes if none is given."""
    for holder in holders(model):
        for index, node in enumerate(holder.node):
            if not kinds or node.op_type in kinds:
                yield holder, index, node


def insert(holder: Holder, index: int, nodes: Nodes) -> None:
    """Put nodes before the one at `index`."""
    later = [onnx.NodeProto.FromString(node.SerializeToString()) for node in holder.node[index:]]
    del holder.node[index:]
    holder.node.extend(nodes.made)
    holder.node.extend(later)


def redirect(holder: Holder, old: str, new: str) -> None:
    """Every node of a holder that reads `old` reads `new` instead."""
    for node in holder.node:
        for at, name in enumerate(node.input):
            if name == old:
                node.input[at] = new


def change_input(model: onnx.ModelProto, name: str, change: Change) -> None:
    """Every reader of a graph input or of an initializer reads the value that `change` makes of it."""
    nodes = Nodes()
    new = change(nodes, name)
    redirect(model.graph, name, new)
    insert(model.graph, 0, nodes)


def change_value(holder: Holder, name: str, change: Change) -> None:
    """Every reader of an inner value reads the value that `change` makes of it. If it is an output of the holder, the
    output changes too."""
    index = next(at for at, node in enumerate(holder.node) if name in node.output)
    producer, inner = holder.node[index], f"fault_{next(_numbers)}"
    producer.output[list(producer.output).index(name)] = inner
    nodes = Nodes()
    new = change(nodes, inner)
    nodes.made.append(helper.make_node("Identity", [new], [name], name=f"{inner}_end"))
    insert(holder, index + 1, nodes)


def constant_value(holder: Holder, model: onnx.ModelProto, name: str) -> Array | None:
    """The value of a Constant node's output or of an initializer. None for all other values."""
    for node in holder.node:
        if node.op_type == "Constant" and name in node.output:
            kind = node.attribute[0]
            value = helper.get_attribute_value(kind)
            return np.asarray(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)
    if holder is model.graph:
        for tensor in model.graph.initializer:
            if tensor.name == name:
                return np.asarray(numpy_helper.to_array(tensor))
    return None


def change_constants(
    model: onnx.ModelProto, applies: Callable[[Array], bool], change: Callable[[Array], Array]
) -> bool:
    """Every node that reads a constant of one element for which `applies` is true reads a changed one. Return whether
    there was any."""
    places = [
        (holder, index, at, value)
        for holder, index, node in sites(model)
        for at, name in enumerate(node.input)
        if (value := constant_value(holder, model, name)) is not None and value.size == 1 and applies(value)
    ]
    for holder, index, at, value in reversed(places):
        read_constant(holder, index, at, change(value))
    return bool(places)


def read_constant(holder: Holder, index: int, at: int, value: Array) -> None:
    """The node at `index` reads a new constant as its input number `at`. Other readers keep the old one."""
    nodes = Nodes()
    holder.node[index].input[at] = nodes.const(value, value.dtype)
    insert(holder, index, nodes)


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that can be changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


@attrs.frozen
class MaskSite:
    """A Where that hides keys. Its input number `condition` is true for keys that a query sees."""

    holder: Holder
    index: int
    condition: int

    @property
    def node(self) -> onnx.NodeProto:
        node: onnx.NodeProto = self.holder.node[self.index]
        return node


def at_most(limit: float) -> Change:
    """Values above a limit become the limit."""
    return lambda nodes, value: nodes.op("Min", value, nodes.like(value, limit))


def change_logits(model: onnx.ModelProto, change: Change, which: float | None = None) -> bool:
    """Softmax nodes read logits that `change` has changed.

    `which` selects one node by its relative place in the graph, from 0 to below 1. None selects all. Return whether
    there is a Softmax.
    """
    found = list(sites(model, "Softmax"))
    if found and which is not None:
        found = [found[int(which * len(found))]]
    for holder, index, node in reversed(found):
        nodes = Nodes()
        node.input[0] = change(nodes, node.input[0])
        insert(holder, index, nodes)
    return bool(found)


def mask_sites(model: onnx.ModelProto) -> list[MaskSite]:
    """Every Where that replaces logits by a very low number, or makes a mask of zeros and such numbers."""
    found = []
    for holder, index, node in sites(model, "Where"):
        low = constant_value(holder, model, node.input[2])
        if low is not None and low.dtype.kind == "f" and low.size == 1 and float(low.ravel()[0]) <= -1e4:
            found.append(MaskSite(holder, index, 0))
    return found


@attrs.frozen
class Logits:
    """The sizes of logits (scalars: batch, queries, keys), and indices that broadcast to [B, N, S, T].

    Queries have the numbers of keys: the last query has the number of the last key.
    """

    nodes: Nodes
    batch: str
    seq: str
    keys: str

    def key(self) -> str:
        return self.nodes.column(self.keys, 2, 1)

    def query(self) -> str:
        past = self.nodes.op("Sub", self.keys, self.seq)
        return self.nodes.op("Add", self.nodes.column(self.seq, 2, 0), past)

    def distance(self) -> str:
        """The query's number minus the key's, [S, T]."""
        return self.nodes.op("Sub", self.query(), self.key())


def at_logits(model: onnx.ModelProto, holder: Holder, node: onnx.NodeProto, nodes: Nodes) -> Logits:
    """The sizes of the logits at a Where of `mask_sites` or at a Softmax."""
    logits = node.input[1] if node.op_type == "Where" else node.input[0]
    if constant_value(holder, model, logits) is None:
        return Logits(nodes, *(nodes.size(logits, axis) for axis in (0, 2, 3)))
    first = model.graph.input[0].name  # the Where makes a separate mask in the main graph
    return Logits(nodes, nodes.size(first, 0), nodes.size(first, 1), nodes.size(node.input[0], -1))


def change_visibility(model: onnx.ModelProto, hide: bool, condition: Callable[[Logits], str]) -> bool:
    """Hide the keys for which a condition holds (`hide` is true), or show them, at every mask.

    In a graph without a mask, hidden keys get a low logit before the softmax. Return False if the graph has no such
    place.
    """
    places = mask_sites(model)
    for place in reversed(places):
        nodes, node = Nodes(), place.node
        chosen = condition(at_logits(model, place.holder, node, nodes))
        old = node.input[0]
        node.input[0] = nodes.op("And", old, nodes.op("Not", chosen)) if hide else nodes.op("Or", old, chosen)
        insert(place.holder, place.index, nodes)
    if places or not hide:
        return bool(places)
    softmaxes = list(sites(model, "Softmax"))
    for holder, index, node in reversed(softmaxes):
        nodes = Nodes()
        chosen = condition(at_logits(model, holder, node, nodes))
        node.input[0] = nodes.op("Where", chosen, nodes.like(node.input[0], -60000.0), node.input[0])
        insert(holder, index, nodes)
    return bool(softmaxes)
