"""Inputs to verify an artifact on, made from a seed: lengths, batches and positions that a wrong graph can't pass.

No length is the traced one (batch 2, seq 7), so that one baked in shows. Positions are consecutive, offset, packed
(starting over within a row), with gaps and in any order, and far out; on two axes they lie on grids that aren't
square, so that x and y swapped shows. Dimensions that a graph or a plan fixes or bounds restrict all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec import Spec

FAR = 100_000
"""Positions go up to here where no table ends earlier: beyond the lengths that models are trained for today."""

LONG, LONGEST = 600, 1024
"""Tokens of the long case, so that tables and masks baked at the usual 512 show; more where a window or a table of
distances reaches further, up to the longest."""

LOUD = {"fp32": 6.0, "fp16": 2.0, "bf16": 1.5}
"""Factor on hidden_states in the loud case, its square on the logits: in fp32 a mask of -20 or -30 then lets keys
through. Half precision has too few digits for logits of a hundred: eager itself would be far off."""

Bounds = dict[str, tuple[int, int | None]]
"""Smallest and largest size of `batch` and `seq` that the artifact takes; None where there is no largest."""

Positions = Callable[[np.random.Generator, int, int, int], np.ndarray[Any, Any]]
"""(generator, batch, seq, limit) to [batch, seq] int64 in [0, limit)."""


@attrs.frozen(kw_only=True)
class Case:
    """One set of inputs by the graph's names, and what it is for."""

    name: str
    arrays: Arrays

    @property
    def sizes(self) -> tuple[int, int]:
        """Batch, and tokens in a row."""
        batch, seq, *_ = next(iter(self.arrays.values())).shape
        return int(batch), int(seq)


def _consecutive(rng: np.random.Generator, batch: int, seq: int, limit: int) -> np.ndarray[Any, Any]:
    return np.tile(np.arange(seq) % limit, (batch, 1))


def _offset(rng: np.random.Generator, batch: int, seq: int, limit: int) -> np.ndarray[Any, Any]:
    starts = np.minimum(np.array([37 + 611 * row for row in range(batch)]), max(0, limit - seq))
    positions: np.ndarray[Any, Any] = (starts[:, None] + np.arange(seq)) % limit
    return positions


def _packed(rng: np.random.Generator, batch: int, seq: int, limit: int) -> np.ndarray[Any, Any]:
    cuts = [max(1, (seq * (row + 2)) // (row + 5)) for row in range(batch)]
    return np.stack([np.r_[np.arange(cut), np.arange(seq - cut)] % limit for cut in cuts])


def _scattered(rng: np.random.Generator, batch: int, seq: int, limit: int) -> np.ndarray[Any, Any]:
    """Gaps, and no order; repeats only where the table is shorter than the sequence."""
    reach = min(limit, 4 * seq + 8)
    return np.stack([rng.choice(reach, seq, replace=reach < seq) for _ in range(batch)])


def _far(rng: np.random.Generator, batch: int, seq: int, limit: int) -> np.ndarray[Any, Any]:
    """Anywhere up to the limit, the last position included."""
    positions = rng.integers(0, limit, (batch, seq))
    positions[:, -1] = limit - 1
    return positions


_CASES: tuple[tuple[str, int, int, Positions], ...] = (
    ("offset", 2, 9, _offset),
    ("consecutive", 3, 16, _consecutive),
    ("one token", 1, 1, _far),
    ("scattered", 2, 21, _scattered),
    ("packed", 1, 40, _packed),
    ("far out", 1, 12, _far),
    ("loud", 2, 23, _scattered),
    ("long", 1, LONG, _consecutive),
)


def make_cases(
    spec: Spec, inputs: Mapping[str, tuple[tuple[str | int, ...], str]], seed: int, bounds: Bounds
) -> list[Case]:
    """The cases for an artifact whose graph has these `inputs`; the same for the same seed.

    `hidden_states` are unit normal (times `LOUD` in one case), rounded to the graph's dtype; `input_ids` lie within the
    vocabulary.
    """
    rng = np.random.default_rng(seed)
    limit = spec.encoding.position_limit() or FAR
    cases = []
    for name, batch, seq, positions in _CASES:
        if name == "long":
            seq = max(seq, min(max(spec.window or 0, spec.encoding.reach() or 0) + 5, LONGEST))
        batch, seq = _within(batch, bounds["batch"]), _within(seq, bounds["seq"])
        arrays = {}
        for key, (shape, dtype) in inputs.items():
            if key == "position_ids":
                arrays[key] = _position_ids(positions, rng, batch, seq, spec.encoding.axes, limit)
            elif key == "input_ids":
                assert spec.vocab_size is not None
                arrays[key] = rng.integers(0, spec.vocab_size, (batch, seq))
            else:
                values = rng.standard_normal((batch, seq, *(int(dim) for dim in shape[2:])))
                values *= LOUD[dtype] if name == "loud" else 1.0
                arrays[key] = values.astype(NUMPY_DTYPES[dtype])
        cases.append(Case(name=f"{name} [{batch}, {seq}]", arrays=arrays))
    return cases


def bounds_of(inputs: Mapping[str, tuple[tuple[str | int, ...], str]]) -> Bounds:
    """What a graph's own inputs say about `batch` and `seq`: a number is fixed, a name is free."""
    bounds: Bounds = {}
    for shape, _ in inputs.values():
        for dim, size in zip(("batch", "seq"), shape, strict=False):
            if isinstance(size, int):
                bounds[dim] = (size, size)
    return {"batch": (1, None), "seq": (1, None), **bounds}


def _within(size: int, bound: tuple[int, int | None]) -> int:
    low, high = bound
    return max(low, size if high is None else min(size, high))


def _position_ids(
    positions: Positions, rng: np.random.Generator, batch: int, seq: int, axes: int, limit: int
) -> np.ndarray[Any, Any]:
    """[batch, seq], or [batch, seq, axes]: consecutive tokens on a grid wider than it is high, or anything per axis."""
    if axes == 1:
        return positions(rng, batch, seq, limit).astype(np.int64)
    if positions in (_consecutive, _packed):
        index, width = positions(rng, batch, seq, limit), max(3, round((1.7 * seq) ** 0.5))
        columns = [index % width, index // width, *(index // 2 + axis for axis in range(axes - 2))]
    else:
        columns = [positions(rng, batch, seq, limit) // (1 + 2 * axis) for axis in range(axes)]
    return np.stack(columns, -1).astype(np.int64)
