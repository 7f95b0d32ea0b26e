"""How a value lays out the heads of attention, found from its numbers: `b s (h d)`, `b h s d`, `(b h) s d`, ...

Random numbers replace a value. What then arrives at the product of attention is compared with every way of arranging
them as [batch, heads, tokens, features]. So chains of Transpose and Reshape need no analysis, and none is misread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

import attrs
import torch

EXACT = 1e-10
"""The largest difference, relative to the largest value, between float64 numbers that count as equal."""

Sizes = tuple[int, int, int, int]
"""Batch, heads, tokens, features."""


@attrs.frozen
class Layout:
    """A layout of the four axes. Each group of letters is one axis of the value.

    The heads may be two axes: `g` has `parts` elements, such as queries and keys, with the heads `h` of one each.
    """

    groups: tuple[str, ...]
    parts: int = 1

    def __str__(self) -> str:
        return " ".join(group if len(group) == 1 else f"({' '.join(group)})" for group in self.groups)

    @property
    def order(self) -> str:
        """The four axes in memory order."""
        return "".join(self.groups)

    def to_heads(self, value: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """The value as [batch, heads, tokens, features]."""
        named = dict(zip("bhsd", sizes, strict=True))
        if "g" not in self.order:
            split = value.reshape([named[letter] for letter in self.order])
            return split.permute([self.order.index(letter) for letter in "bhsd"])
        named |= {"g": self.parts, "h": sizes[1] // self.parts}
        split = value.reshape([named[letter] for letter in self.order])
        return split.permute([self.order.index(letter) for letter in "bghsd"]).flatten(1, 2)


def has_groups(shape: Sequence[int], heads: int) -> bool:
    """Whether scores of this shape have two axes of heads: the key heads, and the query heads that share each."""
    return len(shape) == 5 and shape[2] != heads and shape[1] * shape[2] == heads


def layouts_of(shape: tuple[int, ...], sizes: Sizes) -> Iterator[Layout]:
    """Every layout of these sizes that has this shape, the usual ones first."""
    named = dict(zip("bhsd", sizes, strict=True))
    for layout in _LAYOUTS.get(len(shape), ()):
        dims = [math.prod(named[letter] for letter in group) for group in layout.groups]
        if dims == [*shape]:
            yield layout


def packed_layouts(shape: tuple[int, ...], rows: int, tokens: int) -> Iterator[tuple[Layout, Sizes]]:
    """The layouts of a value with two axes of heads before its features, such as [B, S, 3, N, D], and their sizes."""
    if len(shape) != 5:
        return
    for order in permutations("bghs"):
        sizes = dict(zip((*order, "d"), shape, strict=True))
        if order.index("g") < order.index("h") and (sizes["b"], sizes["s"]) == (rows, tokens):
            layout = Layout((*order, "d"), sizes["g"])
            yield layout, (rows, sizes["g"] * sizes["h"], tokens, sizes["d"])


def _is_used(layout: Layout) -> bool:
    """Whether axes are merged in a way that occurs in graphs and can be undone without knowing a length."""
    merged = [at for at, group in enumerate(layout.groups) if len(group) > 1]
    if not merged or layout.groups == FLAT:
        return True
    after = len(layout.groups) - merged[0] - 1
    names = layout.groups[merged[0]]
    return len(merged) == 1 and (names == "bh" or (names == "hd" and after <= 1))


FLAT = ("bs", "hd")
"""The layout in which rows and tokens are one axis."""


def _cuts(length: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The places where a row of `length` is cut into `parts`."""
    if parts == 1:
        yield ()
        return
    for first in range(1, length - parts + 2):
        for others in _cuts(length - first, parts - 1):
            yield (first, *(first + other for other in others))


def _layouts() -> dict[int, tuple[Layout, ...]]:
    """The layouts by rank."""
    usual = [Layout(groups) for groups in (("b", "s", "hd"), ("b", "s", "h", "d"), ("b", "h", "s", "d"))]
    found: dict[int, tuple[Layout, ...]] = {}
    for rank in (2, 3, 4):
        cuts = [(0, *places, 4) for places in _cuts(4, rank)]
        layouts = [
            Layout(tuple("".join(order[a:b]) for a, b in pairwise(places)))
            for order in permutations("bhsd")
            for places in cuts
        ]
        found[rank] = tuple(sorted(filter(_is_used, layouts), key=lambda layout: layout not in usual))
    return found


_LAYOUTS = _layouts()


def factor(target: torch.Tensor, source: torch.Tensor) -> float | None:
    """The number c with target = c * source; None if there is none.

    The number is rounded to one that graphs have (`snapped`); None if it is near none of these.
    """
    if target.shape != source.shape or not torch.isfinite(target).all():
        return None
    norm = float((source * source).sum())
    ratio = float((target * source).sum()) / norm if norm else 0.0
    limit = EXACT * max(float(target.abs().max()), 1e-30)
    return snapped(ratio) if ratio and float((target - ratio * source).abs().max()) <= limit else None


def snapped(number: float) -> float | None:
    """The number near `number` that a graph may have; None if there is none.

    Such numbers are float32 numbers, their inverses, and the second and fourth roots of both. They may differ from
    `number` by rounding errors of float64. torch multiplies queries and keys by the root of their scale each, and
    computes a scale as the root of 1 / size.
    """
    for power in (1, 2, 4):
        whole = abs(number) ** power
        part = _float32(1.0 / whole) if whole else 0.0
        for one in (_float32(whole), 1.0 / part if part else 0.0):
            candidate = math.copysign(one ** (1.0 / power), number)
            if math.isfinite(candidate) and abs(candidate - number) <= ROUNDING * abs(number):
                return candidate
    return None


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


ROUNDING = 1e-12


def repeated(heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, K, T, D] as [B, N, T, D]: each key head N / K times in a row, for the query heads that read it."""
    return heads.repeat_interleave(num_heads // heads.shape[1], 1)
