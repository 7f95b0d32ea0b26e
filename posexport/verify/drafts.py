"""What each set of inputs is for: its sizes, and kinds of positions, padding and values.

Graphs go wrong in corners: from one length on, between two lengths, for one row or for many, in steps with a cache, or
far out. So each power of two bounds a band of lengths. Every band has one row, several rows, tokens without a cache,
and steps and chunks with a cache, as far as that costs little. Positions, padding and values take turns. In addition,
there are the block's own numbers: every row of its table, every offset of its grid, the lengths at which its encoding
changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import attrs
import numpy as np

from posexport.spec.contract import TRACED_SIZES
from posexport.spec.spec import Spec
from posexport.verify.block_sizes import block_sizes
from posexport.verify.draft import (
    CROWD,
    CROWD_TOKENS,
    LEAST,
    ROWS,
    ROWS_WORK,
    Draft,
    band_between,
    each_size,
    few_cached,
    fewer,
    per_token,
    rows_of_batches,
    shorter,
    size_between,
)
from posexport.verify.eligibility import work
from posexport.verify.few_tokens import along_weights, far_rows, far_starts, magnitudes, no_keys, squares
from posexport.verify.in_turn import long_values, with_negative
from posexport.verify.over_keys import CACHED, LONG, USUAL_CACHED, over_keys
from posexport.verify.padding import ALL_ROWS
from posexport.verify.plain import large_chunks, plain, wide_batches, wide_buffers, wide_cross
from posexport.verify.positions import TEXT, TEXTS, At
from posexport.verify.reach import Reach

SERVED = 2e9
"""The most multiply-adds of the batch of pictures that servers make, of more than 4,096 tokens; above, it is left
out."""

LOGITS = 160_000_000
"""The most logits of the longest row, if no reach was asked for. Each takes eight bytes, several times."""

MOST = 1_400
"""The most tokens of a further case, so that many further cases can be asked for."""

MANY = 24
"""Batches with more rows than this get shorter rows if they cost too much."""

SHORT = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 6), (8, 11), (12, 16), (17, 24), (25, 36), (37, 63), (64, 127))
"""Lengths of prompts of few tokens, each from one number to another."""

FIRST_LENGTH, LENGTHS, LENGTH_WORK, LENGTH_GAP = 64, 4, 4.5e8, 1.5
"""Numbers for the lengths of one row.

FIRST_LENGTH is the length from which on each doubling has LENGTHS lengths; each may take LENGTH_WORK multiply-adds. If
the longest row has at least LENGTH_GAP times the last of these lengths, there is one more halfway, which may take twice
as many.
"""

POWER_WORK = 5e9
"""The most multiply-adds of a long row whose number of tokens is a power of two."""

TEXT_LENGTHS = ((130, 250), (260, 500), (520, 700))
"""Further lengths, for texts on several axes."""

FREE = 500
"""The free slots of a shared cache whose first token is written. With several rows, some have more than a hundred."""

FEW = 12
"""Below this many tokens, both of the largest kinds of batch are tried with each length, since they cost little."""

ALIKE_WORK = 4e9
"""The most multiply-adds of a prompt whose tokens are nearly alike. If they suffice, each band of lengths has one."""


def corners(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """The drafts that every seed has, with sizes drawn from `rng`, within the reach that the user gave.

    Tables and single positions are always tried whole.
    """
    lengths, groups = (
        (_lengths, _between, wide_batches),
        (
            *(over_keys, block_sizes, _hiding, _alone, far_rows, magnitudes, plain, large_chunks),
            *(wide_buffers, wide_cross, along_weights, squares, far_starts, no_keys),
        ),
    )
    of_lengths = [draft for group in lengths for draft in group(spec, rng, reach)]
    others = itertools.chain.from_iterable(group(spec, rng, reach) for group in groups)
    for draft in with_negative(spec, itertools.chain(long_values(rng, of_lengths), others)):
        if draft.positions == "every" or isinstance(draft.positions, At):
            yield draft
        else:
            most = reach.seq if reach.given else max(reach.seq, draft.seq)
            rows = shorter(spec, draft.batch, draft.seq) if draft.batch > MANY else draft.seq
            past = min(draft.past, most, CACHED // (per_token(spec) * draft.batch))
            draft = attrs.evolve(draft, seq=min(rows, most), past=max(past, 0), encoder=min(draft.encoder, most))
            if spec.ordered and draft.positions in ("far", "far row", "middle", "near"):  # keys are large there already
                positions = draft.positions if max(past, draft.spare) < LEAST else "consecutive"
                values = draft.values if positions == "consecutive" else "normal"
                draft = attrs.evolve(draft, positions=positions, values=values)
            yield draft


def further(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Drafts without end: corners in any order, with other sizes and kinds.

    Half of them have any number of rows and tokens.
    """
    drawn = {
        "positions": ("consecutive", "offset", "packed", "scattered", "near", "middle", "mixed", ALL_ROWS),
        "padding": ("none", "left", "right", "both", "middle", "holes", "mixed", ALL_ROWS),
        "values": ("normal", "normal", "quiet", "zeros", "outlier", "peaks"),
    }
    for number in itertools.count(2):
        drafts = list(corners(spec, rng, reach))
        for at in rng.permutation(len(drafts)):
            draft = drafts[at]
            if isinstance(draft.positions, str) and draft.seq * draft.batch <= MOST:
                if rng.random() < 0.5:
                    batch = band_between(rng, 1, max(CROWD[1], reach.batch))
                    seq = band_between(rng, 1, max(min(MOST // batch, reach.seq), 1))
                    past = min(draft.past, USUAL_CACHED // (per_token(spec) * batch))
                    draft = attrs.evolve(draft, name="any size", batch=batch, seq=seq, past=past)
                kinds = {name: str(rng.choice(known)) for name, known in drawn.items()}
                yield attrs.evolve(draft, name=f"{draft.name} {number}", traced=False, **kinds)


def _one_of_each(rng: np.random.Generator, edges: Sequence[float]) -> list[int]:
    """A size between each two neighbouring edges, in their order."""
    wholes = itertools.pairwise(map(int, edges))
    return [size_between(rng, low, max(low, high - 1)) for low, high in wholes]


def _lengths(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Tokens without a cache, or with few cached ones."""
    power, long = int(rng.choice((128, 256, 512))), _long(spec, reach)
    yield from _of_each_kind(spec, rng, reach)
    yield _traced()
    yield from _short(spec, rng, reach)
    yield from _texts(spec, rng)
    if spec.padding_mask:
        yield Draft("no key", 1, size_between(rng, 3, 6), 4, 2, 4, "near", "all")
    yield Draft("long", 1, long, 0, 24, long, "consecutive", "few holes")
    yield from _long_row(spec, rng, reach, power)
    yield from _long_rows(spec, rng, reach, max(LONG, long // 2))


def _of_each_kind(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Few tokens with each kind of positions, and each kind of values that may hide a fault."""
    size = partial(size_between, rng)
    negative = "negative" if spec.negative_positions else "near"
    # name, rows, tokens, cached, spare slots, encoder's tokens, positions, padding, values
    yield Draft("offset", 2, size(8, 10), 0, 4, 13, "offset", "left", "shifted")
    yield Draft("consecutive", 3, size(14, 18), 13, 0, 640, "consecutive", "left")
    yield Draft("one token", 1, 1, 0, 8, 8, "far")
    yield Draft("first token", 1, 1, 0, min(FREE, few_cached(spec, 1)), 1, "near", values="peaks")
    free = itertools.cycle((2, 300, 40))
    for rows in (2, 4, 8, 12, 16, 24, max(32, reach.batch)):
        spare = min(next(free), few_cached(spec, rows))
        yield Draft("single tokens", rows, 1, 0, spare, size(2, 30), "near", "mixed")
    yield Draft("scattered", 2, size(20, 30), 6, 3, 30, "scattered", "last row")
    yield Draft("packed", 1, size(38, 60), 0, 1, 17, "packed")
    yield Draft("far out", 1, size(40, 60), 33, 10, 3, "far")
    yield Draft("far row", size(3, 5), size(30, 60), 9, 0, 4, "far row")
    yield Draft("massive", 2, size(3, 6), 11, 2, 10, "near", "none", "massive")
    yield Draft("loud", 2, size(20, 26), 11, 9, 10, "scattered", "holes", "loud")
    yield Draft("middle", 3, size(30, 60), 20, 0, 50, "middle", "middle", "quiet")
    yield Draft("negative", 4, size(20, 40), 9, 0, 20, negative, "both", "outlier")
    yield Draft("still", 1 + spec.position_axes, size(30, 60), 12, 0, 20, "still", "holes")


def _texts(spec: Spec, rng: np.random.Generator) -> Iterator[Draft]:
    """Texts on several axes that have no last position."""
    size = partial(size_between, rng)
    if spec.position_axes > 1 and spec.position_limits() is None:
        kinds = itertools.cycle(rng.permutation(TEXTS).tolist())
        for low, high in (*SHORT, *TEXT_LENGTHS):
            positions = TEXT + next(kinds)
            yield Draft("text", 1, shorter(spec, 1, size(low, high)), 0, size(0, 20), 2, positions, "holes")


def _long_row(spec: Spec, rng: np.random.Generator, reach: Reach, power: int) -> Iterator[Draft]:
    """One row of each band of lengths, and one of `power` tokens."""
    size = partial(size_between, rng)
    # from the second number on, a length is in another band; it is left out if a row of that length costs too much
    for draft, least in (
        (Draft("65 on", 1, band_between(rng, 65, 127), 0, 0, size(1025, 1700), "far", "long left"), 65),
        (
            Draft("129 on", 1, band_between(rng, 129, 255), 0, 80, band_between(rng, 257, 511), "near", "left", "loud"),
            129,
        ),
        (Draft("257 on", 1, size(257, 400), 0, 0, band_between(rng, 129, 255), "middle", "holes", "outlier"), 257),
        (
            Draft("513 on", 1, band_between(rng, 513, 800), 0, 3, band_between(rng, 65, 127), "far row", "long right"),
            513,
        ),
        (Draft("1025 on", 1, size(1025, 1100), 0, 0, size(600, 1000), "far", "long left", "quiet"), 1025),
        (Draft("power of two", 1, power, 0, 0, power, "shuffled", "none", "zeros"), power),
        *((Draft("power of two", 1, each, 0, 0, 60, "near", "few holes"), each) for each in _long_powers(spec)),
    ):
        seq = shorter(spec, 1, draft.seq)
        if seq >= least or reach.given:
            yield attrs.evolve(draft, seq=seq)


def _long_powers(spec: Spec) -> list[int]:
    """The powers of two above a thousand tokens that cost little."""
    return [power for power in (1024, 2048) if work(spec, {"batch": 1, "seq": power}) <= POWER_WORK]


def _traced() -> Draft:
    """The sizes of the traced example, which no other draft has."""
    batch, seq, past, slots = (TRACED_SIZES[dim] for dim in ("batch", "seq", "past_seq", "max_seq"))
    encoder = TRACED_SIZES["encoder_seq"]
    return Draft("traced sizes", batch, seq, past, slots - past - seq, encoder, "offset", "left", traced=True)


def _long_rows(spec: Spec, rng: np.random.Generator, reach: Reach, encoder: int) -> Iterator[Draft]:
    """Batches of more than a hundred tokens in each row.

    Their lengths are one more or one less than a power of two, or any length in between. If they cost much, there are
    three of these batches, with few rows.
    """
    size = partial(size_between, rng)
    dozen, several = size(*ROWS["dozen"]), size(2, 3)
    # draft, other lengths; if it costs much: those lengths, the fewest rows of the draft's and of those, if any
    for draft, (low, high), highest, least, least_other in (
        (Draft("rows", dozen, 129, 0, 5, size(300, 400), "mixed", "mixed", "peaks"), (130, 254), 192, 6, 2),
        (
            Draft("several rows", several, 255, 0, 90, size(140, 250), "alike", "mixed", "shifted"),
            (130, 511),
            511,
            0,
            0,
        ),
        (Draft("long rows", size(5, 7), 257, 0, 0, size(257, 330), "mixed", "mixed"), (258, 511), 511, 0, 5),
        (Draft("longer rows", 3, 513, 0, 0, encoder, "mixed", "mixed"), (514, 1023), 704, 2, 2),
    ):
        costs_little = work(spec, {"batch": draft.batch, "seq": high}) <= ROWS_WORK
        seq, first = band_between(rng, low, high if costs_little else highest), rng.random() < 0.5
        other = attrs.evolve(draft, name=f"{draft.name} of any length", seq=seq)
        tried = [(draft, least), (other, least_other)]
        if not costs_little:
            tried = [each for each in tried if each[1]][-1 if first else 0 :][:1]
        for each, rows in tried:
            batch = each.batch if costs_little else fewer(spec, each.batch, each.seq, rows)
            if draft.name == "rows":
                batch = max(batch, reach.batch)
            seq = shorter(spec, batch, each.seq)
            if seq < each.seq == draft.seq:
                seq = 2 ** ((seq - 1).bit_length() - 1) + 1
            yield attrs.evolve(each, batch=batch, seq=seq)
    two = Draft("two long rows", 2, size(1025, 1050), 0, 7, size(1025, 1100), "mixed", "mixed")
    if work(spec, {"batch": 2, "seq": two.seq}) <= ROWS_WORK:
        yield two
    pictures = Draft("pictures", size(21, 24), size(197, 210), 0, 0, size(197, 210), "mixed", "mixed")
    if work(spec, {"batch": pictures.batch, "seq": pictures.seq, "encoder_seq": pictures.seq}) < SERVED:
        yield pictures


def _short(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Prompts of 1 to 127 tokens, with one row, with 2 to 9 rows, and with 10 to 16 or 17 to 40."""
    size = partial(size_between, rng)
    positions = itertools.cycle(("near", "consecutive", "still", "offset", "far"))
    padding = itertools.cycle(("holes", "none", "left", "right"))
    # several rows differ, or have one kind for all, or count from their first token that is not padding
    counted = ("consecutive" if spec.padding_mask else "mixed", "left")
    mixed = ("mixed", "mixed")
    for_all = ("mixed", ALL_ROWS), (ALL_ROWS, "mixed")
    patterns = itertools.cycle((mixed, mixed, mixed, for_all[0], mixed, counted, for_all[1]))
    values = itertools.cycle(("zeros", "normal", "same", "normal", "shifted"))
    rows = rows_of_batches(rng, reach) | {"several": each_size(rng, ROWS["several"][0], ROWS["many"][1])}
    large = ["dozen", "crowd"]
    by_turns = itertools.cycle(rng.permutation(large).tolist())
    for low, high in SHORT:
        kinds_of_rows = ("one", "several", *(large if low < FEW else (next(by_turns),)))
        edges = np.linspace(low, high + 1, len(kinds_of_rows) + 1).tolist()
        sizes = rng.permutation(_one_of_each(rng, edges)).tolist()
        for who, seq in zip(kinds_of_rows, sizes, strict=True):
            batch = next(rows[who])
            batch = min(batch, max(CROWD_TOKENS // seq, reach.batch))
            if seq >= FEW:
                batch = max(fewer(spec, batch, seq, ROWS["many"][0]), min(batch, reach.batch))
            kinds = (next(positions), next(padding)) if batch == 1 else next(patterns)
            yield Draft(f"few tokens of {who}", batch, seq, 0, size(0, 20), size(2, 30), *kinds, next(values))


def _between(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Prompts of one row whose lengths lie close together, so that a fault in a narrow band of lengths meets one of
    them."""
    kinds = itertools.cycle(itertools.product(("near", "consecutive", "far"), ("left", "holes", "right", "both")))
    values = itertools.cycle(("normal", "quiet", "normal", "shifted", "normal", "zeros", "outlier"))
    last = max(_long(spec, reach), FIRST_LENGTH)
    edges = np.geomspace(FIRST_LENGTH, last, 1 + round(LENGTHS * math.log2(last / FIRST_LENGTH)))
    each = {seq: work(spec, {"batch": 1, "seq": seq}) for seq in _one_of_each(rng, edges.tolist())}
    lengths = [seq for seq, cost in each.items() if cost <= LENGTH_WORK]
    if lengths and last >= LENGTH_GAP * lengths[-1]:
        halfway = math.isqrt(lengths[-1] * last)
        lengths += [halfway] * (work(spec, {"batch": 1, "seq": halfway}) <= 2 * LENGTH_WORK)
    for seq in lengths:
        yield Draft("length between", 1, seq, 0, 0, size_between(rng, 2, 60), *next(kinds), next(values))


def _hiding(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Prompts of more than a hundred tokens that are nearly alike, except those that masks hide.

    If they cost much, there is only one, which is drawn, and no batch.
    """
    if not (spec.causal or spec.padding_mask or spec.window or spec.attention_chunk_size):
        return
    drafts = [
        Draft("hiding", 1, band_between(rng, *band), 0, 3, 60, "near", "few holes", "alike")
        for band in ((130, 250), (260, 500), (520, 1000), (1030, 2040))
    ]
    if work(spec, {"batch": 1, "seq": drafts[-1].seq}) > ALIKE_WORK:
        drafts = [drafts[int(rng.integers(3))]]
    else:
        rows, seq = size_between(rng, 2, 5), band_between(rng, 130, 500)
        drafts.append(Draft("hiding", rows, seq, band_between(rng, 20, 200), 3, 60, "near", "mixed", "alike"))
    for draft in drafts:
        yield attrs.evolve(draft, seq=shorter(spec, draft.batch, draft.seq))


def _alone(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Rows of a few tokens whose large query sees only its own key: that logit may lie below the values of a mask."""
    if spec.causal:
        yield Draft("alone", 4, 4, 0, 2, 4, "near", "none", "massive")
    if spec.padding_mask:
        yield Draft("alone", 8, 4, 0, 2, 4, "near", "one", "massive")


def _long(spec: Spec, reach: Reach) -> int:
    """The tokens of the longest row."""
    if reach.given:
        return reach.seq
    seq = min(reach.seq, math.isqrt(LOGITS // spec.num_heads))
    return max(min(reach.seq, LONG), shorter(spec, 1, seq))
