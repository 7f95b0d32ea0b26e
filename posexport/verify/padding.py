"""The padding masks of the inputs that verify runs on, drawn at random by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from posexport.spec.arrays import Array

ANEW, ANEW_OF_MANY = 0.3, 0.5
"""How often one row begins with an empty cache while the others go on, in batches of two or three rows, and of more."""

COMPANY = 0.65
"""How often a row of a batch of the kind "mixed" may have no key at all."""

FEW_SEEN, LONG_BATCH = 8, 512
"""The keys that padding leaves in a short row at least, and the keys from which on mixed batches have one such row.

These are batches of two or three rows; larger ones have most kinds of padding.
"""

ALL_ROWS = "all rows"
"""A kind of padding, and of positions, that is drawn once for all rows of a batch, like the beams of one prompt.

These positions don't count up from the number of cached tokens.
"""


def _run(rng: np.random.Generator, length: int) -> int:
    """How many keys are padding: more than half of a row in one of two draws, but never the whole row."""
    return int(rng.integers(1, max(length, 2)))


def _left(rng: np.random.Generator, length: int, cached: int) -> Array:
    return np.arange(length) >= min(_run(rng, length), length - 1)


def _right(rng: np.random.Generator, length: int, cached: int) -> Array:
    """At the end of the cached keys, as if prompts were padded on the right; without a cache, at the end of the row."""
    end, index = cached or length, np.arange(length)
    return (index < end - min(_run(rng, end), end - 1)) | (index >= end)


def _middle_run(rng: np.random.Generator, length: int, cached: int) -> Array:
    first, index = _run(rng, max(length // 2, 1)), np.arange(length)
    return (index < first) | (index >= min(first + _run(rng, max(length // 2, 1)), length - 1))


def _long_left(rng: np.random.Generator, length: int, cached: int) -> Array:
    """Padding on the left: half of the row or more, but not all of it."""
    return np.arange(length) >= min(int(rng.integers(length // 2, max(length * 9 // 10, length // 2 + 1))), length - 1)


def _few_first(rng: np.random.Generator, length: int, cached: int) -> Array:
    """Only a few keys at the beginning of a row are seen: up to eight, in long rows up to a sixteenth of them."""
    return np.arange(length) < int(max(min(FEW_SEEN, length), length // 16, 1) ** rng.random())


PADDING: Mapping[str, Callable[[np.random.Generator, int, int], Array]] = {
    "none": lambda rng, length, cached: np.ones(length, bool),
    "left": _left,
    "right": _right,
    "long left": _long_left,
    "long right": lambda rng, length, cached: _long_left(rng, length, cached)[::-1],
    "tail": lambda rng, length, cached: _left(rng, length, cached)[::-1],
    "both": lambda rng, length, cached: _left(rng, length, cached) | ~_left(rng, length, cached)[::-1],
    "middle": _middle_run,
    "holes": lambda rng, length, cached: rng.random(length) < rng.uniform(0.2, 0.9),
    "few holes": lambda rng, length, cached: rng.random(length) < 0.97,
    "few first": _few_first,
    "few last": lambda rng, length, cached: _few_first(rng, length, cached)[::-1],
    "one": lambda rng, length, cached: np.arange(length) == rng.integers(length),
    "anew": lambda rng, length, cached: np.arange(length) >= cached,
    "all": lambda rng, length, cached: np.zeros(length, bool),
}
"""Maps (generator, keys of a row, cached ones among them) to bool [keys], False for padding.

"anew" hides all cached keys, as in a row that begins while others go on; "all" leaves no key to see.
"""


def attention_mask(kind: str, rng: np.random.Generator, lengths: Array, cached: Array, width: int) -> Array:
    """int64 [batch, width] for rows of `lengths` keys, of which `cached` are cached.

    With "mixed", each row has another kind. With "last row", the last row has no key and the others have all. With "all
    rows", all rows have the mask of the longest row.

    No query sees slots of a shared cache after the last key. Their mask is all 0, all 1 or random.
    """
    mask = rng.integers(0, 2, (len(lengths), width))
    ways = rng.integers(0, 3, len(lengths))  # none, all, or random
    mask = np.where((ways < 2)[:, None], ways[:, None], mask)
    if kind == ALL_ROWS:
        longest = int(lengths.argmax())
        hiding = [each for each in PADDING if each not in ("none", "all")]
        one = mask[longest]
        one[: lengths[longest]] = PADDING[str(rng.choice(hiding))](rng, int(lengths[longest]), int(cached[longest]))
        return np.repeat(one[None], len(lengths), axis=0)
    kinds = [kind]
    if kind == "mixed":
        known = [*PADDING] if rng.random() < COMPANY else [each for each in PADDING if each != "all"]
        kinds = rng.permutation(known).tolist()
        if "all" in kinds and len(lengths) > 2:  # one of the rows then has no key
            kinds.remove("all")
            kinds.insert(int(rng.integers(min(len(lengths), len(kinds) + 1))), "all")
        if len(lengths) in (2, 3) and lengths.max() >= LONG_BATCH:
            kinds[int(rng.integers(len(lengths)))] = str(rng.choice(("few first", "few last")))
    elif kind == "last row":
        kinds = ["none"] * (len(lengths) - 1) + ["all"]
    for row, (length, before) in enumerate(zip(lengths, cached, strict=True)):
        mask[row, :length] = PADDING[kinds[row % len(kinds)]](rng, int(length), int(before))
    if kind == "last row":
        mask[-1] = 0
    elif kind == "mixed" and len(lengths) in (2, 3) and cached.all() and rng.random() < ANEW:
        row = int(rng.integers(len(lengths)))
        mask[row, : lengths[row]] = PADDING["anew"](rng, int(lengths[row]), int(cached[row]))
    return mask
