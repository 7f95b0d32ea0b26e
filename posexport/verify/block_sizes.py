"""Sets of inputs at the sizes of the block itself.

These are every row of its table, every offset of its grid, its windows, and the positions at which its encoding
changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from posexport.spec.spec import Spec
from posexport.verify.coverage import distances, grid_offsets, spread_cells
from posexport.verify.draft import Draft, shorter, size_between
from posexport.verify.positions import At
from posexport.verify.reach import Reach

WINDOWS, GRID_TOKENS = 64, 3_200
"""The most windows of a picture, each of which is a row, and the most tokens of all of them together."""

PAIR_ROWS, SWEEP_ROW, WHOLE = 1200, 256, 1200
"""The rows of the case of pairs; the tokens in a row of the case that reads every row of a table; and the most cells of
a grid, or keys of a window, that one row of tokens has together."""


def block_sizes(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Every row of a table of positions, every offset of a grid, every distance that differs from others, and the
    positions at which angles or factors change."""
    rows, axes = spec.position_limit(), spec.position_axes
    if rows is not None and axes == 1:
        seq = min(rows, SWEEP_ROW)
        yield Draft("every row", max(1, shorter(spec, 1, -(-rows // seq) * seq) // seq), seq, 0, 0, 1, "every")
        if rows <= reach.seq:
            yield Draft("whole table", 1, shorter(spec, 1, rows), 0, 0, 1, "every")
    sides = spec.position_limits()
    if sides is not None and axes > 1 and math.prod(sides) <= WHOLE:
        cells = np.array(list(itertools.product(*map(range, sides))), np.int64)
        cells = np.concatenate((np.zeros((spec.prefix_tokens, axes), np.int64), cells))
        windows = max(2, min(WINDOWS, GRID_TOKENS // len(cells)))  # pictures have many windows
        yield Draft("whole grid", windows, len(cells), 0, 0, 1, At(cells[None]))
    pairs = grid_offsets(spec) if axes > 1 else distances(spec, PAIR_ROWS, rng)
    if pairs is not None:
        yield Draft("pairs", len(pairs), 2, 0, 1, 2, At(pairs))
    elif (spread := spread_cells(spec)) is not None:
        yield Draft("spread cells", 1, shorter(spec, 1, len(spread)), 0, 1, 2, At(spread[None]))
    own = [(kind.window, kind.attention_chunk_size, *kind.encoding.lengths()) for kind in spec.distinct_layers()]
    for keys in sorted({size or 0 for sizes in own for size in sizes}):
        if 1 < keys <= WHOLE:
            yield Draft(f"{keys} tokens", 1, shorter(spec, 1, keys), 0, 0, keys, "offset")
            if spec.kv_cache:
                yield Draft(f"all {keys} keys", 2, 1, keys - 1, 1, 1, "near")
        if keys > 1 and spec.padding_mask and not spec.cross:
            yield from _hidden_window(spec, keys)
        if keys > 1 and spec.kv_cache:  # queries on both sides of the place where the oldest keys go out of sight
            yield Draft(f"past {keys} keys", 1, 4, keys - 2, 2, 1, "near", values="oldest")
            for past in (keys - 1, keys):  # one token that sees the oldest key, or just doesn't any longer
                yield Draft(f"step past {keys} keys", 1, 1, past, 2, 1, "near", values="oldest")
        elif keys > 1 and spec.dtype != "fp32" and not spec.cross:
            seq = keys + size_between(rng, 2, 4)
            if shorter(spec, 1, seq) == seq:
                yield Draft(f"prompt past {keys} keys", 1, seq, 0, 0, 1, "near", values="oldest")
    for edge in spec.position_edges():
        yield from _around(spec, edge, edge + int(rng.integers(edge + 1)))


def _hidden_window(spec: Spec, keys: int) -> Iterator[Draft]:
    """Padding after a few first keys that is longer than a window: its queries see no key, though there are older
    ones."""
    more = 12 + keys // 8
    if spec.kv_cache:
        yield Draft(f"padding past {keys} keys", 1, 3, keys + more, 2, 1, "near", "few first")
    if keys <= WHOLE and shorter(spec, 1, keys + more) == keys + more:
        yield Draft(f"padding past {keys} tokens", 1, keys + more, 0, 2, 1, "near", "few first")


def _around(spec: Spec, edge: int, farther: int) -> Iterator[Draft]:
    """A few tokens up to both sides of a position at which an encoding changes, and tokens with one beyond it.

    That token is the first or any other; it is in the first row, the last or another one, in a step or not, and along
    one axis or all axes.
    """
    rows: list[tuple[str, list[Sequence[int]]]] = [
        (f"position {edge - 1}", [range(edge - 4, edge)]),
        (f"position {edge}", [range(edge - 3, edge + 1)]),
        (f"back from position {farther}", [(farther, 0, 1, 2)]),
        (f"row with position {farther}", [(0, farther, 1, 2), (0, 1, 2, 3)]),
        (f"second row with position {farther}", [(1, 2, 0, 3), (0, 1, farther, 3), (0, 1, 2, 3)]),
        (f"last row with position {farther}", [(1, 2, 0, 3), (3, 0, 1, 2), (0, 1, 2, 3), (0, 1, 2, farther)]),
        (f"last row to position {edge - 1}", [range(4), range(2, 6), range(edge - 4, edge)]),
        (f"last row to position {edge}", [range(4), range(2, 6), range(edge - 3, edge + 1)]),
        (f"steps with position {edge - 1}", [(3,), (0,), (edge - 1,), (7,)]),
        (f"steps with position {edge}", [(3,), (0,), (edge,), (7,)]),
        (f"steps with position {farther}", [(3,), (0,), (farther,), (7,)]),
    ]
    for name, tokens in rows:
        places = np.maximum(np.array(tokens, np.int64), 0)[:, :, None].repeat(spec.position_axes, 2)
        for past in (0, 30) if spec.kv_cache else (0,):
            yield Draft(name, len(tokens), len(tokens[0]), past, 2, 3, At(places))
    for axis in range(spec.position_axes if spec.position_axes > 1 else 0):
        places = np.arange(4)[None, :, None].repeat(spec.position_axes, 2)
        places[0, 1, axis] = farther
        yield Draft(f"axis {axis} with position {farther}", 1, 4, 0, 2, 3, At(places))
