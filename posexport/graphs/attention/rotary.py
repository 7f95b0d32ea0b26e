"""Rotary position embeddings between two values of any graph, found by probing (Su et al. 2021, arXiv:2104.09864).

    (a, b) -> (a cos - b sin, a sin + b cos) for pairs of features of each head

The pairs are (i, i + P) (half), (2i, 2i + 1) (interleaved), or halves of runs of features. For each pairing, the
cosines and sines of every token are computed from two probes and must explain both. The angles are then looked for
among the values that the nodes in between read. These values are still computed by the same nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.attention.absorbed import loses_digits
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.layouts import FLAT, Layout, Sizes, layouts_of, packed_layouts
from posexport.graphs.attention.other_angles import other_angles
from posexport.graphs.attention.pairings import Pairs, pairings
from posexport.graphs.attention.probe import Probe
from posexport.graphs.symbolic_sizes import ONE

MOST_PARTS = 4
"""The most values that together hold the cosines or sines of a rotation."""

MOST_AXES = 3
"""The most axes that together are the tokens of a picture or of a film."""

_TOLERANCE = 1e-9
"""The largest error of a cosine or sine that was solved for."""


MISSES = 6
"""The most values that may fail in a row before the search ends. Views with more axes lie between other values."""

BARRIERS = {
    *("MatMul", "Gemm", "Einsum", "FusedMatMul", "Conv", "Softmax", "LayerNormalization", "RMSNormalization"),
    *("SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Attention"),
    *(
        "MultiHeadAttention",
        "GroupQueryAttention",
        "ReduceMean",
        "Gather",
        "MatMulInteger",
        "Sqrt",
        "Pow",
        "Loop",
        "If",
    ),
}
"""Operators above which no value has the same numbers in another layout."""


@attrs.frozen(kw_only=True)
class AngleSource:
    """Cosines or sines [B or 1, S, P]: the elements `indices` on the axis `features` of a value of the graph.

    `batch` and `tokens` are its other axes. `batch` is None if the value is the same for all rows. `sign` is -1 if it
    holds the negative numbers. The first `prefix` tokens have no angles in it: they are not rotated. If several values
    hold the angles, `rest` has those of the following pairs. If the last axes hold a matrix for each angle, `corner` is
    the place in it. The tokens of a picture may be several axes: `grid` of them from `tokens` on.
    """

    value: ir.Value
    batch: int | None
    tokens: int
    features: int
    indices: tuple[int, ...]
    sign: int
    prefix: int
    rest: AngleSource | None = None
    corner: tuple[int, ...] = ()
    grid: int = 1

    @property
    def axes(self) -> list[int]:
        """The axes of rows, tokens and features, without rows if there is no such axis."""
        tokens = range(self.tokens, self.tokens + self.grid)
        return [*(() if self.batch is None else (self.batch,)), *tokens, self.features]

    def by_token(self, value: torch.Tensor) -> torch.Tensor:
        """A value that holds cosines or sines, brought to [B or 1, S, F]."""
        dropped = [axis for axis in range(value.dim()) if axis not in self.axes]
        rows = 1 if self.batch is None else value.shape[self.batch]
        return value.permute([*dropped, *self.axes]).reshape(rows, -1, value.shape[self.features])

    def read(self, values: Mapping[ir.Value, torch.Tensor], still: float) -> torch.Tensor:
        """The cosines or sines [B or 1, S, P] that `values` hold, with `still` for tokens that are not rotated."""
        parts = []
        for part in self.parts:
            read = part.sign * part.by_token(_at(values[part.value], part.corner))[..., list(part.indices)]
            first = torch.full((read.shape[0], part.prefix, read.shape[2]), still, dtype=read.dtype)
            parts.append(torch.cat([first, read], 1))
        rows = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(rows, -1, -1) for part in parts], -1)

    @property
    def parts(self) -> tuple[AngleSource, ...]:
        """The sources of all pairs, in their order."""
        return (self, *(() if self.rest is None else self.rest.parts))


@attrs.frozen(kw_only=True)
class Rotary:
    """A rotation of `source`, which has the layout `layout`. Its result is `target`.

    `solved` are its cosines and sines [B, S, P] on the probe's inputs.
    """

    source: ir.Value
    target: ir.Value
    layout: Layout
    pairs: Pairs
    cos: AngleSource
    sin: AngleSource
    solved: tuple[torch.Tensor, torch.Tensor] = attrs.field(eq=False, repr=False)

    @property
    def angle_values(self) -> list[ir.Value]:
        """The values that hold its cosines and sines."""
        return [part.value for source in (self.cos, self.sin) for part in source.parts]

    @property
    def in_columns(self) -> bool:
        """Whether one value has all cosines in columns, with one row for each token, and one value all sines."""
        return not any(one.rest is not None or one.corner or one.grid > 1 for one in (self.cos, self.sin))


def farthest_rotation(
    flow: Dataflow, probe: Probe, target: ir.Value, layout: Layout, sizes: Sizes
) -> tuple[Rotary | None, bool]:
    """The rotation to `target` that begins farthest up, and whether there is any, even one with unknown angles."""
    best: Rotary | None = None
    rotates = False
    misses = 0
    above = flow.dominators(target)
    next(above)
    node = target.producer()
    if node is None or _is_barrier(flow, probe, node):
        return None, False
    for value in above:
        if math.prod(probe.shape(value)) == math.prod(probe.shape(target)):
            found, is_one = rotation_of(flow, probe, value, target, layout, sizes)
            rotates |= is_one
            best, misses = (found, 0) if found is not None else (best, misses + 1)
        else:
            misses += 1
        node = value.producer()
        if misses > MISSES or node is None or _is_barrier(flow, probe, node):
            break
    return best, rotates


def _is_barrier(flow: Dataflow, probe: Probe, node: ir.Node) -> bool:
    """Whether no rotation begins above a node. One may begin above a product with a matrix for each angle."""
    others = [value for value in node.inputs if value is not None and value not in flow.content]
    rotates = node.op_type in ("MatMul", "Einsum") and len(others) == 1 and probe.shape(others[0])[-2:] == (2, 2)
    return node.op_type in BARRIERS and not rotates


def rotation_of(
    flow: Dataflow, probe: Probe, source: ir.Value, target: ir.Value, layout: Layout, sizes: Sizes
) -> tuple[Rotary | None, bool]:
    """The rotation from `source` to `target`, which has the layout `layout` with `sizes`, and whether there is one.

    The result is (None, True) if the cosines or sines of a rotation are not values of the graph.
    """
    draws = [probe.random_like(source) for _ in range(2)]
    moved = [layout.to_heads(probe.through(source, [target], draw)[0], sizes) for draw in draws]
    rotates = False
    shape = tuple(draws[0].shape)
    packed = [one for one, own in packed_layouts(shape, sizes[0], sizes[2]) if own == sizes]
    for source_layout in [*layouts_of(shape, sizes), *packed]:
        if source_layout.groups == FLAT:
            continue
        still = [source_layout.to_heads(draw, sizes) for draw in draws]

        def run(zeros: Sequence[int], source_layout: Layout = source_layout) -> torch.Tensor:
            draw = probe.random_like(source)
            source_layout.to_heads(draw, sizes)[..., list(zeros)] = 0  # a view
            return layout.to_heads(probe.through(source, [target], draw)[0], sizes)

        for pairs in pairings(still, moved, run):
            solved = _solve(still, moved, pairs)
            if solved is None or float(solved[1].abs().max()) <= _TOLERANCE:  # without sines, it is only a factor
                continue
            fixed = _fixed_tokens(*solved)
            angles = [_find(flow, probe, source, target, one, sizes, fixed) for one in solved]
            rotates = True
            if angles[0] is None or angles[1] is None:
                continue
            found = Rotary(
                source=source,
                target=target,
                layout=source_layout,
                pairs=pairs,
                cos=angles[0],
                sin=angles[1],
                solved=solved,
            )
            if _turns_always(flow, probe, found, layout, sizes):
                return found, True
    return None, rotates


def _turns_always(flow: Dataflow, probe: Probe, rotary: Rotary, layout: Layout, sizes: Sizes) -> bool:
    """Whether the cosines and sines that were found also explain what the graph does with other angles."""
    nodes = flow.between(rotary.source, rotary.target)
    others = other_angles(flow, probe, nodes)
    if others is None or loses_digits(flow, rotary.source, rotary.target):
        return False
    replaced, arithmetic = others
    features = probe.random_like(rotary.source)
    wanted = dict.fromkeys([rotary.target, *rotary.angle_values])
    results = probe.replaced({**replaced, rotary.source: features}, [*wanted], {*nodes, *arithmetic})
    values = dict(zip(wanted, results, strict=True))
    turned = rotary.pairs.turned(
        rotary.layout.to_heads(features, sizes), rotary.cos.read(values, 1.0), rotary.sin.read(values, 0.0)
    )
    actual = layout.to_heads(values[rotary.target], sizes)
    return float((turned - actual).abs().max()) <= _TOLERANCE * max(float(actual.abs().max()), 1.0)


def _solve(
    still: list[torch.Tensor], moved: list[torch.Tensor], pairs: Pairs
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines [B, S, P] that rotate `still` to `moved`, both [B, H, S, D] per probe; None if none do."""
    sources, results = pairs.indices(), pairs.results()
    norm = cos = sin = torch.zeros(())
    for before, after in zip(still, moved, strict=True):
        (a, b), (c, d) = _both(before, sources), _both(after, results)
        norm = norm + (a * a + b * b).sum(1)
        cos = cos + (c * a + d * b).sum(1)
        sin = sin + (d * a - c * b).sum(1)
    cos, sin = cos / norm, sin / norm
    for before, after in zip(still, moved, strict=True):
        if float((pairs.turned(before, cos, sin) - after).abs().max()) > _TOLERANCE * float(after.abs().max()):
            return None
    return cos, sin


def _both(heads: torch.Tensor, features: tuple[list[int], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return heads[..., features[0]], heads[..., features[1]]


def _fixed_tokens(cos: torch.Tensor, sin: torch.Tensor) -> int:
    """How many of the first tokens are not rotated in any row."""
    still = ((cos - 1.0).abs().amax((0, 2)) <= _TOLERANCE) & (sin.abs().amax((0, 2)) <= _TOLERANCE)
    return int(still.long().cumprod(0).sum())


def _find(
    flow: Dataflow, probe: Probe, source: ir.Value, target: ir.Value, angles: torch.Tensor, sizes: Sizes, fixed: int
) -> AngleSource | None:
    """Where the graph holds cosines or sines [B, S, P], among what the nodes in between read besides content."""
    values = {
        value: None
        for node in flow.between(source, target)
        for value in node.inputs
        if value is not None and value not in flow.content
    }
    for value in values:
        for prefix in range(fixed + 1):
            found = _match(probe, value, angles[:, prefix:], prefix, (sizes[0], sizes[2] - prefix))
            if found is not None:
                return found
    return _find_parts(probe, values, angles, (sizes[0], sizes[2]))


def _find_parts(
    probe: Probe, values: Iterable[ir.Value], angles: torch.Tensor, sizes: tuple[int, int]
) -> AngleSource | None:
    """Cosines or sines [B, S, P] that up to MOST_PARTS values hold, each for consecutive pairs."""
    parts, first, pairs = list[AngleSource](), 0, angles.shape[-1]
    while first < pairs:
        found, last = None, first
        for value in values:
            while last < pairs:
                more = _match(probe, value, angles[..., first : last + 1], 0, sizes)
                if more is None:
                    break
                found, last = more, last + 1
        if found is None or len(parts) == MOST_PARTS:
            return None
        parts, first = [*parts, found], last
    whole: AngleSource | None = None
    for part in reversed(parts):
        whole = attrs.evolve(part, rest=whole)
    return whole


def _match(
    probe: Probe, value: ir.Value, angles: torch.Tensor, prefix: int, sizes: tuple[int, int]
) -> AngleSource | None:
    """How a value holds the angles. Each axis is tried as that of features, and each place in matrices."""
    array = probe.get(value)
    if not array.is_floating_point() or array.numel() <= 1:
        return None
    if any(dim == 1 and size != ONE for dim, size in zip(array.shape, probe.shapes.of(value), strict=True)):
        return None  # an axis that is longer on other inputs
    found = _match_axes(value, array, angles, prefix, sizes)
    for axes in (1, 2):
        if found is None and array.dim() >= 2 + axes and {*array.shape[-axes:]} == {2}:
            for corner in product(range(2), repeat=axes):
                found = found or _match_axes(value, _at(array, corner), angles, prefix, sizes, corner)
    return found or _match_grid(value, array, angles, prefix, sizes)


def _match_grid(
    value: ir.Value, array: torch.Tensor, angles: torch.Tensor, prefix: int, sizes: tuple[int, int]
) -> AngleSource | None:
    """How a value holds the angles if its tokens are adjacent axes, such as the rows and columns of a picture."""
    for first, count in product(range(array.dim() - 1), range(2, MOST_AXES + 1)):
        grid = array.shape[first : first + count]
        if len(grid) < count or min(grid) < 2 or math.prod(grid) != sizes[1]:
            continue
        found = _match_axes(value, array.flatten(first, first + count - 1), angles, prefix, sizes)
        if found is not None and found.tokens == first:
            batch, features = (
                axis if axis is None or axis < first else axis + count - 1 for axis in (found.batch, found.features)
            )
            assert features is not None
            return attrs.evolve(found, batch=batch, features=features, grid=count)
    return None


def _at(array: torch.Tensor, corner: Sequence[int]) -> torch.Tensor:
    """The part of a tensor at these places of its last axes."""
    for place in reversed(corner):
        array = array[..., place]
    return array


def _match_axes(
    value: ir.Value,
    array: torch.Tensor,
    angles: torch.Tensor,
    prefix: int,
    sizes: tuple[int, int],
    corner: tuple[int, ...] = (),
) -> AngleSource | None:
    batch, tokens = sizes
    for features in reversed(range(array.dim())):
        if array.shape[features] < 2 and angles.shape[-1] > 1:
            continue
        others = [axis for axis in range(array.dim()) if axis != features and array.shape[axis] > 1]
        by_tokens = [axis for axis in range(array.dim()) if axis != features and array.shape[axis] == tokens]
        if not by_tokens or len({*others, by_tokens[-1]}) > 2:
            continue
        token_axis = by_tokens[-1]
        batch_axes = [axis for axis in others if axis != token_axis]
        if batch_axes and array.shape[batch_axes[0]] != batch:
            continue
        order = [*batch_axes, token_axis, features]
        dropped = [axis for axis in range(array.dim()) if axis not in order]
        flat = array.permute([*dropped, *order]).reshape([array.shape[axis] for axis in order])
        flat = flat if batch_axes else flat.unsqueeze(0)
        for sign in (1, -1):
            far = (flat.unsqueeze(-1) - sign * angles.unsqueeze(-2)).abs().amax((0, 1))  # [F, P]
            if float(far.amin(0).max()) <= _TOLERANCE:
                return AngleSource(
                    value=value,
                    batch=batch_axes[0] if batch_axes else None,
                    tokens=token_axis,
                    features=features,
                    indices=_regular(far <= _TOLERANCE, far.argmin(0)),
                    sign=sign,
                    prefix=prefix,
                    corner=corner,
                )
    return None


def _regular(matches: torch.Tensor, nearest: torch.Tensor) -> tuple[int, ...]:
    """The indices of matching features [F, P], evenly spaced if possible, so that a Slice can give them."""
    count = matches.shape[1]
    for step in (1, 2):
        for start in range(matches.shape[0] - step * (count - 1)):
            places = torch.arange(count) * step + start
            if bool(matches[places, torch.arange(count)].all()):
                return tuple(places.tolist())
    return tuple(nearest.tolist())
