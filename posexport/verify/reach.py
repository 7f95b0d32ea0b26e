"""How far inputs go, and what of a block they can't show: windows, tables and distances that they don't reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.verify.cases import Case

Array = np.ndarray[Any, Any]

SEQ, BATCH = 2_200, 1
"""Keys that default inputs reach, beyond the 2,048 at which many buffers and tables end; more where a window or a
chunk asks for it."""

GRID = 2_000
"""Offsets of a grid up to which every one is tried."""


@attrs.frozen(kw_only=True)
class Reach:
    """The most keys of a query and rows of a batch that inputs shall have; `given` by the user, who means it."""

    seq: int
    batch: int = BATCH
    given: bool = False


def default_reach(spec: Spec) -> Reach:
    """Beyond every window and distance, and two chunks."""
    asked = [SEQ, spec.saturation_distance() + 24]
    asked += [2 * layer.attention_chunk_size + 24 for layer in spec.distinct_layers() if layer.attention_chunk_size]
    limit = spec.position_limit()
    if spec.ordered and limit is not None:  # keys that grow with their position would hide all others
        return Reach(seq=min(max(asked), limit // 3))
    return Reach(seq=max(asked))


def reach_of(spec: Spec, sizes: Mapping[str, int]) -> Reach:
    """The default reach of a spec with the sizes that the user gave in its place."""
    return attrs.evolve(default_reach(spec), given=bool(sizes), **sizes)


def read_reach(value: object) -> dict[str, int]:
    """The sizes in "seq=4096,batch=8" or in a mapping; TypeError or ValueError for anything else."""
    pairs = value.items() if isinstance(value, Mapping) else [part.split("=") for part in str(value).split(",") if part]
    sizes = {str(name).strip(): int(size) for name, size in pairs}
    if (
        len(sizes) < len(pairs)
        or not set(sizes) <= {"seq", "batch"}
        or not all(0 < size < 2**24 for size in sizes.values())
    ):
        raise ValueError
    return sizes


@attrs.frozen(kw_only=True)
class Shown:
    """What sets of inputs had at most: keys of a query, rows of a batch, and the position farthest from 0."""

    keys: int
    batch: int
    position: int

    def __str__(self) -> str:
        return f"{self.keys} keys, {self.batch} rows, position {self.position}"


def shown(cases: Sequence[Case]) -> Shown | None:
    """What these cases reach; None for none."""
    if not cases:
        return None
    return Shown(
        keys=max(max(case.keys, case.sizes.get("encoder_seq", 0)) for case in cases),
        batch=max(case.sizes["batch"] for case in cases),
        position=max(case.farthest for case in cases),
    )


def not_shown(spec: Spec, cases: Sequence[Case]) -> tuple[str, ...]:
    """What of a block's own numbers these cases did not reach, one clause each."""
    return tuple(dict.fromkeys([*_windows(spec, cases), *_tables(spec, cases)])) if cases else ()


def _windows(spec: Spec, cases: Sequence[Case]) -> Iterator[str]:
    longest = max(case.keys for case in cases)
    limits = {"window": "the window of", "attention_chunk_size": "a chunk of"}
    sizes = {(what, getattr(kind, name)) for kind in spec.distinct_layers() for name, what in limits.items()}
    for what, size in sorted(sizes, key=str):
        if size is not None and size >= longest:
            yield f"no sequence was longer than {what} {size}, so it did not show"


def _tables(spec: Spec, cases: Sequence[Case]) -> Iterator[str]:
    positions = [case.arrays["position_ids"] for case in cases if "position_ids" in case.arrays]
    if not positions:
        return
    rows, axes = spec.position_limit(), spec.position_axes
    if axes == 1 and rows is not None and any(layer.encoding.at_input for layer in spec.distinct_layers()):
        read = len(np.unique(np.concatenate([array.ravel() for array in positions])))
        if read < rows:
            yield f"{rows - read} of {rows} rows of the table of positions were not read"
    if axes == 1:
        farthest = max(_span(case) for case in cases)
        for layer in spec.distinct_layers():
            distance = layer.encoding.saturation_distance()
            if distance is not None and farthest < distance:
                yield f"no two tokens were {distance} positions apart, from where on distances are alike"
    offsets = grid_offsets(spec)
    if axes > 1 and offsets is not None:
        wanted = {tuple(pair) for pair in (offsets[:, 1] - offsets[:, 0]).tolist()}
        wanted |= {tuple(-part for part in pair) for pair in wanted}
        for array in positions:
            few = array[:, :64].astype(np.int64)
            seen = (few[:, :, None] - few[:, None]).reshape(-1, axes)
            wanted -= {tuple(pair) for pair in np.unique(seen, axis=0).tolist()}
        if wanted:
            yield f"{len(wanted)} offsets of the grid were not tried"


def _span(case: Case) -> int:
    """The largest distance between two tokens of a row, cached ones included."""
    positions = case.arrays["position_ids"]
    within = int((positions.max(1) - positions.min(1)).max()) if positions.size else 0
    return max(within, case.keys - 1 if case.keys > case.sizes["seq"] else 0)


def grid_offsets(spec: Spec) -> Array | None:
    """Two cells for every offset of a grid with a size and few cells, int64 [rows, 2, axes]: each cell is in one."""
    side, axes = spec.position_limit(), spec.position_axes
    if side is None or axes < 2 or (2 * side - 1) ** axes > 2 * GRID:
        return None
    cells = np.array(list(product(range(side), repeat=axes)), np.int64)
    offsets = np.array(list(product(range(1 - side, side), repeat=axes)), np.int64)
    offsets = offsets[len(offsets) // 2 :]  # the other half is the same pair the other way round
    first = np.maximum(-offsets, 0)
    room = side - 1 - np.abs(offsets)
    first = first + np.arange(len(offsets))[:, None] % (room + 1)  # pairs begin all over the grid
    pairs = np.stack((first, first + offsets), 1)
    touched = {tuple(cell) for cell in pairs.reshape(-1, axes).tolist()}
    left = np.array([cell for cell in cells.tolist() if tuple(cell) not in touched], np.int64).reshape(-1, axes)
    return np.concatenate((pairs, np.stack((left, left), 1))) if len(left) else pairs


def distances(spec: Spec, most: int, rng: np.random.Generator) -> Array | None:
    """Two positions for every distance up to the one from which on all are alike, int64 [rows, 2, 1], both ways round.

    Of more than `most` distances some are drawn, with those at both ends. None for a block without such a distance.
    """
    reach = max((layer.encoding.saturation_distance() or 0 for layer in spec.distinct_layers()), default=0)
    if not reach or spec.position_axes != 1:
        return None
    wanted = np.arange(reach + 3)
    if len(wanted) > most // 2:
        ends = np.r_[wanted[: most // 8], wanted[-most // 16 :]]
        wanted = np.unique(np.r_[ends, rng.choice(wanted, most // 4, replace=False)])
    starts = rng.integers(0, 50, len(wanted))
    forward = np.stack((starts, starts + wanted), -1)
    both = forward if spec.causal else np.concatenate((forward, forward[:, ::-1]))
    return both[..., None]
