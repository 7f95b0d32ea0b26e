"""Inputs to verify an artifact on, made from a seed: sizes, positions, caches and masks that a wrong graph can't pass.

No length is the traced one, so that one baked in shows. Positions are consecutive, offset, packed (starting over within
a row), with gaps and in any order, and far out; on two axes they lie on grids that aren't square, so that x and y
swapped shows. With a cache there are prefills, steps of one token and chunks; with padding, rows that are padded left,
right, not at all or wholly, and masks with holes. Dimensions that a graph or a plan fixes or bounds restrict all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.contract import Bounds, graph_inputs, resolved, within
from posexport.spec.spec import Spec

FAR = 2**20
"""Positions go up to here where no table ends earlier: as far as models are made to reach today."""

LANDMARKS = (0, 1, 255, 256, 2047, 65_535, FAR - 1)
"""The case "far out" has these and others: half precision aliases from 256 and 2048 on, 16 bits end at 65,535."""

USUAL_POSITIONS = 2**16
"""Cases whose positions all lie below are within the usual range; verdicts state their worst error separately."""

LONG, LONGEST = 600, 1024
"""Tokens of the long cases, so that tables and masks baked at the usual 512 show; more where a window or a table of
distances reaches further, up to the longest."""

LOUD = {"fp32": 6.0, "fp16": 2.0, "bf16": 1.5}
"""Factor on hidden_states and cached keys in the loud case, its square on the logits: in fp32 a mask of -20 or -30 then
lets keys through. Half precision has too few digits for logits of a hundred: eager itself would be far off."""

LOUD_LAYERS, LOUD_BELOW = 3, 2.0
"""Layers up to which that holds, and the most of it in deeper stacks. Without norms, a layer of sharp attention makes
rounding errors some ten times larger: at 6, eight layers of bare attention in fp32 leave nothing to compare. At 2 they
don't grow."""

Array = np.ndarray[Any, Any]

Positions = Callable[[np.random.Generator, Array, int], Array]
"""(generator, places [batch, seq] of the tokens in their rows, limit) to [batch, seq] int64 in [0, limit)."""


@attrs.frozen(kw_only=True)
class Case:
    """One set of inputs by the graph's names, what it is for, and its sizes by dimension (posexport.spec.contract)."""

    name: str
    arrays: Arrays
    sizes: Mapping[str, int]

    @property
    def keys(self) -> int:
        """How many keys the last query has, its own included, without those of an encoder."""
        before = self.arrays["write_indices"].max() if "write_indices" in self.arrays else self.sizes.get("past_seq", 0)
        return int(before) + self.sizes["seq"]

    @property
    def farthest(self) -> int:
        """The largest position, or its distance from 0 where positions are negative; 0 without positions."""
        positions = self.arrays.get("position_ids")
        return 0 if positions is None or not positions.size else int(abs(positions).max())

    @property
    def far_out(self) -> bool:
        """Whether a position lies beyond the usual range."""
        return self.farthest >= USUAL_POSITIONS


def _consecutive(rng: np.random.Generator, places: Array, limit: int) -> Array:
    return places % limit


def _offset(rng: np.random.Generator, places: Array, limit: int) -> Array:
    starts = np.array([37 + 611 * row for row in range(len(places))])
    positions: Array = (np.minimum(starts, max(0, limit - 1 - places.max()))[:, None] + places) % limit
    return positions


def _packed(rng: np.random.Generator, places: Array, limit: int) -> Array:
    batch, seq = places.shape
    cuts = [max(1, (seq * (row + 2)) // (row + 5)) for row in range(batch)]
    return np.stack([np.r_[np.arange(cut), np.arange(seq - cut)] % limit for cut in cuts])


def _scattered(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Gaps, and no order; repeats only where the table is shorter than the sequence."""
    batch, seq = places.shape
    reach = min(limit, 4 * seq + 8)
    return np.stack([rng.choice(reach, seq, replace=reach < seq) for _ in range(batch)])


def _far(rng: np.random.Generator, places: Array, limit: int) -> Array:
    """Anywhere up to the limit, as many landmarks as there is room for, and the last position."""
    batch, seq = places.shape
    positions = rng.integers(0, limit, (batch, seq))
    known = [place for place in LANDMARKS if place < limit][-seq:]
    positions[:, : len(known)] = known
    positions[:, -1] = limit - 1
    return positions


@attrs.frozen
class _Draft:
    """A case where nothing bounds it: `past` tokens in a cache, `spare` places behind the last in a shared one,
    `encoder` tokens of an encoder, a kind of padding (see `_mask`). Fields that don't concern a spec play no part."""

    name: str
    batch: int
    seq: int
    past: int
    spare: int
    encoder: int
    positions: Positions
    padding: str
    cached: bool = False  # made for caches only


_DRAFTS = (
    _Draft("offset", 2, 9, 0, 4, 13, _offset, "left"),
    _Draft("consecutive", 3, 16, 13, 0, 5, _consecutive, "left"),
    _Draft("one token", 1, 1, 0, 8, 8, _far, "none"),
    _Draft("scattered", 2, 21, 6, 3, 30, _scattered, "row"),
    _Draft("packed", 1, 40, 0, 1, 17, _packed, "none"),
    _Draft("far out", 1, 12, 33, 10, 3, _far, "right"),
    _Draft("loud", 2, 23, 11, 9, 10, _scattered, "holes"),
    _Draft("long", 1, LONG, 0, 24, LONG, _consecutive, "none"),
    _Draft("prefill", 3, 14, 0, 3, 1, _consecutive, "right", cached=True),
    _Draft("step", 3, 1, 17, 7, 1, _consecutive, "left", cached=True),
    _Draft("late step", 1, 1, LONG, 39, 1, _offset, "right", cached=True),
)


def make_cases(spec: Spec, seed: int, bounds: Bounds, form: str = "decomposed") -> list[Case]:
    """The cases for an artifact of `spec` in `form` whose dimensions lie within `bounds`; the same for the same seed.

    `hidden_states` are unit normal (in one case times its `loudness`), as are cached keys and values, rounded to the
    graph's dtype; `input_ids` lie within the vocabulary. A shared cache holds what an earlier sequence left behind what
    is written, but in the form contrib: ONNX Runtime's GroupQueryAttention leaves zeros there and nothing else, and
    since it takes several tokens after others for one row only, a chunk for a shared cache has batch 1 there.
    """
    rng = np.random.default_rng(seed)
    reach = min(spec.saturation_distance() + 5, LONGEST)
    return [_case(draft, spec, rng, bounds, reach, form) for draft in _DRAFTS if spec.kv_cache or not draft.cached]


def loudness(spec: Spec) -> float:
    """The factor of the loud case, by dtype and depth."""
    return LOUD[spec.dtype] if spec.layers <= LOUD_LAYERS else min(LOUD[spec.dtype], LOUD_BELOW)


def _case(draft: _Draft, spec: Spec, rng: np.random.Generator, bounds: Bounds, reach: int, form: str) -> Case:
    sizes, before = _sizes(draft, spec, bounds, reach, form)
    shapes = graph_inputs(spec)
    lengths = before + sizes["seq"] if not spec.cross else np.full(sizes["batch"], sizes["encoder_seq"])
    mask = np.ones((sizes["batch"], lengths.max()), np.int64)
    if spec.padding_mask:
        width = resolved(shapes["attention_mask"][0][1], sizes)
        mask = _mask(draft.padding, rng, lengths, before, width)
    places = before[:, None] + np.arange(sizes["seq"])
    if not spec.cross:  # a token's place is counted as pipelines do, padding left out
        places = np.take_along_axis(np.maximum(mask.cumsum(1) - 1, 0), places, 1)
    arrays: Arrays = {}
    for name, (shape, dtype) in shapes.items():
        dims = tuple(resolved(dim, sizes) for dim in shape)
        if name == "position_ids":
            made = _position_ids(draft.positions, rng, places, spec)
            arrays[name] = np.sort(made, 1) if spec.ordered else made
        elif name == "attention_mask":
            arrays[name] = mask
        elif name == "write_indices":
            arrays[name] = before
        elif name == "input_ids" and spec.vocab_size is not None:
            arrays[name] = rng.integers(0, spec.vocab_size, dims)
        else:
            values = rng.standard_normal(dims)
            if spec.kv_cache == "shared" and form == "contrib" and name.startswith("past_"):
                values *= (np.arange(dims[2]) < before[:, None])[:, None, :, None]
            if draft.name == "loud" and not name.startswith("past_value"):
                values *= loudness(spec)
            arrays[name] = values.astype(NUMPY_DTYPES[dtype])
    more = "".join(f" {dim}={size}" for dim, size in sizes.items() if dim not in ("batch", "seq"))
    return Case(name=f"{draft.name} [{sizes['batch']}, {sizes['seq']}]{more}", arrays=arrays, sizes=sizes)


def _sizes(draft: _Draft, spec: Spec, bounds: Bounds, reach: int, form: str) -> tuple[dict[str, int], Array]:
    """The sizes of a case, and how many tokens each row has in its cache."""
    batch = within(draft.batch, bounds["batch"])
    seq, past = (max(size, reach) if size == LONG else size for size in (draft.seq, draft.past))
    past = past if spec.kv_cache else 0
    if spec.kv_cache == "shared":
        seq = within(seq, (1, bounds["max_seq"][1]))
    seq = within(seq, bounds["seq"])
    sizes = {"batch": batch, "seq": seq}
    before = np.zeros(batch, np.int64)
    if spec.cross:
        sizes["encoder_seq"] = within(draft.encoder, bounds["encoder_seq"])
    if spec.kv_cache == "concat":
        sizes["past_seq"] = within(past, bounds["past_seq"])
        before += sizes["past_seq"]
    if spec.kv_cache == "shared":
        if form == "contrib" and not fits_grouped_batch(batch, seq, past):
            batch = sizes["batch"] = within(1, bounds["batch"])
            past = past if batch == 1 else 0
        sizes["max_seq"] = within(past + seq + draft.spare, bounds["max_seq"])
        room = max(sizes["max_seq"] - seq, 0)
        before = np.array([min(max(past - 4 * row, min(past, 1)), room) for row in range(batch)], np.int64)
    return sizes, before


def _mask(padding: str, rng: np.random.Generator, lengths: Array, before: Array, width: int) -> Array:
    """attention_mask [batch, width] of rows with `lengths` keys, `before` of them cached.

    left     a few keys at the start, more in each row
    right    a few keys at the end of what is cached, as where prompts were padded so, or of the row where nothing is
    row      the last row has no key at all
    holes    any keys
    none     every key, and in a shared cache also what lies behind, which no query sees all the same
    """
    mask = np.ones((len(lengths), width), np.int64)
    if padding == "holes":
        mask = rng.integers(0, 2, mask.shape)
    elif padding != "none":
        mask[np.arange(width) >= lengths[:, None]] = 0
    for row, (length, cached) in enumerate(zip(lengths, before, strict=True)):
        if padding == "left":
            mask[row, : min(1 + 2 * row, length - 1)] = 0
        if padding == "right":
            end = cached or length
            mask[row, end - min(1 + 2 * row, end - 1) : end] = 0
    if padding == "row":
        mask[-1] = 0
    return mask


def _position_ids(positions: Positions, rng: np.random.Generator, places: Array, spec: Spec) -> Array:
    """[batch, seq], or [batch, seq, axes]: consecutive tokens on a grid wider than it is high, or anything per axis."""
    axes, limit = spec.position_axes, spec.position_limit() or FAR
    if axes == 1:
        return positions(rng, places, limit).astype(np.int64)
    if positions in (_consecutive, _packed):
        index, width = positions(rng, places, limit), max(3, round((1.7 * places.shape[1]) ** 0.5))
        columns = [index % width, index // width, *(index // 2 + axis for axis in range(axes - 2))]
    else:
        columns = [positions(rng, places, limit) // (1 + 2 * axis) for axis in range(axes)]
    return np.stack(columns, -1).astype(np.int64)
