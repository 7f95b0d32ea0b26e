"""The oracle's own inputs. They are valid for the spec and aimed at the place of a fault.

REACH limits their sizes and positions. Verify must look that far, because a fault beyond REACH does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Range = tuple[int, int]


@attrs.frozen
class Reach:
    """The largest sizes and positions of inputs.

    keys: with a cache or from an encoder. tokens: of several rows. row: tokens of a single row. chunk: tokens of a
    chunk over a cache. batch: rows. crowd: rows for faults of large batches. position: the farthest position.
    exact_position: the same with `angles="exact"`.
    """

    keys: int = 2150
    tokens: int = 1100
    row: int = 2100
    chunk: int = 300
    batch: int = 8
    crowd: int = 40
    position: int = 2**20 - 1
    exact_position: int = 2**24 - 1


REACH = Reach()

DTYPES = {"fp32": np.float32, "fp16": np.float16}

PADDINGS = ("none", "left", "right", "both", "holes", "uneven")
"""Kinds of padding. "uneven" draws a kind for each row."""


@attrs.frozen(kw_only=True)
class Aim:
    """The inputs at which a fault shows. Each pair is a range that includes both ends. Dimensions that the spec does
    not have are ignored.

    `past` is the number of cached tokens. `spare` is the number of free slots after the last token in a shared buffer.
    `start` is the first position (None: after the cached tokens). `edit` changes the drawn arrays at the end.
    """

    batch: Range = (1, 3)
    seq: Range = (1, 24)
    past: Range = (0, 24)
    spare: Range = (0, 5)
    encoder: Range = (1, 24)
    padding: tuple[str, ...] = PADDINGS
    positions: tuple[str, ...] = ("consecutive",)
    start: Range | None = None
    magnitude: float = 1.0
    edit: Callable[[Arrays, np.random.Generator], None] | None = None


def position_reach(spec: Spec) -> int:
    """The farthest position of a spec."""
    limit = spec.position_limit()
    if limit is not None:
        return limit - 1
    if spec.ordered:  # xpos: keys grow with the distance, so verify stops at 6 scale_base
        return 3000
    if any(getattr(layer.encoding, "scaling", None) == "dynamic" for layer in spec.distinct_layers()):
        return 2**16 - 1  # beyond this, runtimes differ by a tenth of the output and more
    return REACH.exact_position if spec.angles == "exact" else REACH.position


def draw(spec: Spec, aim: Aim, random: np.random.Generator) -> Arrays:
    """One set of inputs within an aim."""

    def size(bounds: Range, most: int) -> int:
        low, high = min(bounds[0], most), min(bounds[1], most)
        return int(random.integers(low, max(low, high) + 1))

    batch = size(aim.batch, REACH.crowd)
    cached = spec.kv_cache is not None
    seq = size(aim.seq, REACH.row if batch == 1 else REACH.tokens)
    past = size(aim.past, REACH.keys - 1) if cached else 0
    seq = min(seq, REACH.keys - past) if cached else seq
    if spec.positions == "consecutive":  # no two tokens share a position
        seq = min(seq, spec.token_limit() or seq)
    sizes = {"batch": batch, "seq": seq, "past_seq": past, "total_seq": past + seq}
    sizes["encoder_seq"] = size(aim.encoder, REACH.keys)
    sizes["max_seq"] = past + seq + int(random.integers(aim.spare[0], aim.spare[1] + 1))
    arrays: Arrays = {}
    for name, (shape, dtype) in graph_inputs(spec).items():
        dims = [dim if isinstance(dim, int) else sizes[dim] for dim in shape]
        if name == "input_ids":
            arrays[name] = random.integers(0, spec.vocab_size or 1, dims)
        elif name == "position_ids":
            arrays[name] = _positions(spec, aim, (batch, seq), past, random)
        elif name == "attention_mask":
            arrays[name] = _mask(aim, dims, random)
        elif name == "write_indices":
            arrays[name] = np.minimum(past, np.where(random.random(batch) < 0.5, past, random.integers(0, past + 1)))
            arrays[name] = arrays[name].astype(np.int64)
        else:
            factor = aim.magnitude if name.startswith(("hidden", "encoder")) else 1.0
            arrays[name] = (random.standard_normal(dims) * factor).astype(DTYPES[dtype])
    if aim.edit is not None:
        aim.edit(arrays, random)
    return arrays


def _positions(spec: Spec, aim: Aim, sizes: Range, past: int, random: np.random.Generator) -> Array:
    """Positions of one kind for `sizes` = (batch, tokens). On limited grids every axis is drawn separately. If the spec
    has consecutive positions, only the first position of each row."""
    batch, seq = sizes
    axes, kind = max(spec.position_axes, 1), str(random.choice(aim.positions))
    farthest = position_reach(spec)
    low, high = aim.start or (past, past)
    low, high = min(low, farthest), min(high, farthest)
    start = random.integers(low, max(low, high) + 1, (batch, 1, 1))
    if spec.positions == "consecutive":
        return np.asarray(np.clip(start[..., 0], 0, farthest - seq + 1), np.int64)
    shape = (batch, seq, axes)
    steps = np.broadcast_to(np.arange(seq)[None, :, None], shape)
    limit = spec.position_limit()
    if axes > 1 and kind == "consecutive" and limit is None:  # a grid, row by row
        side = max(1, int(np.ceil(np.sqrt(seq))))
        grid = np.stack([np.arange(seq) % side, np.arange(seq) // side, np.arange(seq) // (side * side)], -1)
        made = np.broadcast_to(grid[None, :, :axes], shape) + (start if aim.start else 0)
    elif axes > 1 and limit is not None:
        made = random.integers(0, limit, shape)
    elif kind == "consecutive":
        made = start + steps
    elif kind == "gaps":
        made = start + np.sort(random.integers(0, max(1, high - low) + seq, shape), 1)
    elif kind == "shuffled":
        made = start + random.permuted(np.array(steps), axis=1)
    elif kind == "repeated":
        made = start + np.array(steps) // 3
    elif kind == "negative":
        made = steps - random.integers(1, 40 + seq, (batch, 1, 1))
    else:
        raise ValueError(kind)
    if limit is not None and axes == 1 and kind == "consecutive" and seq <= limit:
        made = made - np.maximum(made.max(1, keepdims=True) - (limit - 1), 0)
    made = np.asarray(made if kind == "negative" else np.minimum(made, farthest), np.int64)
    made = np.sort(made, 1) if spec.ordered else made
    return np.ascontiguousarray(made[..., 0] if spec.position_axes < 2 else made)


def _mask(aim: Aim, dims: list[int], random: np.random.Generator) -> Array:
    """A mask with one kind of padding. Every row keeps at least one key, unless the kind is "keyless"."""
    rows, length = dims
    mask = np.ones((rows, length), np.int64)
    kind = str(random.choice(aim.padding))
    for row in mask:
        this = str(random.choice(["none", "left", "right", "both", "holes"])) if kind == "uneven" else kind
        if this == "keyless":
            row[:] = 0
        left, right = (int(cut) for cut in np.sort(random.integers(0, length + 1, 2)))
        right = max(right, left + 1)
        if this in ("left", "both"):
            row[: min(left, length - 1)] = 0
        if this in ("right", "both"):
            row[right:] = 0
        if this == "holes":
            row[1 : max(1, length - 1)] = random.random(max(0, length - 2)) < random.uniform(0.2, 0.9)
        if kind != "keyless" and not row.any():
            row[int(random.integers(length))] = 1
    return mask


def broad_aims(spec: Spec) -> Iterator[Aim]:
    """Aims for faults that may show anywhere."""
    farthest = position_reach(spec)
    kinds = ("consecutive", "gaps") if spec.ordered else ("consecutive", "gaps", "shuffled", "repeated")
    yield Aim(batch=(2, 3), seq=(5, 20), past=(3, 12), padding=("none",))
    yield Aim(batch=(2, 4), seq=(9, 24), past=(0, 20), positions=kinds)
    yield Aim(batch=(1, 1), seq=(1, 1), past=(0, 30))
    yield Aim(batch=(2, 3), seq=(20, 60), past=(20, 60), positions=kinds, start=(0, 600))
    yield Aim(batch=(1, 2), seq=(150, 300), past=(100, 300), encoder=(100, 300))
    yield Aim(batch=(1, 1), seq=(1, 4), past=(900, 2200), encoder=(600, 1400))
    yield Aim(batch=(1, 1), seq=(700, 1100), past=(0, 200))
    yield Aim(batch=(2, 3), seq=(9, 20), start=(min(2000, farthest // 2), min(40_000, farthest)), positions=kinds)
    yield Aim(batch=(2, 3), seq=(9, 20), magnitude=1e-3)
    yield Aim(batch=(2, 3), seq=(9, 20), magnitude=8.0)
    yield Aim(batch=(1, 3), seq=(4, 9), padding=("keyless",))
    yield Aim(batch=(2, 3), seq=(6, 12), past=(4, 9), edit=zero_rows)


def zero_rows(arrays: Arrays, random: np.random.Generator) -> None:
    """Some tokens are zero."""
    for name, values in arrays.items():
        if name in ("hidden_states", "encoder_hidden_states"):
            values[:, random.integers(values.shape[1])] = 0
