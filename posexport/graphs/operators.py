"""One operator that stands for attention or a rotation, as its expansion sees it (posexport.graphs.expansions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import onnx_ir as ir

from posexport.graphs.nodes import Nodes

HIDDEN = -3.4028234663852886e38
"""The score that hides a key: the lowest float32. It is finite, so that a row without visible keys doesn't give NaN."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of values on the probe's inputs, by name."""


class Unexpanded(Exception):
    """An operator can't be expanded and stays as it is, with the reason."""


@attrs.frozen(kw_only=True)
class Fold:
    """Query heads in the axis of tokens: their number, and whether the tokens of one head are contiguous."""

    heads: int
    heads_first: bool


@attrs.frozen(kw_only=True)
class Call:
    """One operator of a graph, with what its expansion needs.

    `shapes` are those of its inputs on the probe's inputs. `varying` are the axes (name, number) whose length varies.
    `fold` is set if heads are folded into tokens.
    """

    node: ir.Node
    nodes: Nodes
    shapes: Shapes
    varying: Collection[tuple[str, int]] = ()
    fold: Fold | None = None

    def input(self, index: int) -> ir.Value | None:
        """An input; None if it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of an input on the probe's inputs."""
        return self.shapes[value.name or ""]

    def size(self, value: ir.Value, axis: int) -> int:
        """The length of an axis, as a number; Unexpanded if it isn't the same on all inputs."""
        self.check_fixed(value, axis)
        return self.shape(value)[axis]

    def check_fixed(self, value: ir.Value, *axes: int) -> None:
        """Raise Unexpanded if the length of one of these axes isn't the same on all inputs."""
        rank = len(self.shape(value))
        if any(self.varies(value, axis % rank) for axis in axes):
            raise Unexpanded("its heads or their size vary")

    def varies(self, value: ir.Value, axis: int) -> bool:
        """Whether the length of an axis isn't the same on all inputs."""
        return (value.name or "", axis) in self.varying

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_int()

    def number(self, name: str, default: float = 0.0) -> float:
        """A float32 attribute."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    def check(self, attributes: Collection[str], inputs: int) -> None:
        """Raise Unexpanded for an attribute, or an input from `inputs` on, that the expansion doesn't know."""
        unknown = [name for name in self.node.attributes if name not in attributes]
        extra = [value.name for value in self.node.inputs[inputs:] if value is not None]
        if unknown or extra:
            raise Unexpanded(f"it has {', '.join([*unknown, *map(str, extra)])}")


Expansion = Callable[[Call], Sequence["ir.Value | None"]]
"""Makes the outputs of an operator; None for an output that it doesn't make."""


def default_scale(size: int) -> float:
    """1 / sqrt(size) as a float32, as an attribute would store it."""
    return float(ir.tensor(1.0 / math.sqrt(size), dtype=ir.DataType.FLOAT).numpy())
