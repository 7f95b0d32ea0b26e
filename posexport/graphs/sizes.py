"""Sizes of the axes that may vary, made to agree with each other and with the sizes that a graph fixes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from posexport.errors import RequestError, shown
from posexport.graphs.axes import BATCH, CACHED, ENCODER, FRAMES, HEIGHT, PAST, SEQ, SLOTS, TOTAL, WIDTH, multiple_of
from posexport.graphs.roles import Role
from posexport.machine import available, size_text

_SPARE = 5
"""Places that stay free after the last token, in a cache that is written into."""

PATCH, SMALLEST_PATCH, _PIXELS, _FRAMES = 16, 8, 64, 256
"""Pixels of a patch if the graph doesn't say, the smallest patch, pixels on a side, and the fewest frames of sound.

A first convolution with smaller steps than SMALLEST_PATCH is followed by others.
"""

_BYTES = 8  # of one number in float64
_ALWAYS_FREE = 2**20  # bytes: drawing this many is faster than finding out how many are free

_FREE = 6
"""The size of a dimension whose meaning is not known."""


def fixed_sizes(roles: Iterable[Role]) -> dict[str, int]:
    """The sizes of axes that the graph fixes, by meaning."""
    fixed: dict[str, int] = {}
    for role in roles:
        for dim, axis in zip(role.shape, role.axes, strict=True):
            if isinstance(axis, str) and isinstance(dim, int):
                fixed.setdefault(axis, dim)
    return fixed


def taken_sizes(roles: Mapping[str, Role]) -> dict[str, tuple[int, ...]]:
    """The sizes that a graph was seen to take, by meaning, for axes that don't take all sizes."""
    return {axis: sizes for role in roles.values() for axis, sizes in role.taken}


def _nearest(known: Sequence[int], asked: int) -> int:
    return min((size for size in known if size >= asked), default=max(known))


def is_dynamic(roles: Mapping[str, Role], meaning: str) -> bool:
    """Whether an axis with this meaning exists and may vary."""
    axes = (pair for role in roles.values() for pair in zip(role.shape, role.axes, strict=True))
    return any(axis == meaning and not isinstance(dim, int) for dim, axis in axes)


def fitted(roles: Mapping[str, Role], asked: Mapping[str, int]) -> dict[str, int]:
    """Sizes by meaning, as near to the `asked` sizes as the graph allows; total is past + seq.

    Without an axis of rows there is one row; without a cache there are no past tokens. No row is longer than the table
    of positions that it is looked up in, and a buffer only by a few slots. An axis that doesn't take all sizes gets the
    next larger size that the graph was seen to take, or the largest.
    """
    fixed = fixed_sizes(roles.values())
    taken = taken_sizes(roles)
    kinds = {role.kind for role in roles.values()}
    if not any(BATCH in role.axes for role in roles.values()):
        asked = {**asked, BATCH: 1}
    sizes = {BATCH: 2, SEQ: 8, PAST: 0, ENCODER: 11, **asked}
    sizes |= {axis: size for axis, size in fixed.items() if axis in (BATCH, SEQ, PAST, ENCODER)}
    if not kinds.intersection(CACHED):
        sizes[PAST] = 0
    if SLOTS in fixed:
        sizes[PAST] = max(min(sizes[PAST], fixed[SLOTS] - sizes[SEQ]), 0)
        sizes[SEQ] = sizes[SEQ] if SEQ in fixed else min(sizes[SEQ], fixed[SLOTS])
    limit = min((role.rows for role in roles.values() if role.kind == "position_ids" and role.rows), default=None)
    if limit is not None:
        sizes[SEQ] = sizes[SEQ] if SEQ in fixed else min(sizes[SEQ], limit)
        sizes[PAST] = sizes[PAST] if PAST in fixed else max(min(sizes[PAST], limit - sizes[SEQ]), 0)
    sizes |= {axis: _nearest(known, sizes[axis]) for axis, known in taken.items() if axis in sizes}
    if (total := fixed.get(TOTAL)) is not None and SLOTS not in fixed:
        if PAST not in fixed and (SEQ in fixed or sizes[PAST]):
            sizes[PAST] = max(total - sizes[SEQ], 0)
        elif SEQ not in fixed:
            sizes[SEQ] = max(total - sizes[PAST], 1)
    sizes[TOTAL] = fixed.get(TOTAL, sizes[PAST] + sizes[SEQ])
    needed = sizes[PAST] + sizes[SEQ]
    slots = asked.get(SLOTS, needed + _SPARE)
    slots = slots if limit is None else min(slots, max(limit, needed + _SPARE))
    sizes[SLOTS] = fixed.get(SLOTS, max(slots, needed))
    for role in roles.values():
        for dim, axis in zip(role.shape, role.axes, strict=True):
            if isinstance(dim, int) or not isinstance(axis, str):
                continue
            if axis in (HEIGHT, WIDTH):
                sizes[axis] = asked.get(axis) or side_of(role, axis)
            sizes.setdefault(axis, frames_for(role, sizes[SEQ]) if axis == FRAMES else _FREE)
            if axis in taken:
                sizes[axis] = _nearest(taken[axis], sizes[axis])
    for axis in list(sizes):
        if (multiple := multiple_of(axis)) is not None and multiple[1] in sizes:
            sizes[axis] = multiple[0] * sizes[multiple[1]]
    return {**sizes, **{axis: size for axis, size in fixed.items() if axis not in sizes}}


def step_of(role: Role, axis: str) -> int:
    """The number of pixels that height or width must be a multiple of: a patch, or the step of several convolutions."""
    strides = role.strides or (PATCH, PATCH)
    stride = strides[-2 if axis == HEIGHT and len(strides) > 1 else -1]
    return stride if stride >= SMALLEST_PATCH else 2 * PATCH


def side_of(role: Role, axis: str) -> int:
    """Pixels along the height or the width, from the graph's table of positions if there is one."""
    step = step_of(role, axis)
    return step * role.patches if role.patches else max(_PIXELS // step, 2) * step


def tokens_of_row(roles: Mapping[str, Role]) -> int:
    """The tokens of a row of a graph that fixes their number, or the patches of a picture; 1 if neither is known."""
    pictures = (role for role in roles.values() if role.kind == "images")
    patches = (math.prod(side_of(role, axis) // step_of(role, axis) for axis in (HEIGHT, WIDTH)) for role in pictures)
    return fixed_sizes(roles.values()).get(SEQ) or max(patches, default=1)


def frames_for(role: Role, tokens: int) -> int:
    """Frames of sound for this many tokens, or more.

    They are at least those of a short sound, and whole steps, because a graph may divide the sound into steps.
    """
    length, step = role.frames
    return length + max(tokens - 1, -(-(_FRAMES - length) // step)) * step


def shape_of(role: Role, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input with these sizes."""
    return tuple(
        dim if isinstance(dim, int) else axis if isinstance(axis, int) else sizes[axis]
        for dim, axis in zip(role.shape, role.axes, strict=True)
    )


def check_sizes(roles: Mapping[str, Role], sizes: Mapping[str, int]) -> None:
    """RequestError if inputs have fixed sizes for which nothing can be drawn.

    This is so for no rows or tokens, or for more numbers than fit into memory.
    """
    for name, role in roles.items():
        shape = shape_of(role, sizes)
        if any(size == 0 and axis in (BATCH, SEQ, ENCODER) for size, axis in zip(shape, role.axes, strict=True)):
            raise RequestError(
                f"the input {shown(name)} {shown(list(shape))} is fixed to no rows or no tokens, so nothing can be "
                "drawn for it: export it with others."
            )
        needed = math.prod(shape) * _BYTES
        if needed > _ALWAYS_FREE and needed > (free := available()):
            raise RequestError(
                f"the input {shown(name)} {shown(list(shape))} takes {size_text(needed)} in float64, and "
                f"{size_text(free)} of memory are free: export it with smaller sizes."
            )
