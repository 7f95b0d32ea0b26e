"""Which keys the queries of an attention see, found by trying several lengths, caches and paddings.

With d = query position - key position, by places: all keys (`none`), d >= 0 (`causal`), 0 <= d < w (`window`), |d| < w
(`local`), keys of the same chunk up to the query (`chunk`), keys that an input allows (`input`). Such an input is a
mask for each query, or positions. The result holds for rows of up to `tested` keys: a wider window is not noticed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from posexport.errors import RequestError
from posexport.graphs.attention.logits import AddedToScores, Logits
from posexport.graphs.attention.measure import POSITIONS, Measure
from posexport.graphs.axes import PAST, SEQ
from posexport.graphs.input_facts import is_of_tokens
from posexport.graphs.roles import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    Array = np.ndarray[Any, np.dtype[Any]]

FAR_KEYS, FAR_ROW = 8192, 768
"""The lengths at which a window is looked for: keys of one query after a cache, and keys of a row without a cache."""

LEAST_KEYS = 24
"""The fewest keys of a row that counts as far."""

_MASKS = (
    *("attention_mask", "padding_mask", "encoder_attention_mask", "mask"),
    *("lengths", "prefix_length", "segments", "last_key", "past_length", "total_length"),
)
"""Roles of inputs that say which keys may be seen."""

Mask = dict[str, Any]


def mask_of(added: AddedToScores, measure: Measure, roles: Mapping[str, Role]) -> Mask:
    """The mask as data: `kind`, `window` or `chunk`, `padding` (the inputs that hide keys), `tested`."""
    if not added.terms:
        return _mask("none", None, [], None)
    tried = list(_lengths(added, measure))
    if not tried:
        return _mask("other", None, [], 0)
    kind, size, far = _farthest(tried, _far(added, measure))
    tried += far
    tested = max(one.seen.shape[3] for one in tried)
    read = measure.inputs_of(added.values)
    needed = [name for name in read if roles[name].kind in _MASKS]
    padding = sorted(name for name in needed if not is_of_tokens(roles[name]))
    whole = [name for name in needed if name not in padding]
    given = [roles[name] for name in whole]
    if kind == "other" and whole and _is_given(tried, given):
        return _mask("input", None, [], tested, sorted(whole))
    if whole and kind != "other" and _hide_by_query(added, kind, size, given):
        if kind == "none":
            return _mask("input", None, padding, tested, sorted(whole))
        return _mask(kind, size, sorted(needed), tested)
    placed = sorted(name for name in read if roles[name].kind == POSITIONS)
    if placed and kind != "other" and _follows_positions(added, measure, kind, size):
        return _mask("input", None, padding, tested, placed)
    counts = any(role.grouped for role in roles.values())
    hides = padding and kind != "other" and _padded(added, measure, kind, size, counts=counts)
    if hides is None:
        return _mask("other", None, padding, tested)
    compared = sorted(name for name in read if roles[name].marks) if kind != "other" else []
    marked = compared and _marked(added, kind, size, [roles[name] for name in compared])
    if marked is None:
        return _mask("other", None, sorted([*padding, *compared]), tested)
    return _mask(kind, size, sorted([*(padding if hides else []), *(compared if marked else [])]), tested)


def _mask(kind: str, size: int | None, padding: list[str], tested: int | None, inputs: list[str] | None = None) -> Mask:
    mask: Mask = {"kind": kind, "window": None, "chunk": None, "padding": padding, "tested": tested}
    if inputs is not None:
        mask["inputs"] = inputs
    if size is not None:
        mask["chunk" if kind == "chunk" else "window"] = size
    return mask


def _lengths(added: AddedToScores, measure: Measure) -> Iterator[Logits]:
    """Unpadded rows of several lengths, without those that the graph doesn't take."""
    for seq, past in [(9, 0), (6, 5)] if measure.varies(PAST) else [(9, 0)]:
        with contextlib.suppress(RequestError):
            yield added.at(seq=seq, past=past)


def _far(added: AddedToScores, measure: Measure) -> Iterator[list[Logits]]:
    """Rows with as many keys as the graph takes, then with fewer: a bias may be so low that it hides the farthest keys.

    With a cache, there are two lengths each time: at one length, a chunk looks like a window.
    """
    cached = measure.varies(PAST)
    keys = FAR_KEYS if cached else FAR_ROW
    while keys >= LEAST_KEYS:
        with contextlib.suppress(RequestError):  # beyond the end of a table
            lengths = (keys, keys * 5 // 8 + 1)
            yield [added.at(seq=1, past=each - 1) for each in lengths] if cached else [added.at(seq=keys)]
        keys //= 2


def _kind(tried: list[Logits]) -> tuple[str, int | None]:
    """The kind of mask that fits all of these rows, and the width of its window or chunk."""
    for kind, sizes in _hypotheses(tried):
        for size in sizes:
            if all(_fits(one, kind, size) for one in tried):
                return kind, size
    return "other", None


def _farthest(tried: list[Logits], rows: Iterator[list[Logits]]) -> tuple[str, int | None, list[Logits]]:
    """The kind of mask of the short rows and of the farthest rows that fit together, and these far rows.

    The kind is `other` if no far rows fit.
    """
    kind, size = _kind(tried)
    for far in rows if kind != "other" else ():
        found, width = _kind([*tried, *far])
        if found != "other":
            return found, width, far
        kind, size = "other", None
    return kind, size, []


def _hypotheses(tried: list[Logits]) -> Iterator[tuple[str, list[int | None]]]:
    yield "none", [None]
    yield "causal", [None]
    last = [one.seen[0, 0, -1] for one in tried]
    if not any(row.any() for row in last):  # the last query sees no key
        return
    yield "window", [max(int(row.sum()) for row in last)]
    yield "local", [max(int(one.seen[0, 0, 0].sum()) for one in tried)]
    # the first key that the last query sees begins a chunk
    counts = [int(row.sum()) for row in last]
    starts = {one.seen.shape[3] - count for one, count in zip(tried, counts, strict=True)} - {0}
    common, least = math.gcd(*starts), max(counts)
    yield "chunk", [common // parts for parts in range(common // least, 0, -1) if common % parts == 0]


def _fits(one: Logits, kind: str, size: int | None) -> bool:
    if kind != "none" and one.keys is None:  # the keys are not those of the row, and their places are not known
        return False
    return bool((one.seen == _visible(one, kind, size)).all())


def _visible(one: Logits, kind: str, size: int | None) -> Array:
    """Which keys each query sees with a mask of this kind, bool [S, T]."""
    distances = one.distances()
    if kind == "none":
        return np.ones_like(distances, bool)
    if kind == "local":
        return np.asarray(np.abs(distances) < (size or 0))
    seen = distances >= 0
    if kind == "window":
        seen &= distances < (size or 0)
    if kind == "chunk":
        places = np.arange(one.seen.shape[3])
        seen &= (one.past + np.arange(one.queries))[:, None] // (size or 1) == places // (size or 1)
    return np.asarray(seen)


def _is_given(tried: list[Logits], masks: list[Role]) -> bool:
    """Whether each query sees exactly the keys that an input [batch, 1, seq, keys] allows it."""
    for one in tried:
        for mask in masks:
            sees = _given(one, mask)
            if sees.shape[-2:] != one.seen.shape[-2:] or not (one.seen == sees).all():
                return False
    return True


def _given(one: Logits, mask: Role) -> Array:
    """The keys that an input allows each query to see, [batch, 1 or heads, seq, keys]."""
    given = one.inputs.arrays[mask.name]
    if mask.kind == "padding_mask":
        given = given == 0
    adds = given.dtype.kind == "f" and not mask.truths and mask.kind != "padding_mask"
    sees = given if given.dtype == bool else given > -1e3 if adds else given != 0
    return np.asarray(sees[:, None] if sees.ndim == 3 else sees)


def _hide_by_query(added: AddedToScores, kind: str, size: int | None, masks: list[Role]) -> bool:
    """Whether inputs with a mask for each query, which hid nothing so far, hide keys where their values say so."""
    with contextlib.suppress(RequestError, ValueError):
        one = added.at(seq=7, batch=3, padding="left")
        given = (_given(one, mask) for mask in masks)
        sees, seen = np.logical_and.reduce(np.broadcast_arrays(_visible(one, kind, size), *given)), one.seen
        sees, seen = np.broadcast_arrays(sees, seen)  # one of them may have an axis of heads
        some = sees.any(-1)  # the graph may let queries without any key see all keys
        return not _fits(one, kind, size) and bool((seen[some] == sees[some]).all())
    return False


def _follows_positions(added: AddedToScores, measure: Measure, kind: str, size: int | None) -> bool:
    """Whether queries see other keys if positions begin anew, or go back."""
    axes, length = measure.axes_of(added.values) or 1, measure.sizes(9)[SEQ]
    with contextlib.suppress(RequestError):
        one = added.at(seq=length, positions=[[place] * axes for place in (0, 1, 2, 0, 1, 4, 3, 2, 3)[-length:]])
        return not _fits(one, kind, size)
    return False


def _marked(added: AddedToScores, kind: str, size: int | None, tokens: list[Role]) -> bool | None:
    """Whether all queries stop seeing keys with ids that the graph compares tokens with, such as padding.

    None if anything else changes.
    """
    try:
        one = added.at(seq=16, batch=3, marks=True)
    except RequestError:
        return False
    unmarked = np.broadcast_to(_visible(one, kind, size), one.seen.shape)
    seen = (one.seen | ~unmarked).all((1, 2))  # [rows, keys]
    ids = [(one.inputs.arrays[role.name], role.marks) for role in tokens]
    stand = [np.isin(array, marks) for array, marks in ids if array.shape == seen.shape]
    if not stand or not (one.seen == unmarked & seen[:, None, None]).all():
        return None if (one.seen != unmarked).any() else False
    return bool((~seen).any()) if not (~seen & ~np.logical_or.reduce(stand)).any() else None


def _padded(added: AddedToScores, measure: Measure, kind: str, size: int | None, *, counts: bool) -> bool | None:
    """Whether padding hides keys, and nothing else changes; None if something else changes.

    Queries that see no key are left out: runtimes differ in them, and some graphs let them see all keys. If the graph
    `counts` the keys of a row from the left (Role.grouped), padding is on the right, and queries of padding are left
    out too.
    """
    hides = False
    pasts = (0, 5) if measure.varies(PAST) else (0,)
    for seed, (padding, past) in enumerate((padding, past) for padding in ("left", "right", "holes") for past in pasts):
        if counts and padding != "right":
            continue
        try:
            one = added.at(seq=1 if counts and past else 7, past=past, batch=3, padding=padding, seed=seed)
        except RequestError:
            continue
        if one.keys is None:
            return None
        unpadded = _visible(one, kind, size)
        expected = _from_the_left(one.keys, unpadded) if counts and past else unpadded & one.keys[:, None, None, :]
        some = np.broadcast_to(expected.any(-1, keepdims=True), expected.shape)
        if counts and not past:
            some = some & one.keys[:, None, :, None]
        try:
            seen = np.broadcast_arrays(one.seen, expected)[0]
        except ValueError:
            return None
        expected, some = np.broadcast_to(expected, seen.shape), np.broadcast_to(some, seen.shape)
        if (seen[some] != expected[some]).any():
            same = (seen == unpadded).all()
            if not same:
                return None
        else:
            hides |= bool((seen != unpadded).any())
    return hides


def _from_the_left(keys: Array, visible: Array) -> Array:
    """What one query with cached keys sees, [B, 1, 1, T], if the keys of each row are counted from the left.

    A row has as many keys as are true in `keys` [B, T], and the query is the last of them. `visible` [1, T] is what the
    query sees without padding.
    """
    total = keys.shape[1]
    rows = [np.pad(visible[0, total - count :], (0, total - count)) for count in keys.sum(1)]
    return np.stack(rows)[:, None, None]
