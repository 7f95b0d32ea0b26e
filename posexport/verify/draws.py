"""Parts of the inputs that verify runs on, drawn at random: positions and padding.

Each part is a table of named kinds; posexport.verify.values has the table of magnitudes. posexport.verify.cases decides
which kinds one set of inputs combines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from posexport.spec.spec import Spec

Array = np.ndarray[Any, Any]

FAR, FAR_EXACT = 2**20, 2**24
"""The ends of positions if no table ends earlier: as far as models are made to reach today, and as far as `--angles
exact` is exact."""

FAR_ROUNDED, ROUGH = 2**16, 2.0**-4
"""The end of positions if, at FAR, the angles of runtimes differ by ROUGH or more: faults can't be told from rounding
there."""

NEAR, MIDDLE = 2_000, 64_000
"""Bounds of the kinds "near" (positions below the first bound) and "middle" (positions between the two)."""

LANDMARKS = (0, 1, 255, 256, 2047, 65_535, FAR - 1)
"""Half precision aliases positions from 256 and 2048 on, 16 bits end at 65,535; the kind "far" has all of these."""


def position_end(spec: Spec) -> int:
    """The number of positions along an axis that inputs may have."""
    far = spec.position_limit() or (FAR_EXACT if spec.angles == "exact" else FAR)
    rough = any(each.encoding.rounding(each, FAR, 1) >= ROUGH for each in spec.distinct_layers())
    return min(far, FAR_ROUNDED) if rough else far


ANEW, ANEW_OF_MANY = 0.3, 0.5
"""How often one row begins with an empty cache while the others go on, in batches of two or three rows, and of more."""

NEARBY, COMPANY = 0.3, 0.65
"""Two probabilities for batches of the kind "mixed".

The first is how often no row has far positions; the second is how often a row may have no key at all.
"""

FEW_SEEN, LONG_BATCH = 8, 512
"""The keys that padding leaves in a short row at least, and the keys from which on mixed batches have one such row.

These are batches of two or three rows; larger ones have most kinds of padding.
"""

ALL_ROWS = "all rows"
"""A kind of positions, and of padding, that is drawn once for all rows of a batch, like the beams of one prompt.

These positions don't count up.
"""

Positions = Callable[[np.random.Generator, Array, int], Array]
"""Maps (generator, places [batch, seq] of the tokens in their rows, limit) to [batch, seq] int64 below the limit."""


def _offset(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Consecutive, from another start in each row."""
    starts = 37 + 611 * np.arange(len(places)) + rng.integers(0, 300, len(places))
    room = max(0, limit - 1 - int(places.max()))
    return np.asarray((np.minimum(starts, room)[:, None] + places) % limit)


def _packed(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Two sequences in a row: positions start over."""
    batch, seq = places.shape
    cuts = rng.integers(1, max(seq, 2), batch)
    return np.stack([np.r_[np.arange(cut), np.arange(seq - cut)][:seq] % limit for cut in cuts])


def _scattered(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """With gaps, in no order. Positions repeat only if the table is shorter than the sequence."""
    batch, seq = places.shape
    reach = min(limit, 4 * seq + 8)
    return np.stack([rng.choice(reach, seq, replace=reach < seq) for _ in range(batch)])


def _shuffled(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """The consecutive positions of each row, shuffled."""
    return rng.permuted(places % limit, axis=1)


def _near(rng: np.random.Generator, places: Array, limit: int) -> Array:
    return np.asarray(rng.integers(0, min(NEAR, limit), places.shape))


def _middle(rng: np.random.Generator, places: Array, limit: int) -> Array:
    return np.asarray(rng.integers(min(NEAR, limit // 2), min(MIDDLE, limit), places.shape))


def _far(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Anywhere up to the limit; each power of two is equally likely, in no order.

    Rows of more than a few tokens have as many landmarks as fit, and the last position. Of shorter rows, every second
    one has them.
    """
    seq = places.shape[1]
    positions = np.asarray(np.exp2(rng.uniform(0, np.log2(limit), places.shape)).astype(np.int64) - 1)
    known = [place for place in LANDMARKS if place < limit][-seq:]
    marked = slice(None) if seq > len(LANDMARKS) else slice(int(rng.integers(2)), None, 2)
    positions[marked, : len(known)] = known
    positions[marked, -1] = limit - 1
    return np.asarray(rng.permuted(positions, axis=1))


def _far_row(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Consecutive from a far position."""
    last = limit - 1 - int(places.max())
    return np.asarray((rng.integers(max(0, last // 8), max(last, 1), (len(places), 1)) + places) % limit)


def _negative(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """On both sides of zero; in every second row further below it.

    These rows begin near the limit or anywhere up to it, in turn, where each power of two is equally likely. Any row
    may be the first of the turn.
    """
    below, first = rng.integers(1, places.shape[1] + 40, (len(places), 1)), int(rng.integers(4))
    far, farther = (slice((start - first) % 4, None, 4) for start in (1, 3))
    below[far] = rng.integers(limit // 4, max(limit, 2), below[far].shape)
    below[farther] = np.exp2(rng.uniform(7, np.log2(max(limit, 129)), below[farther].shape)).astype(np.int64)
    return np.asarray(places - np.minimum(below, limit - 1))


def _still(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """The same position for all tokens of a row, 0 in the first row; in every second row, for four tokens at a time."""
    starts = rng.integers(0, max(min(NEAR, limit) - places.shape[1], 1), (len(places), 1))
    starts[:1] = 0
    steps = (places - places[:, :1]) // 4
    steps[::2] = 0
    return np.asarray((starts + steps) % limit)


def _alike(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Consecutive from the same start in all rows."""
    first = min(int(places.max()) - places.shape[1] + 1, max(0, limit - places.shape[1]))
    return np.broadcast_to((max(first, 0) + np.arange(places.shape[1])) % limit, places.shape)


def _every(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Each position up to the limit once, as far as there are tokens."""
    return (np.arange(places.size) % limit).reshape(places.shape)


POSITIONS: Mapping[str, Positions] = {
    "consecutive": lambda rng, places, limit: places % limit,
    "offset": _offset,
    "packed": _packed,
    "scattered": _scattered,
    "shuffled": _shuffled,
    "near": _near,
    "middle": _middle,
    "far": _far,
    "far row": _far_row,
    "negative": _negative,
    "still": _still,
    "alike": _alike,
    "every": _every,
}
"""The kinds of positions of tokens along one axis."""

MIXED = (
    "consecutive",
    "far",
    "scattered",
    "middle",
    "packed",
    "far",
    "shuffled",
    "middle",
    "offset",
    "far",
    "near",
    "middle",
)
"""The kinds that the rows of one batch take in turn with the kind "mixed".

Of any two neighbouring rows, one has far or middle positions, except in a part of the batches (NEARBY). In half
precision, no row has them: a bias of far keys overflows there, which matters if padding hides a token from itself. If
biases are steep, rows have only kinds of CLOSE.
"""

BELOW = tuple("negative" if kind == "offset" else kind for kind in MIXED)
"""The same with negative positions, if they have a meaning."""

CLOSE = ("consecutive", "offset", "packed", "shuffled", "alike", "still")
"""Kinds with which the tokens of a row are near each other along an axis."""

STEEP = 0.6
"""A bias is steep if it changes by more than this from one position to the next."""

TEXTS = ("consecutive", "far", "offset", "middle", "consecutive", "far", "scattered")
"""Kinds of the positions of a text, whose position is the same along every axis."""

TEXT = "text, "
"""The prefix that makes one of TEXTS a kind of positions along several axes."""


@attrs.frozen
class At:
    """Given positions: [rows, tokens, axes], repeated over the rows and tokens of a case."""

    positions: Array


def is_far_out(spec: Spec, kind: object) -> bool:
    """Whether tokens with positions of this kind are so far apart that biases may overflow in half precision."""
    if spec.consecutive:
        return False
    return kind in ("far", "middle") or str(kind).startswith(TEXT) or (kind == "far row" and spec.position_axes > 1)


def _close(spec: Spec) -> list[str]:
    """Kinds with which the tokens of a row are no farther apart than the row is long.

    On several axes "offset" is left out: each axis begins at another offset there, so a text is not near a picture.
    """
    return [kind for kind in CLOSE if kind != "offset" or spec.position_axes == 1]


def steepness(spec: Spec) -> float:
    """The most that a bias may change by from one position to the next; 0 without such a bias."""
    return max(layer.encoding.steepness(layer) for layer in spec.distinct_layers())


def position_ids(kind: str | At, rng: np.random.Generator, places: Array, spec: Spec) -> Array:
    """int64 [batch, seq], or [batch, seq, axes], for tokens with these places [batch, seq] in their rows.

    On several axes, consecutive tokens lie on a grid that is wider than high. For other kinds, each axis is drawn
    independently; with "alike", the position of a token is the same along every axis, like that of a text.
    """
    if kind == ALL_ROWS:
        one = position_ids(str(rng.choice(("packed", "shuffled"))), rng, places[:1], spec)
        return np.repeat(one, len(places), axis=0)
    axes, limit, half = spec.position_axes, position_end(spec), spec.dtype != "fp32"
    kinds = BELOW if spec.negative_positions and not half else MIXED
    near = [each for each in kinds[::2] if not half or each in _close(spec) or steepness(spec) <= STEEP]
    mixed = near if half or (kind == "mixed" and rng.random() < NEARBY) else kinds
    if spec.ordered and half and places.max() > limit // 3:  # too few digits for the keys that are large so far out
        limit //= 3
    known = spec.position_limits()
    limits = known or (limit,) * axes
    if kind == "mixed" and spec.ordered:  # keys grow with their position: a few far ones would hide all others
        kind = "consecutive"
    if isinstance(kind, At):
        rows, tokens = kind.positions.shape[:2]
        batch, seq = places.shape
        made = kind.positions[np.arange(batch)[:, None] % rows, np.arange(seq) % tokens]
        made = np.minimum(made, np.array(known or (spec.position_limit() or FAR_EXACT,)) - 1)
        made = made[..., 0] if axes == 1 else made
    elif axes == 1:
        made = _along(kind, rng, places, limit, mixed)
    elif kind.startswith(TEXT):
        text = _along(kind.removeprefix(TEXT), rng, places, limit, mixed)
        made = np.repeat(text[..., None], axes, -1)
    elif kind in ("consecutive", "packed", "still"):
        width = min(limits[0], max(3, round((1.7 * places.shape[1]) ** 0.5)))
        index = POSITIONS["consecutive" if kind == "still" else kind](rng, places, min(math.prod(limits), 2**62))
        columns = [index % width, index // width, *(index // 2 + axis for axis in range(axes - 2))]
        made = np.stack([column % end for column, end in zip(columns, limits, strict=True)], -1)
        if kind == "still":  # along one axis, as time in a picture
            for row, tokens in enumerate(made):
                tokens[:, row % axes] = rng.integers(min(NEAR, limits[row % axes]))
        elif known is None:
            made = _with_text(rng, made, index)
    else:
        # single tokens differ along the axes by the axis' end, several tokens by the order of landmarks
        sized = known is not None or places.shape[1] > 1
        ends = [end if sized else max(end // (1 + axis), 1) for axis, end in enumerate(limits)]
        columns = [_along(kind, rng, places, end, mixed) for end in ends]
        text = columns[0]
        if kind in ("far", "mixed"):
            columns = [np.roll(column, axis, axis=1) for axis, column in enumerate(columns)]
        made = np.stack(columns, -1)
        if known is None:
            made = _with_text(rng, made, text)
    return (np.sort(made, 1) if spec.ordered else made).astype(np.int64)


def _with_text(rng: np.random.Generator, made: Array, text: Array) -> Array:
    """Positions [batch, seq, axes] with some text.

    Some rows are `text` [batch, seq] along every axis; some are text before and after a picture.
    """
    batch, seq = text.shape
    begin, way = rng.integers(0, seq, (batch, 1)), rng.integers(0, 3, (batch, 1))
    end = begin + rng.integers(1, seq + 1, (batch, 1))
    outside = (np.arange(seq) < begin) | (np.arange(seq) >= end)
    return np.where(((way == 0) | ((way == 1) & outside))[..., None], text[..., None], made)


def _along(kind: str, rng: np.random.Generator, places: Array, limit: int, mixed: Sequence[str]) -> Array:
    if kind != "mixed":
        return POSITIONS[kind](rng, places, limit)
    first = int(rng.integers(len(mixed)))
    rows = (
        POSITIONS[mixed[(first + row) % len(mixed)]](rng, places[row : row + 1], limit) for row in range(len(places))
    )
    return np.concatenate(list(rows))


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
