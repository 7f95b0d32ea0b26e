"""All-pairs selection: a few rows from a product of options in which every two options still occur together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def _pairs(row: Row) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(combinations(row.items(), 2))


def all_pairs(options: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], tries: int = 3000) -> list[Row]:
    """Rows of `options`, one value for each name, that are `allowed`.

    The function draws `tries` random rows. Every two values that occur together in an allowed one of them also occur
    together in a returned row. The result is the same each time.
    """
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
