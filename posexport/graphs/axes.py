"""The meaning of each axis of a graph's inputs: rows, new tokens, cached tokens, all keys, tokens of an encoder.

Roles say what an axis usually is, with rows before tokens. Tokens come first if the names of dimensions say so, as in
`[seq, batch, 64]`, or if those of other inputs do (`_told`, `_told_by_others`). Dimensions with the same name are one
dimension. Its meaning is then that of the role that comes first in ORDER: a mask whose length has the name of the
tokens' axis is as long as the tokens. Some exporters give all dimensions one name, such as `unk`. Such names are
ignored (`reused_names`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from posexport.spec.contract import Shape
from posexport.spec.input_roles import is_state

BATCH, SEQ, PAST, TOTAL, SLOTS, ENCODER = "batch", "seq", "past", "total", "slots", "encoder"
"""`total` is past + seq. A cache with `slots` places is written into; `past` of them are full."""

HEIGHT, WIDTH, FRAMES, AXES, KEPT = "height", "width", "frames", "axes", "kept"
"""`kept` are the last tokens: only these get logits."""

Axes = tuple["str | int", ...]
"""The meaning of each axis, or its size if it has no meaning.

A dynamic axis without a meaning is `dim NAME`. `4*batch` is four times as long as an axis with a meaning, if the file
says so (`multiple_of`).
"""

_Layout = tuple["str | None", ...]

_TOKENS: dict[int, _Layout] = {1: (SEQ,), 2: (BATCH, SEQ)}
_CACHE: dict[int, _Layout] = {3: (BATCH, PAST, None), 4: (BATCH, None, PAST, None), 5: (None, BATCH, None, PAST, None)}
_MASK: dict[int, _Layout] = {1: (TOTAL,), 2: (BATCH, TOTAL), 3: (BATCH, SEQ, TOTAL), 4: (BATCH, None, SEQ, TOTAL)}
_ANY: dict[int, _Layout] = {0: (), 1: (BATCH,), 2: (BATCH, None), 3: (BATCH, SEQ, None), 4: (BATCH, SEQ, None, None)}

KNOWN_AXES: dict[str, dict[int, _Layout]] = {
    "token_ids": _TOKENS,
    "encoder_token_ids": {2: (BATCH, ENCODER)},
    "token_type_ids": {**_TOKENS, 3: (BATCH, SEQ, None)},
    "position_ids": {**_TOKENS, 3: (AXES, BATCH, SEQ)},
    "attention_mask": _MASK,
    "bias": {2: (SEQ, TOTAL), 3: (None, SEQ, TOTAL), 4: _MASK[4]},
    "encoder_attention_mask": {2: (BATCH, ENCODER), 3: (BATCH, SEQ, ENCODER), 4: (BATCH, None, SEQ, ENCODER)},
    "padding_mask": _MASK,
    "past": _CACHE,
    "encoder_past": {
        rank: tuple(ENCODER if axis == PAST else axis for axis in layout) for rank, layout in _CACHE.items()
    },
    "state": {rank: (BATCH, *[None] * (rank - 1)) for rank in (2, 3, 4, 5)},
    "cache_position": {1: (SEQ,)},
    "write_indices": {1: (BATCH,)},
    "past_length": {0: (), 1: (BATCH,), 2: (BATCH, None)},
    "total_length": {0: (), 1: (None,)},
    "lengths": {1: (BATCH,), 2: (BATCH, None)},
    "prefix_length": {0: (), 1: (BATCH,), 2: (BATCH, None)},
    "segments": {1: (None,)},
    "last_key": {1: (BATCH,), 2: (BATCH, None)},
    "use_cache": {0: (), 1: (None,)},
    "logits_to_keep": {0: (), 1: (None,)},
    "boxes": {3: (BATCH, SEQ, None)},
    "features": {**_ANY, 5: (BATCH, None, None, None, None)},
    "encoder_features": {2: (ENCODER, None), 3: (BATCH, ENCODER, None)},
    "images": {3: (None, HEIGHT, WIDTH), 4: (BATCH, None, HEIGHT, WIDTH), 5: (BATCH, None, None, HEIGHT, WIDTH)},
    "audio": {2: (BATCH, FRAMES), 3: (BATCH, None, FRAMES)},
    "index": _ANY,
    "mask": _ANY,
    "rows": {1: (BATCH,)},
    "picture_mask": {3: (BATCH, HEIGHT, WIDTH), 4: (BATCH, None, HEIGHT, WIDTH)},
    "ones": {**_ANY, 3: (BATCH, HEIGHT, WIDTH), 4: (BATCH, None, HEIGHT, WIDTH)},
    "zeros": {**_ANY, 3: (BATCH, None, None)},
}
"""The meaning of axes by role and rank."""

CACHED = ("past", "state", "past_length", "write_indices", "cache_position")
"""Roles of inputs without which there are no tokens before the given ones."""

MASKS = ("attention_mask", "encoder_attention_mask", "padding_mask")
"""Roles of masks, which may have axes of tokens and keys."""

ORDER = ("token_ids", "features", "past", "encoder_features", "encoder_past", "position_ids", "images", "audio")
"""The roles whose names of dimensions count before those of other roles."""


_NO_NAME = re.compile(r"unk(nown)?(_*\d+)?|none|null|any|dyn(amic)?|[?*]|-1", re.IGNORECASE)
"""Names that exporters write if they don't know a name."""

_MULTIPLE = re.compile(r"(?P<factor>[0-9]{1,9})\s*\*\s*(?P<name>\w+)")
"""A name that torch gives to a dimension of rows and heads together: `4*s77`."""

_ROW_WORD = re.compile(r"batch.*|bsz?|b|rows?")
_TOKEN_WORD = re.compile(r"(seq|tok|len|time|pos|past|mem|src|tgt|key|quer|frame|total|encoder|context).*|[tsl]")
_OF_AN_INPUT = re.compile(r".*_(dynamic_axes|dim|axis)_?\d+", re.IGNORECASE)
"""Words in names of dimensions for rows and for tokens. A name made of an input's name and a number says nothing."""

_BY_TOKEN = (SEQ, TOTAL, ENCODER)
"""Meanings of axes of tokens that may come before the axis of rows."""

_TELLING = ("token_ids", "encoder_token_ids", "token_type_ids", "position_ids", "past", "encoder_past", "images")
_TELLING_IN_SPACE = ("features", "encoder_features")
"""Roles whose axes have different lengths: with two or more axes, and with three or more."""


def reused_names(kinds: Mapping[str, str], shapes: Mapping[str, Shape], joined: Collection[str] = ()) -> set[str]:
    """The names of dimensions that stand for several lengths or, like `unk`, for an unknown one.

    A name stands for several lengths if it is that of both the rows and the tokens of one input. While a cache grows
    (is one of `joined`), it also does if it is that of the cached tokens and of something else.
    """
    found = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str) and _NO_NAME.fullmatch(dim)}
    meanings: dict[str, set[str]] = {}
    layouts = _told_by_rows(kinds, shapes, {name: _layout(kinds[name], shape) for name, shape in shapes.items()})
    for name, shape in shapes.items():
        own: dict[str, set[str]] = {}
        for dim, meaning in zip(shape, layouts[name] or (), strict=False):
            if isinstance(dim, str) and meaning is not None:
                own.setdefault(dim, set()).add(meaning)
        for dim, several in own.items():
            meanings.setdefault(dim, set()).update(several)
            telling = len(shape) > 1 and (
                kinds[name] in _TELLING or (kinds[name] in _TELLING_IN_SPACE and len(shape) > 2)
            )
            if telling and len(several) > 1 and not several <= {HEIGHT, WIDTH}:
                found.add(dim)
    if any(kinds[name] == "past" for name in joined):
        found |= {dim for dim, several in meanings.items() if PAST in several and len(several) > 1}
    return found


def without_names(shape: Shape, names: Collection[str]) -> Shape:
    """A shape with `?` in place of these names."""
    return tuple("?" if dim in names else dim for dim in shape)


def said_by(dim: str | int) -> str | None:
    """What the name of a dimension says: BATCH for rows, SEQ for tokens of any kind, None for neither or both."""
    if isinstance(dim, int) or _OF_AN_INPUT.fullmatch(dim):
        return None
    words = [word for word in re.split(r"[^a-z0-9]+", dim.lower()) if word]
    said = {BATCH} if any(map(_ROW_WORD.fullmatch, words)) else set()
    said |= {SEQ} if any(map(_TOKEN_WORD.fullmatch, words)) else set()
    return said.pop() if len(said) == 1 else None


def multiple_of(dim: str | int) -> tuple[int, str] | None:
    """The factor and the other name or meaning of a dimension that is a multiple of another one; otherwise None."""
    found = _MULTIPLE.fullmatch(dim) if isinstance(dim, str) else None
    return (int(found["factor"]), found["name"]) if found else None


def is_token_first(axes: Axes | _Layout) -> bool:
    """Whether an input has its tokens on the first axis and its rows on the second."""
    return axes[1:2] == (BATCH,) and axes[0] in _BY_TOKEN


def is_first_of_tokens(axes: Axes) -> bool:
    """Whether the first axis of an input is one of tokens."""
    return axes[:1] != () and axes[0] in _BY_TOKEN


def has_untold_order(kind: str, shape: Shape, axes: Axes) -> bool:
    """Whether an input whose `axes` were taken to be rows and then tokens may have tokens first.

    This is so if its dimensions vary and no name says which they are.
    """
    usual = axes[:2] in ((BATCH, SEQ), (BATCH, ENCODER)) and kind not in MASKS
    dims = shape[:2]
    apart = usual and (dims[0] != dims[1] or dims[0] == "?")
    return apart and all(isinstance(dim, str) and said_by(dim) is None for dim in dims)


def has_untold_rows(kind: str, shape: Shape, axes: Axes) -> bool:
    """Whether features with two axes, taken to be rows and features, may be tokens and features: no name tells."""
    rows = kind == "features" and len(axes) == 2 and axes[0] == BATCH and isinstance(axes[1], int)
    return rows and isinstance(shape[0], str) and said_by(shape[0]) is None


def axes_of(
    kinds: Mapping[str, str],
    shapes: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    joined: Collection[str] = (),
    scored: Collection[str] = (),
    token_first: Collection[str] = (),
) -> dict[str, Axes | None]:
    """The meaning of the axes of each input; None if its role can't have its rank.

    `kinds` and `shapes` are by the inputs' names. `outputs` are the shapes of outputs: a cache whose output is as long
    as its input is written into. `joined` are inputs that a node concatenates with others: such a cache grows. `scored`
    are inputs that go to a product unchanged: a mask with two dimensions is then one of tokens and keys. `token_first`
    are inputs that are known to have tokens before rows.
    """
    layouts = {name: _layout(kinds[name], shapes[name]) for name in kinds}
    layouts |= {
        name: (SEQ, layout[1])
        for name, layout in layouts.items()
        if layout is not None and len(layout) == 2 and name in scored and kinds[name] in MASKS
    }
    layouts |= {name: _tokens_first(layouts[name]) for name in token_first}
    layouts = _told_by_rows(kinds, shapes, layouts)
    rank = {kind: at for at, kind in enumerate(ORDER)}
    plain = {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}
    multiples = {dim: found for dim in plain if (found := multiple_of(dim)) is not None and found[1] in plain}
    names: dict[str, str] = {}
    for name in sorted(kinds, key=lambda name: rank.get(kinds[name], len(ORDER))):
        for dim, meaning in zip(shapes[name], layouts[name] or (), strict=False):
            if isinstance(dim, str) and dim != "?" and meaning is not None and dim not in multiples:
                names.setdefault(dim, meaning)
    names |= {dim: f"{factor}*{names[other]}" for dim, (factor, other) in multiples.items() if other in names}
    grows = any(kinds[name] == "past" for name in joined)
    written = not grows and _is_written_into(kinds, shapes, outputs)
    axes: dict[str, Axes | None] = {}
    for name, layout in layouts.items():
        if layout is None:
            axes[name] = None
            continue
        pairs = enumerate(zip(shapes[name], layout, strict=True))
        meanings = [_meaning(f"{name} {at}", dim, usual, names) for at, (dim, usual) in pairs]
        axes[name] = tuple(SLOTS if written and meaning == PAST else meaning for meaning in meanings)
    if any(SEQ in _free(shapes[name], own or ()) for name, own in axes.items()):
        for name, own in axes.items():
            if own is not None and kinds[name] in (*MASKS, "bias"):
                axes[name] = _without_queries(shapes[name], own)
    return axes


def _free(shape: Shape, axes: Axes) -> set[int | str]:
    """The meanings of those axes whose size may vary."""
    return {axis for dim, axis in zip(shape, axes, strict=False) if isinstance(dim, str)}


def _without_queries(shape: Shape, axes: Axes) -> Axes:
    """The axes of a mask. An axis of queries with length 1 gets no meaning: the mask is the same for all queries."""
    return tuple(1 if dim == 1 and axis == SEQ else axis for dim, axis in zip(shape, axes, strict=True))


def _meaning(place: str, dim: str | int, usual: str | None, names: Mapping[str, str]) -> str | int:
    """The meaning of one axis. `place` names the axis if the file doesn't."""
    if isinstance(dim, int):
        return dim if usual is None else usual
    named = usual if dim == "?" else names.get(dim, usual)
    return named or f"dim {place if dim == '?' else dim}"


def _tokens_first(layout: _Layout | None) -> _Layout | None:
    """The axes with tokens first. If the layout has no tokens, its rows become tokens."""
    if _has_two_orders(layout):
        return _swapped(layout)
    return (SEQ, *layout[1:]) if layout is not None and layout[:1] == (BATCH,) and not _tokens_in(layout) else layout


def _swapped(layout: _Layout | None) -> _Layout | None:
    """The axes with the first two in the other order."""
    return None if layout is None else (layout[1], layout[0], *layout[2:])


def _has_two_orders(layout: _Layout | None) -> bool:
    """Whether a layout has rows and then its only tokens: others write it with the tokens first."""
    return layout is not None and layout[:1] == (BATCH,) and layout[1:2] != () and _tokens_in(layout) == [1]


def _tokens_in(layout: _Layout) -> list[int]:
    return [at for at, meaning in enumerate(layout) if meaning in _BY_TOKEN]


def _layout(kind: str, shape: Shape) -> _Layout | None:
    """The axes of a role, in the order that the names of dimensions say."""
    layout = _usual_layout(kind, shape)
    return None if layout is None else _told(kind, layout, shape)


def _told(kind: str, layout: _Layout, shape: Shape) -> _Layout:
    """The axes with tokens first if the names of dimensions say so.

    The names say so if the second axis is one of rows and the first isn't. They also say so if the first is one of
    tokens and the second says nothing, except in a mask, where the second may be its keys. If there is one axis for
    rows and none for tokens, its name decides too.
    """
    said = [*map(said_by, shape)]
    if _has_two_orders(layout):
        first, second = said[:2]
        told = second == BATCH or (first == SEQ and second is None and kind not in MASKS)
        if told and first != BATCH:
            return (layout[1], layout[0], *layout[2:])
    elif KNOWN_AXES[kind].get(1) == _ANY[1] and layout[:1] == (BATCH,) and not _tokens_in(layout) and said[0] == SEQ:
        return (SEQ, *layout[1:])
    return layout


def _told_by_others(
    kinds: Mapping[str, str], shapes: Mapping[str, Shape], layouts: Mapping[str, _Layout | None]
) -> list[str]:
    """The inputs of features that have tokens first, although their own names don't tell their order.

    The second dimension is the rows of another input, such as a mask [rows, keys], and the first isn't. Or two such
    inputs share the second dimension and no other.
    """
    of_rows = {name: layout for name, layout in layouts.items() if layout is not None and BATCH in layout}
    rows = {
        shapes[name][layout.index(BATCH)]
        for name, layout in of_rows.items()
        if len(layout) == 2 or is_token_first(layout) or (len(layout) == 4 and isinstance(shapes[name][1], int))
    }
    pairs = {
        name: shapes[name][:2]
        for name, layout in of_rows.items()
        if kinds[name] in ("features", "encoder_features") and _has_two_orders(layout)
    }
    untold = {name: pair for name, pair in pairs.items() if all(dim != "?" and said_by(dim) is None for dim in pair)}
    named = [pair for pair in untold.values() if all(isinstance(dim, str) for dim in pair)]
    rows |= {second for first, second in named if any(second == rows_too and first != one for one, rows_too in named)}
    rows = {dim for dim in rows if isinstance(dim, str)}
    return [name for name, (first, second) in untold.items() if second in rows and first not in rows]


def _told_by_rows(
    kinds: Mapping[str, str], shapes: Mapping[str, Shape], layouts: Mapping[str, _Layout | None]
) -> dict[str, _Layout | None]:
    """The axes of all inputs, in the order that the rows of other inputs tell.

    Features may have tokens first (`_told_by_others`). So may caches, as in [cached, batch, heads, size]: their first
    dimension then has another name than the rows of all other inputs, and a later one has that name.
    """
    told = {**layouts, **{name: _swapped(layouts[name]) for name in _told_by_others(kinds, shapes, layouts)}}
    others = [
        (name, layout) for name, layout in told.items() if kinds[name] not in _CACHED_TOKENS and layout is not None
    ]
    rows = {shapes[name][layout.index(BATCH)] for name, layout in others if BATCH in layout}
    for name, layout in told.items():
        shape = shapes[name]
        at = next((at for at, dim in enumerate(shape) if dim in rows and isinstance(dim, str) and dim != "?"), 0)
        if layout is not None and layout[:1] == (BATCH,) and at and isinstance(shape[0], str):
            tokens = _CACHED_TOKENS.get(kinds[name])
            told[name] = (tokens, *(BATCH if one == at else None for one in range(1, len(shape)))) if tokens else layout
    return told


_CACHED_TOKENS = {"past": PAST, "encoder_past": ENCODER}


def _usual_layout(kind: str, shape: Shape) -> _Layout | None:
    """The usual axes of a role. The fixed dimensions tell which axes are tokens."""
    layout = KNOWN_AXES[kind].get(len(shape))
    if layout is None:
        return None
    dynamic = [at for at, dim in enumerate(shape) if isinstance(dim, str)]
    if kind == "position_ids" and len(shape) < 3 and shape[-1:] == (1,):
        return (*layout[:-1], None)  # the first position of each row; it is the same with one token for each row
    if kind in ("past", "encoder_past") and len(shape) in (3, 4):
        # [batch, heads, tokens, size] or [batch, tokens, size], unless only another axis may vary
        free, meaning = [at for at in dynamic if at], next(axis for axis in layout if axis in (PAST, ENCODER))
        tokens = free[0] if len(free) == 1 else layout.index(meaning)
        return tuple(BATCH if at == 0 else meaning if at == tokens else None for at in range(len(shape)))
    if kind == "position_ids" and len(shape) == 3 and not isinstance(shape[0], int) and dynamic != [0, 1, 2]:
        return (BATCH, AXES, SEQ) if dynamic == [0, 2] else (BATCH, SEQ, AXES)
    if kind == "position_ids" and len(shape) == 3 and shape[0] == 1 and dynamic == [1] and shape[2] in (2, 3):
        return (None, SEQ, AXES)  # shared by all rows
    if kind == "position_ids" and len(shape) == 3 and all(isinstance(dim, int) for dim in shape):
        return (AXES, BATCH, SEQ) if int(shape[0]) <= 4 < int(shape[2]) else (BATCH, SEQ, AXES)
    if kind == "features" and len(shape) == 2 and not isinstance(shape[1], int):
        return (BATCH, SEQ)
    if kind == "features" and len(shape) == 3 and dynamic[-1:] == [2] and 1 not in dynamic:
        return (BATCH, None, SEQ)  # [batch, channels, tokens]
    if kind == "features" and len(shape) == 4:  # [batch, tokens, heads, size] or [batch, heads, tokens, size]
        first = next((at for at in dynamic if 0 < at < 3), None)
        return (BATCH, SEQ if first == 1 else None, SEQ if first == 2 else None, None)
    return layout


def _is_written_into(kinds: Mapping[str, str], shapes: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> bool:
    """Whether caches have slots that are written into.

    They do if their outputs have the same length, if a mask is as long as the whole cache, or if an input says where to
    write.
    """
    caches = [name for name, kind in kinds.items() if kind == "past" and len(shapes[name]) == 4]
    if not caches:
        return False
    if "write_indices" in kinds.values():
        return True
    places = [(name, (_layout("past", shapes[name]) or ()).index(PAST)) for name in caches]
    lengths = {(at, shapes[name][at]) for name, at in places if shapes[name][at] != "?"}
    present: list[Shape] = [
        shape for name, shape in outputs.items() if "present" in name.lower() and len(shape) == 4 and not is_state(name)
    ]
    present = present or [
        shape
        for shape in outputs.values()
        if any(_but_for(shape, at) == _but_for(shapes[name], at) for name, at in places)
    ]
    if present:
        return all((at, shape[at]) in lengths for shape, (_, at) in zip(present, places, strict=False))
    masks = [shapes[name][-1] for name, kind in kinds.items() if kind == "attention_mask" and shapes[name]]
    return any(length == size and isinstance(size, int) for length in masks for _, size in lengths)


def _but_for(shape: Shape, axis: int) -> tuple[int | str, ...]:
    """A shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])
