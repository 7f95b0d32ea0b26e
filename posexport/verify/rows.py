"""Rows of batches, kind by kind, and sizes that are drawn one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from posexport.verify.reach import Reach

ROWS = {"one": (1, 1), "several": (2, 5), "many": (6, 9), "dozen": (10, 16), "crowd": (17, 40)}
"""Rows of a batch, from one number to another; fewer where each has many tokens."""

CROWD = ROWS["crowd"]

CROWD_TOKENS = 900
"""Tokens of all rows of the largest batches together."""


def each_size(rng: np.random.Generator, low: int, high: int) -> Iterator[int]:
    """Sizes from `low` to `high` without end, in random orders of all of them; behind every second one comes a power of
    two."""
    sizes = list(range(low, high + 1))
    powers = itertools.cycle(size for size in sizes if size & (size - 1) == 0)
    while True:
        for number, size in enumerate(rng.permutation(sizes).tolist()):
            yield size
            if number % 2 == 0:
                yield next(powers)


def rows_of_batches(rng: np.random.Generator, reach: Reach) -> dict[str, Iterator[int]]:
    """Numbers of rows by kind of batch, each of them in turn; every second of the largest is the reach that was asked
    for."""
    rows = {who: each_size(rng, *bounds) for who, bounds in ROWS.items()}
    if reach.batch >= CROWD[0]:
        asked = itertools.repeat(reach.batch)
        rows["crowd"] = itertools.chain.from_iterable(zip(asked, rows["crowd"], strict=False))
    return rows


def band_between(rng: np.random.Generator, low: int, high: int) -> int:
    """A size from `low` to `high`, each doubling as likely."""
    return int(low * (high / low) ** rng.random())
