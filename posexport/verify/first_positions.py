"""The first positions of rows, for artifacts whose positions are consecutive by promise.

A set of inputs has the kinds of posexport.verify.positions. Such an artifact takes only the first position of each row.
It is moved so that the positions of all new tokens lie within the limit.
"""

from __future__ import annotations

import numpy as np

from posexport.spec.arrays import Array
from posexport.spec.spec import Spec
from posexport.verify.positions import At, position_end, position_ids

NOTE = "only consecutive positions were tried, as its spec promises"
"""What verdicts say of such an artifact."""

LONG = 200
"""Rows of so many tokens begin far out with the kind "far". There are few of them, and a single token of this kind is
more often near than far."""


def first_positions(kind: str | At, rng: np.random.Generator, places: Array, new: Array, spec: Spec) -> Array:
    """int64 [batch, 1], for new tokens with these places [batch, seq] in their rows.

    bool `new` [batch, seq] is false for new tokens that are padding. With the kind "consecutive", in every second row
    the first token that is not padding has its own place as its position: if the row begins with padding, it begins
    below zero.
    """
    if kind == "far" and places.shape[1] >= LONG:
        kind = "far row"
    first = position_ids(kind, rng, places, spec)[:, :1]
    if kind == "consecutive":
        padding = np.where(new.all(1), 0, new.argmin(1))
        first[::2, 0] -= padding[::2]
    seq, limit = places.shape[1], position_end(spec)
    if spec.ordered and spec.dtype != "fp32":  # as in position_ids
        limit //= 3
    lowest = 1 - limit if spec.negative_positions else 0
    return np.clip(first, lowest, max(limit - seq, 0)).astype(np.int64)
