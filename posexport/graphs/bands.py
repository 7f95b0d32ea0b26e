"""Corners of many sizes for a graph with tokens, so that an error in a narrow range of sizes is found.

Prompts, steps and chunks, with one row and with several, rows, and tokens of an encoder each get a ladder of sizes.
Every range whose end is at least RATIO times its beginning contains a rung of the ladder. The rungs are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from posexport.graphs.axes import BATCH, PAST, SEQ, SLOTS
from posexport.graphs.cases import Corner
from posexport.graphs.draw import Kinds
from posexport.graphs.input_facts import rows_begin_apart
from posexport.graphs.numbers import FEATURES
from posexport.graphs.roles import Role
from posexport.graphs.sizes import is_dynamic, tokens_of_row

RATIO = 1.5
"""End / beginning of the narrowest range that always contains a rung."""

LONGEST, MOST_ROWS = 600, 40
"""The last rungs of tokens and of rows, if the graph and its cost allow them."""

CROWD = 16
"""The first rung of steps with more rows than this has up to a quarter of the last rung of cached tokens, and the first
rung of prompts SHORTEST to LONG_CROWD tokens, if that is at most a sixth of the cost."""

LONG_CROWD = 80

POWERS = (64, 128, 256, 512)
"""Numbers of keys that are whole blocks of kernels. A step has such a number of keys or one less, by seed."""

SHORTEST = 40
"""Cost does not make the last rung of tokens smaller than this."""

_OF_ALL = 18
"""The approximate sum of all lengths times their rows, as a multiple of the longest length."""

FEWEST_ROWS, _OF_ALL_ROWS = 6, 3
"""Cost does not make the last rung of rows smaller than the first number.

The second number is the sum of a ladder as a multiple of its last rung.
"""


VALUES = ("normal", "zeros", "normal", "between")
"""The kinds of numbers that rungs take in turn, if the graph takes features. Large ones are left out: in stacks of bare
attention their rounding errors grow from layer to layer."""

POSITIONS = (
    *("consecutive", "offset", "consecutive", "shuffled", "consecutive", "still"),
    *("scattered", "consecutive", "far"),
)
"""The kinds of positions that they take in turn, if the graph takes positions.

The numbers of these kinds, and that of kinds of padding, have no common factor, so that each kind meets each other one.
"""


SPARE, FEW_SPARE = (5, 0, 40, 1, None), 5
"""The slots of a buffer after the last token that rungs take in turn.

None: half as many as the last rung of cached tokens has, or 40 if there are several rows. Rows share these slots if
they are more than FEW_SPARE.
"""


APART = (True, True, False)
"""Whether rows of a buffer begin apart, for rungs of several rows with cached tokens in turn."""


@attrs.frozen(kw_only=True)
class Cost:
    """The most new tokens and cached tokens of all rows of all sets of inputs together.

    `longest` is the most new and cached tokens in one row; None: any number.
    """

    tokens: float = math.inf
    cached: float = math.inf
    longest: int | None = None

    def last(self, budget: float) -> int:
        """The last rung of a ladder within a budget."""
        return int(min(self.longest or LONGEST, LONGEST, max(SHORTEST, budget / _OF_ALL)))


def ladder(first: int, last: int, rng: np.random.Generator) -> list[int]:
    """Whole numbers from `first` to `last`, so close that no range with the ratio RATIO fits between two of them."""
    rungs = [first] if first <= last else []
    while rungs and rungs[-1] < last:
        high = math.ceil(RATIO * (rungs[-1] + 1))  # the range begins after a rung and ends before the next
        low = max(rungs[-1] + 1, math.ceil(0.9 * high))
        rungs.append(min(int(rng.integers(low, high + 1)), last))
    return rungs


def band_corners(roles: Mapping[str, Role], seed: int, cost: Cost) -> Iterator[Corner]:
    """The corners for a graph with these roles, the same for the same seed."""
    rng = np.random.default_rng((seed, 5))
    alone, new, old = cost.last(3 * cost.tokens), cost.last(cost.tokens), cost.last(cost.cached)
    encoder = itertools.cycle(rng.permutation(ladder(1, new, rng)).tolist())
    rows = itertools.cycle(rng.permutation((2, 3, 4, 5, 7, 10)).tolist())
    padding, values, positions = (
        itertools.cycle(np.roll(kinds, int(rng.integers(len(kinds)))).tolist())
        for kinds in (rng.permutation(("none", "left", "right", "holes", "mixed")), _values(roles), POSITIONS)
    )
    if is_dynamic(roles, SEQ):
        corners = _sizes(roles, rng, rows, alone, new, old, cost)
    else:
        corners = _sizes_beside(roles, rng, rows, cost.tokens, old)
    spare = itertools.cycle(SPARE) if is_dynamic(roles, SLOTS) else None
    turns = itertools.cycle(APART if rows_begin_apart(roles) else (False,))
    for corner in corners:
        apart = corner.batch > 1 and corner.past > 0 and next(turns)
        kinds = Kinds(padding=next(padding), values=next(values), positions=next(positions), apart=apart)
        corner = attrs.evolve(corner, encoder=int(next(encoder)), kinds=kinds)
        yield corner if spare is None else _with_spare(corner, next(spare), old, cost.longest)
    if any(role.kind == "position_ids" for role in roles.values()):
        yield Corner(label="farthest positions", batch=2, seq=33, kinds=Kinds(positions="farthest"))
        yield Corner(label="step of farthest positions", batch=3, seq=1, past=20, kinds=Kinds(positions="farthest"))


def _with_spare(corner: Corner, slots: int | None, last: int, longest: int | None) -> Corner:
    """The corner with so many free slots, an entry of SPARE, or those up to `longest` if these are fewer."""
    many = last // 2 if corner.batch == 1 else SHORTEST
    spare = many if slots is None else slots
    spare = min(spare, max(spare // corner.batch, FEW_SPARE))
    room = spare if longest is None else max(longest - corner.seq - corner.past, 0)
    return attrs.evolve(corner, spare=min(spare, room))


def _sizes(
    roles: Mapping[str, Role], rng: np.random.Generator, rows: Iterator[int], alone: int, new: int, old: int, cost: Cost
) -> Iterator[Corner]:
    for seq in ladder(2, alone, rng):
        yield Corner(label="band of prompts", batch=1, seq=seq)
    for seq in ladder(1, max(new // 2, min(new, SHORTEST)), rng):
        yield Corner(label="band of rows of prompts", batch=next(rows), seq=seq)
    many = ladder(5, MOST_ROWS, rng)
    crowd = next(batch for batch in many if batch > CROWD)
    room = int(min(new, LONG_CROWD, cost.tokens / (6 * crowd)))
    for number, batch in enumerate(many):
        ends = (SHORTEST, room + 1) if batch == crowd and room >= SHORTEST else (1, 10)
        seq = int(rng.integers(*ends)) if number else batch  # with as many rows as tokens, mixed-up axes cause no error
        yield Corner(label="band of many rows", batch=batch, seq=seq)
    if not _grows(roles):
        return
    for past in ladder(1, old - 1, rng):
        yield Corner(label="band of steps", batch=1, seq=1, past=past)
    for past in ladder(1, old - 1, rng):
        yield Corner(label="band of rows of steps", batch=next(rows), seq=1, past=past)
    one_more = int(rng.integers(2))
    for number, power in enumerate(each for each in POWERS if each < old):
        yield Corner(label="blocks of keys", batch=1, seq=1, past=power - (number + one_more) % 2)
    many = ladder(5, MOST_ROWS, rng)
    crowd = next(batch for batch in many if batch > CROWD)
    for batch in many:
        most = max(old // 4, min(old, LONG_CROWD), SHORTEST + 1)
        pasts = (SHORTEST, most) if batch == crowd else (2, SHORTEST)
        yield Corner(label="many steps", batch=batch, seq=1, past=int(rng.integers(*pasts)))
    pasts, chunks = (rng.permutation(ladder(*ends, rng)).tolist() for ends in ((1, old - 2), (2, new - 1)))
    for number in range(max(len(pasts), len(chunks))):
        past, seq = pasts[number % len(pasts)], chunks[number % len(chunks)]
        past = int(max(min(past, (cost.longest or math.inf) - seq), 1))
        yield Corner(label="band of chunks", batch=next(rows) if number % 2 and seq < 64 else 1, seq=seq, past=past)


def _sizes_beside(
    roles: Mapping[str, Role], rng: np.random.Generator, rows: Iterator[int], tokens: float, old: int
) -> Iterator[Corner]:
    """Rows and cached tokens of a graph that has a fixed number of tokens, or that takes pictures."""
    seq = tokens_of_row(roles)
    if is_dynamic(roles, BATCH):
        last = min(MOST_ROWS, max(FEWEST_ROWS, tokens / (_OF_ALL_ROWS * seq)))
        for batch in ladder(2, int(last), rng):
            yield Corner(label="band of rows", batch=batch, seq=seq)
    if _grows(roles):
        for past in ladder(1, old - 1, rng):
            yield Corner(label="band of cached tokens", batch=1, seq=seq, past=past)
            yield Corner(label="rows of cached tokens", batch=next(rows), seq=seq, past=past)


def _values(roles: Mapping[str, Role]) -> tuple[str, ...]:
    """The kinds of numbers of rungs. Caches alone stay normal: rounding errors of large ones grow from layer to
    layer."""
    return VALUES if any(role.kind in FEATURES for role in roles.values()) else ("normal",)


def _grows(roles: Mapping[str, Role]) -> bool:
    """Whether any number of tokens may be cached."""
    return any(role.kind in ("past", "write_indices") for role in roles.values()) and (
        is_dynamic(roles, PAST) or is_dynamic(roles, SLOTS)
    )
