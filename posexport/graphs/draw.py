"""Inputs of a graph, drawn by role so that they agree: masks are as long as the keys, positions follow them.

posexport.graphs.cases decides which kinds are combined in one set of inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from posexport.errors import RequestError, shown
from posexport.graphs.axes import AXES, BATCH, ENCODER, KEPT, PAST, SEQ, SLOTS, TOTAL, is_token_first
from posexport.graphs.input_facts import COUNTING, dtype_of, is_of_tokens, pads_encoder, rows_begin_apart, takes_padding
from posexport.graphs.numbers import drawn_numbers, every_number
from posexport.graphs.places import FAR, FARTHEST, POSITIONS, keys_of, places_of
from posexport.graphs.roles import Role
from posexport.graphs.sizes import check_sizes, fitted, shape_of, taken_sizes
from posexport.runtimes.base import Arrays
from posexport.spec.arrays import Array

VOCABULARY = 100
"""The tokens of a vocabulary whose table was not found."""

BIASES = 2.0
"""The standard deviation of what is added to scores."""

SCORES: Mapping[str, tuple[float, float]] = {
    "plain": (0.0, -1.0),
    "biased": (BIASES, -1.0),
    "infinite": (0.0, -math.inf),
}
"""What a floating-point mask adds to scores: the standard deviation for visible keys, and what hides a key, as a
multiple of the largest number of the mask's dtype."""


@attrs.frozen(kw_only=True)
class Kinds:
    """The kinds of one set of inputs: `positions` of POSITIONS, `padding` of PADDING or "mixed", `values` of VALUES,
    `scores` of SCORES. With `ends`, the first and the last token of the vocabulary are among the tokens. With positions
    `every`, all tokens are, if there are enough places. With `apart`, rows of a buffer contain different numbers of
    tokens, and one contains none. With `marks`, ids that the graph compares tokens with are among the tokens: at most a
    quarter of each row, except in rows with one or two tokens. With `unseen`, all tokens of the encoder's last row are
    padding."""

    positions: str = "consecutive"
    padding: str = "none"
    values: str = "normal"
    scores: str = "plain"
    ends: bool = True
    apart: bool = False
    marks: bool = False
    unseen: bool = False


@attrs.frozen(kw_only=True)
class DrawnInputs:
    """One set of inputs by the graph's names, its label, and its sizes by meaning (posexport.graphs.axes).

    `keys` bool [batch, total] says which keys of a row are seen, `encoder_keys` [batch, encoder] which keys of an
    encoder. The `seq` keys from `begins` [batch] on are those of the new tokens.
    """

    label: str
    arrays: Arrays
    sizes: Mapping[str, int]
    kinds: Kinds
    keys: Array
    encoder_keys: Array
    begins: Array

    @property
    def tokens(self) -> Array:
        """bool [batch, seq]: which new tokens are not padding."""
        return np.take_along_axis(self.keys, places_of(self.begins, self.sizes), 1)

    @property
    def slots(self) -> Array:
        """bool [batch, slots]: the places of a buffer whose keys are seen."""
        free = max(self.sizes.get(SLOTS, 0) - self.keys.shape[1], 0)
        return np.pad(self.keys, ((0, 0), (0, free)))


@attrs.frozen(kw_only=True)
class _Draw:
    """What the makers of inputs need."""

    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sizes: Mapping[str, int]
    kinds: Kinds
    keys: Array
    encoder_keys: Array
    begins: Array
    rng: np.random.Generator
    tokens: Iterator[int] | None = None


def every_token(role: Role, *seed: int) -> Iterator[int]:
    """Endless tokens of an input's vocabulary; each token comes once before any comes again (`every_number`)."""
    return every_number(role.rows or VOCABULARY, *seed)


def _ids(draw: _Draw) -> Array:
    rows = draw.role.rows or VOCABULARY
    ids = draw.rng.integers(0, rows, draw.shape)
    if draw.kinds.positions == "every":
        return np.resize(draw.rng.permutation(rows), draw.shape)
    if draw.tokens is not None:
        ids = np.fromiter(itertools.islice(draw.tokens, ids.size), np.int64, ids.size).reshape(draw.shape)
    if draw.kinds.ends and ids.size:
        ids.flat[-1] = rows - 1
        ids.flat[0] = 0 if ids.size > 1 else rows - 1
    if draw.kinds.marks and draw.role.marks and ids.ndim:
        sees_more = draw.role.kind == "token_ids" and draw.sizes[PAST] > 0
        _mark(ids, draw.role.marks, draw.rng, first=0 if sees_more else 1)
    return ids


def _mark(ids: Array, marks: Sequence[int], rng: np.random.Generator, first: int) -> None:
    """Replace random tokens between the first and the last of each row by ids that the graph compares tokens with;
    their number is the same in each row. In rows with one or two tokens, the last token of about every other row is
    replaced, unless its index is below `first`: a query must see a key that is not padding."""
    length = ids.shape[-1]
    places, count = length - 2, max(length // 4, 1)
    for number, row in enumerate(ids.reshape(-1, length)):
        numbers = np.resize(np.roll(marks, number), count)
        if places > 0:
            row[1 + rng.permutation(places)[:count]] = numbers
        elif length > first and rng.random() < 0.5:
            row[-1] = numbers[0]


def _types(draw: _Draw) -> Array:
    return draw.rng.integers(0, draw.role.rows or 2, draw.shape)


def _positions(draw: _Draw) -> Array:
    """Positions, counted without padding as pipelines do: of the new tokens, or only of the first new token, or of an
    encoder's tokens or all keys, depending on the axes."""
    limit = draw.role.rows or (FARTHEST if draw.kinds.positions == "farthest" else FAR)
    keys = draw.encoder_keys if ENCODER in draw.role.axes else draw.keys
    places = np.maximum(keys.cumsum(1) - 1, 0)
    if draw.role.is_first_position:
        places, limit = np.take_along_axis(places, draw.begins[:, None], 1), max(limit - draw.sizes[SEQ] + 1, 1)
    elif SEQ in draw.role.axes and keys is draw.keys:
        places = np.take_along_axis(places, places_of(draw.begins, draw.sizes), 1)
    make = POSITIONS[draw.kinds.positions]
    if AXES not in draw.role.axes:
        made = make(draw.rng, places, limit)
        return made if len(draw.shape) == 2 else made[0]
    at = draw.role.axes.index(AXES)
    if BATCH not in draw.role.axes:  # all rows share the positions of the first
        places = places[:1]
    if draw.kinds.positions == "consecutive":  # a picture among text has positions on a grid
        grid = [places, *(places // (2 + axis) for axis in range(1, draw.shape[at]))]
        return np.stack([axis % limit for axis in grid], at)
    return np.stack([make(draw.rng, places, limit) for _ in range(draw.shape[at])], at)


def _mask(draw: _Draw) -> Array:
    """A mask of rows and keys has ones and zeros. A mask of tokens and keys is True if a token sees a key, or is what
    is added to scores (SCORES); with a cache, a token sees only keys up to its own. Each token sees itself. A mask for
    all rows is that of the first row."""
    encoder = draw.role.kind.startswith("encoder") or ENCODER in draw.role.axes
    keys = draw.encoder_keys if encoder else draw.keys
    rank, width = len(draw.shape), draw.shape[-1]
    of_rows = draw.role.axes[0] == BATCH or rank == 4
    if not is_of_tokens(draw.role):
        wide = _widened(keys, width)
        wide = wide if math.prod(draw.shape) == wide.size else wide[:1]
        return wide.reshape(draw.shape) if rank < 3 else _shown(draw, wide.reshape(len(wide), *draw.shape[1:]))
    batch, seq = draw.shape[0] if of_rows else 1, draw.shape[-2]
    seen = np.broadcast_to(_widened(keys, width)[:batch, None, :], (batch, seq, width)).copy()
    if not of_rows:
        seen &= draw.rng.random(seen.shape) < 0.8
        seen |= ~seen.any(-1, keepdims=True)
    if not encoder:
        places = places_of(draw.begins, draw.sizes)[:batch, :, None]
        if width > seq or draw.sizes[PAST]:
            seen &= np.arange(width) <= places
        np.put_along_axis(seen, np.minimum(places, width - 1), True, 2)
    return _shown(draw, np.broadcast_to(seen[:, None] if rank == 4 else seen, draw.shape) if rank > 2 else seen[0])


def _shown(draw: _Draw, seen: Array) -> Array:
    """The visible keys as booleans, or as what is added to scores."""
    if draw.dtype.kind in "bi" or draw.role.truths:
        return np.asarray(seen)
    deviation, hidden = SCORES[draw.kinds.scores]
    largest = float(np.finfo(np.float16 if draw.dtype.itemsize == 2 else np.float32).max)
    return np.where(seen, deviation * draw.rng.standard_normal(draw.shape) if deviation else 0.0, hidden * largest)


def _widened(keys: Array, width: int) -> Array:
    """Keys [batch, width]: the last ones, or all of them with invisible keys after them."""
    if keys.shape[1] >= width:
        return keys[:, keys.shape[1] - width :]
    return np.pad(keys, ((0, 0), (0, width - keys.shape[1])))


def _floats(draw: _Draw) -> Array:
    return drawn_numbers(draw.kinds.values, draw.role, draw.shape, draw.sizes, draw.rng, draw.dtype.itemsize == 2)


def _cached(draw: _Draw) -> Array:
    """What is cached. Integers, which stand for features until they are scaled, are any of their dtype."""
    if draw.dtype.kind not in "iu":
        return _floats(draw)
    limits = np.iinfo(draw.dtype)
    return draw.rng.integers(limits.min, limits.max, draw.shape, endpoint=True)


def _boxes(draw: _Draw) -> Array:
    """Boxes by two corners; the first corner is not farther than the second along either axis."""
    corners = draw.rng.integers(0, min(draw.role.rows or 1000, 1000), draw.shape)
    half = draw.shape[-1] // 2
    return np.concatenate(
        [
            np.minimum(corners[..., :half], corners[..., half:]),
            corners.max(-1, keepdims=True).repeat(draw.shape[-1] - half, -1),
        ],
        -1,
    )


def _number(value: Callable[[Mapping[str, int]], int]) -> Callable[[_Draw], Array]:
    return lambda draw: np.full(draw.shape, value(draw.sizes))


def _segments(draw: _Draw) -> Array:
    """Where segments of the tokens begin, in rising order from 0 on, and where the last one ends."""
    last, count = draw.sizes[SEQ], draw.shape[0]
    inner = np.sort(draw.rng.integers(0, last + 1, max(count - 2, 0)))
    return np.array([0, *inner, last][-count:] if count else [])


def _begins(draw: _Draw) -> Array:
    """Where the new tokens of each row begin, or those of the first row if one number is for all."""
    begins = draw.begins.reshape(-1, *[1] * (len(draw.shape) - 1))
    return begins if draw.shape and draw.shape[0] == len(begins) else np.full(draw.shape, draw.begins[0])


def _picture_mask(draw: _Draw) -> Array:
    """Each picture fills a corner of its area, at least half as high and as wide; the first picture fills all of it."""
    height, width = draw.shape[-2:]
    count = math.prod(draw.shape[:-2])
    sides = [draw.rng.integers((size + 1) // 2, size + 1, count) for size in (height, width)]
    high, wide = (np.where(np.arange(count), side, size) for side, size in zip(sides, (height, width), strict=True))
    rows, columns = np.arange(height)[:, None] < high[:, None, None], np.arange(width) < wide[:, None, None]
    return (rows & columns).reshape(draw.shape)


MAKERS: Mapping[str, Callable[[_Draw], Array]] = {
    "token_ids": _ids,
    "encoder_token_ids": _ids,
    "token_type_ids": _types,
    "position_ids": _positions,
    "attention_mask": _mask,
    "encoder_attention_mask": _mask,
    "padding_mask": lambda draw: ~_mask(draw).astype(bool),
    "bias": lambda draw: BIASES * draw.rng.standard_normal(draw.shape),
    "past": _cached,
    "encoder_past": _cached,
    "state": lambda draw: _floats(draw) if draw.sizes[PAST] else np.zeros(draw.shape),
    "cache_position": lambda draw: draw.sizes[PAST] + np.arange(draw.shape[0]),
    "write_indices": _begins,
    "past_length": _begins,
    "total_length": _number(lambda sizes: sizes[PAST] + sizes[SEQ]),
    "lengths": lambda draw: draw.keys.sum(1).reshape(draw.shape),
    "prefix_length": lambda draw: draw.rng.integers(0, draw.sizes[PAST] + draw.sizes[SEQ] + 1, draw.shape),
    "segments": _segments,
    "last_key": lambda draw: (draw.keys.sum(1) - 1).reshape(draw.shape),
    "use_cache": _number(lambda sizes: int(sizes[PAST] > 0)),
    "logits_to_keep": _number(lambda sizes: sizes[KEPT]),
    "boxes": _boxes,
    "features": _floats,
    "encoder_features": _floats,
    "images": _floats,
    "audio": _floats,
    "index": lambda draw: draw.rng.integers(0, draw.role.rows or VOCABULARY, draw.shape),
    "mask": lambda draw: draw.rng.integers(0, 2, draw.shape),
    "rows": lambda draw: draw.rng.integers(0, draw.sizes[BATCH], draw.shape),
    "picture_mask": _picture_mask,
    "ones": lambda draw: np.ones(draw.shape),
    "zeros": lambda draw: np.zeros(draw.shape),
}
"""The maker of an input by its role."""


def draw_inputs(
    roles: Mapping[str, Role],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
    kinds: Kinds | None = None,
    label: str = "drawn",
    tokens: Mapping[str, Iterator[int]] | None = None,
) -> DrawnInputs:
    """One set of inputs with these `sizes` by meaning, as near as the graph allows (posexport.graphs.sizes.fitted);
    RequestError if the graph allows none, or if an input's axes don't fit its role.

    `tokens` gives the tokens of inputs by name, so that several sets share a vocabulary (`every_token`).
    """
    kinds = kinds or Kinds()
    sizes = fitted(roles, sizes)
    check_sizes(roles, sizes)
    if any(role.kind == "logits_to_keep" for role in roles.values()):
        sizes[KEPT] = int(rng.choice([1, sizes[SEQ], int(rng.integers(1, sizes[SEQ] + 1))]))
    if not any(map(takes_padding, roles.values())):
        kinds = attrs.evolve(kinds, padding="none")
    # what all rows share is drawn for the first row, which then has no padding
    for_all = any(BATCH not in role.axes and {SEQ, TOTAL, SLOTS, ENCODER} & {*role.axes} for role in roles.values())
    whole = 0 if for_all else None
    keys = keys_of(kinds.padding, rng, sizes, whole)
    counted = {role.kind for role in roles.values() if takes_padding(role)} <= COUNTING
    if counted:
        keys = ~np.sort(~keys, axis=1)
    begins = np.full(sizes[BATCH], sizes[PAST])
    if kinds.apart and rows_begin_apart(roles):
        begins[1:] = rng.integers(0, sizes[PAST] + 1, sizes[BATCH] - 1)
        begins[1:][-1:] = 0
        keys = _keys_apart(np.ones_like(keys) if counted else keys, begins, sizes[SEQ])
    padded = pads_encoder(roles)
    of_encoder = {PAST: 0, SEQ: sizes[ENCODER], BATCH: sizes[BATCH]}
    encoder_keys = keys_of("mixed" if padded and sizes[BATCH] > 1 else "none", rng, of_encoder, whole)
    if padded and kinds.unseen:
        encoder_keys[-1] = False
    arrays: Arrays = {}
    for name, role in roles.items():
        draw = _Draw(
            role=role,
            shape=shape_of(role, sizes),
            dtype=dtype_of(role),
            sizes=sizes,
            kinds=kinds,
            keys=keys,
            encoder_keys=encoder_keys,
            begins=begins,
            rng=rng,
            tokens=(tokens or {}).get(name),
        )
        arrays[name] = np.array(_made(draw), draw.dtype, order="C")
    return DrawnInputs(
        label=label, arrays=arrays, sizes=sizes, kinds=kinds, keys=keys, encoder_keys=encoder_keys, begins=begins
    )


def _keys_apart(keys: Array, begins: Array, seq: int) -> Array:
    """The keys that rows of a buffer see whose `seq` new tokens begin at `begins`: none after these, and at least one
    of them."""
    kept = keys & (np.arange(keys.shape[1]) < begins[:, None] + seq)
    for row, begin in zip(kept, begins.tolist(), strict=True):
        row[begin + seq - 1] |= not row[begin : begin + seq].any()
    return kept


def _made(draw: _Draw) -> Array:
    """The array of an input. Makers have rows first, so an input with tokens first is transposed. RequestError if the
    input has axes that its role can't have."""
    if is_token_first(draw.role.axes):
        role, (first, second, *rest) = draw.role, draw.shape
        axes, stated = ((each[1], each[0], *each[2:]) for each in (role.axes, role.shape))
        role = attrs.evolve(role, axes=axes, shape=stated)
        turned = attrs.evolve(draw, shape=(second, first, *rest), role=role)
        return _made(turned).swapaxes(0, 1)
    try:
        return np.broadcast_to(MAKERS[draw.role.kind](draw), draw.shape)
    except ValueError:
        role = draw.role
        raise RequestError(
            f"the input {shown(role.name)} can't be drawn as {role.kind}: by its dimensions' names its axes are "
            f"[{', '.join(map(str, role.axes))}], which this role doesn't have; give it another role with --input "
            f"{shown(role.name)[1:-1]}=ROLE, or give your own inputs to 'posexport verify' with --inputs FILE.npz."
        ) from None


PROBED = {BATCH: 3, SEQ: 5, PAST: 7, ENCODER: 11}
"""Sizes of the probe's inputs: all different, so that no axis is mistaken for another."""


def probe_inputs(roles: Mapping[str, Role], seed: int) -> DrawnInputs:
    """The set of inputs on which a graph is probed. If the graph takes only some sizes, it has the second of them: the
    first may be one block of tokens, in which attention looks as if it saw all of them."""
    second = {axis: next((size for size in sizes if size > 1), 1) + 1 for axis, sizes in taken_sizes(roles).items()}
    return draw_inputs(roles, {**PROBED, **second}, np.random.default_rng(seed), label="probe")
