"""Which keys of each row are seen, where its new tokens are among them, and which positions tokens have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.spec.arrays import Array

FAR, FARTHEST = 2**15, 2**20
"""The limits of far and of the farthest positions, unless a table ends earlier."""

OFFSET = 300
"""The limit of the first position of rows whose positions don't begin at 0."""


def places_of(begins: Array, sizes: Mapping[str, int]) -> Array:
    """The places of the new tokens among the keys of their rows [batch, seq]."""
    return begins[:, None] + np.arange(sizes[SEQ])


def _mask_left(rng: np.random.Generator, total: int, past: int) -> Array:
    return np.arange(total) >= rng.integers(1, max(total * 2 // 3, 2))


def _mask_right(rng: np.random.Generator, total: int, past: int) -> Array:
    """Padding at the end of the cached tokens, as after padded prompts, or of the row if nothing is cached."""
    end, index = past or total, np.arange(total)
    return (index < end - rng.integers(1, max(end * 2 // 3, 2))) | (index >= end)


def _mask_holes(rng: np.random.Generator, total: int, past: int) -> Array:
    return np.asarray(rng.random(total) < 0.7)


PADDING: Mapping[str, Callable[[np.random.Generator, int, int], Array]] = {
    "none": lambda rng, total, past: np.ones(total, bool),
    "left": _mask_left,
    "right": _mask_right,
    "holes": _mask_holes,
}
"""(generator, keys of a row, cached keys among them) to bool [keys], False for padding.

With "mixed", rows use these kinds in turn.
"""


ALIKE = 0.15
"""The share of padded batches whose rows all have the same padding, as the beams of one prompt do."""


def keys_of(kind: str, rng: np.random.Generator, sizes: Mapping[str, int], whole: int | None = None) -> Array:
    """bool [batch, past + seq]: which keys are seen. Each row has at least one visible key among its new tokens.

    In a batch with padding, there are three cases. One row has no padding: the row `whole` or any. Or all rows may have
    padding. Or all rows have the same padding.
    """
    past, total, batch = sizes[PAST], sizes[PAST] + sizes[SEQ], sizes[BATCH]
    kinds = [kind] if kind != "mixed" else list(PADDING)
    if kind == "mixed" and whole is None:
        kinds = np.roll(kinds, int(rng.integers(len(kinds)))).tolist()
    rows = []
    for row in range(batch):
        keys = PADDING[kinds[row % len(kinds)]](rng, total, past)
        if not keys[past:].any():
            keys[-1] = True
        rows.append(keys)
    if batch > 1 and kind != "none":
        if whole is None and rng.random() < ALIKE:
            rows = [min(rows, key=np.count_nonzero)] * batch
        elif (place := int(rng.integers(batch + 1)) if whole is None else whole) < batch:
            rows[place][:] = True
    return np.array(rows, bool).reshape(batch, total)


POSITIONS: Mapping[str, Callable[[np.random.Generator, Array, int], Array]] = {
    "consecutive": lambda rng, places, limit: places % limit,
    "offset": lambda rng, places, limit: (
        (places + rng.integers(0, max(min(limit // 4, OFFSET), 1), (len(places), 1))) % limit
    ),
    "scattered": lambda rng, places, limit: rng.integers(0, min(limit, 8 * places.shape[1] + 8), places.shape),
    "shuffled": lambda rng, places, limit: rng.permuted(places % limit, axis=1),
    "still": lambda rng, places, limit: np.repeat(
        rng.integers(0, min(limit, OFFSET), (len(places), 1)), places.shape[1], 1
    ),
    "far": lambda rng, places, limit: _far(rng, places, limit),
    "farthest": lambda rng, places, limit: np.sort(_far(rng, places, limit), axis=1),
    "every": lambda rng, places, limit: np.arange(places.size).reshape(places.shape) % limit,
}
"""(generator, places [batch, seq] of the tokens among the visible ones, limit) to positions below the limit."""


def _far(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Random positions below the limit; each power of two is equally likely. The last token has the largest one."""
    far = np.exp2(rng.uniform(0, np.log2(limit), places.shape)).astype(np.int64) - 1
    return np.hstack((far[:, :-1], np.full((len(far), 1), limit - 1)))
