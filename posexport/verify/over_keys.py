"""Sets of inputs with keys that exist before the new tokens: steps, chunks and prompts with a cache or an encoder.

Caches of wide blocks have many numbers, so they share a budget, and most of them get shorter in such blocks. Some
faults begin at a certain number of keys. The drafts that find them have a separate budget, so that they keep their
length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial

import attrs
import numpy as np

from posexport.spec.spec import Spec
from posexport.verify.draft import (
    CROWD_TOKENS,
    ROWS,
    Draft,
    band_between,
    per_token,
    rows_of_batches,
    shorter,
    shrunk,
    size_between,
)
from posexport.verify.eligibility import work
from posexport.verify.padding import ALL_ROWS
from posexport.verify.reach import Reach

ENCODED, MANY_ENCODED = 5e9, 1.2e10
"""The most multiply-adds for the tokens of an encoder.

The first is for those of a step or a chunk, since there are many such cases; the second is for the few cases in which
several rows have many keys.
"""

LONG = 600
"""The keys that the longest cache has, whatever they cost."""

CACHED, BANDS_CACHED, ROWS_CACHED, ALL_CACHED = 2**27, 100_000_000, 40_000_000, 100_000_000
"""The most numbers in caches, if no reach was asked for.

They are for the longest cache, for all caches that keep their length, for all caches of many rows with many keys, and
for all other caches. Each number takes eight bytes, several times.
"""

MANY_CACHED = 2**24
"""The most numbers in the late cache of ten or more rows; wide blocks get fewer rows there."""

USUAL_CACHED = 2**23
"""The most numbers in a cache, of all rows together, except in the few cases that go to the end of the reach."""

POWERS, FEW_ROWS = {128: 2, 256: 1, 512: 2, 1024: 1, 2048: 2}, 2
"""Numbers of keys at which buffers end or wrap, and rows that are kept.

POWERS maps each such number of keys to the rows of single tokens that try it. One row also tries one key fewer and one
key more. Other drafts keep FEW_ROWS rows if their cache is too large otherwise.
"""

BEFORE_END = (20, 120)
"""The keys between the last steps but one and the end of the longest cache."""

BANDS, STEPS = (4, 16, 64, 256, 1000), (1, 2, 3, 5, 9, 16, 28, 50, 89, 158, 281, 500, 889, 1580)
"""Cached tokens, for chunks that cost much and for all others. From four on, they vary by a third."""

MOST = {"one": (180, 1580), "several": (140, 1580), "many": (100, 1580), "dozen": (40, 889), "crowd": (7, 889)}
"""The most new tokens and cached tokens of each row, by kind of batch."""

TOKENS = (("step", 1, 1), ("short chunk", 2, 7), ("chunk", 8, 55), ("wide chunk", 56, 180))
"""New tokens, from one number to another."""

LONG_BUFFER, MANY_ROWS, LEAST_FREE = 4_000, 4, 1_000
"""Free slots of a shared cache with few tokens, the rows from which on they are shared, and the fewest for each row.

The last number varies by a half.
"""

PATTERN = ("middle", "far", "near", "far row", "consecutive", "far", "offset")
"""The kinds of positions that steps and chunks of one row take in turn."""

VALUES_PATTERN = (
    *("normal", "zeros", "peaks", "normal", "loud", "outlier", "normal", "peaks", "quiet", "normal", "zeros"),
    *("shifted", "normal", "loud", "a twentieth", "normal", "peaks", "zeros", "normal"),
)
"""The kinds of values that they, and those of several rows, take in turn."""

PADDING_PATTERN = ("left", "holes", "both", "few holes", "right", "few first", "few last", "none")
"""The kinds of padding that they take in turn.

Their number has no common factor with those of PATTERN and of values, so that each kind meets each other one.
"""

ROWS_PATTERN = (*[("mixed", "mixed")] * 5, ("mixed", ALL_ROWS), *[("mixed", "mixed")] * 5, (ALL_ROWS, "mixed"))
"""The kinds of positions and of padding that batches with a cache take in turn.

Most of their rows differ: only then is it noticed if a graph reads one row for another.
"""

LATE_STEP = "late step"
"""The draft with the longest cache, which no budget makes shorter."""

MANY_KEYS = (
    ((4, 9), (1, 1), (705, 1100)),
    ((4, 9), (2, 40), (705, 900)),
    ((10, 16), (1, 7), (260, 500)),
    ((17, 40), (1, 1), (130, 250)),
    ((1, 1), (8, 60), (600, 1600)),
)
"""Rows, new tokens and keys before them, from one number to another, for blocks of any size.

If more rows would have too many numbers, there are as few as these numbers allow.
"""

OVER_MANY = "many keys of many rows"
"""The name of the drafts of MANY_KEYS."""

KEPT = (
    *("step near the end", "chunk near the end", *(f"{power} keys" for power in POWERS), "step of one"),
    *("steps near the end", *(f"keys and one of {power}" for power in POWERS), "late steps", "late chunks"),
    "late steps of many rows",
)
"""Drafts that keep their length, the most important first."""

BUDGETS = ((KEPT, BANDS_CACHED), (("wide late chunk", OVER_MANY), ROWS_CACHED))
"""Drafts that keep their length, and the most numbers in all of their caches together."""


def over_keys(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Steps, chunks and prompts with keys that exist before: those of a cache, or of an encoder."""
    if spec.kv_cache:
        drafts = _cached(spec, rng, reach)
        yield from drafts if reach.given else _within_budget(spec, list(drafts))
    elif spec.cross:
        for draft in _cached(spec, rng, reach):
            most = MANY_ENCODED if draft.name == OVER_MANY else ENCODED
            keys = shrunk(max(draft.past, 1), partial(_encoder_work, spec, draft.batch), most)
            yield attrs.evolve(draft, past=0, spare=0, encoder=keys)


def _encoder_work(spec: Spec, batch: int, keys: int) -> float:
    return work(spec, {"batch": batch, "seq": 1, "encoder_seq": keys})


def _within_budget(spec: Spec, drafts: list[Draft]) -> Iterator[Draft]:
    """The drafts, the largest with fewer cached tokens and free slots if needed.

    All drafts, except those that keep their length, have at most ALL_CACHED numbers in their caches together.
    """
    kept = _kept(spec, drafts)
    others = [_cached_numbers(spec, draft) for number, draft in enumerate(drafts) if number not in kept]
    most = ALL_CACHED
    while sum(min(numbers, most) for numbers in others) > ALL_CACHED:
        most = int(most * 0.9)
    for number, draft in enumerate(drafts):
        fits = most // (draft.batch * per_token(spec))
        few = attrs.evolve(draft, past=min(draft.past, fits), spare=min(draft.spare, fits))
        yield kept.get(number, few)


def _kept(spec: Spec, drafts: list[Draft]) -> dict[int, Draft]:
    """The drafts that keep their length, by index; with fewer rows if budgets require it."""
    kept = {number: draft for number, draft in enumerate(drafts) if draft.name == LATE_STEP}
    for names, budget in BUDGETS:
        left = budget
        long = [number for number, draft in enumerate(drafts) if draft.name in names]
        for number in sorted(long, key=lambda number: names.index(drafts[number].name)):
            if (draft := _with_rows_that_fit(spec, drafts[number], left)) is not None:
                kept[number] = draft
                left -= _cached_numbers(spec, draft)
    return kept


def _with_rows_that_fit(spec: Spec, draft: Draft, left: int) -> Draft | None:
    """A draft with all of its rows, or with a few, whose cache has at most `left` numbers; None if none fits.

    A draft with many rows keeps at least two.
    """
    for rows in (draft.batch, *range(min(draft.batch - 1, FEW_ROWS), 0, -1)):
        fewer_rows = attrs.evolve(draft, batch=rows)
        if _cached_numbers(spec, fewer_rows) <= left and (rows > 1 or draft.batch <= FEW_ROWS):
            return fewer_rows
    return None


def _cached_numbers(spec: Spec, draft: Draft) -> int:
    """The numbers in the cache of a draft."""
    slots = draft.past + draft.spare * (spec.kv_cache == "shared")
    return draft.batch * slots * per_token(spec)


def _cached(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """The same drafts, with all keys in a cache."""
    size, late = partial(size_between, rng), longest_cache(spec, reach)
    rows = rows_of_batches(rng, reach)
    yield Draft("prefill", 3, size(14, 18), 0, 3, 1, "consecutive", "right", "zeros")
    yield from _of_each_length(spec, rng, reach, rows)
    if spec.kv_cache == "shared":
        yield from _in_long_buffers(spec, rng, reach)
    if spec.negative_positions:
        yield Draft("negative steps", 4, 1, size(33, 60), 2, 1, "negative", "mixed")
    yield Draft("step", 3, 1, size(18, 40), 7, 1, "consecutive", "left")
    yield Draft("steps of rows alike", 4, 1, band_between(rng, 33, 127), 5, 9, "alike")
    # prompts that were padded to one length, and beams of one padded prompt
    alike = [("steps", 1), ("chunks", 30)], rng.permutation(["left", ALL_ROWS]).tolist()
    for (name, largest), padding in zip(*alike, strict=True):
        batch, seq, past = size(4, 9), size(min(largest, 2), largest), band_between(rng, 20, 300)
        yield Draft(f"{name} of padded rows alike", batch, seq, past, size(0, 40), 9, "alike", padding)
    yield from _over_many(spec, rng, late)
    yield from _around_powers(late, int(spec.kv_cache is not None))
    yield from _near_the_end(spec, rng, late)


def _of_each_length(
    spec: Spec, rng: np.random.Generator, reach: Reach, rows: Mapping[str, Iterator[int]]
) -> Iterator[Draft]:
    """Steps and chunks of each kind of rows with caches of each length, as far as they cost little."""
    size, late = partial(size_between, rng), longest_cache(spec, reach)
    patterns = itertools.cycle(ROWS_PATTERN)
    positions: Iterator[str] = itertools.cycle(rng.permutation(PATTERN).tolist())
    padding: Iterator[str] = itertools.cycle(rng.permutation(PADDING_PATTERN).tolist())
    values = itertools.cycle(VALUES_PATTERN)
    spare = itertools.cycle((3, 300, 0, 70, 1, 25))
    for (who, (widest, longest)), (what, few, more) in itertools.product(MOST.items(), TOKENS):
        largest, more = max(ROWS[who][1], reach.batch if who == "crowd" else 1), min(more, widest)
        longest = min(longest, USUAL_CACHED // (per_token(spec) * largest))
        bands = (STEPS if largest * more <= CROWD_TOKENS // 2 else BANDS) if few <= widest else ()
        for middle in sorted({min(about, longest) for about in bands}):
            seq, batch = band_between(rng, few, more), next(rows[who])
            past = middle if middle < 4 else band_between(rng, round(0.75 * middle), round(1.33 * middle))
            past = min(past, late - 1)
            kinds = (next(positions), next(padding)) if batch == 1 else next(patterns)
            yield Draft(f"{what} of {who}", batch, seq, past, next(spare), size(1, 64), *kinds, next(values))


def _in_long_buffers(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Few tokens in a shared cache with many slots."""
    size = partial(size_between, rng)
    free = max(reach.seq - 100, 0) if reach.given else min(LONG_BUFFER, CACHED // per_token(spec))
    for batch, seq, past in (
        (1, size(8, 30), 0),
        (1, 1, size(30, 100)),
        (3, 1, size(30, 100)),
        (1, size(32, 127), size(0, 20)),
        (size(4, 9), size(2, 60), 0),
        (size(4, 9), 1, band_between(rng, 128, 500)),
    ):
        slots = free if batch < MANY_ROWS else min(free, max(free // batch, LEAST_FREE))
        spare = band_between(rng, max(-(-slots // 2), 1), max(slots, 1))
        yield Draft("long buffer", batch, seq, past, spare, 1, "near")


def _over_many(spec: Spec, rng: np.random.Generator, late: int) -> Iterator[Draft]:
    """Steps and chunks in which several or many rows have many keys each.

    Smaller batches don't show a row that is read for another, or a mask that ends too early.
    """
    for rows, tokens, pasts in MANY_KEYS:
        past = max(min(size_between(rng, *pasts), late - 1), 1)
        fit = MANY_ENCODED // _encoder_work(spec, 1, past) if spec.cross else USUAL_CACHED // (past * per_token(spec))
        batch = min(size_between(rng, *rows), max(int(fit), rows[0]))
        yield Draft(OVER_MANY, batch, size_between(rng, *tokens), past, 2, 1, "mixed", "mixed")


def _around_powers(late: int, new: int) -> Iterator[Draft]:
    """Single tokens with as many keys as POWERS says, of which `new` are their own, and with one key fewer or more."""
    for power, count in POWERS.items():
        if power <= late:
            yield Draft(f"{power} keys", count, 1, power - new, 0, 1, "near")
    for power, more in itertools.product(POWERS, (-1, 1)):
        if power + more <= late:
            yield Draft(f"keys and one of {power}", 1, 1, power + more - new, 0, 1, "near")


def _near_the_end(spec: Spec, rng: np.random.Generator, late: int) -> Iterator[Draft]:
    """Steps, chunks and a prompt with the longest cache or one that is a little shorter."""
    size = partial(size_between, rng)
    for name, count in (("step", 1), ("steps", size(2, 3)), ("steps", size(4, 9))):
        before = max(late - size(*BEFORE_END) - 1, 1)
        yield Draft(f"{name} near the end", count, 1, before, 1, 1, "near")
    yield Draft(LATE_STEP, 1, 1, late - 1, 39, 1, "offset", "right")
    yield Draft("late steps", 4, 1, max(LONG, late - size(20, 900)), 2, 1, "far", "mixed")
    yield Draft("chunk near the end", 1, size(2, 4), late - 4, 6, 1, "consecutive", "holes")
    yield Draft("late chunks", 3, size(5, 20), max(300, late - size(20, 900)), 0, 1, "scattered", "right")
    yield Draft("wide late chunk", 1, size(60, 130), max(300, late - size(130, 200)), 2, 1, "consecutive", "left")
    yield Draft("long chunk", 4, size(200, 330), max(300, late - size(300, 1200)), 0, 1, "near", "both", "peaks")
    yield Draft("prompt", 2, shorter(spec, 2, size(400, 900)), size(100, 600), 0, 1, "consecutive", "left")
    past = max(LONG, late - size(20, 900))
    if (many := min(size(10, 16), MANY_CACHED // (past * per_token(spec)))) >= MANY_ROWS:
        yield Draft("late steps of many rows", many, 1, past, 2, 1, "far", "mixed")


def longest_cache(spec: Spec, reach: Reach) -> int:
    """The keys of the longest cache."""
    return reach.seq if reach.given else max(LONG, min(reach.seq, CACHED // per_token(spec)))
