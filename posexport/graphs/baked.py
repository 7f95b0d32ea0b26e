"""Sizes that a graph fixes although its inputs say that they vary.

Exporters that trace write sizes of their example into Reshape and Expand: such a graph takes these alone. Its constants
tell which they may be, and evaluating it tells which they are.
"""

from __future__ import annotations

import contextlib
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
from posexport.graphs.sizes import is_dynamic
from posexport.runtimes.tensors import to_tensors
from posexport.spec.contract import Shape, Values

TRIES = 300
"""Sizes that are tried at most."""

SIDES = (224, 384, 336, 518, 256, 512, 32, 28)
"""Pixels on a side of images that models are made for."""

_ROWS = (1, 2, 3, 4, 6, 8)
"""Rows of an example."""

_LONGEST = 4096
"""Tokens of an example at most."""


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
    sides = [axis for axis in (HEIGHT, WIDTH) if is_dynamic(roles, axis)]
    yield from (dict.fromkeys(sides, side) for side in SIDES if sides)
    rows = _ROWS if is_dynamic(roles, BATCH) else ()
    lengths = sorted(_lengths(model))
    for axes in ((SEQ,), (ENCODER,), (SEQ, ENCODER)):
        if not all(is_dynamic(roles, axis) for axis in axes):
            continue
        tried = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(lengths, repeat=len(axes))]
        yield from tried
        yield from ({BATCH: count, **sizes} for sizes in tried for count in rows)
    yield from ({BATCH: count} for count in rows)


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
    """The roles, with the sizes fixed that the graph alone takes, where it doesn't take others.

    They stay as they are where the graph takes no size that was tried, or has an operator that can't be evaluated.
    """
    try:
        _evaluate(model, roles, seed)
    except UnknownOperatorError:
        return dict(roles)
    except RequestError:
        for sizes in baked_sizes(model, roles):
            fixed = pinned(roles, sizes)
            with contextlib.suppress(RequestError):
                _evaluate(model, fixed, seed)
                return fixed
    return dict(roles)


def _evaluate(model: ir.Model, roles: Mapping[str, Role], seed: int) -> None:
    arrays = to_tensors(probe_inputs(roles, seed).arrays)
    results = Evaluator(model).run(arrays)
    tensors = {name: value for name, value in results.items() if isinstance(value, torch.Tensor)}
    inputs, outputs = (values_of_model(values) for values in (model.graph.inputs, model.graph.outputs))
    given, made = ({name: tuple(tensor.shape) for name, tensor in some.items()} for some in (arrays, tensors))
    if not agree(inputs, outputs, given, made):
        raise RequestError("its outputs have other sizes than it says: export it again.")


def agree(inputs: Values, outputs: Values, given: Mapping[str, Shape], made: Mapping[str, Shape]) -> bool:
    """Whether the axes of outputs that are named as axes of inputs have their sizes.

    A graph that is given other sizes than its own may mix rows and tokens without an error.
    """
    sizes = {dim: size for name, shape in given.items() for dim, size in zip(inputs[name][0], shape, strict=False)}
    pairs = [pair for name, shape in made.items() for pair in zip(outputs[name][0], shape, strict=False)]
    return all(sizes.get(dim, size) == size for dim, size in pairs if isinstance(dim, str) and dim != "?")
