"""The positions of the inputs that verify runs on, drawn at random by kind.

posexport.verify.padding has the kinds of padding, posexport.verify.values those of magnitudes. posexport.verify.cases
decides which kinds one set of inputs combines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from posexport.spec.arrays import Array
from posexport.spec.spec import Spec
from posexport.verify.padding import ALL_ROWS

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


NEARBY = 0.3
"""How often no row of a batch of the kind "mixed" has far positions."""

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
precision, rows have the kinds of HALF instead and, if biases are steep, only kinds of CLOSE.
"""

BELOW = tuple("negative" if kind == "offset" else kind for kind in MIXED)
"""The same with negative positions, if they have a meaning."""

HALF = {"far": "far row", "middle": "far row"}
"""The kinds that stand in half precision for those whose tokens are far from each other.

A bias of far keys overflows there, which matters if padding hides a token from itself.
"""

FROM_ANYWHERE = ("offset", "far row", "negative")
"""Kinds with which the tokens of a row are near each other, but each axis begins somewhere else."""

CLOSE = ("consecutive", "packed", "shuffled", "alike", "still", *FROM_ANYWHERE)
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

    On several axes those of FROM_ANYWHERE are left out: each axis begins somewhere else there, so a text is not near a
    picture.
    """
    return [kind for kind in CLOSE if kind not in FROM_ANYWHERE or spec.position_axes == 1]


def steepness(spec: Spec) -> float:
    """The most that a bias may change by from one position to the next; 0 without such a bias."""
    return max(layer.encoding.steepness(layer) for layer in spec.distinct_layers())


def position_ids(kind: str | At, rng: np.random.Generator, places: Array, spec: Spec) -> Array:
    """int64 [batch, seq], or [batch, seq, axes], for tokens with these places [batch, seq] in their rows.

    On several axes, consecutive tokens lie on a grid that is wider than high. For other kinds, each axis is drawn
    independently; with "alike", the position of a token is the same along every axis, like that of a text.
    """
    if kind == ALL_ROWS:
        one = position_ids(str(rng.choice(_for_all_rows(spec))), rng, places[:1], spec)
        return np.repeat(one, len(places), axis=0)
    mixed = _mixed_kinds(kind, rng, spec)
    if isinstance(kind, At):
        made = _given(kind, places, spec)
    else:
        if kind == "mixed" and spec.ordered:  # keys grow with their position: a few far ones would hide all others
            kind = "consecutive"
        known, end = spec.position_limits(), _end(places, spec)
        limits = known or (end,) * spec.position_axes
        if spec.position_axes == 1:
            made = _along(kind, rng, places, end, mixed)
        elif kind.startswith(TEXT):
            text = _along(kind.removeprefix(TEXT), rng, places, end, mixed)
            made = np.repeat(text[..., None], spec.position_axes, -1)
        elif kind in ("consecutive", "packed", "still"):
            made = _on_grid(kind, rng, places, limits, known is None)
        else:
            made = _on_axes(kind, rng, places, limits, known is None, mixed)
    return (np.sort(made, 1) if spec.ordered else made).astype(np.int64)


def _mixed_kinds(kind: str | At, rng: np.random.Generator, spec: Spec) -> Sequence[str]:
    """The kinds that the rows of a batch take in turn if `kind` is "mixed"."""
    kinds: Sequence[str] = BELOW if spec.negative_positions else MIXED
    if kind == "mixed" and rng.random() < NEARBY:
        kinds = kinds[::2]
    if spec.dtype == "fp32":
        return kinds
    kinds = [HALF.get(each, each) for each in kinds]
    return kinds if steepness(spec) <= STEEP else [each for each in kinds if each in _close(spec)]


def _for_all_rows(spec: Spec) -> list[str]:
    """The kinds that all rows of a batch may have in common; "consecutive" is tried with rows alike anyway."""
    is_near = spec.dtype == "fp32" or steepness(spec) <= STEEP or "far row" in _close(spec)
    return ["packed", "shuffled", *(["far row"] if is_near and not spec.ordered else [])]


def _end(places: Array, spec: Spec) -> int:
    """The number of positions along an axis without a limit of its own."""
    end = position_end(spec)
    if spec.ordered and spec.dtype != "fp32" and places.max() > end // 3:
        return end // 3  # half precision has too few digits for the keys that are large so far out
    return end


def _given(kind: At, places: Array, spec: Spec) -> Array:
    rows, tokens = kind.positions.shape[:2]
    batch, seq = places.shape
    made = kind.positions[np.arange(batch)[:, None] % rows, np.arange(seq) % tokens]
    ends = spec.position_limits() or (spec.position_limit() or FAR_EXACT,)
    made = np.asarray(np.minimum(made, np.array(ends) - 1))
    return made[..., 0] if spec.position_axes == 1 else made


def _on_grid(kind: str, rng: np.random.Generator, places: Array, limits: Sequence[int], with_text: bool) -> Array:
    """Tokens on a grid in their order, [batch, seq, axes]; with "still", one axis of each row has a single position."""
    width = min(limits[0], max(3, round((1.7 * places.shape[1]) ** 0.5)))
    index = POSITIONS["consecutive" if kind == "still" else kind](rng, places, min(math.prod(limits), 2**62))
    columns = [index % width, index // width, *(index // 2 + axis for axis in range(len(limits) - 2))]
    made = np.stack([column % end for column, end in zip(columns, limits, strict=True)], -1)
    if kind == "still":  # along one axis, as time in a picture
        for row, tokens in enumerate(made):
            axis = row % len(limits)
            tokens[:, axis] = rng.integers(min(NEAR, limits[axis]))
        return made
    return _with_text(rng, made, index) if with_text else made


def _on_axes(
    kind: str, rng: np.random.Generator, places: Array, limits: Sequence[int], with_text: bool, mixed: Sequence[str]
) -> Array:
    """Positions [batch, seq, axes] of which each axis is drawn independently."""
    # single tokens differ along the axes by the axis' end, several tokens by the order of landmarks
    sized = not with_text or places.shape[1] > 1
    ends = [end if sized else max(end // (1 + axis), 1) for axis, end in enumerate(limits)]
    columns = [_along(kind, rng, places, end, mixed) for end in ends]
    text = columns[0]
    if kind in ("far", "mixed"):
        columns = [np.roll(column, axis, axis=1) for axis, column in enumerate(columns)]
    made = np.stack(columns, -1)
    return _with_text(rng, made, text) if with_text else made


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
