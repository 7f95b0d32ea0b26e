"""Which nodes an attention may take the place of: those that do on all inputs what they do on the probe's.

A probe shows that nodes between two values change nothing but a layout, or turn pairs of features. Whether they always
do is a matter of their kind. A Clip changes no small numbers, a Slice to the last 4096 keys no short caches, a Where on
the length nothing before some length: such nodes are not taken over, and attention begins below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import onnx_ir as ir

from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.probe import Probe

_LAYOUTS = {
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Identity", "Cast", "Split"),
    *("SplitToSequence", "Dropout"),
}
"""Operators that change no number."""

_WHOLE = 2**31 - 1
"""An end from which on a Slice takes all that there is."""


def keeps_numbers(flow: Dataflow, probe: Probe, node: ir.Node) -> bool:
    """Whether a node only lays content out otherwise, or multiplies it by a fixed number, on all inputs."""
    content = [value for value in node.inputs if value in flow.content]
    others = [value for value in node.inputs if value is not None and value not in flow.content]
    if node.op_type in _LAYOUTS:
        return node.inputs[0] in flow.content
    if node.op_type == "Slice":
        return node.inputs[0] in flow.content and _cuts_alike(probe, node)
    if node.op_type in ("Concat", "Neg"):
        return not others
    if node.op_type == "Gather":
        return node.inputs[0] in flow.content and all(value in probe.fixed for value in others)
    if node.op_type in ("Mul", "Div"):
        scaled = node.op_type == "Mul" or node.inputs[0] in flow.content
        return scaled and len(content) == 1 and all(value in probe.fixed for value in others)
    return False


def _cuts_alike(probe: Probe, node: ir.Node) -> bool:
    """Whether a Slice that takes all of an axis here takes all of every axis, and one that cuts does so by its bounds.

    What is cut here is seen by the probe, and lengths that make another cut by those who test the result.
    """
    bounds = [value for value in node.inputs[1:] if value is not None]
    fixed = all(value in probe.fixed for value in bounds)
    assert node.inputs[0] is not None
    shape = probe.shape(node.inputs[0])
    starts, ends, *more = ([int(number) for number in probe.get(value).reshape(-1)] for value in bounds)
    axes = more[0] if more else list(range(len(starts)))
    for start, end, axis in zip(starts, ends, axes, strict=True):
        size = shape[axis]
        if start == 0 and end >= _WHOLE and fixed:
            continue
        if not fixed or abs(start) > size or (abs(end) > size and end < _WHOLE):
            return False
    return True


def turns_alike(flow: Dataflow, probe: Probe, nodes: Iterable[ir.Node], angles: Sequence[ir.Value]) -> bool:
    """Whether nodes that turn pairs of features by `angles`, cosines and sines, know of no other angles."""
    origins = Origins(flow, probe)
    known: frozenset[int] = reduce(frozenset.union, (origins.of(value) for value in angles), frozenset())
    for node in nodes:
        others = [value for value in node.inputs if value is not None and value not in flow.content]
        if keeps_numbers(flow, probe, node) or (node.op_type in _LINEAR and not others):
            continue
        if node.op_type not in _PRODUCTS and not (node.op_type in _SUMS and all(v in probe.fixed for v in others)):
            return False
        if not all(value in probe.fixed or origins.of(value) <= known for value in others):
            return False
    return True


_LINEAR = {"Add", "Sub", "Sum"}
_PRODUCTS = {"Mul", "MatMul", "Einsum"}
_SUMS = {"ReduceSum"}


class Origins:
    """What values beside content are laid out from: the nodes before any Reshape, Concat, Slice or sign.

    Two computations of the same from the same are one origin.
    """

    def __init__(self, flow: Dataflow, probe: Probe) -> None:
        self._flow, self._probe = flow, probe
        self._keys: dict[ir.Value, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, value: ir.Value) -> frozenset[int]:
        """The origins of a value; none for one that is fixed."""
        if value in self._probe.fixed:
            return frozenset()
        node = value.producer()
        if node is None or node.inputs[0] is None:
            return frozenset([self.key(value)])
        if node.op_type in _LAYOUTS or (node.op_type in ("Slice", "Gather") and self._rest_is_fixed(node)):
            return self.of(node.inputs[0])
        if node.op_type in ("Concat", "Neg", "Not") or (node.op_type in ("Mul", "Div") and self._scales(node)):
            sources = [self.of(source) for source in node.inputs if source is not None]
            return reduce(frozenset.union, sources, frozenset())
        return frozenset([self.key(value)])

    def above(self, value: ir.Value) -> frozenset[int]:
        """The value and all from which it is computed, but for content and what is fixed."""
        seen, pending = {value}, [value]
        while pending:
            node = pending.pop().producer()
            for source in () if node is None else node.inputs:
                if source is not None and source not in seen and source not in self._flow.content:
                    seen.add(source)
                    pending.append(source)
        return frozenset(self.key(one) for one in seen if one not in self._probe.fixed)

    def _rest_is_fixed(self, node: ir.Node) -> bool:
        return all(value in self._probe.fixed for value in node.inputs[1:] if value is not None)

    def _scales(self, node: ir.Node) -> bool:
        return any(value in self._probe.fixed for value in node.inputs if value is not None)

    def key(self, value: ir.Value) -> int:
        """A number, the same for values that are computed in the same way."""
        if value not in self._keys:
            self._keys[value] = self._numbers.setdefault(self._described(value), len(self._numbers))
        return self._keys[value]

    def _described(self, value: ir.Value) -> tuple[object, ...]:
        node = value.producer()
        if value in self._flow.constant and (node is None or node.op_type == "Constant"):
            array = self._probe.get(value)
            if array.numel() < _SMALL:
                return (str(array.dtype), *array.shape, array.numpy().tobytes())
        if node is None or node.outputs[0] is not value or node.op_type == "Constant":
            return (value.name,)
        attributes = tuple(sorted((name, repr(attribute.value)) for name, attribute in node.attributes.items()))
        return (node.domain, node.op_type, attributes, *(None if one is None else self.key(one) for one in node.inputs))


_SMALL = 4096
"""Elements of a constant that is known by its numbers."""
