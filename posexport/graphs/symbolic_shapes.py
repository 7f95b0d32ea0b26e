"""The shape of every value, and integers computed from shapes, as polynomials of the dimensions of a graph's inputs.

The shapes on one set of inputs are known. This module tells which lengths are always the same number, and which are
always equal to each other (posexport.graphs.symbolic_sizes). The output of an operator without a rule is a symbol of
its own, about which nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping

import onnx_ir as ir
import torch

from posexport.artifact.onnx_limits import RANDOM
from posexport.graphs import shape_rules, symbolic_numbers
from posexport.graphs.attention.computations import Computations
from posexport.graphs.attention.dataflow import (
    LENGTHS,
    Dataflow,
    bodies,
    constant_of,
    is_sequence,
    numbers_read,
    values_read,
)
from posexport.graphs.axes import BATCH, ENCODER, FRAMES, HEIGHT, SEQ, SLOTS, TOTAL, WIDTH
from posexport.graphs.equations import letters_of
from posexport.graphs.forced_sizes import forced
from posexport.graphs.node_arguments import input_of
from posexport.graphs.roles import Role, shape_of_value
from posexport.graphs.symbolic_sizes import Shape, Size, Symbols


class SymbolicShapes:
    """The symbolic shapes of a graph's values.

    `fixed` are the values, except content, that are the same on all inputs: constants, and what is computed from these
    and from lengths that can't vary.
    """

    def __init__(
        self,
        flow: Dataflow,
        values: Mapping[str, torch.Tensor],
        constant: Callable[[ir.Value], torch.Tensor],
        roles: Mapping[str, Role],
    ) -> None:
        """`values` are those on one set of inputs, by name. `constant` gives a value that depends on no input.

        `roles` say which named dimensions of inputs were found to have only one size. They are fixed if the graph says
        so too.
        """
        self.computations = Computations(flow, constant)
        self._flow, self._values, self._constant = flow, values, constant
        self._known: dict[Hashable, int] = {}
        self._least: dict[Hashable, int] = {}
        self._compute(roles)
        self._least = self._bounds(roles)
        if self._least:  # these bounds decide how lengths are rounded, also in nodes before they are found
            self._compute(roles)
        while found := self._forced(roles):
            self._known |= found
            self._compute(roles)

    def _compute(self, roles: Mapping[str, Role]) -> None:
        """Compute the shapes of all values, with fixed dimensions `_known` and bounds `_least` of others, by name."""
        flow = self._flow
        self.symbols = Symbols()
        self.fixed = set(flow.constant)
        self.equal: list[tuple[Size, Size]] = []
        """Lengths that must be equal."""
        self.met: list[tuple[Size, ...]] = []
        """Lengths that are broadcast together: they are equal, except those that are 1."""
        self._shapes: dict[ir.Value, Shape] = {}
        self._numbers: dict[ir.Value, Shape | None] = {}
        for value in flow.graph.inputs:
            if value not in flow.constant:
                self._shapes[value] = self._of_graph_input(value, roles.get(value.name or ""))
        for value in flow.graph.initializers.values():
            if value in flow.constant and value.const_value is not None:
                self._shapes[value] = _stored(value.const_value)
        for node in flow.graph:
            self._follow_bodies(node)
            computed = self._is_fixed(node)
            for at, value in enumerate(node.outputs):
                if computed:
                    self.fixed.add(value)
                role = roles.get(value.name or "")  # of an operator that can't be evaluated
                self._shapes[value] = (
                    self._of_output(node, at, value) if role is None else self._of_graph_input(value, role)
                )
                for size in self._shapes[value]:
                    self.symbols.note_length(size)
                if value not in flow.content and value not in self.fixed and self.whole_numbers(value) is not None:
                    self.fixed.add(value)

    def _follow_bodies(self, node: ir.Node) -> None:
        """Find the shapes of values in the branches of an If, as far as rules tell.

        A branch may not run, so the lengths that it needs to be equal need not be.
        """
        equal, met = len(self.equal), len(self.met)
        for body in bodies(node) if node.op_type == "If" else ():
            with self.symbols.supposing():
                self._follow(body)
        del self.equal[equal:], self.met[met:]

    def _follow(self, body: ir.Graph) -> None:
        """Find the shapes of values in a branch, and in the branches of its own nodes."""
        for value in body.initializers.values():
            if value.const_value is not None:
                self._shapes[value] = _stored(value.const_value)
        for one in body:
            self._follow_bodies(one)
            for at, value in enumerate(one.outputs):
                tensor = constant_of(value)
                shape = shape_rules.of_output(self, one, at) if tensor is None else None
                if tensor is not None:
                    shape = _stored(tensor)
                if shape is not None:
                    self._shapes[value] = shape

    def of(self, value: ir.Value) -> Shape:
        """The shape of a value."""
        return self._shapes[value]

    def on(self, values: Iterable[ir.Value], inputs: Mapping[str, tuple[int, ...]]) -> dict[ir.Value, tuple[int, ...]]:
        """The shapes of values on inputs with these shapes, if the inputs' shapes alone determine them."""
        known: dict[int, int] = {}
        for name, shape in inputs.items():
            for size, actual in zip(self.of(self._flow.values[name]), shape, strict=True):
                if size.number == 1 and len(size.symbols) == 1 and known.setdefault(size.symbols[0], actual) != actual:
                    return {}
        sizes = {value: [self.symbols.value(size, known) for size in self.of(value)] for value in values}
        return {
            value: tuple(size for size in shape if size is not None)
            for value, shape in sizes.items()
            if None not in shape
        }

    def numbers(self, value: ir.Value | None) -> Shape | None:
        """The integers or booleans of a value with at most one axis; None if there are too many, or others."""
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = self._known_numbers(value)
        return self._numbers[value]

    def whole_numbers(self, value: ir.Value | None) -> list[int] | None:
        """The numbers of a value that are the same on all inputs; None unless all of them are."""
        found = self.numbers(value)
        return [one.number for one in found] if found is not None and all(one.is_fixed for one in found) else None

    def actual(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value on the given inputs; a constant has its own shape."""
        found = self._values.get(value.name or "")
        return tuple(found.shape) if isinstance(found, torch.Tensor) else tuple(one.number for one in self.of(value))

    def dtype(self, value: ir.Value) -> torch.dtype | None:
        """The dtype of a value on the given inputs; None for a sequence of tensors."""
        found = self.tensor(value)
        return None if found is None else found.dtype

    def is_whole(self, value: ir.Value) -> bool:
        """Whether a value contains integers or booleans."""
        found = self.tensor(value)
        return found is not None and not found.is_floating_point() and not found.is_complex()

    def _is_fixed(self, node: ir.Node) -> bool:
        """Whether an operator outputs the same on all inputs because its own inputs are the same."""
        if node.op_type in LENGTHS or any(value in self._flow.content for value in node.outputs):
            return False
        numbers = numbers_read(node, values_read(node))
        return all(value in self.fixed for value in numbers) and node.op_type not in RANDOM

    def _known_numbers(self, value: ir.Value) -> Shape | None:
        if constant_of(value) is not None:
            return symbolic_numbers.of_constant(value)
        actual, node = self.actual(value), value.producer()
        if len(actual) > 1 or math.prod(actual) > symbolic_numbers.MOST_NUMBERS:
            return None
        if not all(size.is_fixed for size in self.of(value)):
            return None
        found = None if node is None else symbolic_numbers.of_node(self, node)
        if node is not None and (node.op_type == "Split" or value is not node.outputs[0]):
            found = self._part_of_numbers(node, value, found) if node.op_type == "Split" else None
        if found is not None and value in self._flow.constant and all(size.is_fixed for size in found):
            return found
        tensor = self.tensor(value)
        if tensor is None:
            return None
        here = tensor.reshape(-1).tolist()
        if (
            found is not None
            and [one.number if one.is_fixed else number for one, number in zip(found, here, strict=False)] == here
        ):
            return found
        if not self.is_whole(value):
            return None
        if value in self.fixed:
            return tuple(Size(int(number)) for number in here)
        key = self.computations.key(value)
        return tuple(self.symbols.other("number", key, at) for at in range(len(here)))

    def tensor(self, value: ir.Value) -> torch.Tensor | None:
        """A value on the given inputs; None for a sequence of tensors."""
        found = self._values.get(value.name or "")
        if found is None and value in self._flow.constant:
            found = self._constant(value)
        return found if isinstance(found, torch.Tensor) else None

    def _part_of_numbers(self, node: ir.Node, value: ir.Value, found: Shape | None) -> Shape | None:
        sizes = [self.of(one)[0] for one in node.outputs if self._shapes.get(one)]
        if found is None or len(sizes) != len(node.outputs) or not all(size.is_fixed for size in sizes):
            return None
        at = [one is value for one in node.outputs].index(True)
        start = sum(size.number for size in sizes[:at])
        return found[start : start + sizes[at].number]

    def _of_graph_input(self, value: ir.Value, role: Role | None) -> Shape:
        actual = self._values.get(value.name or "")
        if not isinstance(actual, torch.Tensor):
            return ()
        rank = actual.dim()
        axes = role.axes if role is not None else [""] * rank
        sizes = []
        for dim, axis in zip(_dimensions(value, rank, role), axes, strict=True):
            known = dim if isinstance(dim, int) else self._known.get(dim)
            least = max(int(isinstance(axis, str) and axis in _NEVER_EMPTY), self._least.get(dim, 0))
            sizes.append(Size(known) if known is not None else self.symbols.dimension(dim, least))
        return tuple(sizes)

    def _bounds(self, roles: Mapping[str, Role]) -> dict[Hashable, int]:
        """Dimensions of inputs that must be larger than 1 because of what the graph computes from them, by name."""
        found: dict[Hashable, int] = {}
        for value in self._flow.graph.inputs:
            shape = self._shapes.get(value, ())
            names = _dimensions(value, len(shape), roles.get(value.name or ""))
            for size, name in zip(shape, names, strict=False):
                least = self.symbols.least(size)
                if not size.is_fixed and least is not None and least > 1:
                    found[name] = least
        return found

    def _forced(self, roles: Mapping[str, Role]) -> dict[Hashable, int]:
        """Further dimensions that were found to have one size and must have it, by name."""
        taken: dict[Size, int] = {}
        names: dict[Size, Hashable] = {}
        above_one: set[Size] = set()
        for value in self._flow.graph.inputs:
            role, shape = roles.get(value.name or ""), self._shapes.get(value, ())
            if role is None:
                continue
            for size, name, dim, axis in zip(
                shape, _dimensions(value, len(shape), role), role.shape, role.axes, strict=False
            ):
                if not size.is_fixed and isinstance(dim, int):
                    taken[size], names[size] = dim, name
                    if axis not in (HEIGHT, WIDTH):  # 1 was tried for all others
                        above_one.add(size)
        found = forced(self, self._flow.graph.outputs, taken, above_one) if taken else {}
        return {names[size]: number for size, number in found.items()}

    def _of_output(self, node: ir.Node, at: int, value: ir.Value) -> Shape:
        tensor = constant_of(value)
        if tensor is not None:
            return _stored(tensor)
        shape = shape_rules.of_output(self, node, at)
        if value in self._flow.constant:
            known = is_sequence(value) or (shape is not None and all(size.is_fixed for size in shape))
            return shape or () if known else tuple(Size(dim) for dim in self._constant(value).shape)
        actual = self._values.get(value.name or "")
        if value in self.fixed and isinstance(actual, torch.Tensor):
            return tuple(Size(dim) for dim in actual.shape)
        if not isinstance(actual, torch.Tensor):
            return shape or ()
        if shape is None or len(shape) != actual.dim():
            shape = tuple(self.symbols.other("shape", value.name, axis) for axis in range(actual.dim()))
        return tuple(
            size if not size.is_fixed or size.number == dim else self.symbols.other("shape", value.name, axis)
            for axis, (size, dim) in enumerate(zip(shape, actual.shape, strict=True))
        )

    def of_input(self, node: ir.Node, at: int) -> Shape | None:
        """The shape of what a node reads at a place; None if it reads nothing there."""
        value = input_of(node, at)
        return None if value is None else self._shapes.get(value)

    def knows(self, value: ir.Value) -> bool:
        """Whether the shape of a value is known."""
        return value in self._shapes

    def axes(self, node: ir.Node, at: int = 1) -> list[int] | None:
        """The axes that an operator names by attribute, or by an input that is fixed."""
        attribute = node.attributes.get("axes")
        return [*attribute.as_ints()] if attribute is not None else self.whole_numbers(input_of(node, at))

    def bounds(self, node: ir.Node) -> dict[int, tuple[Size, Size, int]] | None:
        """Start, end and step of each axis that a Slice names; None if they aren't known."""
        shape = self.of_input(node, 0)
        if "starts" in node.attributes:
            parts = [tuple(map(Size, node.attributes[name].as_ints())) for name in ("starts", "ends")]
            axes = [*node.attributes["axes"].as_ints()] if "axes" in node.attributes else [*range(len(parts[0]))]
            steps: list[int] | None = [1] * len(parts[0])
        else:
            starts, ends = (self.numbers(input_of(node, at)) for at in (1, 2))
            if starts is None or ends is None:
                return None
            parts = [starts, ends]
            given = self.whole_numbers(input_of(node, 3))
            axes = [*range(len(starts))] if input_of(node, 3) is None else given or []
            steps = [1] * len(starts) if input_of(node, 4) is None else self.whole_numbers(input_of(node, 4))
        if shape is None or steps is None or not len(parts[0]) == len(parts[1]) == len(axes) == len(steps):
            return None
        return {
            axis % len(shape): (start, end, step)
            for axis, start, end, step in zip(axes, *parts, steps, strict=True)
            if -len(shape) <= axis < len(shape)
        }

    def letters(self, node: ir.Node) -> tuple[dict[str, list[Size]], str] | None:
        """The lengths of each letter of an Einsum, and the letters of its result; None if they aren't known."""
        shapes = [self.of(value) for value in node.inputs if value is not None]
        letters = letters_of(node, [*map(len, shapes)])
        if letters is None:
            return None
        found: dict[str, list[Size]] = {}
        for part, shape in zip(letters[0], shapes, strict=True):
            for letter, size in zip(part, shape, strict=True):
                found.setdefault(letter, []).append(size)
        return found, letters[1]


def _stored(tensor: ir.TensorProtocol) -> Shape:
    """The shape of a stored tensor."""
    return tuple(Size(int(size)) for size in tensor.shape.numpy())


def _dimensions(value: ir.Value, rank: int, role: Role | None) -> list[Hashable]:
    """The dimensions of an input: numbers, names, or (input, axis) for a dimension without a name."""
    dims = (shape_of_value(value) if role is None else role.stated) or ("?",) * rank
    return [(value.name, axis) if dim == "?" else dim for axis, dim in enumerate(dims)]


_NEVER_EMPTY = {BATCH, SEQ, ENCODER, TOTAL, SLOTS, HEIGHT, WIDTH, FRAMES}
"""Axes with at least one element; a cache may have none."""
