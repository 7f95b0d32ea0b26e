"""Sets of inputs as most services make them: no padding, rows alike, positions that count from the first token.

Graphs have fast paths for them, chosen by a mask of ones, by default positions or by rows of one length. A fault may be
only in such a path. So every kind of batch has prompts, steps and chunks of this kind in each band of lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import attrs
import numpy as np

from posexport.spec.spec import Spec
from posexport.verify.draft import (
    ROWS_WORK,
    Draft,
    band_between,
    few_cached,
    fewer,
    per_token,
    shorter,
    shrunk,
    size_between,
)
from posexport.verify.eligibility import work
from posexport.verify.padding import ALL_ROWS
from posexport.verify.reach import MOST, Reach

ROWS = {"one row": (1, 1), "few rows": (2, 5), "many rows": (6, 16), "crowd": (17, 40)}
"""The rows of a batch, from one number to another."""

PROMPTS = {
    "one row": ((4, 15), (16, 63), (64, 180), (181, 500), (501, 1400)),
    "few rows": ((4, 15), (16, 63), (64, 300)),
    "many rows": ((4, 15), (16, 100)),
    "crowd": ((2, 7), (8, 22)),
}
"""The tokens of a prompt."""

PASTS = ((1, 12), (13, 48), (49, 160), (161, 480), (481, 1500))
"""The cached tokens of a step."""

CHUNKS = (((2, 7), (5, 300)), ((8, 60), (30, 500)), ((61, 190), (1, 250)))
"""The tokens of a chunk, and its cached tokens."""

MOST_CHUNKED = {"one row": 200, "few rows": 200, "many rows": 100, "crowd": 10}
"""The number of tokens that chunks must stay below, for each kind of rows."""

LARGE_CHUNKS = ((range(192, 513), (1, 90)), (range(256, 513, 256), (100, 590)), (range(340, 521), (600, 1200)))
LONG_CHUNK = (range(900, 1201), (300, 700))
"""The same for prompts of one row that servers cut into pieces; a piece has one of these numbers of tokens.

LONG_CHUNK is a piece that is left out if the reach is smaller.
"""

WIDE = (((8, 8), (100, 127), ((8, 128),)), ((24, 32), (65, 90), ((32, 64),)), ((4, 4), (705, 1000), ((4, 1024),)))
"""The rows and tokens of prompts that blocks of any size get, and powers of two that half of the draws use instead."""

WIDE_KINDS = (
    ("alike", "none"),
    ("mixed", "mixed"),
    ("alike", "none"),
    ("mixed", "mixed"),
    ("alike", ALL_ROWS),
    ("mixed", "mixed"),
)
"""The kinds of positions and of padding of these prompts, all equally likely."""

CHEAP = (((6, 9), (513, 700)), ((10, 16), (260, 400)), ((17, 40), (130, 250)))
"""The rows and tokens of prompts that blocks get only if they cost little."""

WHOLE = (64, 128, 192, 256)
"""The tokens of several rows from which kernels make whole blocks."""

LARGE_BUFFER, BUFFER_NUMBERS = (8_000, 33_000), 2**24
"""The slots of the largest shared buffer, from one number to another, and the most numbers in it."""


def plain(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Prompts, steps and chunks of rows that are alike, without padding."""
    size = partial(size_between, rng)
    for who, bands in PROMPTS.items():
        for band in bands:
            draft = _plain(f"plain prompt of {who}", size(*ROWS[who]), size(*band), 0, size(2, 60))
            yield _affordable(spec, draft, ROWS[who][0])
    if not spec.kv_cache:
        return
    for who, band in itertools.product(ROWS, PASTS):
        if who == "one row" or band[0] < (481 if who == "few rows" else 161):
            yield _with_small_cache(spec, _plain(f"plain steps of {who}", size(*ROWS[who]), 1, size(*band), 1))
    for who, (tokens, pasts) in itertools.product(ROWS, CHUNKS):
        if tokens[1] < MOST_CHUNKED[who]:
            draft = _plain(f"plain chunk of {who}", size(*ROWS[who]), size(*tokens), size(*pasts), 1)
            yield _affordable(spec, _with_small_cache(spec, draft), ROWS[who][0])


def large_chunks(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Prompts in pieces: many tokens of one row with a cache, with and without padding; and chunks of about a dozen
    rows."""
    size = partial(size_between, rng)
    if not spec.kv_cache:
        return
    padding = itertools.cycle(rng.permutation(["none", "left", "few holes"]).tolist())
    is_beyond = reach.given and reach.seq < sum(sizes[0] for sizes in LONG_CHUNK)
    for tokens, pasts in LARGE_CHUNKS if is_beyond else (*LARGE_CHUNKS, LONG_CHUNK):
        seq = int(rng.choice(tokens))
        draft = Draft("piece of a prompt", 1, seq, size(*pasts), 0, 1, "consecutive", next(padding))
        yield _affordable(spec, _with_small_cache(spec, draft), 1)
    dozen = Draft("chunks of a dozen", size(10, 16), size(56, 110), size(10, 150), 2, 1, "mixed", "mixed")
    yield _affordable(spec, _with_small_cache(spec, dozen), 10)


def wide_batches(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Prompts of several and of many rows.

    They have fewer tokens only if they would cost more than the longest prompt, or are beyond the reach that was asked
    for. The other drafts give large blocks few rows of many tokens. Smaller batches don't show a row that is read for
    another, or a mask that ends too early.
    """
    size, most = partial(size_between, rng), reach.seq if reach.given else MOST["seq"]
    for rows, tokens, powers in WIDE:
        batch, seq = size(*rows), size(*tokens)
        if rng.random() < 0.5:
            batch, seq = powers[int(rng.integers(len(powers)))]
        kinds = WIDE_KINDS[int(rng.random() * len(WIDE_KINDS))]
        yield Draft("wide batch", batch, shorter(spec, batch, min(seq, most)), 0, 2, size(2, 60), *kinds)
    for rows, tokens in CHEAP:
        batch, seq = size(*rows), min(size(*tokens), most)
        if work(spec, {"batch": batch, "seq": seq}) <= ROWS_WORK:
            yield Draft("many long rows", batch, seq, 0, 3, size(2, 60), "mixed", "mixed")
    batch, seq = size(2, 5), int(rng.choice(WHOLE))
    yield Draft("rows of whole blocks", batch, shorter(spec, batch, seq), 0, 0, seq, "near", "mixed")


def wide_buffers(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Shared buffers of usual lengths with a short text in them: most of their slots are free."""
    size = partial(size_between, rng)
    if spec.kv_cache != "shared":
        return
    for rows, tokens, pasts, free in (
        ((1, 1), (1, 1), (5, 200), (350, 1000)),
        ((1, 1), (1, 1), (5, 200), (1000, 1900)),
        ((1, 1), (2, 60), (0, 200), (350, 1900)),
        ((1, 1), (130, 500), (0, 0), (400, 1900)),
        ((2, 3), (64, 200), (0, 0), (100, 900)),
        ((2, 5), (1, 1), (5, 200), (350, 1900)),
        ((4, 9), (64, 130), (0, 60), (100, 400)),
    ):
        kind = ("alike", "none") if rng.random() < 0.5 else ("near", "left")
        draft = Draft("wide buffer", size(*rows), size(*tokens), size(*pasts), size(*free), 1, *kind)
        yield _affordable(spec, _with_small_cache(spec, draft), rows[0])
    low, high = LARGE_BUFFER
    high = min(high, BUFFER_NUMBERS // per_token(spec))
    if high >= low and not reach.given:
        powers = [power for power in (2**13, 2**14, 2**15) if power <= high]
        slots = int(rng.choice(powers)) if powers and rng.random() < 0.5 else band_between(rng, low, high)
        past = size(5, 300)
        yield Draft("large buffer", 1, 1, past, slots - past - 1, 1, "near", "left")


def wide_cross(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """A text of some hundred tokens with the many keys of an encoder."""
    if spec.cross:
        seq = shorter(spec, 1, size_between(rng, 130, 448))
        keys = size_between(rng, 1000, 1500)
        keys = shrunk(keys, lambda tokens: work(spec, {"batch": 1, "seq": seq, "encoder_seq": tokens}), ROWS_WORK * 4)
        yield Draft("text over sound", 1, seq, 0, 0, keys, "consecutive", "few holes")
        yield attrs.evolve(_plain("plain text over sound", 1, seq, 0, keys), spare=0)


def _plain(name: str, batch: int, seq: int, past: int, encoder: int) -> Draft:
    """A draft of rows alike without padding; about half of them fill a shared buffer up to its last slot."""
    return Draft(name, batch, seq, past, 2 * ((seq + past) % 2), encoder, "alike", "none")


def _with_small_cache(spec: Spec, draft: Draft) -> Draft:
    """The draft with fewer cached tokens and free slots if they would have too many numbers."""
    room = few_cached(spec, draft.batch)
    return attrs.evolve(draft, past=min(draft.past, room), spare=min(draft.spare, room))


def _affordable(spec: Spec, draft: Draft, least: int) -> Draft:
    """The draft with fewer rows or tokens if they cost much."""
    batch = fewer(spec, draft.batch, draft.seq, least)
    return attrs.evolve(draft, batch=batch, seq=shorter(spec, batch, draft.seq))
