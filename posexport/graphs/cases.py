"""Sets of inputs for any graph, each for a corner case in which graphs go wrong.

The corners are those that artifacts of posexport are verified in: one row and several, one token, prompts, steps and
chunks with a cache, padding on either side and between, masks that add biases or minus infinity, positions out of order
and far out, small and large numbers, the first and the last token. Sizes that a graph fixes restrict them. Corners that
become equal are drawn once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from posexport.graphs.axes import BATCH, ENCODER, HEIGHT, PAST, SEQ, SLOTS, TOTAL, WIDTH, said_by
from posexport.graphs.draw import DrawnInputs, Kinds, draw_inputs, every_token
from posexport.graphs.input_facts import pads_encoder, rows_begin_apart, takes_padding, takes_scores
from posexport.graphs.roles import Role
from posexport.graphs.sizes import fitted, is_dynamic, shape_of, side_of, step_of

LEAST = 4
"""The fewest cases: a graph that fixes every size gets different numbers in each."""


@attrs.frozen(kw_only=True)
class Corner:
    """A case before it is drawn: rows, new tokens, cached tokens, tokens of an encoder, and its kinds.

    `encoder` None takes the next of several lengths. `spare` are the slots of a buffer after the last token; None: a
    few. `free` is the size of axes without a known meaning.
    """

    label: str
    batch: int = 2
    seq: int
    past: int = 0
    spare: int | None = None
    encoder: int | None = None
    free: int | None = None
    kinds: Kinds = attrs.field(factory=Kinds)


_PROMPTS = (
    Corner(label="prompt", batch=1, seq=9),
    Corner(label="several prompts", batch=3, seq=12),
    Corner(label="one token", batch=1, seq=1),
    Corner(label="padding on the left", batch=3, seq=14, kinds=Kinds(padding="left")),
    Corner(label="padding on the right", batch=3, seq=17, kinds=Kinds(padding="right")),
    Corner(label="holes", batch=4, seq=11, kinds=Kinds(padding="holes")),
    Corner(label="large numbers", batch=2, seq=19, kinds=Kinds(values="loud")),
    Corner(label="small numbers", batch=2, seq=8, kinds=Kinds(values="quiet")),
    Corner(label="numbers between", batch=2, seq=16, kinds=Kinds(values="between")),
    Corner(label="zeros", batch=2, seq=10, kinds=Kinds(values="zeros")),
    Corner(label="one large feature", batch=2, seq=13, kinds=Kinds(values="outlier")),
)

_POSITIONS = (
    Corner(label="offset positions", batch=3, seq=15, kinds=Kinds(positions="offset", padding="mixed")),
    Corner(label="positions out of order", batch=2, seq=13, kinds=Kinds(positions="scattered")),
    Corner(label="shuffled positions", batch=1, seq=21, kinds=Kinds(positions="shuffled")),
    Corner(label="far positions", batch=2, seq=10, kinds=Kinds(positions="far")),
)

_CACHED = (
    Corner(label="step", batch=1, seq=1, past=15),
    Corner(label="steps", batch=4, seq=1, past=23, kinds=Kinds(padding="mixed")),
    Corner(label="chunk", batch=1, seq=5, past=18, kinds=Kinds(values="loud")),
    Corner(label="chunks", batch=3, seq=19, past=19, kinds=Kinds(padding="left", values="zeros")),
    Corner(label="few cached tokens", batch=2, seq=7, past=1, kinds=Kinds(padding="right", values="loud")),
    Corner(label="step of far positions", batch=2, seq=1, past=40, kinds=Kinds(positions="far", values="quiet")),
    Corner(label="long cache", batch=1, seq=2, past=190, kinds=Kinds(padding="holes")),
)

_APART = (
    Corner(label="steps of rows apart", batch=4, seq=1, past=29, kinds=Kinds(apart=True)),
    Corner(label="chunks of rows apart", batch=3, seq=6, past=17, kinds=Kinds(apart=True)),
)
"""Each row of a buffer has its own place for new tokens."""

_SCORES = (
    Corner(label="biases in the mask", batch=3, seq=12, kinds=Kinds(scores="biased")),
    Corner(label="minus infinity in the mask", batch=2, seq=16, kinds=Kinds(scores="infinite", padding="left")),
)

_CACHED_SCORES = (
    Corner(label="biases over a cache", batch=2, seq=3, past=14, kinds=Kinds(scores="biased", padding="right")),
    Corner(label="minus infinity over a cache", batch=2, seq=1, past=9, kinds=Kinds(scores="infinite")),
)

_LONG = (
    Corner(label="64 tokens", batch=1, seq=64, kinds=Kinds(padding="holes")),
    Corner(label="long prompt", batch=1, seq=131),
)

_MANY_ROWS = (
    Corner(label="rows that may be tokens", batch=37, seq=3),
    Corner(label="many rows that may be tokens", batch=131, seq=2),
)
"""For graphs in which no name says which axis is that of tokens: as many rows as there are tokens in other corners."""

_LONG_AXES = (Corner(label="longer axes", batch=1, seq=5, free=37), Corner(label="long axes", batch=2, seq=3, free=131))
"""For axes without a known meaning."""

MOST_NUMBERS = 2**22
"""The most numbers in a set of inputs with many rows or long axes."""

_ENCODER_LENGTHS = (11, 5, 16, 1, 7, 23)
"""The numbers of tokens of an encoder, used in turn."""

_UNSEEN = Corner(
    label="a row of an encoder that is all padding",
    batch=3,
    seq=5,
    encoder=6,
    kinds=Kinds(unseen=True, scores="infinite"),
)
"""Here real tokens see no key. Their outputs are up to the graph."""

_PICTURES = (
    Corner(label="one", batch=1, seq=8),
    Corner(label="several", batch=3, seq=9),
    Corner(label="large numbers", batch=1, seq=10, kinds=Kinds(values="loud")),
    Corner(label="small numbers", batch=2, seq=11, kinds=Kinds(values="quiet")),
    Corner(label="zeros", batch=1, seq=12, kinds=Kinds(values="zeros")),
    Corner(label="one large column", batch=1, seq=13, kinds=Kinds(values="outlier")),
)
"""For graphs that take only pictures or sound, which cost more than tokens."""

_ALIKE_VALUES = ("large numbers", "small numbers", "numbers between", "zeros", "one large feature")
"""Corners that are left out for a graph without numbers among its inputs."""

_SIDES = ((1.0, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (1.5, 0.5))
"""The height and the width of images of any size, as multiples of the model's own, used in turn."""


def cases_of(
    roles: Mapping[str, Role],
    seed: int,
    *,
    reach: Mapping[str, int] | None = None,
    more: int = 0,
    own: Sequence[Corner] = (),
    longest: int | None = None,
) -> list[DrawnInputs]:
    """The cases for a graph with these roles, the same for the same seed.

    `more` is the number of further cases with drawn sizes. `own` are further corners of the graph. No case has more
    than `longest` tokens in a row, except those of `reach`.

    There are between about 4 cases, for a graph that fixes its sizes, and 28. Lengths stay below 200 keys, unless
    `reach` asks for `seq` keys or `batch` rows, or the graph's own corners are longer.
    """
    seen: set[object] = set()
    drawn: list[DrawnInputs] = []
    pictures = _pictures(roles)
    tokens = {
        name: every_token(role, seed, 2)
        for name, role in roles.items()
        if role.kind in ("token_ids", "encoder_token_ids")
    }
    asked = [*_reaching(reach or {})]
    for number, corner in enumerate((*_corners(roles), *asked, *_further(seed, more), *own)):
        if longest is not None and corner.seq + corner.past > longest and corner not in asked:
            continue
        sizes = {BATCH: corner.batch, SEQ: corner.seq, PAST: corner.past}
        sizes[ENCODER] = corner.encoder or _ENCODER_LENGTHS[number % len(_ENCODER_LENGTHS)]
        if corner.spare is not None:
            sizes[SLOTS] = corner.past + corner.seq + corner.spare
        if pictures:
            sizes |= _sides(roles, number, pictures)
        if corner.free is not None:
            sizes |= dict.fromkeys(_free_axes(roles), corner.free)
        if any(role.grouped for role in roles.values()):
            corner = _for_grouped(corner)
            sizes[BATCH] = corner.batch
        if corner in (*_MANY_ROWS, *_LONG_AXES) and _numbers(roles, fitted(roles, sizes)) > MOST_NUMBERS:
            continue
        key = _key(roles, fitted(roles, sizes), corner.kinds)
        if key in seen and not (len(drawn) < LEAST and len(seen) == 1):
            continue
        seen.add(key)
        rng = np.random.default_rng((seed, number))
        kinds = attrs.evolve(corner.kinds, marks=number > 0)  # the first case has no special tokens
        case = draw_inputs(roles, sizes, rng, kinds, corner.label, tokens)
        drawn.append(attrs.evolve(case, label=f"{corner.label} {_sizes_text(roles, case)}"))
    return drawn


def without_keys(roles: Mapping[str, Role]) -> tuple[Corner, ...]:
    """Corners for comparing two graphs, in which real tokens see no key, if an input may cause this.

    One graph by itself need not give numbers there.
    """
    return (_UNSEEN,) if pads_encoder(roles) else ()


def of_more_queries(few: int | None) -> tuple[Corner, ...]:
    """A corner with more than `few` queries, which a graph computes in another way; none if `few` is None."""
    return () if few is None else (Corner(label="many queries", seq=few + few // 2),)


def _corners(roles: Mapping[str, Role]) -> Iterator[Corner]:
    kinds = {role.kind for role in roles.values()}
    numbers = {role.kind for role in roles.values() if role.dtype in ("fp32", "fp16", "bf16", "fp64")}
    numbers -= {"attention_mask", "encoder_attention_mask", "bias", "picture_mask", "ones", "zeros"}
    scored = any(map(takes_scores, roles.values()))
    if scored:
        yield from _SCORES
    if {"images", "audio"} & kinds and not is_dynamic(roles, SEQ):
        yield from _PICTURES
        return
    yield from (corner for corner in _PROMPTS if numbers or corner.label not in _ALIKE_VALUES)
    if "position_ids" in kinds:
        yield from _POSITIONS
    if {"past", "state", "write_indices"} & kinds:
        yield from (*_CACHED, *(_CACHED_SCORES if scored else ()))
    if rows_begin_apart(roles):
        yield from _APART
    yield from _LONG
    if _rows_may_be_tokens(roles):
        yield from _MANY_ROWS
    if _free_axes(roles):
        yield from _LONG_AXES


def _rows_may_be_tokens(roles: Mapping[str, Role]) -> bool:
    """Whether the number of rows may vary, and no name of a dimension tells rows from tokens."""
    axes = [pair for role in roles.values() for pair in zip(role.stated, role.axes, strict=True)]
    told = any(
        said_by(dim) == (BATCH if axis == BATCH else SEQ) for dim, axis in axes if axis in (BATCH, SEQ, TOTAL, ENCODER)
    )
    return is_dynamic(roles, BATCH) and not told


def _free_axes(roles: Mapping[str, Role]) -> list[str]:
    """The axes that may vary and have no known meaning."""
    pairs = [pair for role in roles.values() for pair in zip(role.shape, role.axes, strict=True)]
    free = [axis for dim, axis in pairs if isinstance(dim, str) and isinstance(axis, str) and axis.startswith("dim ")]
    return [*dict.fromkeys(free)]


def _numbers(roles: Mapping[str, Role], sizes: Mapping[str, int]) -> int:
    """The number of elements of a set of inputs."""
    return sum(math.prod(shape_of(role, sizes)) for role in roles.values())


def _reaching(reach: Mapping[str, int]) -> Iterator[Corner]:
    """Corners of the sizes that the user asked for."""
    if "seq" in reach:
        yield Corner(label="as long as asked", batch=1, seq=reach["seq"])
        yield Corner(label="step behind as many", batch=1, seq=1, past=reach["seq"] - 1)
    if "batch" in reach:
        yield Corner(label="as many rows as asked", batch=reach["batch"], seq=6, kinds=Kinds(padding="mixed"))


def _further(seed: int, count: int) -> Iterator[Corner]:
    """Corners of any size and kind."""
    rng = np.random.default_rng((seed, 0, 1))
    for number in range(count):
        kinds = Kinds(
            positions=str(rng.choice(("consecutive", "offset", "scattered", "shuffled", "far"))),
            padding=str(rng.choice(("none", "left", "right", "holes", "mixed"))),
            values=str(rng.choice(("normal", "normal", "quiet", "loud", "zeros", "between"))),
            scores=str(rng.choice(("plain", "biased", "infinite"))),
        )
        past = int(rng.integers(0, 60)) * int(rng.integers(0, 2))
        sizes = {"batch": int(rng.integers(1, 6)), "seq": int(rng.integers(1, 40)), "past": past}
        yield Corner(label=f"any {number + 1}", kinds=kinds, **sizes)


def _for_grouped(corner: Corner) -> Corner:
    """The corner for GroupQueryAttention.

    It counts keys from the left, and takes several new tokens after a cache for only one row.
    """
    padding = "none" if corner.past or corner.kinds.padding == "none" else "right"
    batch = 1 if corner.past and corner.seq > 1 else corner.batch
    return attrs.evolve(corner, batch=batch, kinds=attrs.evolve(corner.kinds, padding=padding))


def _key(roles: Mapping[str, Role], sizes: Mapping[str, int], kinds: Kinds) -> object:
    """What makes a case different from others."""
    have = {role.kind for role in roles.values()}
    axes = {axis for role in roles.values() for axis in role.axes} | ({PAST} if SLOTS in sizes else set())
    padded = any(map(takes_padding, roles.values()))
    return (
        kinds.scores if any(map(takes_scores, roles.values())) else "",
        tuple(sorted((str(axis), size) for axis, size in sizes.items() if axis in axes)),
        kinds.positions if "position_ids" in have else "",
        kinds.padding if padded else "",
        kinds.apart,
        kinds.unseen,
        kinds.values if {"features", "past", "state", "images", "audio", "encoder_features"} & have else "",
    )


def _pictures(roles: Mapping[str, Role]) -> list[str]:
    """Height and width, if they may vary."""
    return [axis for axis in (HEIGHT, WIDTH) if is_dynamic(roles, axis)]


def _sides(roles: Mapping[str, Role], number: int, axes: list[str]) -> dict[str, int]:
    """Sizes of images: in turn that of the graph's own table, and others that are whole patches."""
    sizes, parts = {}, _SIDES[number % len(_SIDES)]
    for axis, part in zip((HEIGHT, WIDTH), parts, strict=True):
        if axis in axes:
            role = next(role for role in roles.values() if axis in role.axes)
            step = step_of(role, axis)
            sizes[axis] = max(round(side_of(role, axis) * part / step), 1) * step
    return sizes


def _sizes_text(roles: Mapping[str, Role], case: DrawnInputs) -> str:
    """The sizes of a case for its label: `[2, 9] past=3`."""
    axes = dict.fromkeys(axis for role in roles.values() for axis in role.axes if isinstance(axis, str))
    first = [str(case.sizes[axis]) for axis in (BATCH, SEQ) if axis in axes]
    rest = [f"{axis}={case.sizes[axis]}" for axis in (PAST, ENCODER, HEIGHT, WIDTH) if axis in axes]
    if SLOTS in axes and PAST not in axes:
        rest.append(f"past={case.sizes[PAST]}")
    return " ".join([f"[{', '.join(first)}]", *rest])
