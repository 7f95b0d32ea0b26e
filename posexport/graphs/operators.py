"""One operator that stands for attention or a rotation, as its expansion sees it (posexport.graphs.expansions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import onnx_ir as ir

from posexport.graphs.nodes import Nodes

HIDDEN = -3.4028234663852886e38
"""What hides a key: the lowest float32, which is finite, so that a row without keys is no NaN."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of values on the probe's inputs, by name."""


class Unexpanded(Exception):
    """An operator that stays as it is, with the reason."""


@attrs.frozen(kw_only=True)
class Fold:
    """Query heads in the axis of tokens: their number, and whether those of one head stand together."""

    heads: int
    heads_first: bool


@attrs.frozen(kw_only=True)
class Call:
    """One operator of a graph, with what its expansion needs: `shapes` of its inputs on the probe's, and those of their
    axes that are `varying`, by name and number; `fold` where heads are folded into tokens."""

    node: ir.Node
    nodes: Nodes
    shapes: Shapes
    varying: Collection[tuple[str, int]] = ()
    fold: Fold | None = None

    def input(self, index: int) -> ir.Value | None:
        """An input, None where it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of an input on the probe's inputs."""
        return self.shapes[value.name or ""]

    def size(self, value: ir.Value, axis: int) -> int:
        """The length of an axis that is written as a number; Unexpanded where it isn't the same on all inputs."""
        self.check_fixed(value, axis)
        return self.shape(value)[axis]

    def check_fixed(self, value: ir.Value, *axes: int) -> None:
        """Raise Unexpanded where the length of one of these axes isn't the same on all inputs."""
        rank = len(self.shape(value))
        if any(self.varies(value, axis % rank) for axis in axes):
            raise Unexpanded("its heads or their size vary")

    def varies(self, value: ir.Value, axis: int) -> bool:
        """Whether the length of an axis isn't the same on all inputs."""
        return (value.name or "", axis) in self.varying

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is a whole number."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_int()

    def number(self, name: str, default: float = 0.0) -> float:
        """An attribute that is a float32 number."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    def check(self, attributes: Collection[str], inputs: int) -> None:
        """Raise Unexpanded for an attribute, or an input from `inputs` on, that the expansion doesn't know."""
        unknown = [name for name in self.node.attributes if name not in attributes]
        extra = [value.name for value in self.node.inputs[inputs:] if value is not None]
        if unknown or extra:
            raise Unexpanded(f"it has {', '.join([*unknown, *map(str, extra)])}")


Expansion = Callable[[Call], Sequence["ir.Value | None"]]
"""Makes the outputs of an operator, None for one that it doesn't make."""


def default_scale(size: int) -> float:
    """1 / sqrt(size) as a float32, as an attribute would hold it."""
    return float(ir.tensor(1.0 / math.sqrt(size), dtype=ir.DataType.FLOAT).numpy())
