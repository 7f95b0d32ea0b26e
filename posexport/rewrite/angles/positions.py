"""The positions that cosines and sines are computed from, as a value of the graph: found by putting others there.

Any value above the angles that has a whole number for each token may hold the positions. It does where angles are
computed from it alone, and follow the numbers that are put there instead, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import outer_values
from posexport.graphs.attention.rotary import AngleSource
from posexport.graphs.view import View

_STEPS = 400
"""Values that are looked at above angles, at most."""

_LENGTHS = ("Shape", "Size")
"""Operators that give lengths alone."""

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Floating-point dtypes that hold positions as they are."""


@attrs.frozen(kw_only=True)
class PositionSource:
    """Positions [B, S] as `value` holds them, of `rank` axes of which all but `batch` and `tokens` are of size 1; those
    are the same for all rows where `batch` is None."""

    value: ir.Value
    batch: int | None
    tokens: int
    rank: int

    def laid_out(self, positions: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Positions [B or 1, S] in the `shape` that the value has."""
        rows = positions if self.batch is not None else positions[0]
        if self.batch is not None and self.batch > self.tokens:
            rows = rows.T
        return rows.reshape(list(shape))

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Positions [B or 1, S] of the value."""
        if self.batch is None:
            return value.reshape(1, -1)
        rows, tokens = value.shape[self.batch], value.shape[self.tokens]
        if self.batch > self.tokens:
            return value.reshape(tokens, rows).T
        return value.reshape(rows, tokens)


def candidates(view: View, sources: Sequence[AngleSource]) -> Iterator[PositionSource]:
    """The values that may hold the positions of these cosines and sines, whole numbers first, the nearest first."""
    rows = [None if one.batch is None else view.probe.shape(one.value)[one.batch] for one in sources]
    tokens = view.probe.shape(sources[0].value)[sources[0].tokens]
    batch = next((count for count in rows if count is not None), None)
    values = [source.value for source in sources]
    held = [(one, source) for one in _above(view, values) if (source := _source(view, one, batch, tokens)) is not None]
    found = [(one, source) for one, source in held if _are_alone(view, values, one, tokens)]
    whole = [source for one, source in found if not view.probe.get(one).is_floating_point()]
    floats = [source for one, source in found if view.probe.get(one).is_floating_point()]
    yield from whole
    for source in floats:
        numbers = view.probe.get(source.value)
        if (
            bool((numbers == numbers.round()).all())
            and view.dtypes([source.value]).get(source.value.name or "") in _WIDE
        ):
            yield source


def _source(view: View, value: ir.Value, batch: int | None, tokens: int) -> PositionSource | None:
    """How a value holds a number for each token of each row."""
    try:
        held = view.probe.get(value)
    except Exception:  # a constant of a kind that has no tensor
        return None
    if not isinstance(held, torch.Tensor) or held.dtype == torch.bool:
        return None
    axes = [axis for axis, size in enumerate(held.shape) if size > 1]
    by_token = [axis for axis in axes if held.shape[axis] == tokens]
    if not by_token or len(axes) > 2:
        return None
    others = [axis for axis in axes if axis != by_token[-1]]
    if others and (batch is None or held.shape[others[0]] != batch):
        return None
    if not others and batch is not None and batch > 1:
        return None  # rows have positions of their own
    return PositionSource(value=value, batch=others[0] if others else None, tokens=by_token[-1], rank=held.dim())


def _are_alone(view: View, values: Sequence[ir.Value], positions: ir.Value, tokens: int) -> bool:
    """Whether positions are all that values know of their tokens, and of the numbers of the graph's inputs; on lengths
    they may depend otherwise."""
    above = _above(view, values, positions)
    if len(above) >= _STEPS:
        return False
    below = {positions}
    for value in sorted(above, key=view.flow.depth):
        node = value.producer()
        if value is positions or (node is not None and below.intersection((*node.inputs, *outer_values(node)))):
            below.add(value)
        elif node is None or tokens in view.probe.shape(value):
            return False
    return True


def _above(view: View, values: Sequence[ir.Value], stop: ir.Value | None = None) -> list[ir.Value]:
    """The numbers that values are computed from, the nearest first, without constants and what carries features, and
    without what is above `stop` alone."""
    seen = dict.fromkeys(values)
    pending = [*values]
    while pending and len(seen) < _STEPS:
        value = pending.pop(0)
        node = value.producer()
        if node is None or value is stop or (stop is not None and node.op_type in _LENGTHS):
            continue
        for source in (*node.inputs, *outer_values(node)):
            if source is None or source in view.flow.content or source in view.flow.constant:
                continue
            if source not in seen:
                seen[source] = None
                pending.append(source)
    return list(seen)
