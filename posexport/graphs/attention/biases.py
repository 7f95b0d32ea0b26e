"""The bias that an attention adds to its scores, measured and named: a function of distance or of offsets on a grid.

A bias that depends on features, on the row of the batch, or on the places themselves has no name here: `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import onnx_ir as ir

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.dataflow import constant_of
from posexport.graphs.attention.logits import AddedToScores, Logits
from posexport.graphs.attention.measure import Measure
from posexport.graphs.attention.rotation import unknown
from posexport.graphs.axes import PAST
from posexport.graphs.fits.distance import ROUNDING, distance_parameters
from posexport.models.biases import alibi_slopes

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

ROWS, PLACES, NOT_MEASURED, SHAPE = "bias-by-row", "bias-of-places", "not-evaluated", "bias-unknown"
"""Codes of the reasons why a bias has no name."""

ROW, FAR_KEYS = 320, 1024
"""The lengths at which a bias is measured: tokens of a row, and keys of one query after a cache."""

LENGTHS = (ROW, 160, 80, 40, 20, 12, 9, 8, 6, 4)
"""The lengths of rows that are tried in turn if the graph doesn't take longer ones."""

LARGEST_WINDOW, GRID = 64, 6
"""The most columns of a window on a grid, and the columns of a grid of unknown size."""

_STEPS = 400
"""The most values that are looked at above a bias."""

Bias = dict[str, Any]


def bias_of(added: AddedToScores, measure: Measure, sinks: bool) -> Bias | None:
    """The bias as an encoding; None if only a mask is added.

    With `sinks`, a number that is added to all logits of a query counts too.
    """
    if not added.terms:
        return None
    axes = measure.axes_of(added.values)
    try:
        if axes == 2:
            return _on_positions(added)
        rows = [added.at(seq=8, past=4, batch=2), *_far(added)] if measure.varies(PAST) else [_row(added)]
    except RequestError as error:
        return unknown("unknown", Reason(NOT_MEASURED, str(error).rstrip(".")))
    if not any(one.bias.any() for one in rows):
        return None
    if any((one.bias != one.bias[:1]).any() for one in rows):
        found = _by_region(rows[0]) if len(rows) == 1 else None
        text = "rows of a batch, or windows of an image, have different biases"
        return found or unknown("unknown", Reason(ROWS, text))
    by_distance = [_by_distance(one, sinks) for one in rows]
    if any(one is None for one in by_distance):
        return _on_grid(rows[0]) or unknown(
            "unknown", Reason(PLACES, "it depends on more than the distance between query and key")
        )
    behind, ahead = (_longest([one[at] for one in by_distance if one is not None]) for at in (0, 1))
    if not behind.any() and not ahead.any():
        return None  # the same for all keys of a query, which doesn't change a softmax
    tables = [rows for value in added.values for rows in tables_above(value)]
    found = distance_parameters(behind, ahead, tables)
    return found or unknown("unknown", Reason(SHAPE, "no known encoding has these numbers"), of="distance")


def _row(added: AddedToScores) -> Logits:
    """A row that is as long as the graph takes. Raises RequestError if the graph takes none of LENGTHS."""
    for seq in LENGTHS[:-1]:
        try:
            return added.at(seq=seq)
        except RequestError:  # beyond the end of a table
            continue
    return added.at(seq=LENGTHS[-1])


def _far(added: AddedToScores) -> list[Logits]:
    """One query with as many cached keys as the graph takes."""
    past = FAR_KEYS - 1
    while past > 8:
        try:
            return [added.at(seq=1, past=past)]
        except RequestError:
            past //= 2
    return []


def _by_distance(one: Logits, sinks: bool) -> tuple[Array, Array] | None:
    """The bias of keys behind [N, D] and ahead [N, E] of the query, by their distance from 0, as far as keys are seen.

    None if the bias depends on more than the distance.
    """
    bias = np.broadcast_to(one.bias[0], (one.bias.shape[1], *one.distances().shape))
    seen = np.broadcast_to(one.seen[0].all(0), one.distances().shape)
    distances = one.distances()
    if not sinks:
        own = np.clip(one.past + np.arange(len(distances)), 0, distances.shape[1] - 1)
        if not seen[np.arange(len(distances)), own].all():
            return None
        bias = bias - bias[:, np.arange(len(distances)), own][:, :, None]
    largest = max(float(np.abs(bias[:, seen]).max(initial=0.0)), 1e-30)
    sides = []
    for sign in (1, -1):
        columns = []
        for distance in range(distances.shape[1]):
            place = one.past - sign * distance  # the offset of the diagonal
            here = np.diagonal(seen, place)
            if not here.any():
                break
            values = np.diagonal(bias, place, 1, 2)[:, here]
            if np.abs(values - values[:, :1]).max() > ROUNDING * largest:
                return None
            columns.append(values[:, 0])
        sides.append(np.stack(columns, 1) if columns else np.zeros((len(bias), 1)))
    return sides[0], sides[1]


def _longest(sides: list[Array]) -> Array:
    return max(sides, key=lambda side: side.shape[1])


def tables_above(value: ir.Value) -> Iterator[int]:
    """The numbers of rows of the two-dimensional tables that a value is computed from."""
    seen, pending = {value}, [value]
    while pending and len(seen) < _STEPS:
        one = pending.pop()
        stored = constant_of(one)
        if stored is not None:
            if len(stored.shape) == 2:
                yield int(stored.shape[0])  # type: ignore[arg-type]
            continue
        node = one.producer()
        sources = {source for source in node.inputs if source is not None} - seen if node is not None else set()
        seen |= sources
        pending += sources


def _on_grid(one: Logits) -> Bias | None:
    """The bias of a window of w x w tokens, in rows, that depends on the offset between key and query.

    BEiT's window has one more token before the others, with its own biases.
    """
    bias, tokens = one.bias[0], one.seen.shape[3]
    if bias.shape[1] != tokens:
        return None
    for special in (0, 1):
        side = math.isqrt(tokens - special)
        if side < 2 or side * side != tokens - special:
            continue
        cells = [(row, column) for row in range(side) for column in range(side)]
        if _by_offset(bias[:, special:, special:], cells):
            if special == 0:
                return _named_grid(bias, cells, side)
            first = bias[:, 0, 1:], bias[:, 1:, 0]
            if all((values == values[:, :1]).all() for values in first):
                return {"name": "beit", "window_size": side}
    return None


def _by_region(one: Logits) -> Bias | None:
    """The bias of windows of an image that have the same bias by offset on their grid.

    Between tokens of different regions, one negative number or minus infinity is added. Such tokens are in one window
    because of a shift.
    """
    rows, heads, queries, keys = one.bias.shape
    if queries != keys or one.past or rows < 2:
        return None
    total = np.where(one.seen, one.bias, -np.inf)
    shared = total.max(0)
    if not np.isfinite(shared).all():
        return None
    besides = total - shared
    limit = ROUNDING * max(float(np.abs(one.bias).max()), 1e-30)
    numbers, together = besides[besides < -limit], besides[:, 0] >= -limit
    number = float(numbers.max(initial=-np.inf))
    same = np.isinf(numbers).all() if math.isinf(number) else (np.abs(numbers - number) <= limit).all()
    if not same or not ((besides >= -limit) == together[:, None]).all() or not all(map(_are_regions, together)):
        return None
    found = _on_grid(attrs.evolve(one, seen=np.ones((1, heads, queries, keys), bool), bias=shared[None]))
    return found if found is None or math.isinf(number) else {**found, "between_regions": float(f"{number:.6g}")}


def _are_regions(together: Array) -> bool:
    """Whether `together` [S, S] divides the tokens into regions: it is reflexive, symmetric and transitive."""
    further = together.astype(int) @ together.astype(int) > 0
    return bool(together.diagonal().all() and (together == together.T).all() and (further == together).all())


def _offsets(cells: list[tuple[int, int]]) -> Array:
    """(query row - key row, query column - key column) of all pairs [S, S, 2]."""
    places = np.array(cells)
    return np.asarray(places[:, None] - places[None])


def _by_offset(bias: Array, cells: list[tuple[int, int]]) -> bool:
    offsets = _offsets(cells)
    reach = int(np.abs(offsets).max())
    index = ((offsets[..., 0] + reach) * (2 * reach + 1) + offsets[..., 1] + reach).ravel()
    flat = bias.reshape(len(bias), -1)
    table = np.zeros((len(bias), (2 * reach + 1) ** 2))
    table[:, index] = flat
    return bool(np.abs(table[:, index] - flat).max() <= ROUNDING * max(float(np.abs(flat).max()), 1e-30))


def _named_grid(bias: Array, cells: list[tuple[int, int]], side: int) -> Bias:
    """alibi2d, if the bias is a multiple of the distance; otherwise swin, a table by offset."""
    offsets = _offsets(cells).astype(float)
    for distance, far in (("euclidean", np.sqrt((offsets**2).sum(-1))), ("manhattan", np.abs(offsets).sum(-1))):
        slopes = -(bias * far).sum((1, 2)) / (far * far).sum()
        if np.abs(-slopes[:, None, None] * far - bias).max() <= ROUNDING * max(float(np.abs(bias).max()), 1e-30):
            found: Bias = {"name": "alibi2d"}
            if np.abs(slopes - alibi_slopes(len(slopes))).max() > 1e-5 * np.abs(slopes).max():
                found["slopes"] = [float(one) for one in slopes]
            return found if distance == "euclidean" else {**found, "distance": distance}
    return {"name": "swin", "window_size": side}


def _on_positions(added: AddedToScores) -> Bias | None:
    """A bias by cells of a grid, whose positions are inputs.

    It is measured in the smallest window for whose offsets some table has one row each, or else on a grid of GRID
    columns and rows.
    """
    rows = [rows for value in added.values for rows in tables_above(value)]
    sides = [(math.isqrt(count) + 1) // 2 for count in rows if math.isqrt(count) ** 2 == count and count % 2]
    side = min((side for side in sides if 2 <= side <= LARGEST_WINDOW), default=GRID)
    cells = [(row, column) for row in range(side) for column in range(side)]
    one = added.at(seq=len(cells), positions=[[column, row] for row, column in cells])
    bias = np.broadcast_to(one.bias[0], (one.bias.shape[1], len(cells), one.bias.shape[3]))
    if not bias.any():
        return None
    if bias.shape[2] != len(cells) or not _by_offset(bias, cells):
        return unknown("unknown", Reason(PLACES, "it depends on more than the offset between query and key"))
    found = _named_grid(bias, cells, side)
    if found["name"] == "swin" and side not in sides:
        return unknown("unknown", Reason(SHAPE, "no known encoding has these numbers"), of="offset")
    return found
