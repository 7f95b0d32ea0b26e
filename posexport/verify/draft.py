"""A set of inputs before it is drawn, how its sizes are drawn, and how large it may be: its cost and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import attrs
import numpy as np

from posexport.spec.contract import Bounds, within
from posexport.spec.spec import Spec
from posexport.verify.eligibility import work
from posexport.verify.positions import At
from posexport.verify.reach import Reach

WORK = 3e10
"""The most multiply-adds of a case. Longer and larger cases become shorter."""

ROWS_WORK = 1.2e9
"""The most multiply-adds of a batch of many rows. Blocks with a hidden size of about 600 or more get fewer rows."""

LEAST = 26
"""The tokens that a case always may have, whatever they cost."""

FEW_CACHED = 2**19
"""The most numbers in a small cache, of all rows together. Each row has at least one token."""

ROWS = {"one": (1, 1), "several": (2, 5), "many": (6, 9), "dozen": (10, 16), "crowd": (17, 40)}
"""The rows of a batch, from one number to another; fewer if each row has many tokens."""

CROWD = ROWS["crowd"]

CROWD_TOKENS = 900
"""The most tokens of the largest batches, of all rows together."""


@attrs.frozen
class Draft:
    """A case before bounds restrict it.

    It has `past` tokens in a cache, `spare` places after the last one in a shared cache, `encoder` tokens of an
    encoder, and kinds of positions.py, padding.py and values.py. Fields that don't concern a spec have no effect.
    `traced` says that the sizes are those of the trace, which other drafts avoid.
    """

    name: str
    batch: int
    seq: int
    past: int
    spare: int
    encoder: int
    positions: str | At
    padding: str = "none"
    values: str = "normal"
    traced: bool = False


def memory(spec: Spec, drafts: Iterable[Draft], bounds: Bounds) -> int:
    """About how many bytes the inputs of all drafts take together within `bounds`, plus the largest logits in
    float64."""
    inputs = logits = 0
    for draft in drafts:
        batch, seq = within(draft.batch, bounds["batch"]), within(draft.seq, bounds["seq"])
        encoder = within(draft.encoder, bounds["encoder_seq"]) if spec.cross else 0
        past, slots = 0, 0
        if spec.kv_cache == "concat":
            past = slots = within(draft.past, bounds["past_seq"])
        elif spec.kv_cache == "shared":
            slots = within(draft.past + seq + draft.spare, bounds["max_seq"])
            past = min(draft.past, slots)
        inputs += 4 * batch * (slots * per_token(spec) + (seq + encoder) * spec.hidden_size)
        logits = max(logits, 2 * 8 * batch * spec.num_heads * seq * (encoder or past + seq))
    return inputs + logits


def per_token(spec: Spec) -> int:
    """The numbers in a cache for each token."""
    return 2 * spec.layers * spec.num_kv_heads * spec.head_dim


def few_cached(spec: Spec, batch: int) -> int:
    """The most tokens that each of `batch` rows has in a small cache."""
    return max(1, FEW_CACHED // (per_token(spec) * batch))


def size_between(rng: np.random.Generator, low: int, high: int) -> int:
    """A size from `low` to `high`; all are equally likely."""
    return int(rng.integers(low, high + 1))


def band_between(rng: np.random.Generator, low: int, high: int) -> int:
    """A size from `low` to `high`; each doubling is equally likely."""
    return int(low * (high / low) ** rng.random())


def each_size(rng: np.random.Generator, low: int, high: int) -> Iterator[int]:
    """Sizes from `low` to `high` without end, in random orders of all of them.

    A power of two follows every second size.
    """
    sizes = list(range(low, high + 1))
    powers = itertools.cycle(size for size in sizes if size & (size - 1) == 0)
    while True:
        for number, size in enumerate(rng.permutation(sizes).tolist()):
            yield size
            if number % 2 == 0:
                yield next(powers)


def rows_of_batches(rng: np.random.Generator, reach: Reach) -> dict[str, Iterator[int]]:
    """Numbers of rows by kind of batch, without end.

    Every second of the largest ones is the batch that the user asked for.
    """
    rows = {who: each_size(rng, *bounds) for who, bounds in ROWS.items()}
    if reach.batch >= CROWD[0]:
        asked = itertools.repeat(reach.batch)
        rows["crowd"] = itertools.chain.from_iterable(zip(asked, rows["crowd"], strict=False))
    return rows


def shorter(spec: Spec, batch: int, seq: int) -> int:
    """The number of tokens that each of `batch` rows may have within WORK: `seq` or fewer, but at least LEAST."""
    return shrunk(seq, lambda tokens: work(spec, {"batch": batch, "seq": tokens}), WORK)


def fewer(spec: Spec, batch: int, seq: int, least: int) -> int:
    """The number of rows that may have `seq` tokens each within ROWS_WORK: `batch` or fewer, but at least `least`."""
    return min(batch, max(least, int(ROWS_WORK / work(spec, {"batch": 1, "seq": seq}))))


def shrunk(size: int, cost: Callable[[int], float], most: float) -> int:
    """The size, or a smaller one that costs at most `most`; not below LEAST, unless the size is."""
    while size > LEAST and cost(size) > most:
        size = max(LEAST, int(size * 0.8))
    return size
