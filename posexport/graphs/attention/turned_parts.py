"""Rotations of parts of queries or keys, and rotations before a norm: they are rewritten where they are.

    queries = concat(projection, rotation(another projection))    keys = norm(rotation(projection))

From an operand of attention upwards, every value with rows, tokens and features may be the result of a rotation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import permutations

import attrs
import onnx_ir as ir

from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.layouts import Layout, Sizes, packed_layouts
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.rotary import Rotary, farthest_rotation
from posexport.graphs.symbolic_sizes import Size

MOST_VALUES = 48
"""The most values that are looked at above an operand."""

_PRODUCTS = {"MatMul", "Gemm", "Einsum", "FusedMatMul", "Conv", "Softmax", "MatMulInteger", "Loop", "If"}
"""Operators that end the search above an operand."""


@attrs.frozen(kw_only=True)
class Turn:
    """A rotation whose result has the layout `layout`, with `heads` heads of `dim` features."""

    rotary: Rotary
    layout: Layout
    heads: int
    dim: int


def turned_parts(flow: Dataflow, probe: Probe, operand: ir.Value, batch: int, tokens: Collection[int]) -> list[Turn]:
    """The rotations above an operand with `batch` rows, whose number of tokens is one of `tokens`."""
    found: list[Turn] = []
    seen, pending = {operand}, [operand]
    for value in pending:
        node = value.producer()
        if node is None or node.op_type in _PRODUCTS or len(seen) > MOST_VALUES:
            continue
        turn = _turn(flow, probe, value, batch, tokens)
        if turn is not None:
            found.append(turn)
            continue
        for source in flow.content_inputs(node):
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return found


def place_of(flow: Dataflow, probe: Probe, turn: Turn, operand: ir.Value, layout: Layout, sizes: Sizes) -> int | None:
    """The first feature of a rotated part in the heads of an operand, which has the layout `layout` with `sizes`.

    None if the heads don't contain the part as it is.
    """
    batch, heads, tokens, _ = sizes
    part = probe.random_like(turn.rotary.target)
    if part.numel() != batch * turn.heads * tokens * turn.dim or turn.heads not in (1, heads):
        return None
    turned = turn.layout.to_heads(part, (batch, turn.heads, tokens, turn.dim))
    whole = layout.to_heads(probe.through(turn.rotary.target, [operand], part)[0], sizes)
    starts = range(whole.shape[-1] - turn.dim + 1)
    return next((at for at in starts if bool((whole[..., at : at + turn.dim] == turned).all())), None)


def in_all_heads(flow: Dataflow, probe: Probe, turn: Turn, operand: ir.Value, layout: Layout, sizes: Sizes) -> bool:
    """Whether each head of an operand depends on a rotated part, or there are no heads that don't."""
    target = turn.rotary.target
    once, again = (
        layout.to_heads(probe.through(target, [operand], probe.random_like(target))[0], sizes) for _ in range(2)
    )
    return bool((once != again).any(-1).any(-1).any(0).all())


def _turn(flow: Dataflow, probe: Probe, value: ir.Value, batch: int, tokens: Collection[int]) -> Turn | None:
    for layout, sizes in _layouts(probe.shape(value), batch, tokens):
        if not _same_heads(probe, value, layout, sizes[1]):
            continue
        rotary, _ = farthest_rotation(flow, probe, value, layout, sizes)
        if rotary is not None:
            return Turn(rotary=rotary, layout=layout, heads=sizes[1], dim=sizes[3])
    return None


def _same_heads(probe: Probe, value: ir.Value, layout: Layout, heads: int) -> bool:
    """Whether a value has the same number of heads, of the same size, on all inputs."""
    for group, size in zip(layout.groups, probe.shapes.of(value), strict=True):
        if group == "bh":
            if probe.shapes.symbols.quotient(size, Size(heads)) is None:
                return False
        elif group in ("g", "h", "d", "hd") and not size.is_fixed:
            return False
    return True


def _layouts(shape: tuple[int, ...], batch: int, tokens: Collection[int]) -> Iterator[tuple[Layout, Sizes]]:
    """The ways in which a value may have rows, heads, tokens and, last, at least two features."""
    if math.prod(shape) == 0 or not shape or shape[-1] < 2:
        return
    if len(shape) == 4:
        for order in permutations("bhs"):
            sizes = dict(zip((*order, "d"), shape, strict=True))
            if sizes["b"] == batch and sizes["s"] in tokens:
                yield Layout((*order, "d")), (batch, sizes["h"], sizes["s"], sizes["d"])
    for length in tokens:
        yield from packed_layouts(shape, batch, length)
    if len(shape) == 3 and shape[0] == batch and shape[1] in tokens:
        yield Layout(("b", "s", "hd")), (batch, 1, shape[1], shape[2])
    if len(shape) == 3 and shape[0] % batch == 0 and shape[0] > batch and shape[1] in tokens:
        yield Layout(("bh", "s", "d")), (batch, shape[0] // batch, shape[1], shape[2])
