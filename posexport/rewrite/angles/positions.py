"""The positions that cosines and sines are computed from, as a value of the graph. It is found by replacing values.

Any value above the angles that has a whole number for each token may hold the positions. It does if angles are computed
only from it, token by token (posexport.rewrite.angles.followed), and follow numbers that are put in its place. Lengths
may only decide how many angles there are (posexport.rewrite.angles.lengths).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import LENGTHS, values_read
from posexport.graphs.attention.rotary import AngleSource
from posexport.graphs.view import View
from posexport.rewrite.angles.followed import Followed
from posexport.rewrite.angles.lengths import Lengths

_STEPS = 400
"""The most values above angles that are looked at."""

_WHOLE = {
    *(
        "Cast",
        "Identity",
        "Reshape",
        "Expand",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Slice",
        "Concat",
        "Gather",
        "Tile",
    ),
    *("Add", "Sub", "Mul", "Neg", "Abs", "Min", "Max", "Clip", "Range", "CumSum", "Where"),
}
"""Operators that compute whole numbers from whole numbers."""

_ROUNDING = ("Floor", "Round", "Ceil")

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Floating-point dtypes that can hold positions exactly."""


@attrs.frozen(kw_only=True)
class PositionSource:
    """Positions [B, S] as `value` holds them.

    It has `rank` axes, of which all except `batch` and `tokens` have size 1. If `batch` is None, positions are the same
    for all rows. `whole` are tables above the angles without the cut that a length makes, by name.
    """

    value: ir.Value
    batch: int | None
    tokens: int
    rank: int
    whole: Mapping[str, torch.Tensor] = attrs.field(factory=dict, eq=False, repr=False)

    def laid_out(self, positions: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Positions [B or 1, S] in the `shape` of the value."""
        rows = positions if self.batch is not None else positions[0]
        if self.batch is not None and self.batch > self.tokens:
            rows = rows.T
        return rows.reshape(list(shape))

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """The positions [B or 1, S] of the value."""
        if self.batch is None:
            return value.reshape(1, -1)
        rows, tokens = value.shape[self.batch], value.shape[self.tokens]
        if self.batch > self.tokens:
            return value.reshape(tokens, rows).T
        return value.reshape(rows, tokens)


@attrs.define(kw_only=True)
class Candidates:
    """The values that may hold the positions, the likeliest first. `by_length`: lengths decide angles of other values
    too."""

    sources: list[PositionSource] = attrs.field(factory=list)
    by_length: bool = False


def candidates(view: View, sources: Sequence[AngleSource]) -> Candidates:
    """The values that may hold the positions of these cosines and sines: whole numbers first, then the nearest
    first."""
    rows = [None if one.batch is None else view.probe.shape(one.value)[one.batch] for one in sources]
    tokens = view.probe.shape(sources[0].value)[sources[0].tokens]
    batch = next((count for count in rows if count is not None), None)
    values = [source.value for source in sources]
    found, floats = Candidates(), list[PositionSource]()
    for one in _above(view, values):
        source = _source(view, one, batch, tokens)
        lengths = None if source is None else _followed(view, values, source)
        found.by_length |= lengths is False
        if source is None or not isinstance(lengths, Lengths):
            continue
        source = attrs.evolve(source, whole=lengths.whole)
        if not view.probe.dtype(one).is_floating_point:
            found.sources.append(source)
        elif _is_whole(view, one) and view.dtypes([one]).get(one.name or "") in _WIDE:
            floats.append(source)
    found.sources += floats
    return found


def _is_whole(view: View, value: ir.Value) -> bool:
    """Whether floating-point numbers are whole on all inputs: computed from whole ones without a division."""
    pending, seen = [value], {value}
    while pending:
        one = pending.pop()
        node = one.producer()
        if not view.probe.dtype(one).is_floating_point or (node is not None and node.op_type in _ROUNDING):
            continue
        if one in view.probe.fixed:
            numbers = view.probe.get(one)
            if not bool((numbers == numbers.round()).all()):
                return False
            continue
        if node is None or node.op_type not in _WHOLE:
            return False
        new = {source for source in node.inputs if source is not None} - seen
        seen |= new
        pending += new
    return True


def _source(view: View, value: ir.Value, batch: int | None, tokens: int) -> PositionSource | None:
    """How a value holds a number for each token of each row; None if it doesn't."""
    try:
        held = view.probe.get(value)
    except Exception:  # a constant of a kind without a tensor
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
    return PositionSource(value=value, batch=others[0] if others else None, tokens=by_token[-1], rank=held.dim())


def _followed(view: View, values: Sequence[ir.Value], positions: PositionSource) -> Lengths | bool | None:
    """What lengths do above these values, if all that these know about their tokens is the positions.

    False if lengths decide the values too. None if something else does, such as the numbers of other inputs of the
    graph.
    """
    above = _above(view, values, positions.value)
    if len(above) >= _STEPS:
        return None
    lengths, decided = Lengths(view), False
    followed = Followed(view.probe.shapes, lengths, positions.value, positions.batch, positions.tokens)
    for value in sorted(above, key=view.flow.depth):
        node = value.producer()
        if value is positions.value:
            continue
        if node is None:
            return None
        inputs = {*values_read(node)}
        if node.op_type not in LENGTHS and followed.values & inputs:
            numbers = lengths.read(node, followed.values)
            by_length = {one for one in numbers if lengths.decide(one)}
            decided |= bool(by_length)
            if not followed.may_meet(node, {*numbers} - by_length) or not followed.follows(node):
                return None
            continue
        if node.op_type not in LENGTHS and view.flow.content & inputs:
            return None
        lengths.tell(value)
    if not followed.values.issuperset(values):
        return None
    return lengths if not decided else False


def _above(view: View, values: Sequence[ir.Value], stop: ir.Value | None = None) -> list[ir.Value]:
    """The numbers that values are computed from, the nearest first.

    Constants and values with features are left out, and so is what is only above `stop`.
    """
    seen = dict.fromkeys(values)
    pending = [*values]
    while pending and len(seen) < _STEPS:
        value = pending.pop(0)
        node = value.producer()
        if node is None or value is stop or (stop is not None and node.op_type in LENGTHS):
            continue
        for source in values_read(node):
            if source in view.flow.content or source in view.flow.constant:
                continue
            if source not in seen:
                seen[source] = None
                pending.append(source)
    return list(seen)
