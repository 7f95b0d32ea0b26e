"""Sets of inputs to verify an artifact on, drawn from a seed, so that a graph that is wrong in one corner can't pass.

A draft says what one set is for: ranges of its sizes, and kinds of positions, padding and values (posexport.verify.
draws). Drafts are the corners in which graphs go wrong: long rows, many rows, rows that differ, one token, chunks and
steps over short and long caches, every row of a table and every offset of a small grid, positions where the encoding
changes, far ones, padding of all kinds, and values that are quiet, zero, loud or single and large. No length is the
traced one, so that one baked in shows. Dimensions that a graph or a plan fixes or bounds restrict all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

import attrs
import numpy as np

from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.contract import TRACED_SIZES, Bounds, graph_inputs, resolved, within
from posexport.spec.spec import Spec
from posexport.verify.draws import VALUES, Array, At, Tokens, attention_mask, position_ids
from posexport.verify.eligibility import work
from posexport.verify.reach import Reach, default_reach, distances, grid_offsets

USUAL_POSITIONS = 2**16
"""Cases whose positions all lie below are within the usual range; verdicts state their worst error separately."""

WORK = 3e10
"""Multiply-adds that a case may take: longer and larger ones become shorter, down to LEAST tokens in a row."""

LEAST = 26

LONGEST_NAME = 60

ROWS, MEDIUM = (6, 9), (260, 340)
"""Rows of the case with many of them, and tokens of each."""

PAIR_ROWS, SWEEP_ROW = 1200, 256
"""Rows of two tokens at most, and tokens in a row of the case that reads every row of a table."""


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


@attrs.frozen(kw_only=True)
class _Draft:
    """A case where nothing bounds it: `past` tokens in a cache, `spare` places behind the last in a shared one,
    `encoder` tokens of an encoder. Fields that don't concern a spec play no part. A `long` one has as many keys as
    shall be reached, at most; `apart` says that rows of a shared cache begin at different places."""

    name: str
    batch: int
    seq: int
    past: int = 0
    spare: int = 0
    encoder: int = 9
    positions: str | At = "consecutive"
    padding: str = "none"
    values: str = "normal"
    apart: bool = True


def make_cases(
    spec: Spec, seed: int, bounds: Bounds, form: str = "decomposed", *, reach: Reach | None = None, more: int = 0
) -> list[Case]:
    """The cases for an artifact of `spec` in `form` whose dimensions lie within `bounds`; the same for the same seed.

    `reach` says how far they go (default: default_reach of the spec), `more` how many further ones are drawn.
    `hidden_states` are unit normal times what a kind of values makes of them, as are cached keys and values, rounded to
    the graph's dtype; `input_ids` lie within the vocabulary. A shared cache holds what an earlier sequence left behind
    what is written, but in the form contrib: ONNX Runtime's GroupQueryAttention leaves zeros there and nothing else, and
    since it takes several tokens after others for one row only, a chunk for a shared cache has batch 1 there.
    """
    rng = np.random.default_rng(seed)
    reach = reach or default_reach(spec)
    drafts = list(_drafts(spec, rng, reach))
    drafts += islice(_further(spec, rng, reach), more)
    return [_case(draft, spec, rng, bounds, form) for draft in drafts]


def _further(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[_Draft]:
    """Drafts without end: those of make_cases drawn again, in other company."""
    padding = ("none", "left", "right", "both", "middle", "holes", "mixed")
    for number in range(2, 10**9):
        for draft in _drafts(spec, rng, reach):
            if isinstance(draft.positions, At) or draft.seq * draft.batch > 4 * MEDIUM[1]:
                continue
            kinds = ("consecutive", "offset", "packed", "scattered", "near", "middle", "mixed")
            drawn = {"positions": kinds, "padding": padding, "values": tuple(VALUES)}
            others = {name: str(rng.choice(known)) for name, known in drawn.items()}
            if draft.values in ("loud", "peaks"):  # loud tokens that see each other leave nothing to compare
                others["values"] = draft.values
            yield attrs.evolve(draft, name=f"{draft.name} {number}", **others)


def _drafts(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[_Draft]:
    """The corners, with sizes drawn from `rng`."""

    def draw(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    long, rows = _long(spec, reach), max(draw(*ROWS), reach.batch)
    medium = _shorter(spec, rows, draw(*MEDIUM))
    negative = "negative" if spec.negative_positions else "near"
    yield _Draft(name="offset", batch=2, seq=draw(8, 10), spare=4, encoder=13, positions="offset", padding="left")
    yield _Draft(name="consecutive", batch=3, seq=draw(14, 18), past=13, encoder=640, padding="left")
    yield _Draft(name="one token", batch=1, seq=1, spare=8, encoder=8, positions="far")
    yield _Draft(name="first token", batch=1, seq=1, spare=3, encoder=1, positions="near", values="peaks")
    yield _Draft(
        name="scattered", batch=2, seq=draw(20, 30), past=6, spare=3, encoder=30, positions="scattered", padding="all"
    )
    yield _Draft(name="packed", batch=1, seq=draw(38, 60), encoder=17, positions="packed", spare=1)
    yield _Draft(
        name="far out", batch=1, seq=draw(12, 16), past=33, spare=10, encoder=3, positions="far"
    )
    yield _Draft(
        name="loud",
        batch=2,
        seq=draw(20, 26),
        past=11,
        encoder=10,
        spare=9,
        positions="scattered",
        padding="holes",
        values="loud",
    )
    yield _Draft(
        name="long",
        batch=1,
        seq=long,
        spare=24,
        encoder=long,
        positions="consecutive",
        padding="holes" if spec.padding_mask else "none",
    )
    yield _Draft(
        name="rows",
        batch=rows,
        seq=medium,
        spare=5,
        encoder=draw(300, 400),
        positions="mixed",
        padding="mixed",
        values="peaks",
    )
    yield _Draft(
        name="several rows",
        batch=draw(2, 4),
        seq=draw(40, 90),
        encoder=draw(40, 90),
        positions="shuffled",
        values="zeros",
    )
    yield _Draft(
        name="middle",
        batch=3,
        seq=draw(30, 60),
        past=20,
        encoder=50,
        positions="middle",
        padding="middle",
        values="quiet",
    )
    yield _Draft(
        name="negative",
        batch=2,
        seq=draw(20, 40),
        past=9,
        encoder=20,
        positions=negative,
        padding="both",
        values="outlier",
    )
    if spec.padding_mask:
        yield _Draft(
            name="no key", batch=1, seq=draw(3, 6), past=4, spare=2, encoder=4, positions="near", padding="all"
        )
    yield from _tables(spec, rng)
    if spec.kv_cache:
        late = max(_late(spec, reach) - 12, 1)
        yield _Draft(name="prefill", batch=3, seq=draw(14, 18), spare=3, padding="right", apart=False)
        yield _Draft(name="step", batch=3, seq=1, past=draw(16, 40), spare=7, padding="left")
        yield _Draft(name="late step", batch=1, seq=1, past=late, spare=39, positions="offset", padding="right")
        yield _Draft(
            name="steps",
            batch=rows,
            seq=1,
            past=draw(200, 500),
            spare=2,
            positions="mixed",
            padding="mixed",
            values="peaks",
        )
        yield _Draft(
            name="chunk",
            batch=draw(3, 5),
            seq=draw(2, 8),
            past=draw(33, 300),
            positions="near",
            spare=3,
            padding="mixed",
        )
        yield _Draft(name="long chunk", batch=2, seq=draw(60, 140), past=draw(300, 900), padding="both", values="peaks")
        yield _Draft(name="late chunk", batch=1, seq=draw(2, 9), past=late, spare=6, padding="holes")


def _tables(spec: Spec, rng: np.random.Generator) -> Iterator[_Draft]:
    """Every row of a table of positions, every offset of a grid, every distance that differs from others, and the
    positions from which on angles or factors change."""
    if spec.cross and not spec.position_axes:
        return
    rows = spec.position_limit()
    if rows is not None and spec.position_axes == 1:
        seq = min(rows, SWEEP_ROW)
        batch = _shorter(spec, 1, seq * -(-rows // seq)) // seq or 1
        yield _Draft(name="every row", batch=batch, seq=_other_than("seq", seq), positions="every")
    pairs = grid_offsets(spec) if spec.position_axes > 1 else distances(spec, PAIR_ROWS, rng)
    if pairs is not None:
        yield _Draft(name="pairs", batch=len(pairs), seq=2, spare=1, encoder=2, positions=At(pairs))
    for edge in spec.position_edges():
        for last in (edge - 1, edge):
            places = np.maximum(np.arange(last - 3, last + 1), 0)
            name = f"position {last}"
            yield _Draft(name=name, batch=1, seq=4, spare=2, encoder=3, positions=At(places[None, :, None]))


def _shorter(spec: Spec, batch: int, seq: int) -> int:
    """The largest number of tokens up to `seq` that a case of so many rows may have within WORK; at least LEAST."""
    sizes = {"batch": batch, "seq": seq}
    while seq > LEAST and work(spec, {**sizes, "seq": seq}) > WORK:
        seq = max(LEAST, int(seq * 0.8))
    return seq


def _long(spec: Spec, reach: Reach) -> int:
    """Tokens of the longest row."""
    return reach.seq if reach.given else max(min(reach.seq, 600), _shorter(spec, 1, min(reach.seq, _square(spec))))


SQUARE, CACHED = 1.6e8, 2**27
"""Logits of the longest row, and cached numbers, that a default reach may take; each needs eight bytes several times."""


def _square(spec: Spec) -> int:
    return math.isqrt(int(SQUARE) // spec.num_heads)


def _late(spec: Spec, reach: Reach) -> int:
    """Keys of the longest cache."""
    per_token = 2 * spec.layers * spec.num_kv_heads * spec.head_dim
    return reach.seq if reach.given else max(600, min(reach.seq, CACHED // per_token))


def _other_than(dim: str, size: int) -> int:
    """The size, or the next one where it is that of the trace."""
    return size + (size == TRACED_SIZES[dim])


def _case(draft: _Draft, spec: Spec, rng: np.random.Generator, bounds: Bounds, form: str) -> Case:
    sizes, before = _sizes(draft, spec, bounds, form)
    shapes = graph_inputs(spec)
    lengths = before + sizes["seq"] if not spec.cross else np.full(sizes["batch"], sizes["encoder_seq"])
    mask = np.ones((sizes["batch"], lengths.max()), np.int64)
    if spec.padding_mask:
        mask = attention_mask(draft.padding, rng, lengths, before, resolved(shapes["attention_mask"][0][1], sizes))
    places = before[:, None] + np.arange(sizes["seq"])
    new = np.zeros((sizes["batch"], sizes["seq"]), bool)
    if not spec.cross:  # a token's place is counted as pipelines do, padding left out
        new = np.take_along_axis(mask, places, 1) == 0
        places = np.take_along_axis(np.maximum(mask.cumsum(1) - 1, 0), places, 1)
    arrays: Arrays = {}
    for name, (shape, dtype) in shapes.items():
        dims = tuple(resolved(dim, sizes) for dim in shape)
        if name == "position_ids":
            arrays[name] = position_ids(draft.positions, rng, places, spec)
        elif name == "attention_mask":
            arrays[name] = mask
        elif name == "write_indices":
            arrays[name] = before
        elif name == "input_ids" and spec.vocab_size is not None:
            arrays[name] = _token_ids(rng, dims, spec.vocab_size)
        else:
            cached = name.startswith("past_")
            masked = mask[:, : dims[2]] == 0 if cached else mask == 0 if name.startswith("encoder") else new
            tokens = Tokens(
                values=rng.standard_normal(dims),
                masked=masked,
                cached=cached,
                spec=spec,
                rng=rng,
                keys=not name.startswith("past_value"),
            )
            values = VALUES[draft.values](tokens)
            if spec.kv_cache == "shared" and form == "contrib" and cached:
                values = values * (np.arange(dims[2]) < before[:, None])[:, None, :, None]
            arrays[name] = values.astype(NUMPY_DTYPES[dtype])
    more = "".join(f" {dim}={size}" for dim, size in sizes.items() if dim not in ("batch", "seq"))
    return Case(name=f"{draft.name} [{sizes['batch']}, {sizes['seq']}]{more}", arrays=arrays, sizes=sizes)


def _token_ids(rng: np.random.Generator, dims: tuple[int, ...], vocab_size: int) -> Array:
    """Any tokens, the first and the last of the vocabulary among them."""
    ids: Array = rng.integers(0, vocab_size, dims)
    ids[-1, -1] = vocab_size - 1
    ids[0, 0] = 0 if ids.size > 1 else rng.choice((0, vocab_size - 1))
    return ids


def _sizes(draft: _Draft, spec: Spec, bounds: Bounds, form: str) -> tuple[dict[str, int], Array]:
    """The sizes of a case, and how many tokens each row has in its cache."""
    batch, past = within(draft.batch, bounds["batch"]), draft.past if spec.kv_cache else 0
    seq = draft.seq
    if spec.kv_cache == "shared":
        seq = within(seq, (1, bounds["max_seq"][1]))
    seq = within(seq, bounds["seq"])
    sizes = {"batch": batch, "seq": seq}
    before = np.zeros(batch, np.int64)
    if spec.cross:
        sizes["encoder_seq"] = within(_other_than("encoder_seq", draft.encoder), bounds["encoder_seq"])
    if spec.kv_cache == "concat":
        sizes["past_seq"] = within(past + (past + seq == TRACED_SIZES["total_seq"]), bounds["past_seq"])
        before += sizes["past_seq"]
    if spec.kv_cache == "shared":
        if form == "contrib" and not fits_grouped_batch(batch, seq, past):
            batch = sizes["batch"] = within(1, bounds["batch"])
            past = past if batch == 1 else 0
        sizes["max_seq"] = within(_other_than("max_seq", past + seq + draft.spare), bounds["max_seq"])
        room = max(sizes["max_seq"] - seq, 0)
        starts = [past, 0, *(max(past - 4 * row, min(past, 1)) for row in range(1, batch))]
        if batch < 3 or not draft.apart:
            starts = [max(past - 4 * row, min(past, 1)) for row in range(batch)]
        before = np.array([min(start, room) for start in starts[:batch]], np.int64)
    return sizes, before
