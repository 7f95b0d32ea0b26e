"""The rotation of queries and keys as an encoding with its parameters, named as in posexport's specs.

Frequencies that fit no encoding are listed: `{"name": "rope", "layout": ..., "frequencies": [...]}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.angles import AngleProbe, NotLinear, OtherRows, Turning, turning_of
from posexport.graphs.attention.measure import Measure
from posexport.graphs.attention.pairings import Pairs
from posexport.graphs.attention.rotary import Rotary
from posexport.graphs.fits.axes import axes_parameters
from posexport.graphs.fits.decay import xpos_decay
from posexport.graphs.fits.grid import dinov3_parameters, grid_turning
from posexport.graphs.fits.rope import nearest_theta, rope_parameters

if TYPE_CHECKING:
    Encoding = dict[str, Any]

TABLE, SIDES, ROWS, NOT_EVALUATED = "rotation-by-table", "rotations-differ", "rotation-by-row", "not-evaluated"
"""Codes of the reasons why a rotation has no parameters."""

GRID = (5, 7)
"""Rows and columns of the positions that a rotation over a grid is tried on."""

MOST_PREFIX = 16
"""The most tokens before the patches of an image."""


def unknown(name: str, reason: Reason, **known: Any) -> Encoding:
    """An encoding of which no more than `known` is known, with the reason."""
    return {"name": name, **known, "reason": {"code": reason.code, "text": reason.text}}


def rotary_encoding(measure: Measure, q: Rotary, k: Rotary, head_dim: int) -> tuple[Encoding, int]:
    """The encoding of a rotation of queries and keys, and how many tokens at the beginning are not rotated."""
    layout = layout_of(q.pairs)
    width = _width(q.pairs, head_dim)
    if q.pairs != k.pairs:
        reason = Reason(
            SIDES, "the features of queries and keys are paired in different ways, or in parts that are joined later"
        )
        return unknown("rotary", reason, layout=layout), 0
    if not (q.in_columns and k.in_columns):
        reason = Reason(TABLE, "its cosines and sines are in several values, in matrices, or on several axes of tokens")
        return unknown("rotary", reason, layout=layout, **width), 0
    try:
        turning = turning_of(measure, q)
        other = turning if _same_angles(q, k) else turning_of(measure, k)
    except OtherRows:
        reason = Reason(ROWS, "rows are not rotated by their own positions")
        return unknown("rotary", reason, layout=layout, **width), 0
    except NotLinear:
        found = _on_a_grid(measure, q)
        if found is not None and _same_angles(q, k):
            return found
        reason = Reason(TABLE, "its cosines and sines are not those of multiples of positions")
        return unknown("rotary", reason, layout=layout, **width), 0
    except RequestError as error:
        reason = Reason(NOT_EVALUATED, str(error).rstrip("."))
        return unknown("rotary", reason, layout=layout, **width), 0
    if np.abs(other.frequencies - turning.frequencies).max() > 2 * max(turning.tolerance, other.tolerance, 1e-12):
        reason = Reason(SIDES, "queries and keys are rotated at different frequencies")
        return unknown("rotary", reason, layout=layout, **width), 0
    return _named(turning, other, q.pairs, head_dim), turning.prefix


def layout_of(pairs: Pairs) -> str:
    """`interleaved`: pairs (2i, 2i + 1). `half`: pairs (i, i + n/2) of the n rotated features, or of each run."""
    return "interleaved" if pairs.interleaved or pairs.sorted else "half"


def _width(pairs: Pairs, head_dim: int) -> Encoding:
    """How many features of a head are rotated, if not all are, and the first of them, if it isn't the head's first."""
    if 2 * pairs.count == head_dim:
        return {}
    return {"rotary_dim": 2 * pairs.count, **({"rotary_start": pairs.start} if pairs.start else {})}


def _same_angles(q: Rotary, k: Rotary) -> bool:
    return (q.cos, q.sin) == (k.cos, k.sin)


def _named(turning: Turning, other: Turning, pairs: Pairs, head_dim: int) -> Encoding:
    layout, frequencies = layout_of(pairs), turning.frequencies
    width = _width(pairs, head_dim)
    table = {"name": "rope", "layout": layout, **width, "frequencies": _listed(frequencies)}
    if turning.growth is not None or other.growth is not None:
        return _decaying(turning, other, layout) or {**table, "decay": True}
    if len(frequencies) > 1:
        found = axes_parameters(frequencies, turning.amplitude, turning.tolerance, pairs)
        return table if found is None else {**found, **width}
    parameters = rope_parameters(turning) if len(pairs.runs) == 1 else None
    if parameters is None:
        scale = {} if abs(turning.amplitude - 1) < 1e-6 else {"attention_factor": turning.amplitude}
        more: dict[str, Any] = {} if turning.edge is None else {"longer_than": turning.edge}
        near = nearest_theta(frequencies[0])
        more |= {} if near is None else {"near": {"theta": near[0], "difference": near[1]}}
        return {**table, **scale, **more}
    return {"name": "rope", "layout": layout, **width, **parameters}


def _decaying(turning: Turning, other: Turning, layout: str) -> Encoding | None:
    """xpos: with each position, the amplitude of keys grows as much as that of queries shrinks."""
    if turning.growth is None or other.growth is None or np.abs(turning.growth + other.growth).max() > 1e-9:
        return None
    plain = rope_parameters(turning)
    decay = xpos_decay(turning.growth)
    if plain is None or "scaling" in plain or decay is None:
        return None
    return {"name": "xpos", "layout": layout, **plain, **decay}


def _listed(frequencies: Any) -> list[Any]:
    rows = [[float(one) for one in row] for row in frequencies]
    return rows[0] if len(rows) == 1 else rows


def _on_a_grid(measure: Measure, rotary: Rotary) -> tuple[Encoding, int] | None:
    """The encoding of tokens that are patches: from positions on a grid, or from an image without positions.

    If images may have any size, an image of another size must give the same parameters.
    """
    probe = AngleProbe(measure, rotary)
    hidden = max(rotary.cos.prefix, rotary.sin.prefix)  # tokens that the cosines and sines leave out
    if probe.axes is None:
        turns = probe.places(GRID[0] * GRID[1])
        sides = measure.other_sides()
        found = _of_grid(turns, rotary.pairs, len(turns) - 4, follows=sides is not None)
        if found is None or sides is None:
            return None if found is None else (found[0], max(found[1], hidden))
        again = _of_grid(probe.places(GRID[0] * GRID[1], sides=sides), rotary.pairs, len(turns) - 4, follows=True)
        return (found[0], max(found[1], hidden)) if again == found else None
    if probe.axes != 2:
        return None
    turns = probe.at([[column, row] for row in range(GRID[0]) for column in range(GRID[1])])
    found = _of_grid(turns, rotary.pairs, 0, follows=True)
    return None if found is None else (found[0], max(found[1], hidden, probe.prefix))


def _of_grid(turns: Any, pairs: Pairs, most_prefix: int, *, follows: bool) -> tuple[Encoding, int] | None:
    """The encoding of the rotations [S, P] of the cells of some grid, and the number of tokens before them.

    `follows`: the grid is that of the tokens, and not a parameter.
    """
    grid = grid_turning(turns, max(min(MOST_PREFIX, most_prefix), 0))
    if grid is None:
        return None
    found = axes_parameters(grid.steps, 1.0, 1e-6, pairs) if grid.starts_at_zero else None
    found = found or dinov3_parameters(grid, by_grid=follows)
    return None if found is None else (found, grid.prefix)
