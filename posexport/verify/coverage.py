"""States which of a block's own numbers the inputs reach: windows, tables, distances and grids.

It also states what outputs can't show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from posexport.runtimes.base import Arrays
from posexport.spec.arrays import Array
from posexport.spec.contract import Bounds, within
from posexport.spec.spec import Spec
from posexport.verify.blocks import root_mean_square
from posexport.verify.parity import TOLERANCES
from posexport.verify.reach import Shown

if TYPE_CHECKING:
    from posexport.verify.cases import Case

GRID = 2_000
"""The most offsets of a grid that are each tried by two tokens of their own."""

MOST_OF = 0.9
"""The part of the reach that inputs must have at least to count as having it."""

PAIR, MANY_ROWS = 2, 8
"""Tokens of a prompt up to which its rows don't count as reached, and the rows of a batch whose longest is stated.

Prompts of two tokens don't count, since there is a row for every distance between two tokens.
"""

ALIKE = 16
"""Tokens of a row are alike if they differ by fewer floors of the tolerance than this."""

OFFSETS, FEW_TOKENS = 2**22, 1_500
"""The most offsets of a grid for which the tried ones are counted, and the most tokens of a row that are looked at."""


Lengths = tuple[str, list[int], float]
"""A kind of length, the lengths that were tried, and the largest that a graph's bounds allow."""


def reached(cases: Sequence[Case]) -> Shown | None:
    """What these cases reach; None without cases."""
    if not cases:
        return None
    sizes = [(case.sizes["batch"], case.sizes["seq"], case.keys) for case in cases]
    served = [batch for batch, seq, keys in sizes if seq > PAIR or keys > seq]
    return Shown(
        keys=max(max(case.keys, case.sizes.get("encoder_seq", 0)) for case in cases),
        batch=max(served or [batch for batch, _, _ in sizes]),
        tokens_of_many=max((seq for batch, seq, _ in sizes if batch >= MANY_ROWS and seq > PAIR), default=None),
        position=max((case.farthest for case in cases if case.positions is not None), default=None),
    )


def not_shown(spec: Spec, cases: Sequence[Case], bounds: Bounds | None = None) -> tuple[str, ...]:
    """Which of a block's own numbers these cases did not reach within a graph's bounds, in one clause each."""
    return tuple(dict.fromkeys([*_windows(spec, cases, bounds or {}), *_tables(spec, cases)])) if cases else ()


def too_costly(spec: Spec, cases: Sequence[Case], reach: int, bounds: Bounds) -> tuple[str, ...]:
    """Which lengths end well before `reach` because longer ones cost much, though a graph's bounds allow them; in
    clauses."""
    slots = bounds.get("max_seq", (1, None))
    prompts = [case.sizes["seq"] for case in cases]
    wanted: list[Lengths] = [("prompt", prompts, within(within(reach, bounds["seq"]), slots))]
    if spec.cross:
        lengths = [case.sizes["encoder_seq"] for case in cases]
        wanted.append(("sequence of an encoder", lengths, within(reach, bounds["encoder_seq"])))
    wanted += _caches(spec, cases, reach, bounds)
    return tuple(
        f"no {what} was longer than {max(lengths)} tokens, since longer ones take long: give --reach seq={reach}"
        for what, lengths, most in wanted
        if max(lengths, default=most) < MOST_OF * most
    )


def _caches(spec: Spec, cases: Sequence[Case], reach: int, bounds: Bounds) -> Iterator[Lengths]:
    """The cached tokens of one row or more, of several rows, and with several new tokens."""
    if not spec.kv_cache:
        return
    most = max(min(reach - 1, _most_cached(bounds)), 0)
    lengths = [(case.sizes["batch"], case.sizes["seq"], case.keys - case.sizes["seq"]) for case in cases]
    yield "cache", [past for *_, past in lengths], most
    if bounds["batch"][1] is None or bounds["batch"][1] > 1:
        yield "cache of several rows", [past for batch, _, past in lengths if batch > 1], most
    if bounds["seq"][1] is None or bounds["seq"][1] > 1:
        yield "cache under several tokens", [past for _, seq, past in lengths if seq > 1], most


def _most_cached(bounds: Bounds) -> float:
    """The most cached tokens that a graph's bounds allow."""
    ends = _ends(bounds, "past_seq")
    fewest, _ = bounds.get("seq", (1, None))
    ends += [None if end is None else end - fewest for end in _ends(bounds, "total_seq", "max_seq")]
    return min((end for end in ends if end is not None), default=math.inf)


def _ends(bounds: Bounds, *dims: str) -> list[int | None]:
    """The largest sizes of those of these dimensions that a graph has."""
    return [bounds[dim][1] for dim in dims if dim in bounds]


def _windows(spec: Spec, cases: Sequence[Case], bounds: Bounds) -> Iterator[str]:
    prompts = [case.keys for case in cases if case.keys == case.sizes["seq"]]
    cached = [case.keys for case in cases if case.keys > case.sizes["seq"]]
    longest_prompt = min(bounds.get(dim, (1, None))[1] or math.inf for dim in ("seq", "max_seq"))
    parts = (("prompt", prompts, longest_prompt), ("cache with its new tokens", cached, _most_cached(bounds)))
    longest = max(prompts + cached)
    limits = {"window": "the window of", "attention_chunk_size": "a chunk of"}
    sizes = {(what, getattr(kind, name)) for kind in spec.distinct_layers() for name, what in limits.items()}
    for what, size in sorted(sizes, key=str):
        if size is not None and size >= longest:
            yield f"no sequence was longer than {what} {size}, so it did not show"
            continue
        for part, keys, most in parts:
            if size is not None and keys and max(keys) <= size < most:
                yield f"no {part} was longer than {what} {size}, so it did not show there"


def _tables(spec: Spec, cases: Sequence[Case]) -> Iterator[str]:
    if spec.vocab_size is not None:
        ids = [case.arrays["input_ids"].ravel() for case in cases if "input_ids" in case.arrays]
        left = spec.vocab_size - len(np.unique(np.concatenate(ids)))
        if left:
            yield f"{left} of {spec.vocab_size} token ids were not read"
    positions = [case.positions for case in cases if case.positions is not None]
    if not spec.position_axes or not (positions or spec.consecutive):
        return
    rows, axes, sides = spec.position_limit(), spec.position_axes, spec.position_limits()
    at_input = any(layer.encoding.at_input for layer in spec.distinct_layers())
    if positions and axes == 1 and rows is not None and at_input:
        read = len(np.unique(np.concatenate([array.ravel() for array in positions])))
        if read < rows:
            yield f"{rows - read} of {rows} rows of the table of positions were not read"
    if axes == 1:
        farthest = max(_span(case) for case in cases)
        for layer in spec.distinct_layers():
            distance = layer.encoding.saturation_distance()
            if distance is not None and farthest < distance:
                yield f"no two tokens were {distance} positions apart, from where on distances are alike"
    if axes > 1 and sides is not None:
        if spec.consecutive:
            cells = np.arange(max(case.sizes["seq"] for case in cases))
            positions = [np.stack((cells % sides[0], cells // sides[0]), -1)[None]]
        left = _untried_offsets(positions, np.array(sides))
        if left:
            yield f"{left} of {math.prod(2 * side - 1 for side in sides)} offsets of the grid were not tried"


def _untried_offsets(positions: Sequence[Array], sides: Array) -> int:
    """How many differences between two cells of a grid are in no row. The first tokens of rows are looked at first."""
    count = int(np.prod(2 * sides - 1))
    if count > OFFSETS:
        return count
    tried = np.zeros(2 * sides - 1, bool)
    for first in (64, FEW_TOKENS):
        for array in positions:
            cells = array[:, :first].astype(np.int64)
            if array.shape[1] <= FEW_TOKENS and not tried.all():
                differences = cells[:, :, None] - cells[:, None] + sides - 1
                tried[tuple(differences.reshape(-1, len(sides)).T)] = True
    return int(tried.size - tried.sum())


def _span(case: Case) -> int:
    """The largest distance between two tokens of a row, including cached ones."""
    positions = case.positions
    if positions is None:  # consecutive positions
        return case.keys - 1
    within = int((positions.max(1) - positions.min(1)).max()) if positions.size else 0
    return max(within, case.keys - 1 if case.keys > case.sizes["seq"] else 0)


def grid_offsets(spec: Spec) -> Array | None:
    """Two cells for every offset of a grid with a size and few cells, int64 [rows, 2, axes]; each cell is used.

    None if the block takes only the position of the first token.
    """
    sides, axes = spec.position_limits(), spec.position_axes
    if sides is None or axes < 2 or spec.consecutive or math.prod(2 * side - 1 for side in sides) > 2 * GRID:
        return None
    cells = np.array(list(product(*map(range, sides))), np.int64)
    offsets = np.array(list(product(*(range(1 - side, side) for side in sides))), np.int64)
    offsets = offsets[len(offsets) // 2 :]  # the other half has the same pairs in reverse order
    first = np.maximum(-offsets, 0)
    room = np.array(sides) - 1 - np.abs(offsets)
    first = first + np.arange(len(offsets))[:, None] % (room + 1)  # pairs begin all over the grid
    pairs = np.stack((first, first + offsets), 1)
    touched = {tuple(cell) for cell in pairs.reshape(-1, axes).tolist()}
    left = np.array([cell for cell in cells.tolist() if tuple(cell) not in touched], np.int64).reshape(-1, axes)
    return np.concatenate((pairs, np.stack((left, left), 1))) if len(left) else pairs


def spread_cells(spec: Spec) -> Array | None:
    """Cells of a larger grid with a size, int64 [cells, axes], such that any offset lies between two of them.

    Along each axis they are the first ones, the last one and every k-th one, with k about the root of the side: any
    distance lies between two of these. None if there are more than FEW_TOKENS, or if positions are not given.
    """
    sides, axes = spec.position_limits(), spec.position_axes
    if sides is None or axes < 2 or spec.consecutive:
        return None
    places = []
    for side in sides:
        step = math.isqrt(side - 1) + 1
        places.append(sorted({*range(step), *range(step - 1, side, step), side - 1}))
    return None if math.prod(map(len, places)) > FEW_TOKENS else np.array(list(product(*places)), np.int64)


def distances(spec: Spec, most: int, rng: np.random.Generator) -> Array | None:
    """Two positions for every distance up to the one from which on all are alike, int64 [rows, 2, 1].

    Without a causal mask, each pair comes in both orders. If there are more than `most`, some are drawn, with those at
    both ends. None for a block without such a distance, and if two tokens can't be placed apart.
    """
    reach = max((layer.encoding.saturation_distance() or 0 for layer in spec.distinct_layers()), default=0)
    if not reach or spec.position_axes != 1 or spec.consecutive:
        return None
    count = reach + 3
    if count > most // 2:
        ends = np.r_[: most // 8, count + -most // 16 : count]
        wanted = np.unique(np.r_[ends, rng.choice(count, most // 4, replace=False)])
    else:
        wanted = np.arange(count)
    starts = rng.integers(0, 50, len(wanted))
    forward = np.stack((starts, starts + wanted), -1)
    both = forward if spec.causal else np.concatenate((forward, forward[:, ::-1]))
    return both[..., None]


def lost_in_layers(spec: Spec, reference: Sequence[Arrays]) -> tuple[str, ...]:
    """What these float64 outputs of a block can't show, in clauses.

    Several layers of bare attention make tokens alike. Then it no longer matters how attention weighs them, and what a
    layer did with positions is lost in rounding.
    """
    outputs = [arrays["output"] for arrays in reference if arrays["output"].shape[1] > 1]
    several = [values for values in outputs if np.isfinite(values).all()]  # NaN and Inf fail the comparison
    if spec.layers == 1 or not several:
        return ()
    if not are_alike(several, spec.dtype):
        return ()
    most = max(map(_apart, several))
    return (
        f"after {spec.layers} layers of bare attention all tokens of a row are alike (to {most:.0e}), so a fault in "
        "how a layer uses positions may not show: it does with a cache, a residual or fewer layers",
    )


def are_alike(outputs: Sequence[Array], dtype: str) -> bool:
    """Whether the tokens of each row of finite outputs [B, S, hidden_size] are alike, apart from rounding in
    `dtype`."""
    most = ALIKE * TOLERANCES[dtype].floor
    return all(not _differ(values, most) and _apart(values) <= most for values in outputs)


def _differ(values: Array, most: float) -> bool:
    """Whether the first and the last token of a row already show that a token is farther than `most` from the mean."""
    return float(abs(values[:, 0] - values[:, -1]).max()) > 2 * most * (root_mean_square(values) or 1.0)


def _apart(values: Array) -> float:
    """How far tokens are from the mean of their row, as a multiple of the root mean square of all values."""
    return float(abs(values - values.mean(1, keepdims=True)).max() / (root_mean_square(values) or 1.0))
