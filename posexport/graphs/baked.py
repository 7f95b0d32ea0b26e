"""Sizes that a graph fixes although its inputs say that they vary: those it may have been traced with.

Exporters that trace write sizes of their example into Reshape and Expand. Such a graph takes only these sizes. Its
constants tell which sizes are possible; posexport.graphs.settled finds out which ones work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import attrs
import onnx_ir as ir

from posexport.graphs.axes import BATCH, ENCODER, HEIGHT, SEQ, WIDTH
from posexport.graphs.roles import Role
from posexport.graphs.sizes import is_dynamic, step_of
from posexport.spec.contract import Shape, Values

TRIES = 300
"""The most sizes that are tried."""

SIDES_TRIED = 512
"""The most pixels on a side that are tried, for sides that are multiples of a number in the graph."""

SIDES = (224, 384, 336, 518, 256, 512, 32, 28)
"""Pixels on a side of images that models are usually made for."""

_ROWS = (1, 2, 3, 4, 6, 8)
"""Likely numbers of rows of an example."""

_LONGEST = 4096
"""The most tokens of an example."""


def pinned(roles: Mapping[str, Role], sizes: Mapping[str, int]) -> dict[str, Role]:
    """The roles, with varying axes fixed to these sizes, given by meaning."""

    def fixed(role: Role) -> Role:
        shape = (
            sizes[axis] if isinstance(axis, str) and axis in sizes and not isinstance(dim, int) else dim
            for dim, axis in zip(role.shape, role.axes, strict=True)
        )
        return attrs.evolve(role, shape=tuple(shape))

    return {name: fixed(role) for name, role in roles.items()}


def baked_sizes(model: ir.Model, roles: Mapping[str, Role]) -> Iterator[dict[str, int]]:
    """The sizes by meaning that the graph may have been traced with, likely ones first; at most TRIES."""
    return itertools.islice(_sizes(model, roles), TRIES)


def _sizes(model: ir.Model, roles: Mapping[str, Role]) -> Iterator[dict[str, int]]:
    lengths = sorted(_lengths(model))
    sides = [axis for axis in (HEIGHT, WIDTH) if is_dynamic(roles, axis)]
    if sides:
        steps = [step_of(role, axis) for role in roles.values() for axis in sides if axis in role.axes]
        multiples = [steps[0] * length for length in lengths if steps[0] * length <= SIDES_TRIED]  # windows of patches
        yield from (dict.fromkeys(sides, side) for side in dict.fromkeys((*SIDES, *multiples)))
    free = [axis for axis in _varying(roles) if axis.startswith("dim ")]
    maps = [*free, *(axis for axis in (SEQ, HEIGHT, WIDTH) if is_dynamic(roles, axis))] if free else []
    if maps:  # feature maps, cut into windows
        yield from (dict.fromkeys(maps, length) for length in lengths)
    rows = _ROWS if is_dynamic(roles, BATCH) else ()
    for axes in ([SEQ], [ENCODER], [SEQ, ENCODER]):
        if not all(is_dynamic(roles, axis) for axis in axes):
            continue
        tried = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(lengths, repeat=len(axes))]
        yield from tried
        yield from ({BATCH: count, **sizes} for sizes in tried for count in rows)
    yield from ({BATCH: count} for count in rows)
    if len(maps) == 2:  # a map whose height and width differ
        yield from (dict(zip(maps, sizes, strict=True)) for sizes in itertools.permutations(lengths, 2))


def _varying(roles: Mapping[str, Role]) -> list[str]:
    """The axes that may vary, by meaning."""
    pairs = (pair for role in roles.values() for pair in zip(role.shape, role.axes, strict=True))
    return [*dict.fromkeys(axis for dim, axis in pairs if isinstance(axis, str) and not isinstance(dim, int))]


def _lengths(model: ir.Model) -> set[int]:
    """The constants of the graph that may be lengths in shapes, and the products of two from one tensor."""
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


def agree(inputs: Values, outputs: Values, given: Mapping[str, Shape], made: Mapping[str, Shape]) -> bool:
    """Whether axes of outputs that share a name with axes of inputs have the same size.

    A graph that gets other sizes than its own may mix rows and tokens without an error.
    """
    sizes: dict[str | int, set[int | str]] = {}  # a file may give one name to several lengths
    for name, shape in given.items():
        for dim, size in zip(inputs[name][0], shape, strict=False):
            sizes.setdefault(dim, set()).add(size)
    pairs = [pair for name, shape in made.items() for pair in zip(outputs[name][0], shape, strict=False)]
    return all(size in sizes.get(dim, {size}) for dim, size in pairs if isinstance(dim, str) and dim != "?")
