"""Sizes that a graph fixes although its inputs say that they vary.

Exporters that trace write sizes of their example into Reshape and Expand: such a graph takes these alone. Its constants
tell which they may be, and evaluating it tells which they are.

A graph that takes one of these sizes may still take others: attention within blocks of 8 tokens takes all multiples of
8, and a table of 16 rows that is added takes 16 tokens or one. What is true of one size alone, such as that a block is
all tokens, must not be told of such a graph. So other sizes are tried after the first one. Where the graph can be
evaluated on one of them, the axis stays one that varies; sizes on which its outputs are as long as it says are those
that are drawn (Role.taken). Only a graph that takes none of the sizes that are tried counts as one of a fixed size:
whether there is another one, nobody knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import attrs
import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.axes import BATCH, ENCODER, HEIGHT, SEQ, WIDTH
from posexport.graphs.draw import probe_inputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.kernels.fallback import UnknownOperatorError
from posexport.graphs.roles import Role, values_of_model
from posexport.graphs.sizes import is_dynamic, step_of
from posexport.runtimes.tensors import to_tensors
from posexport.spec.contract import Shape, Values

TRIES = 300
"""Sizes that are tried at most."""

SIDES_TRIED = 512
"""Pixels on a side that are tried at most, where sides are multiples of a number in the graph."""

SIDES = (224, 384, 336, 518, 256, 512, 32, 28)
"""Pixels on a side of images that models are made for."""

_ROWS = (1, 2, 3, 4, 6, 8)
"""Rows of an example."""

_LONGEST = 4096
"""Tokens of an example at most."""

_LONG, _LARGEST_SIDE = 300, 1024
"""A large number of tokens, and pixels on a side of images at most, that are tried where others are taken."""


def pinned(roles: Mapping[str, Role], sizes: Mapping[str, int]) -> dict[str, Role]:
    """The roles, with axes that vary fixed to these sizes by meaning."""

    def fixed(role: Role) -> Role:
        shape = (
            sizes[axis] if isinstance(axis, str) and axis in sizes and not isinstance(dim, int) else dim
            for dim, axis in zip(role.shape, role.axes, strict=True)
        )
        return attrs.evolve(role, shape=tuple(shape))

    return {name: fixed(role) for name, role in roles.items()}


def baked_sizes(model: ir.Model, roles: Mapping[str, Role]) -> Iterator[dict[str, int]]:
    """The sizes by meaning that the graph may have been traced with, likely ones first; TRIES at most."""
    return itertools.islice(_sizes(model, roles), TRIES)


def _sizes(model: ir.Model, roles: Mapping[str, Role]) -> Iterator[dict[str, int]]:
    lengths = sorted(_lengths(model))
    sides = [axis for axis in (HEIGHT, WIDTH) if is_dynamic(roles, axis)]
    if sides:
        steps = [step_of(role, axis) for role in roles.values() for axis in sides if axis in role.axes]
        multiples = [steps[0] * length for length in lengths if steps[0] * length <= SIDES_TRIED]  # windows of patches
        yield from (dict.fromkeys(sides, side) for side in dict.fromkeys((*SIDES, *multiples)))
    free = [axis for axis in _varying(roles) if axis.startswith("dim ")]
    if free:  # feature maps, cut into windows
        axes = [*free, *(axis for axis in (SEQ, HEIGHT, WIDTH) if is_dynamic(roles, axis))]
        yield from (dict.fromkeys(axes, length) for length in lengths)
    rows = _ROWS if is_dynamic(roles, BATCH) else ()
    for axes in ([SEQ], [ENCODER], [SEQ, ENCODER]):
        if not all(is_dynamic(roles, axis) for axis in axes):
            continue
        tried = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(lengths, repeat=len(axes))]
        yield from tried
        yield from ({BATCH: count, **sizes} for sizes in tried for count in rows)
    yield from ({BATCH: count} for count in rows)


def _varying(roles: Mapping[str, Role]) -> list[str]:
    """The axes that may vary, by meaning."""
    pairs = (pair for role in roles.values() for pair in zip(role.shape, role.axes, strict=True))
    return [*dict.fromkeys(axis for dim, axis in pairs if isinstance(axis, str) and not isinstance(dim, int))]


def _lengths(model: ir.Model) -> set[int]:
    """The numbers in shapes that the graph holds as constants, and the products of two of one shape."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    constants = (node.attributes for node in model.graph if node.op_type == "Constant")
    tensors += [attributes["value"].as_tensor() for attributes in constants if "value" in attributes]
    lengths: set[int] = set()
    for tensor in tensors:
        if tensor is None or tensor.dtype != ir.DataType.INT64 or tensor.size > 8:
            continue
        numbers = [int(number) for number in tensor.numpy().flat if 1 < number <= _LONGEST]
        products = (a * b for a, b in itertools.combinations(numbers, 2))
        lengths |= {*numbers, *(product for product in products if product <= _LONGEST)}
    return lengths


def settled_roles(model: ir.Model, roles: Mapping[str, Role], seed: int) -> dict[str, Role]:
    """The roles, with the sizes fixed that the graph alone takes, where it doesn't take the usual ones; with those that
    it was seen to take, where these are several.

    They stay as they are where the graph takes no size that was tried, or has an operator that can't be evaluated.
    """
    try:
        if _evaluate(model, roles, seed):
            return dict(roles)
    except UnknownOperatorError:
        return dict(roles)
    except RequestError:
        pass
    for sizes in baked_sizes(model, roles):
        if _takes(model, pinned(roles, sizes), seed):
            taken = _taken(model, roles, sizes, seed)
            fixed = pinned(roles, {axis: size for axis, size in sizes.items() if axis not in taken})
            return {
                name: attrs.evolve(role, taken=tuple((axis, tuple(taken[axis])) for axis in taken if axis in role.axes))
                for name, role in fixed.items()
            }
    return dict(roles)


def _taken(model: ir.Model, roles: Mapping[str, Role], sizes: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """For each of these axes that isn't fixed the sizes that the graph takes, of this one and of others that are tried,
    for one axis alone and for all together."""
    taken: dict[str, set[int]] = {}
    groups = [*((axis,) for axis in sizes), tuple(sizes)]
    for axes in dict.fromkeys(groups):
        for changed in zip(*(_others(axis, sizes[axis]) for axis in axes), strict=False):
            others = {axis: other for axis, other in zip(axes, changed, strict=True) if other != sizes[axis]}
            agrees = _takes(model, pinned(roles, {**sizes, **others}), seed) if others else None
            if agrees is None:
                continue
            for axis, size in others.items():
                known = taken.setdefault(axis, {sizes[axis]})
                if agrees:
                    known.add(size)
    return {axis: sorted(known) for axis, known in taken.items()}


def _others(axis: str, size: int) -> tuple[int, ...]:
    """Other sizes than one: multiples, 1 more, less, and a large one."""
    if axis in (HEIGHT, WIDTH):
        return tuple(min(other, _LARGEST_SIDE) for other in (2 * size, size + 1, max(size // 2, 1)))
    if axis == BATCH:
        return (2 * size, size + 1, 1)
    return (2 * size, size + 1, max(size // 2, 1), 3 * size, 1, size * -(-_LONG // size))


def _takes(model: ir.Model, roles: Mapping[str, Role], seed: int) -> bool | None:
    """Whether the graph's outputs have the sizes that it says; None where it can't be evaluated on these inputs."""
    try:
        return _evaluate(model, roles, seed)
    except RequestError:
        return None


def _evaluate(model: ir.Model, roles: Mapping[str, Role], seed: int) -> bool:
    """Whether the graph's outputs have the sizes that it says; RequestError where it can't be evaluated."""
    arrays = to_tensors(probe_inputs(roles, seed).arrays)
    results = Evaluator(model).run(arrays)
    tensors = {name: value for name, value in results.items() if isinstance(value, torch.Tensor)}
    inputs, outputs = (values_of_model(values) for values in (model.graph.inputs, model.graph.outputs))
    given, made = ({name: tuple(tensor.shape) for name, tensor in some.items()} for some in (arrays, tensors))
    return agree(inputs, outputs, given, made)


def agree(inputs: Values, outputs: Values, given: Mapping[str, Shape], made: Mapping[str, Shape]) -> bool:
    """Whether the axes of outputs that are named as axes of inputs have their sizes.

    A graph that is given other sizes than its own may mix rows and tokens without an error.
    """
    sizes: dict[str | int, set[int | str]] = {}  # several of a name that the file gives to several lengths
    for name, shape in given.items():
        for dim, size in zip(inputs[name][0], shape, strict=False):
            sizes.setdefault(dim, set()).add(size)
    pairs = [pair for name, shape in made.items() for pair in zip(outputs[name][0], shape, strict=False)]
    return all(size in sizes.get(dim, {size}) for dim, size in pairs if isinstance(dim, str) and dim != "?")
