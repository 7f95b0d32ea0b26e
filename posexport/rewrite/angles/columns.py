"""Which pair's cosine or sine each feature of a value is, so that the value can be computed from those of all pairs.

Graphs arrange cosines and sines for the rotation that they write: each of the P twice, as two halves or alternating,
some negative, or both in one value. Each feature is compared with all of them at positions that are put into the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from posexport.graphs.attention.rotary import AngleSource
from posexport.rewrite.angles.parameters import ExactAngles

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]
    Whole = np.ndarray[Any, np.dtype[np.int64]]

_BLOCK = 64
"""The number of features that are compared at a time."""


@attrs.frozen(kw_only=True)
class Columns:
    """For each feature of a value: its pair, whether it is the sine of the pair, and whether it is negated."""

    pairs: tuple[int, ...]
    sines: tuple[bool, ...]
    negative: tuple[bool, ...]

    def of(self, cos: Array, sin: Array) -> Array:
        """The features [..., F] made from cosines and sines [..., P]."""
        pairs = list(self.pairs)
        chosen = np.where(np.asarray(self.sines), sin[..., pairs], cos[..., pairs])
        return np.asarray(np.where(np.asarray(self.negative), -chosen, chosen))

    def misfit(self, value: Array, cos: Array, sin: Array, tolerance: Array) -> float:
        """How far a value [n, F] is from these features at most, as a multiple of tolerances [n, P]."""
        return float((np.abs(value - self.of(cos, sin)) / tolerance[:, list(self.pairs)]).max(initial=0.0))


def columns_of(values: list[Array], exact: ExactAngles, positions: Whole) -> tuple[Columns, ...] | float:
    """The columns of values [n, F] at positions [n]; or, if they differ, by how many times what rounding explains.

    Two values with equally many features have the same pairs: so the sine of a slow pair is known even if its cosine is
    1 everywhere.
    """
    parts = [_misfits(value, exact, positions) for value in values]
    joint = len(values) == 2 and parts[0].shape == parts[1].shape and _is_of_one_kind(parts[0], parts[1])
    together = [parts[0].min(0) + parts[1].min(0)] * 2 if joint else [part.min(0) for part in parts]
    found, worst = list[Columns](), 0.0
    for part, misfits in zip(parts, together, strict=True):
        pairs = misfits.argmin(1)
        own = part[:, np.arange(len(pairs)), pairs]  # [4, F]
        kinds = own.argmin(0)
        worst = max(worst, float(own.min(0).max()))
        found.append(
            Columns(
                pairs=tuple(pairs.tolist()),
                sines=tuple((kinds >= 2).tolist()),
                negative=tuple((kinds % 2 == 1).tolist()),
            )
        )
    return tuple(found) if worst <= 1.0 else worst


def _misfits(value: Array, exact: ExactAngles, positions: Whole) -> Array:
    """[4, F, P]: how far features are from cosines, negative cosines, sines and negative sines, as a multiple of
    tolerances."""
    cos, sin = exact.cos_sin(positions)
    tolerance = exact.tolerance(positions)
    parts = []
    for start in range(0, value.shape[1], _BLOCK):
        features = value[:, start : start + _BLOCK, None]
        parts.append(
            np.stack([(np.abs(features - one[:, None]) / tolerance[:, None]).max(0) for one in (cos, -cos, sin, -sin)])
        )
    return np.asarray(np.nan_to_num(np.concatenate(parts, 1), nan=np.inf))


def _is_of_one_kind(first: Array, second: Array) -> bool:
    """Whether one value has cosines and the other sines."""
    kinds = [set((part.min(2).argmin(0) // 2).tolist()) for part in (first, second)]
    return kinds == [{0}, {1}]


def as_in(source: AngleSource, features: torch.Tensor, rank: int) -> torch.Tensor:
    """[B or 1, S, F] laid out like the value with `rank` axes."""
    kept = source.axes
    flat = features if source.batch is not None else features[0]
    flat = flat.permute([kept.index(axis) for axis in sorted(kept)])
    for axis in (axis for axis in range(rank) if axis not in kept):
        flat = flat.unsqueeze(axis)
    return flat
