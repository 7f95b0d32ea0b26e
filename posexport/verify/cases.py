"""Sets of inputs to verify an artifact on, drawn from a seed, so that a graph that is wrong in one corner can't pass.

A draft says what one set is for: ranges of its sizes, and kinds of positions, padding and values (posexport.verify.
draws). Drafts are the corners in which graphs go wrong: long rows, many rows, rows that differ, one token, chunks and
steps over short and long caches, every row of a table and every offset of a small grid, positions where the encoding
changes, far ones, padding of all kinds, and values that are quiet, zero, loud or single and large. No length is the
traced one, so that one baked in shows. Dimensions that a graph or a plan fixes or bounds restrict all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.contract import TRACED_SIZES, Bounds, graph_inputs, resolved, within
from posexport.spec.spec import Spec
from posexport.verify.coverage import distances, grid_offsets, spread_cells
from posexport.verify.draws import VALUES, Array, At, Tokens, attention_mask, position_ids
from posexport.verify.eligibility import work
from posexport.verify.reach import Reach, default_reach

USUAL_POSITIONS = 2**16
"""Cases whose positions all lie below are within the usual range; verdicts state their worst error separately."""

WORK = 3e10
"""Multiply-adds that a case may take: longer and larger ones become shorter, down to LEAST tokens in a row."""

LEAST, LONG = 26, 600
"""Tokens that a case and the longest row have whatever they cost."""

LOGITS, CACHED = 160_000_000, 2**27
"""Logits of the longest row, and numbers in the longest cache, where no reach was asked for: each takes eight bytes,
several times."""

MOST = 1_400
"""Tokens that a further case may have, so that many of them can be asked for."""

POWERS = (128, 256, 512, 1024)
"""Lengths that models are served with: each seed tries one but the last, and steps over a cache of each."""

PAIR_ROWS, SWEEP_ROW = 1200, 256
"""Rows of the case of pairs at most, and tokens in a row of the case that reads every row of a table."""


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
        return 0 if positions is None or not positions.size else max(int(positions.max()), -int(positions.min()))

    @property
    def far_out(self) -> bool:
        """Whether a position lies beyond the usual range."""
        return self.farthest >= USUAL_POSITIONS


@attrs.frozen
class _Draft:
    """A case where nothing bounds it: `past` tokens in a cache, `spare` places behind the last in a shared one,
    `encoder` tokens of an encoder, and kinds of posexport.verify.draws. Fields that don't concern a spec play no part.
    """

    name: str
    batch: int
    seq: int
    past: int
    spare: int
    encoder: int
    positions: str | At
    padding: str = "none"
    values: str = "normal"


def make_cases(
    spec: Spec, seed: int, bounds: Bounds, form: str = "decomposed", *, reach: Reach | None = None, more: int = 0
) -> list[Case]:
    """The cases for an artifact of `spec` in `form` whose dimensions lie within `bounds`; the same for the same seed.

    `reach` says how far they go (default: default_reach of the spec), `more` how many further ones are drawn.
    `hidden_states`, cached keys and values are unit normal where their kind says nothing else, rounded to the graph's
    dtype; `input_ids` lie within the vocabulary. A shared cache holds what an earlier sequence left behind what is
    written, but in the form contrib: ONNX Runtime's GroupQueryAttention leaves zeros there and nothing else, and since
    it takes several tokens after others for one row only, a chunk for a shared cache has batch 1 there.
    """
    reach = reach or default_reach(spec)
    rng, others = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    tokens = _every_token(spec.vocab_size or 1, np.random.default_rng((seed, 2)))
    cases = [_case(draft, spec, rng, bounds, form, tokens) for draft in list(_corners(spec, rng, reach))]
    further = itertools.islice(_further(spec, others, reach), more)
    return cases + [_case(draft, spec, others, bounds, form, tokens) for draft in further]


def _clipped(draft: _Draft, reach: Reach) -> _Draft:
    """The draft within a reach that the user gave; tables and single positions are tried whole all the same."""
    if not reach.given or draft.positions == "every" or isinstance(draft.positions, At):
        return draft
    sizes = {name: min(getattr(draft, name), reach.seq) for name in ("seq", "past", "encoder")}
    return attrs.evolve(draft, **sizes)


def _further(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[_Draft]:
    """Drafts without end: those of make_cases with other sizes, in no order, and with other kinds."""
    drawn = {
        "positions": ("consecutive", "offset", "packed", "scattered", "near", "middle", "mixed"),
        "padding": ("none", "left", "right", "both", "middle", "holes", "mixed"),
        "values": ("normal", "normal", "quiet", "zeros", "outlier", "peaks"),
    }
    for number in itertools.count(2):
        drafts = list(_corners(spec, rng, reach))
        for at in rng.permutation(len(drafts)):
            draft = drafts[at]
            if isinstance(draft.positions, str) and draft.seq * draft.batch <= MOST:
                kinds = {name: str(rng.choice(known)) for name, known in drawn.items()}
                yield attrs.evolve(draft, name=f"{draft.name} {number}", **kinds)


def _corners(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[_Draft]:
    """The drafts of make_cases, within the reach."""
    for draft in _drafts(spec, rng, reach):
        yield _clipped(draft, reach)


def _drafts(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[_Draft]:
    """The corners, with sizes drawn from `rng`."""

    def size(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    long, late = _long(spec, reach), _late(spec, reach)
    many = max(size(6, 9), reach.batch)
    tokens, beside = _shorter(spec, many, size(70, 120)), size(2, 3)
    negative = "negative" if spec.negative_positions else "near"
    # name, rows, tokens, cached, spare slots, encoder's tokens, positions, padding, values
    yield _Draft("offset", 2, size(8, 10), 0, 4, 13, "offset", "left")
    yield _Draft("consecutive", 3, size(14, 18), 13, 0, 640, "consecutive", "left")
    yield _Draft("one token", 1, 1, 0, 8, 8, "far")
    yield _Draft("first token", 1, 1, 0, 3, 1, "near", values="peaks")
    yield _Draft("single tokens", many, 1, 0, 2, 2, "near", "mixed")
    yield _Draft("scattered", 2, size(20, 30), 6, 3, 30, "scattered", "last row")
    yield _Draft("packed", 1, size(38, 60), 0, 1, 17, "packed")
    yield _Draft("far out", 1, size(40, 60), 33, 10, 3, "far")
    yield _Draft("far row", size(3, 5), size(30, 60), 9, 0, 4, "far row")
    yield _Draft("loud", 2, size(20, 26), 11, 9, 10, "scattered", "holes", "loud")
    yield _Draft("long", 1, long, 0, 24, long, "consecutive", "few holes")
    yield _Draft("rows", many, tokens, 0, 5, size(300, 400), "mixed", "mixed", "peaks")
    row = _shorter(spec, beside, size(900, 1300) // beside)
    yield _Draft("long rows", beside, row, 0, 0, max(LONG, long // 2), "mixed", "mixed")
    power = int(rng.choice(POWERS[:-1]))
    yield _Draft("power of two", size(1, 2), power, 0, 0, power, "shuffled", values="zeros")
    yield _Draft("middle", 3, size(30, 60), 20, 0, 50, "middle", "middle", "quiet")
    yield _Draft("negative", 2, size(20, 40), 9, 0, 20, negative, "both", "outlier")
    if spec.padding_mask:
        yield _Draft("no key", 1, size(3, 6), 4, 2, 4, "near", "all")
    yield from _tables(spec, rng)
    if spec.kv_cache:
        yield _Draft("prefill", 3, size(14, 18), 0, 3, 1, "consecutive", "right")
        yield _Draft("step", 3, 1, size(18, 40), 7, 1, "consecutive", "left")
        yield _Draft("late step", 1, 1, late - 1, 39, 1, "offset", "right")
        yield _Draft("steps", many, 1, size(200, 500), 0, 1, "mixed", "mixed", "peaks")
        yield _Draft("late steps", 4, 1, max(LONG, late - size(20, 900)), 2, 1, "near", "mixed")
        yield _Draft("prompt", 2, _shorter(spec, 2, size(400, 1100)), size(100, 900), 0, 1, "consecutive", "left")
        for power in POWERS:
            yield _Draft(f"{power} keys", 2, 1, power - size(0, 1), 1, 1, "near")
        yield _Draft("chunk", size(3, 5), size(2, 6), size(33, 300), 3, 1, "near", "mixed")
        yield _Draft("chunks", many, size(12, 48), size(600, 1000), 4, 1, "mixed", "mixed")
        yield _Draft("short chunks", 3, size(5, 20), max(300, late - size(20, 900)), 0, 1, "scattered", "right")
        yield _Draft("wide chunks", many, size(50, 180), size(40, 300), 0, 1, "offset", "right")
        yield _Draft("long chunk", 2, size(200, 330), max(300, late - size(300, 1200)), 0, 1, "near", "both", "peaks")
        yield _Draft("wide late chunk", 1, size(60, 130), max(300, late - size(130, 200)), 2, 1, "consecutive", "left")
        yield _Draft("late chunk", 1, size(2, 4), late - 4, 6, 1, "consecutive", "holes")


def _tables(spec: Spec, rng: np.random.Generator) -> Iterator[_Draft]:
    """Every row of a table of positions, every offset of a grid, every distance that differs from others, and the
    positions from which on angles or factors change."""
    rows = spec.position_limit()
    if rows is not None and spec.position_axes == 1:
        seq = min(rows, SWEEP_ROW)
        yield _Draft("every row", max(1, _shorter(spec, 1, -(-rows // seq) * seq) // seq), seq, 0, 0, 1, "every")
    pairs = grid_offsets(spec) if spec.position_axes > 1 else distances(spec, PAIR_ROWS, rng)
    if pairs is not None:
        yield _Draft("pairs", len(pairs), 2, 0, 1, 2, At(pairs))
    elif (cells := spread_cells(spec)) is not None:
        yield _Draft("cells", 1, _shorter(spec, 1, len(cells)), 0, 1, 2, At(cells[None]))
    for edge in spec.position_edges():
        for last in (edge - 1, edge):
            places = np.maximum(np.arange(last - 3, last + 1), 0)
            yield _Draft(f"position {last}", 1, 4, 0, 2, 3, At(places[None, :, None]))


def _shorter(spec: Spec, batch: int, seq: int) -> int:
    """The largest number of tokens up to `seq` that a case of so many rows may have within WORK; at least LEAST."""
    while seq > LEAST and work(spec, {"batch": batch, "seq": seq}) > WORK:
        seq = max(LEAST, int(seq * 0.8))
    return seq


def _long(spec: Spec, reach: Reach) -> int:
    """Tokens of the longest row."""
    if reach.given:
        return reach.seq
    seq = min(reach.seq, math.isqrt(LOGITS // spec.num_heads))
    return max(min(reach.seq, LONG), _shorter(spec, 1, seq))


def _late(spec: Spec, reach: Reach) -> int:
    """Keys of the longest cache."""
    per_token = 2 * spec.layers * spec.num_kv_heads * spec.head_dim
    return reach.seq if reach.given else max(LONG, min(reach.seq, CACHED // per_token))


def _other_than(dim: str, size: int) -> int:
    """The size, or the next one where it is that of the trace."""
    return size + (size == TRACED_SIZES[dim])


def _case(
    draft: _Draft, spec: Spec, rng: np.random.Generator, bounds: Bounds, form: str, token_ids: Iterator[int]
) -> Case:
    sizes, before = _sizes(draft, spec, rng, bounds, form)
    shapes = graph_inputs(spec)
    lengths = before + sizes["seq"] if not spec.cross else np.full(sizes["batch"], sizes["encoder_seq"])
    width = sizes.get("max_seq", int(lengths.max()))
    mask = np.ones((sizes["batch"], width), np.int64)
    if spec.padding_mask:
        mask = attention_mask(draft.padding, rng, lengths, before, width)
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
            arrays[name] = _token_ids(rng, dims, spec.vocab_size, token_ids)
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


def _every_token(vocab_size: int, rng: np.random.Generator) -> Iterator[int]:
    """Ids of tokens without end, each of the vocabulary before one comes again."""
    while True:
        yield from rng.permutation(vocab_size).tolist()


def _token_ids(rng: np.random.Generator, dims: tuple[int, ...], vocab_size: int, tokens: Iterator[int]) -> Array:
    """The next tokens, and the first and the last of the vocabulary."""
    ids: Array = np.fromiter(itertools.islice(tokens, math.prod(dims)), np.int64).reshape(dims)
    ids[-1, -1] = vocab_size - 1
    ids[0, 0] = 0 if ids.size > 1 else rng.choice((0, vocab_size - 1))
    return ids


def _sizes(
    draft: _Draft, spec: Spec, rng: np.random.Generator, bounds: Bounds, form: str
) -> tuple[dict[str, int], Array]:
    """The sizes of a case, and how many tokens each row has in its cache."""
    batch, past = within(draft.batch, bounds["batch"]), draft.past if spec.kv_cache else 0
    seq = _other_than("seq", draft.seq)
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
        starts = [max(past - 4 * row, min(past, 1)) for row in range(batch)]
        if batch > 3:  # one that begins beside others that go on
            starts[1] = 0
        # any row may be the longest: one that is read for all shows
        before = rng.permutation(np.array([min(start, room) for start in starts], np.int64))
    return sizes, before
