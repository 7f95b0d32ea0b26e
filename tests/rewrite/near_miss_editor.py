"""Small edits of a graph: new constants, new nodes before a node, and copies of a path with another source."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import onnx_ir as ir

DTYPES = {ir.DataType.FLOAT16: np.float16, ir.DataType.DOUBLE: np.float64}


@attrs.define(eq=False)
class Editor:
    """A model that is changed in place, and the random generator that picks the place."""

    model: ir.Model
    rng: random.Random
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"changed_{self.count}"

    def integers(self, *numbers: int) -> ir.Value:
        """A list of int64."""
        return self.constant(np.array(numbers, dtype=np.int64))

    def number(self, number: float, like: ir.Value | None) -> ir.Value:
        """A scalar in the dtype of another value, or float32 if that is unknown."""
        dtype = like.dtype if like is not None else None
        if dtype is not None and dtype.is_integer():
            return self.constant(np.array(int(number), dtype=dtype.numpy()))
        return self.constant(np.array(number, dtype=DTYPES.get(dtype, np.float32)))  # type: ignore[arg-type]

    def constant(self, array: np.ndarray[Any, Any]) -> ir.Value:
        """A new initializer."""
        name = self.name()
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(value.const_value.dtype)
        self.model.graph.register_initializer(value)
        return value

    def before(self, node: ir.Node, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The output of a new node before `node`.

        It has the dtype of the first input, and also its shape unless the operator changes shapes.
        """
        fresh = ir.node(operator, list(inputs), attributes)
        output, first = fresh.outputs[0], inputs[0]
        output.name = self.name()
        if first is not None and operator not in ("Transpose", "Gather", "Reshape", "Concat", "Slice"):
            output.shape, output.type = first.shape, first.type
        elif first is not None:
            output.type = first.type
        node.graph.insert_before(node, fresh)
        return output

    def wrap(self, use: tuple[ir.Node, int], operator: str, *others: ir.Value, **attributes: Any) -> None:
        """Inserts an operator before one input of one node."""
        node, index = use
        node.replace_input_with(index, self.before(node, operator, node.inputs[index], *others, **attributes))

    def swap(self, one: tuple[ir.Node, int], other: tuple[ir.Node, int]) -> None:
        """Exchanges two inputs."""
        first, second = one[0].inputs[one[1]], other[0].inputs[other[1]]
        one[0].replace_input_with(one[1], second)
        other[0].replace_input_with(other[1], first)

    def retype(self, node: ir.Node, operator: str) -> None:
        """Gives a node another operator."""
        node.op_type = operator

    def with_source(self, use: tuple[ir.Node, int], source: ir.Value, stand_in: ir.Value) -> bool:
        """Computes one input of one node from `stand_in` instead of `source`.

        The editor copies the nodes in between; all other readers keep the old ones.
        Returns False if the input does not depend on `source`.
        """
        node, index = use
        memory: dict[ir.Value, ir.Value] = {source: stand_in}
        replaced = self._copy(node.inputs[index], memory, node)
        if replaced is node.inputs[index]:
            return False
        node.replace_input_with(index, replaced)
        return True

    def _copy(self, value: ir.Value | None, memory: dict[ir.Value, ir.Value], before: ir.Node) -> ir.Value | None:
        if value is None or value in memory:
            return memory.get(value) if value is not None else None
        node = value.producer()
        memory[value] = value
        if node is None:
            return value
        inputs = [self._copy(entry, memory, before) for entry in node.inputs]
        if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
            return value
        fresh = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain, num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, fresh.outputs, strict=True):
            new.name, new.shape, new.type = self.name(), old.shape, old.type
            memory[old] = new
        before.graph.insert_before(before, fresh)
        return memory[value]
