"""Finds the sizes that a graph takes, if it fixes some although its inputs say that they vary: it is evaluated on them.

A graph that takes one of these sizes may take others too. Attention within blocks of 8 tokens takes all multiples of 8.
A table of 16 rows that is added takes 16 tokens or one. What holds for only one size, for example that a block is all
tokens, must not be said of such a graph. So other sizes are tried after the first one. If the graph can be evaluated on
one of them, the axis stays dynamic. The sizes on which its outputs have the stated lengths are the sizes that are drawn
(Role.taken). A graph counts as one with a fixed size only if it takes none of the other sizes that are tried; whether
it takes some other size is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.axes import BATCH, ENCODER, HEIGHT, SEQ, WIDTH
from posexport.graphs.baked import agree, baked_sizes, pinned
from posexport.graphs.draw import PROBED, probe_inputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.kernels.fallback import UnknownOperatorError
from posexport.graphs.roles import Role, values_of_model
from posexport.graphs.sizes import is_dynamic
from posexport.runtimes.tensors import to_tensors

_LONG, _LARGEST_SIDE = 300, 1024
"""A large number of tokens, and the most pixels on a side of images, that are tried as other sizes."""


def settled_roles(model: ir.Model, roles: Mapping[str, Role], seed: int) -> dict[str, Role]:
    """The roles, with fixed sizes for axes of which the graph takes only one size.

    If the graph takes several sizes, the roles list those that were found (Role.taken). The roles stay as they are if
    the graph takes the usual sizes, takes none of the sizes that were tried, or has an operator that can't be
    evaluated.
    """
    try:
        if _evaluate(model, roles, seed) and _takes_near_sizes(model, roles, seed):
            return dict(roles)
    except UnknownOperatorError:
        return dict(roles)
    except RequestError:
        pass
    for sizes in baked_sizes(model, roles):
        if _takes(model, pinned(roles, sizes), seed):
            if is_dynamic(roles, BATCH) and not _takes_near_sizes(model, pinned(roles, sizes), seed):
                sizes = {BATCH: PROBED[BATCH], **sizes}
            taken = _taken(model, roles, sizes, seed)
            fixed = pinned(roles, {axis: size for axis, size in sizes.items() if axis not in taken})
            return {
                name: attrs.evolve(role, taken=tuple((axis, tuple(taken[axis])) for axis in taken if axis in role.axes))
                for name, role in fixed.items()
            }
    return dict(roles)


def _takes_near_sizes(model: ir.Model, roles: Mapping[str, Role], seed: int) -> bool:
    """Whether the graph takes one row or token less than the probe, or one more: it may have the probe's own sizes."""
    axes = [axis for axis in (BATCH, SEQ, ENCODER) if is_dynamic(roles, axis)]
    near = ({axis: PROBED[axis] + step for axis in axes} for step in (-1, 1))
    return not axes or any(_takes(model, pinned(roles, sizes), seed) for sizes in near)


def _taken(model: ir.Model, roles: Mapping[str, Role], sizes: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """The sizes that the graph takes, for each of these axes that isn't fixed.

    They are the given size and others that were tried, for one axis at a time and for all together.
    """
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
    """Other sizes to try: multiples, 1 more, fewer, and a large one."""
    if axis in (HEIGHT, WIDTH):
        return tuple(min(other, _LARGEST_SIDE) for other in (2 * size, size + 1, max(size // 2, 1)))
    if axis == BATCH:
        return (2 * size, size + 1, 1)
    return (2 * size, size + 1, max(size // 2, 1), 3 * size, 1, size * -(-_LONG // size))


def _takes(model: ir.Model, roles: Mapping[str, Role], seed: int) -> bool | None:
    """Whether the graph's outputs have the sizes that it says; None if it can't be evaluated on these inputs."""
    try:
        return _evaluate(model, roles, seed)
    except RequestError:
        return None


def _evaluate(model: ir.Model, roles: Mapping[str, Role], seed: int) -> bool:
    """Whether the graph's outputs have the sizes that it says; RequestError if it can't be evaluated."""
    arrays = to_tensors(probe_inputs(roles, seed).arrays)
    results = Evaluator(model).run(arrays)
    tensors = {name: value for name, value in results.items() if isinstance(value, torch.Tensor)}
    inputs, outputs = (values_of_model(values) for values in (model.graph.inputs, model.graph.outputs))
    given, made = ({name: tuple(tensor.shape) for name, tensor in some.items()} for some in (arrays, tensors))
    return agree(inputs, outputs, given, made)
