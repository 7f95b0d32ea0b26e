"""All pairs: a small selection from a product of options in which every two options still meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def _pairs(row: Row) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(combinations(row.items(), 2))


def all_pairs(options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], tries: int = 3000) -> list[Row]:
    """Rows of `options`, one value for each name, that are `allowed`; every two values that any of `tries` random rows
    holds together are in one of them. The same each time."""
    rng = random.Random(0)
    pool, missing = [], set()
    for _ in range(tries):
        numbers = {name: rng.randrange(len(values)) for name, values in options.items()}
        if allowed({name: options[name][number] for name, number in numbers.items()}):
            pool.append((numbers, _pairs(numbers)))
            missing |= pool[-1][1]
    chosen: list[Row] = []
    while missing:
        numbers, covered = max(pool, key=lambda each: len(each[1] & missing))
        missing -= covered
        chosen.append({name: options[name][number] for name, number in numbers.items()})
    return chosen
