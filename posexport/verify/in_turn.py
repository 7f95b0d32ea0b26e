"""Kinds of values and of positions that drafts without a special kind take in turn.

A fault may need large or small values and a long row, or a position below zero and any size. So each kind of values is
in some long rows, and negative positions are in rows, lengths and caches of every size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from posexport.spec.spec import Spec
from posexport.verify.draft import Draft
from posexport.verify.values import SIZES

LONG_VALUES = ("loud", "outlier", "quiet", *SIZES, "aligned", "shifted", "peaks")
"""The kinds of values of long rows, besides normal ones and those that lengths have anyway."""

LONG = 200
"""Rows of so many tokens are long."""

NEGATIVE = 3
"""One in so many drafts with positions near zero has negative ones, if they have a meaning."""


def long_values(rng: np.random.Generator, drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts. The longest keeps normal values; of the other long ones with normal values, every second gets another
    kind, so that the rows of each kind are as long as possible."""
    made, kinds = list(drafts), itertools.cycle(rng.permutation(LONG_VALUES).tolist())
    normal = [at for at, draft in enumerate(made) if draft.values == "normal" and draft.seq >= LONG]
    for at in sorted(normal, key=lambda at: -made[at].seq)[1::2]:
        made[at] = attrs.evolve(made[at], values=next(kinds))
    return made


def with_negative(spec: Spec, drafts: Iterator[Draft]) -> Iterator[Draft]:
    """The drafts, some of those near position zero below it, if the encoding has negative positions."""
    turns = itertools.cycle([True] + [False] * (NEGATIVE - 1))
    for draft in drafts:
        if spec.negative_positions and draft.positions == "near" and next(turns):
            draft = attrs.evolve(draft, positions="negative")
        yield draft
