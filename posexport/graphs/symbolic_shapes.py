"""The shape of every value as polynomials of the dimensions of a graph's inputs, and whole numbers computed from shapes
(posexport.graphs.symbolic_sizes).

Shapes on one set of inputs are known. Here is told which of their lengths are always the same number, and which are
always equal to each other. What an operator without a rule gives is a symbol of its own: nothing is claimed of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch

from posexport.graphs import symbolic_numbers
from posexport.graphs.attention.computations import Computations
from posexport.graphs.attention.dataflow import LENGTHS, Dataflow, constant_of, outer_values
from posexport.graphs.axes import BATCH, ENCODER, FRAMES, HEIGHT, SEQ, SLOTS, TOTAL, WIDTH
from posexport.graphs.roles import Role
from posexport.graphs.symbolic_sizes import ONE, Size, Symbols, product

Shape = tuple[Size, ...]

_WHOLE = 2**31 - 1
"""An end from which on a Slice takes all that there is."""


class SymbolicShapes:
    """The symbolic shapes of a graph's values.

    In `fixed` are the values beside content that are the same on all inputs: constants, and what is computed from these
    and from lengths that can't vary.
    """

    def __init__(
        self,
        flow: Dataflow,
        values: Mapping[str, torch.Tensor],
        constant: Callable[[ir.Value], torch.Tensor],
        roles: Mapping[str, Role],
    ) -> None:
        """`values` are those on one set of inputs, by name, `constant` gives one that depends on no input, and `roles`
        say which dimensions of inputs are fixed although they have a name."""
        self.symbols = Symbols()
        self.fixed = set(flow.constant)
        self.computations = Computations(flow, constant)
        self._flow, self._values, self._constant = flow, values, constant
        self._shapes: dict[ir.Value, Shape] = {}
        self._numbers: dict[ir.Value, Shape | None] = {}
        for value in flow.graph.inputs:
            if value not in flow.constant:
                self._shapes[value] = self._of_graph_input(value, roles.get(value.name or ""))
        for value in flow.graph.initializers.values():
            if value in flow.constant and value.const_value is not None:
                self._shapes[value] = tuple(Size(int(size)) for size in value.const_value.shape.numpy())
        for node in flow.graph:
            computed = self._is_fixed(node)
            for at, value in enumerate(node.outputs):
                if computed:
                    self.fixed.add(value)
                self._shapes[value] = self._of_output(node, at, value)
                if value not in flow.content and self.whole_numbers(value) is not None:
                    self.fixed.add(value)

    def of(self, value: ir.Value) -> Shape:
        """The shape of a value."""
        return self._shapes[value]

    def numbers(self, value: ir.Value | None) -> Shape | None:
        """The whole numbers or truth values of a value of at most one axis; None where there are many, or others."""
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = self._known_numbers(value)
        return self._numbers[value]

    def whole_numbers(self, value: ir.Value | None) -> list[int] | None:
        """The numbers of a value that are the same for all inputs; None where not all are."""
        found = self.numbers(value)
        return [one.number for one in found] if found is not None and all(one.is_fixed for one in found) else None

    def actual(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value on the inputs at hand; that of a constant is its own."""
        found = self._values.get(value.name or "")
        return tuple(found.shape) if isinstance(found, torch.Tensor) else tuple(one.number for one in self.of(value))

    def is_whole(self, value: ir.Value) -> bool:
        """Whether a value has whole numbers or truth values."""
        found = self._values.get(value.name or "")
        if found is None and value in self._flow.constant:
            found = self._constant(value)
        return isinstance(found, torch.Tensor) and not found.is_floating_point() and not found.is_complex()

    def _is_fixed(self, node: ir.Node) -> bool:
        """Whether an operator gives the same on all inputs because it is given the same."""
        if node.op_type in LENGTHS or any(value in self._flow.content for value in node.outputs):
            return False
        read = [value for value in (*node.inputs, *outer_values(node)) if value is not None]
        return all(value in self.fixed for value in read) and not node.op_type.startswith(_RANDOM)

    def _known_numbers(self, value: ir.Value) -> Shape | None:
        if constant_of(value) is not None:
            return symbolic_numbers.of_constant(value)
        node = value.producer()
        actual = self._values.get(value.name or "")
        if actual is None and value in self._flow.constant:
            actual = self._constant(value)
        if not isinstance(actual, torch.Tensor) or actual.dim() > 1 or actual.numel() > symbolic_numbers.MOST_NUMBERS:
            return None
        found = None if node is None else symbolic_numbers.of_node(self, node)
        if node is not None and (node.op_type == "Split" or value is not node.outputs[0]):
            found = self._part_of_numbers(node, value, found) if node.op_type == "Split" else None
        here = actual.reshape(-1).tolist()
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
        stated = [*value.shape] if value.shape is not None else [None] * rank
        fixed, axes = (role.shape, role.axes) if role is not None else ([None] * rank, [""] * rank)
        sizes = []
        for at, (dim, other, axis) in enumerate(zip(stated, fixed, axes, strict=True)):
            known = next((one for one in (dim, other) if isinstance(one, int) and one >= 0), None)
            name = (dim.value if isinstance(dim, ir.SymbolicDim) else None) or (value.name, at)
            least = int(isinstance(axis, str) and axis in _NEVER_EMPTY)
            sizes.append(Size(known) if known is not None else self.symbols.dimension(name, least))
        return tuple(sizes)

    def _of_output(self, node: ir.Node, at: int, value: ir.Value) -> Shape:
        tensor = constant_of(value)
        if tensor is not None:
            return tuple(Size(int(size)) for size in tensor.shape.numpy())
        rule = _RULES.get(node.op_type)
        shape: Shape | None = None
        if rule is not None and all(one is None or one in self._shapes for one in node.inputs):
            shape = rule(self, node) if at == 0 or node.op_type in ("Split", "TopK") else None
            if node.op_type == "Split" and shape is not None:
                shape = self._part(node, at, shape)
        if value in self._flow.constant:
            known = shape is not None and all(size.is_fixed for size in shape)
            return shape if known and shape is not None else tuple(Size(dim) for dim in self._constant(value).shape)
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
        """The shape of what a node reads at a place; None where it reads nothing there."""
        value = node.inputs[at] if at < len(node.inputs) else None
        return None if value is None else self._shapes.get(value)

    def _of_shape(self, node: ir.Node, at: int) -> Shape | None:
        """The numbers of an input that is a shape."""
        return self.numbers(_input(node, at))

    def _like_first(self, node: ir.Node) -> Shape | None:
        return self.of_input(node, 0)

    def _like_second(self, node: ir.Node) -> Shape | None:
        return self.of_input(node, 1)

    def _broadcast(self, node: ir.Node) -> Shape | None:
        shapes = [(self.of(value), self.actual(value)) for value in node.inputs if value is not None]
        return self._together(shapes)

    def _together(self, shapes: Sequence[tuple[Shape, tuple[int, ...]]]) -> Shape:
        rank = max(len(shape) for shape, _ in shapes)
        sizes = []
        for axis in range(-rank, 0):
            those = [(shape[axis], actual[axis]) for shape, actual in shapes if len(shape) >= -axis]
            sizes.append(self._common(those))
        return tuple(sizes)

    def _common(self, sizes: Sequence[tuple[Size, int]]) -> Size:
        """The length of an axis on which values meet, each given with its length here: one that isn't 1 has it."""
        other = {size for size, _ in sizes if size != ONE}
        if len(other) < 2:
            return next(iter(other), ONE)
        long = list(dict.fromkeys(size for size, actual in sizes if actual != 1))
        if len(long) < len(other):  # one that is 1 here may be longer elsewhere
            return self.symbols.other("broadcast", *sorted(other, key=repr))
        return next((size for size in long if size.is_fixed), long[0])

    def _transposed(self, node: ir.Node) -> Shape | None:
        shape = self.of_input(node, 0)
        attribute = node.attributes.get("perm")
        if shape is None or attribute is None:
            return shape and shape[::-1]
        perm = attribute.as_ints()
        return tuple(shape[axis] for axis in perm) if len(perm) == len(shape) else None

    def _reshaped(self, node: ir.Node) -> Shape | None:
        shape, to = self.of_input(node, 0), self._of_shape(node, 1)
        if shape is None or to is None:
            return None
        copies = not _integer(node, "allowzero", 0)
        sizes: list[Size | None] = []
        for axis, size in enumerate(to):
            if size == Size(0) and copies:
                sizes.append(shape[axis] if axis < len(shape) else None)
            else:
                sizes.append(None if size == Size(-1) else size)
        if sizes.count(None) > 1:
            return None
        known, whole = product(size for size in sizes if size is not None), product(shape)
        left = self.symbols.quotient(whole, known)
        if left is None:
            left = self.symbols.other("Div", whole, known)
        return tuple(left if size is None else size for size in sizes)

    def _flattened(self, node: ir.Node) -> Shape | None:
        shape, axis = self.of_input(node, 0), _integer(node, "axis", 1)
        return None if shape is None else (product(shape[:axis]), product(shape[axis:]))

    def axes(self, node: ir.Node, at: int = 1) -> list[int] | None:
        """The axes that an operator names by attribute, or by an input that is fixed."""
        attribute = node.attributes.get("axes")
        return [*attribute.as_ints()] if attribute is not None else self.whole_numbers(_input(node, at))

    def _squeezed(self, node: ir.Node) -> Shape | None:
        shape, axes = self.of_input(node, 0), self.axes(node)
        if shape is None or axes is None:
            return None
        dropped = {axis % len(shape) for axis in axes} if shape else set()
        return tuple(size for axis, size in enumerate(shape) if axis not in dropped)

    def _unsqueezed(self, node: ir.Node) -> Shape | None:
        shape, axes = self.of_input(node, 0), self.axes(node)
        if shape is None or axes is None:
            return None
        rank = len(shape) + len(axes)
        added = {axis % rank for axis in axes}
        rest = iter(shape)
        return tuple(ONE if axis in added else next(rest, ONE) for axis in range(rank))

    def _expanded(self, node: ir.Node) -> Shape | None:
        shape, to = self.of_input(node, 0), self._of_shape(node, 1)
        if shape is None or to is None or node.inputs[0] is None:
            return None
        here = self._values.get(node.outputs[0].name or "")
        actual = self.actual(node.inputs[0])
        if not isinstance(here, torch.Tensor):
            return None
        asked = tuple(int(one) for one in self._asked(node.inputs[1], to, tuple(here.shape), actual))
        return self._together([(shape, actual), (to, asked)])

    def _asked(
        self, value: ir.Value | None, to: Shape, here: tuple[int, ...], actual: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The lengths that an Expand asks for on the inputs at hand."""
        found = self._values.get(value.name or "") if value is not None else None
        if isinstance(found, torch.Tensor):
            return tuple(int(one) for one in found.reshape(-1).tolist())
        return tuple(size.number if size.is_fixed else dim for size, dim in zip(to, here[-len(to) :], strict=True))

    def _tiled(self, node: ir.Node) -> Shape | None:
        shape, times = self.of_input(node, 0), self._of_shape(node, 1)
        if shape is None or times is None or len(shape) != len(times):
            return None
        return tuple(size * count for size, count in zip(shape, times, strict=True))

    def _joined(self, node: ir.Node) -> Shape | None:
        shapes = [self.of(value) for value in node.inputs if value is not None]
        actual = [self.actual(value) for value in node.inputs if value is not None]
        if not shapes[0] or len({len(shape) for shape in shapes}) != 1:
            return None
        axis = _integer(node, "axis", 0) % len(shapes[0])
        common = self._together(list(zip(shapes, actual, strict=True)))
        return (*common[:axis], self.symbols.total(shape[axis] for shape in shapes), *common[axis + 1 :])

    def _part(self, node: ir.Node, at: int, shape: Shape) -> Shape | None:
        if not shape:
            return None
        axis = _integer(node, "axis", 0) % len(shape)
        attribute = node.attributes.get("split")
        sizes = tuple(map(Size, attribute.as_ints())) if attribute is not None else self._of_shape(node, 1)
        if sizes is None and _input(node, 1) is None and shape[axis].is_fixed:
            step = -(-shape[axis].number // len(node.outputs))
            sizes = tuple(Size(min(step, shape[axis].number - step * one)) for one in range(len(node.outputs)))
        size = sizes[at] if sizes is not None and at < len(sizes) else None
        if size is None:
            size = self.symbols.quotient(shape[axis], Size(len(node.outputs)))
        return None if size is None else (*shape[:axis], size, *shape[axis + 1 :])

    def bounds(self, node: ir.Node) -> dict[int, tuple[Size, Size, int]] | None:
        """Start, end and step of each axis that a Slice names; None where they aren't known."""
        shape = self.of_input(node, 0)
        if "starts" in node.attributes:
            parts = [tuple(map(Size, node.attributes[name].as_ints())) for name in ("starts", "ends")]
            axes = [*node.attributes["axes"].as_ints()] if "axes" in node.attributes else [*range(len(parts[0]))]
            steps: list[int] | None = [1] * len(parts[0])
        else:
            starts, ends = (self._of_shape(node, at) for at in (1, 2))
            if starts is None or ends is None:
                return None
            parts = [starts, ends]
            given = self.whole_numbers(_input(node, 3))
            axes = [*range(len(starts))] if _input(node, 3) is None else given or []
            steps = [1] * len(starts) if _input(node, 4) is None else self.whole_numbers(_input(node, 4))
        if shape is None or steps is None or not len(parts[0]) == len(parts[1]) == len(axes) == len(steps):
            return None
        return {
            axis % len(shape): (start, end, step)
            for axis, start, end, step in zip(axes, *parts, steps, strict=True)
            if -len(shape) <= axis < len(shape)
        }

    def _cut(self, node: ir.Node) -> Shape | None:
        shape, bounds = self.of_input(node, 0), self.bounds(node)
        if shape is None or bounds is None:
            return None
        sizes = list(shape)
        for axis, (start, end, step) in bounds.items():
            sizes[axis] = self._taken(node, axis, shape[axis], (start, end, step))
        return tuple(sizes)

    def _taken(self, node: ir.Node, axis: int, size: Size, bounds: tuple[Size, Size, int]) -> Size:
        """The length of what a Slice takes of an axis. What cuts a row here is said to cut every row: of a shorter one
        less than nothing would be left."""
        start, end, step = bounds
        if size.is_fixed and start.is_fixed and end.is_fixed:
            return Size(len(range(size.number)[start.number : end.number : step]))
        actual = self.actual(node.inputs[0])[axis] if node.inputs[0] is not None else 0
        least = self.symbols.least(size) or 0
        first = self._place(start, size, least, actual)
        last = self._place(end, size, actual, least)
        if step != 1 or first is None or last is None:
            return self.symbols.other("Slice", size, start, end, step)
        return self.symbols.difference(last, first)

    def _place(self, bound: Size, size: Size, back: int, forth: int) -> Size | None:
        """Where a bound lies on an axis, which has `back` elements before a place counted from its end, and `forth`
        before one counted from its beginning; None where it may lie outside."""
        if bound == size or (bound.is_fixed and bound.number >= _WHOLE):
            return size
        if bound.is_fixed:
            inside = bound.number <= forth if bound.number >= 0 else -bound.number <= back
            return None if not inside else bound if bound.number >= 0 else self.symbols.total([size, bound])
        left = self.symbols.least(self.symbols.difference(size, bound))
        low = self.symbols.least(bound)
        return bound if left is not None and left >= 0 and low is not None and low >= 0 else None

    def _gathered(self, node: ir.Node) -> Shape | None:
        data, indices = self.of_input(node, 0), self.of_input(node, 1)
        if not data or indices is None:
            return None
        axis = _integer(node, "axis", 0) % len(data)
        return (*data[:axis], *indices, *data[axis + 1 :])

    def _gathered_by_places(self, node: ir.Node) -> Shape | None:
        data, indices, batch = self.of_input(node, 0), self.of_input(node, 1), _integer(node, "batch_dims", 0)
        if data is None or not indices or not indices[-1].is_fixed:
            return None
        return (*indices[:-1], *data[batch + indices[-1].number :])

    def _padded(self, node: ir.Node) -> Shape | None:
        shape = self.of_input(node, 0)
        attribute = node.attributes.get("pads")
        pads = tuple(map(Size, attribute.as_ints())) if attribute is not None else self._of_shape(node, 1)
        axes = None if _input(node, 3) is None else self.whole_numbers(_input(node, 3))
        if shape is None or pads is None or (axes is None and _input(node, 3) is not None):
            return None
        axes = [*range(len(shape))] if axes is None else axes
        if len(pads) != 2 * len(axes):
            return None
        sizes = list(shape)
        for at, axis in enumerate(axes):
            sizes[axis] = self.symbols.total([shape[axis], pads[at], pads[at + len(axes)]])
        return tuple(sizes)

    def _largest(self, node: ir.Node) -> Shape | None:
        shape, count = self.of_input(node, 0), self._of_shape(node, 1)
        if not shape or not count:
            return None
        axis = _integer(node, "axis", -1) % len(shape)
        return (*shape[:axis], count[0], *shape[axis + 1 :])

    def _one_hot(self, node: ir.Node) -> Shape | None:
        shape, depth, axis = self.of_input(node, 0), self._of_shape(node, 1), _integer(node, "axis", -1)
        if shape is None or depth is None or len(depth) != 1:
            return None
        axis %= len(shape) + 1
        return (*shape[:axis], depth[0], *shape[axis:])

    def _multiplied(self, node: ir.Node) -> Shape | None:
        pairs = [(self.of(value), self.actual(value)) for value in node.inputs[:2] if value is not None]
        for at, name in enumerate(("transA", "transB")):
            if at < len(pairs) and _integer(node, name, 0):
                shape, actual = pairs[at]
                pairs[at] = ((*shape[:-2], *shape[:-3:-1]), (*actual[:-2], *actual[:-3:-1]))
        if len(pairs) != 2 or any(len(shape) < 2 for shape, _ in pairs):
            return None
        (left, a), (right, b) = pairs
        rows = self._together([(left[:-2], a[:-2]), (right[:-2], b[:-2])]) if len(left) + len(right) > 4 else ()
        return (*rows, left[-2], right[-1])

    def letters(self, node: ir.Node) -> dict[str, list[Size]] | None:
        """The lengths by letter of an Einsum, as its operands have them; None for one with an ellipsis."""
        equation = _string(node, "equation").replace(" ", "")
        parts = equation.partition("->")[0].split(",")
        shapes = [self.of(value) for value in node.inputs if value is not None]
        if not equation.replace(",", "").replace("->", "").isalpha() or [*map(len, parts)] != [*map(len, shapes)]:
            return None
        found: dict[str, list[Size]] = {}
        for part, shape in zip(parts, shapes, strict=True):
            for letter, size in zip(part, shape, strict=True):
                found.setdefault(letter, []).append(size)
        return found

    def _summed(self, node: ir.Node) -> Shape | None:
        letters, (_, arrow, result) = self.letters(node), _string(node, "equation").replace(" ", "").partition("->")
        if letters is None or not arrow:
            return None
        lengths = {letter: next((one for one in sizes if one != ONE), ONE) for letter, sizes in letters.items()}
        return tuple(lengths[letter] for letter in result)

    def _reduced(self, node: ir.Node) -> Shape | None:
        shape, axes = self.of_input(node, 0), self.axes(node)
        if node.op_type.startswith("Arg"):
            axes = [_integer(node, "axis", 0)]
        if shape is None or (axes is None and _input(node, 1) is not None):
            return None
        if not axes and _integer(node, "noop_with_empty_axes", 0):
            return shape
        dropped = {axis % len(shape) for axis in axes} if axes else set(range(len(shape)))
        kept = _integer(node, "keepdims", 1)
        return tuple(ONE if axis in dropped else size for axis, size in enumerate(shape) if kept or axis not in dropped)

    def _made(self, node: ir.Node) -> Shape | None:
        return self._of_shape(node, 0)

    def _ranged(self, node: ir.Node) -> Shape | None:
        """What is counted one by one, from a whole number or from a fraction above it, up to a whole number."""
        limit, step, first = self.numbers(node.inputs[1]), self.numbers(node.inputs[2]), node.inputs[0]
        start = self.numbers(first)
        if start is None and first in self.fixed and first is not None:
            number = self._values.get(first.name or "")
            start = (Size(math.floor(float(self._constant(first) if number is None else number))),)
        if start is None or limit is None or step != (ONE,) or len(start) != 1 or len(limit) != 1:
            return None
        return (self.symbols.difference(limit[0], start[0]),)

    def _rank(self, node: ir.Node) -> Shape | None:
        found = self._values.get(node.outputs[0].name or "")
        return (Size(found.numel()),) if isinstance(found, torch.Tensor) else None

    def _convolved(self, node: ir.Node) -> Shape | None:
        """A row for a row, a channel for each filter; what is left of the other axes follows from their lengths."""
        shape, weights = self.of_input(node, 0), self.of_input(node, 1)
        here = self._values.get(node.outputs[0].name or "")
        if not shape or not isinstance(here, torch.Tensor) or len(shape) != here.dim():
            return None
        sizes = [
            self._strided(node, at, size, length)
            for at, (size, length) in enumerate(zip(shape[2:], here.shape[2:], strict=True))
        ]
        channels = weights[0] if node.op_type in ("Conv", "ConvInteger") and weights else shape[1]
        if node.op_type == "ConvTranspose" and weights:
            channels = weights[1] * Size(_integer(node, "group", 1))
        return (shape[0], channels, *sizes)

    def _strided(self, node: ir.Node, at: int, size: Size, length: int) -> Size:
        """What a convolution, a pooling or Resize leaves of an axis, which is `length` here."""
        if node.op_type in ("Resize", "Upsample"):
            return self.symbols.other(node.op_type, at, size, node.outputs[0].name)
        if size.is_fixed:
            return Size(length)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        weights = self.of_input(node, 1) or ()
        if node.op_type == "Conv" and attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
            axes = len(weights) - 2
            stride = (attributes.get("strides") or [1] * axes)[at]
            dilation = (attributes.get("dilations") or [1] * axes)[at]
            pads = attributes.get("pads") or [0] * 2 * axes
            kernel = weights[2 + at]
            if kernel.is_fixed:
                reach = dilation * (kernel.number - 1) + 1
                left = self.symbols.total([size, Size(pads[at] + pads[at + axes] - reach)])
                return self.symbols.total([self.symbols.floor_quotient(left, stride), ONE])
        return self.symbols.other(node.op_type, at, size, repr(sorted(attributes.items())), weights)


def _input(node: ir.Node, at: int) -> ir.Value | None:
    return node.inputs[at] if at < len(node.inputs) else None


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _string(node: ir.Node, name: str) -> str:
    attribute = node.attributes.get(name)
    return "" if attribute is None else attribute.as_string()


_Rule = Callable[[SymbolicShapes, ir.Node], "Shape | None"]

_BROADCAST = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Where", "Min", "Max", "Sum", "Mean", "And", "Or", "Xor", "PRelu"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "BitwiseAnd", "BitwiseOr"),
)
_LIKE_FIRST = (
    *("Abs", "Acos", "Asin", "Atan", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "CumSum", "Dropout", "Elu"),
    *("Erf", "Exp", "Floor", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "HardSigmoid", "HardSwish", "Identity"),
    *("IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid"),
    *("Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Trilu", "Softmax"),
    *("LogSoftmax", "Hardmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BatchNormalization", "InstanceNormalization"),
    *("GroupNormalization", "LpNormalization", "LRN", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    *("ScatterElements", "ScatterND", "Scatter", "TensorScatter", "RotaryEmbedding", "EyeLike", "ReverseSequence"),
)
_REDUCTIONS = (
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"),
    *("ReduceSumSquare", "ReduceLogSum", "ArgMax", "ArgMin"),
)
_CONVOLUTIONS = (
    *("Conv", "ConvTranspose", "ConvInteger", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
    *("LpPool", "Resize", "Upsample"),
)

_RANDOM = ("Random", "Bernoulli", "Multinomial")

_NEVER_EMPTY = {BATCH, SEQ, ENCODER, TOTAL, SLOTS, HEIGHT, WIDTH, FRAMES}
"""Axes that have an element at least; a cache may have none."""

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_BROADCAST, SymbolicShapes._broadcast),
    **dict.fromkeys(_LIKE_FIRST, SymbolicShapes._like_first),
    **dict.fromkeys(_REDUCTIONS, SymbolicShapes._reduced),
    **dict.fromkeys(_CONVOLUTIONS, SymbolicShapes._convolved),
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", "MatMulInteger"), SymbolicShapes._multiplied),
    "Concat": SymbolicShapes._joined,
    "ConstantOfShape": SymbolicShapes._made,
    "Einsum": SymbolicShapes._summed,
    "Expand": SymbolicShapes._expanded,
    "Flatten": SymbolicShapes._flattened,
    "Gather": SymbolicShapes._gathered,
    "GatherElements": SymbolicShapes._like_second,
    "GatherND": SymbolicShapes._gathered_by_places,
    "OneHot": SymbolicShapes._one_hot,
    "Pad": SymbolicShapes._padded,
    "Range": SymbolicShapes._ranged,
    "Reshape": SymbolicShapes._reshaped,
    "Shape": SymbolicShapes._rank,
    "Slice": SymbolicShapes._cut,
    "Split": SymbolicShapes._like_first,
    "Squeeze": SymbolicShapes._squeezed,
    "Tile": SymbolicShapes._tiled,
    "TopK": SymbolicShapes._largest,
    "Transpose": SymbolicShapes._transposed,
    "Unsqueeze": SymbolicShapes._unsqueezed,
}
"""The shape of an operator's first output; that of what a Split divides."""
