"""The axes of scores between their product and their softmax, if they differ from rows, heads, queries, keys.

    [B, S, N, T], or with heads and queries as one axis: [B, N*S, T] and [B, S*N, T]; keys before queries: [B, N, T, S];
    heads before rows: [N, B, S, T]

Multi-query attention that folds heads into tokens adds its mask and takes its softmax in such a layout. A graph may
also transpose its scores in any way before the softmax. Axes are groups of the letters b rows, h heads, s queries, t
keys. An empty tuple means the usual axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import permutations

import onnx_ir as ir
import torch

from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.products import SCORES, Product

ScoreAxes = tuple[str, ...]

USUAL: ScoreAxes = ()

KEYS_FIRST: ScoreAxes = ("b", "h", "t", "s")
"""The axes of scores whose keys come before their queries."""

_FOLDED: tuple[ScoreAxes, ...] = (("b", "s", "h", "t"), ("b", "hs", "t"), ("b", "sh", "t"))
_FOLDED += tuple((*axes[:1], "", *axes[1:]) for axes in _FOLDED[1:])
_FOLDED += (KEYS_FIRST, ("h", "b", "s", "t"))
_FOLDED += tuple(order for order in permutations("bhst") if order not in _FOLDED)
"""Axes of scores, the usual ones first. An empty group is an axis of size 1."""

MOVES = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose")
"""Operators that change the layout of scores."""


def score_axes(probe: Probe, product: Product, nodes: Iterable[ir.Node]) -> dict[ir.Value, ScoreAxes]:
    """The axes of each value between the product and the softmax, for values whose axes are not the usual ones.

    `nodes` are the nodes in between, the last one first.
    """
    shape, letters = probe.shape(product.result), product.axes[2]
    moves, is_usual = [*nodes][::-1], letters == SCORES[2]
    if len(shape) != 4 or (is_usual and not any(node.op_type in MOVES for node in moves)):
        return {}
    current = torch.arange(math.prod(shape)).reshape(shape)
    numbers = current.permute([letters.index(letter) for letter in SCORES[2]])
    found: dict[ir.Value, ScoreAxes] = {} if is_usual else {product.result: tuple(letters)}
    for node in moves:
        after = probe.shape(node.outputs[0])
        if node.op_type == "Transpose":
            perm = node.attributes.get("perm")
            current = current.permute([*reversed(range(current.dim()))] if perm is None else [*perm.as_ints()])
        elif node.op_type in MOVES and math.prod(after) == current.numel():
            current = current.reshape(after)
        if current.shape != after:
            return found  # what follows has another layout, or is broadcast
        if not torch.equal(current, numbers):
            named = [axes for axes in _FOLDED if torch.equal(_laid_out(numbers, axes), current)]
            found[node.outputs[0]] = named[0] if named else USUAL
    return found


def turned(axes: ScoreAxes) -> ScoreAxes | None:
    """The axes with queries and keys exchanged; None if they are not four separate axes."""
    if axes == USUAL:
        return KEYS_FIRST
    if len(axes) != 4 or any(len(group) != 1 for group in axes):
        return None
    exchanged = tuple({"s": "t", "t": "s"}.get(letter, letter) for letter in axes)
    return USUAL if exchanged == tuple("bhst") else exchanged


def by_query(value: torch.Tensor, axes: ScoreAxes, heads: int) -> torch.Tensor:
    """Scores, or a value that is broadcast to them, as [B or 1, N or 1, S or 1, T or 1]."""
    if axes == USUAL:
        return value
    value = value[(None,) * (len(axes) - value.dim())]
    letters = ""
    for group in axes:
        at = len(letters)
        if group == "":
            value = value.squeeze(at)
        elif len(group) == 2:
            size = value.shape[at]
            split = (1, 1) if size == 1 else (heads, size // heads) if group == "hs" else (size // heads, heads)
            value = value.reshape(*value.shape[:at], *split, *value.shape[at + 1 :])
        letters += group
    return value.permute([letters.index(letter) for letter in "bhst"])


def queries_of(shape: tuple[int, ...], axes: ScoreAxes, heads: int) -> int:
    """The number of queries in scores of this shape."""
    for group, size in zip(axes, shape, strict=False):
        if "s" in group:
            return size // heads if "h" in group else size
    return shape[-2]


def _laid_out(numbers: torch.Tensor, axes: ScoreAxes) -> torch.Tensor:
    """Scores [B, N, S, T] laid out in these axes."""
    sizes = dict(zip("bhst", numbers.shape, strict=True))
    moved = numbers.permute(["bhst".index(letter) for letter in "".join(axes)])
    return moved.reshape([math.prod(sizes[letter] for letter in group) for group in axes])
