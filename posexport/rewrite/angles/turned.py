"""Whether a rotation takes its angles only from two values of the graph: tried with other angles in their place.

A graph may have angles in more values than the recognised ones, such as the negative sine. With exact angles in some of
them and rounded ones in others, the result would be neither of the two functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posexport.graphs.attention.layouts import Layout, Sizes, layouts_of, packed_layouts
from posexport.graphs.attention.rotary import Rotary
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.view import View
from posexport.rewrite.angles.columns import Columns, as_in
from posexport.rewrite.angles.parameters import ExactAngles

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]

EXACT = 1e-9
"""The part of the largest value by which the rotation by other angles may differ in float64."""

_ROOM = 2**20
"""The number of positions that are tried, from 0."""


def turning_error(
    view: View, evaluator: Evaluator, rotary: Rotary, exact: ExactAngles, columns: Sequence[Columns], dim: int
) -> float:
    """How far the graph's rotation with exact angles of random positions is from the correct one.

    The difference is a part of the largest value; infinite if it is not a rotation of heads with `dim` features at all.
    """
    batch, tokens, _ = rotary.solved[0].shape
    heads = math.prod(view.probe.shape(rotary.source)) // (batch * tokens * dim)
    sizes = (batch, heads, tokens, dim)
    source = rotary.layout.to_heads(still := view.probe.random_like(rotary.source), sizes)
    target = _layout(view, rotary, sizes)
    if target is None:
        return math.inf
    rng = np.random.default_rng(tokens)
    prefix = rotary.cos.prefix
    rows = 1 if rotary.cos.batch is None else batch
    positions = rng.integers(0, _ROOM, (rows, tokens - prefix))
    cos, sin = exact.cos_sin(positions)
    known = _known(view, rotary) | {rotary.source.name or "": still}
    for angles, one in zip((rotary.cos, rotary.sin), columns, strict=True):
        rank = len(view.probe.shape(angles.value))
        known[angles.value.name or ""] = as_in(angles, torch.from_numpy(one.of(cos, sin)), rank)
    name = rotary.target.name or ""
    moved = target.to_heads(evaluator.run(known, [name])[name], sizes)
    kept = ((0, 0), (prefix, 0), (0, 0))
    full = (np.pad(cos, kept, constant_values=1.0), np.pad(sin, kept))
    expected = rotary.pairs.turned(source, *map(torch.from_numpy, full))
    return float((moved - expected).abs().max()) / max(float(expected.abs().max()), 1e-300)


def _layout(view: View, rotary: Rotary, sizes: Sizes) -> Layout | None:
    """The layout of the result of the rotation; None if it has none that is known."""
    still = view.probe.random_like(rotary.source)
    moved = view.probe.through(rotary.source, [rotary.target], still)[0]
    expected = rotary.pairs.turned(rotary.layout.to_heads(still, sizes), *rotary.solved)
    limit = EXACT * max(float(expected.abs().max()), 1e-300)
    shape = tuple(moved.shape)
    packed = [one for one, own in packed_layouts(shape, sizes[0], sizes[2]) if own == sizes]
    for layout in [*layouts_of(shape, sizes), *packed]:
        if float((layout.to_heads(moved, sizes) - expected).abs().max()) <= limit:
            return layout
    return None


def _known(view: View, rotary: Rotary) -> dict[str, torch.Tensor]:
    """The inputs of the nodes of a rotation, on the probe's inputs."""
    nodes = view.flow.between(rotary.source, rotary.target)
    computed = {value for node in nodes for value in node.outputs}
    read = {value for node in nodes for value in node.inputs if value is not None}
    return {value.name or "": view.probe.get(value) for value in read - computed if value not in view.flow.constant}
