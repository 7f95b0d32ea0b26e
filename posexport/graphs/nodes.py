"""New nodes of a graph, and conversions between layouts of heads. The same node is never written twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from posexport.graphs.attention.layouts import Layout

PREFIX = "posexport"
"""The start of the names of new values and nodes."""


class Nodes:
    """Nodes to be added to a graph, with names that begin with `prefix`. An equal node is made only once."""

    def __init__(self, taken: set[str], prefix: str = PREFIX) -> None:
        self.nodes: list[ir.Node] = []
        self._taken, self._prefix = taken, prefix
        self._known: dict[tuple[Any, ...], tuple[ir.Value, ...]] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: int = 1,
        domain: str = "",
        dtype: ir.DataType | None = None,
        key: object = None,
    ) -> tuple[ir.Value, ...]:
        """The outputs of a node; all have the `dtype` if it is given."""
        attributes = dict(attributes or {})
        known = (op_type, domain, tuple(inputs), repr(sorted(attributes.items())) if key is None else key, outputs)
        if known not in self._known:
            node = ir.node(
                op_type, list(inputs), attributes, domain=domain, num_outputs=outputs, name=self._name(op_type)
            )
            for value in node.outputs:
                value.name = self._name(op_type)
                if dtype is not None:
                    value.type = ir.TensorType(dtype)
            self.nodes.append(node)
            self._known[known] = tuple(node.outputs)
        return self._known[known]

    def one(
        self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **attributes: Any
    ) -> ir.Value:
        """The only output of a node. Its default dtype is that of the first input; for Where, that of the second."""
        first = inputs[op_type == "Where"] if inputs else None
        return self.op(op_type, inputs, attributes, dtype=dtype or (None if first is None else first.dtype))[0]

    def constant(self, value: Any, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """A constant: a number, or a list of them."""
        tensor = ir.tensor(np.asarray(value).astype(dtype.numpy()), dtype=dtype)
        key = (repr(value), dtype)
        return self.op("Constant", [], {"value": tensor}, dtype=dtype, key=key)[0]

    def _name(self, op_type: str) -> str:
        index = len(self.nodes)
        while (name := f"{self._prefix}/{op_type}_{index}") in self._taken:
            index += 1
        self._taken.add(name)
        return name

    def length(self, value: ir.Value, axis: int, end: int | None = None) -> ir.Value:
        """The length [1] of an axis, or the lengths of the axes up to `end` (exclusive)."""
        return self.one("Shape", value, dtype=ir.DataType.INT64, start=axis, end=axis + 1 if end is None else end)

    def shaped(self, value: ir.Value, *shape: int) -> ir.Value:
        """A Reshape; 0 keeps an axis, -1 is the rest."""
        return self.one("Reshape", value, self.constant(list(shape)))

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in a dtype."""
        return value if value.dtype == dtype else self.one("Cast", value, dtype=dtype, to=int(dtype))


def to_tokens(nodes: Nodes, value: ir.Value, layout: Layout, heads: int, dim: int) -> ir.Value:
    """A value laid out as `layout` with `heads` heads of `dim` features, as [B, S, heads*dim]."""
    if layout.groups == ("b", "s", "hd"):
        return value
    groups = list(layout.groups)
    if "g" in groups:
        value = nodes.one("Transpose", value, perm=[groups.index(letter) for letter in "bsghd"])
        return nodes.shaped(value, 0, 0, heads * dim)
    for at, group in enumerate(groups):
        if group == "hd":
            value = nodes.shaped(value, *[0] * at, heads, dim, *[-1] * (len(groups) - at - 1))
            groups[at : at + 1] = ["h", "d"]
            break
        if group == "bh":
            # 0 keeps the axis at the same place, so the new axis is made first
            value = nodes.one("Unsqueeze", value, nodes.constant([at + 1]))
            value = nodes.shaped(value, *[0] * at, -1, heads, *[0] * (len(groups) - at - 1))
            groups[at : at + 1] = ["b", "h"]
            break
    if groups != ["b", "s", "h", "d"]:
        value = nodes.one("Transpose", value, perm=[groups.index(letter) for letter in "bshd"])
    return nodes.shaped(value, 0, 0, heads * dim)


def from_tokens(nodes: Nodes, value: ir.Value, layout: Layout, heads: int, dim: int) -> ir.Value:
    """[B, S, heads*dim] laid out as `layout`."""
    if layout.groups == ("b", "s", "hd"):
        return value
    if layout.groups == ("bs", "hd"):
        return nodes.shaped(value, -1, heads * dim)
    if "g" in layout.groups:
        value = nodes.shaped(value, 0, 0, layout.parts, heads // layout.parts, dim)
        return nodes.one("Transpose", value, perm=["bsghd".index(letter) for letter in layout.groups])
    tokens, value = value, nodes.shaped(value, 0, 0, heads, dim)
    order = layout.order
    if order != "bshd":
        value = nodes.one("Transpose", value, perm=["bshd".index(letter) for letter in order])
    if layout.groups[-1] == "hd":
        return nodes.shaped(value, 0, 0, heads * dim)
    if len(layout.groups) == 4:
        return value
    lengths = {"d": nodes.constant([dim]), "s": nodes.length(tokens, 1)}
    lengths |= {"hd": nodes.constant([heads * dim]), "bh": nodes.constant([-1])}
    lengths["b"] = nodes.constant([-1])
    shape = nodes.one("Concat", *(lengths[group] for group in layout.groups), axis=0)
    return nodes.one("Reshape", value, shape)
