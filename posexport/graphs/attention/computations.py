"""Values that are not content: which of them are computed in the same way, and what they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import Dataflow, bodies

_SMALL = 4096
"""A constant with fewer elements is compared by its numbers."""


class Computations:
    """Numbers for values: the same number if the same operators compute two values from the same values.

    `get` returns the tensor of a constant.
    """

    def __init__(self, flow: Dataflow, get: Callable[[ir.Value], torch.Tensor]) -> None:
        self._flow, self._get = flow, get
        self._keys: dict[ir.Value, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def key(self, value: ir.Value) -> int:
        """The number of a value."""
        pending = [value]  # sources come first; no recursion, because they may be many operators deep
        while pending:
            one, node = pending[-1], pending[-1].producer()
            if one in self._keys:
                pending.pop()
                continue
            known = node is None or one in self._flow.content
            sources = () if known or node is None else node.inputs
            missing = [source for source in sources if source is not None and source not in self._keys]
            pending += missing
            if not missing:
                pending.pop()
                self._keys[one] = self._numbers.setdefault(self._described(one), len(self._numbers))
        return self._keys[value]

    def _described(self, value: ir.Value) -> tuple[object, ...]:
        node = value.producer()
        if value in self._flow.content:
            return (value.name,)
        if value in self._flow.constant and (node is None or node.op_type == "Constant"):
            array = self._get(value)
            if array.numel() < _SMALL:
                return (str(array.dtype), *array.shape, array.numpy().tobytes())
        if node is None or node.outputs[0] is not value or node.op_type == "Constant" or bodies(node):
            return (value.name,)
        attributes = tuple(sorted((name, repr(attribute.value)) for name, attribute in node.attributes.items()))
        return (node.domain, node.op_type, attributes, *(None if one is None else self.key(one) for one in node.inputs))


def above(flow: Dataflow, values: Iterable[ir.Value]) -> Iterator[ir.Value]:
    """The values and everything that they are computed from, without content."""
    pending = [value for value in values if value not in flow.content]
    seen = set(pending)
    while pending:
        value = pending.pop()
        yield value
        node = value.producer()
        for source in () if node is None else node.inputs:
            if source is not None and source not in seen and source not in flow.content:
                seen.add(source)
                pending.append(source)
