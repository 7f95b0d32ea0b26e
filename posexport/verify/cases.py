"""Sets of inputs to verify an artifact on, drawn from a seed, so that a graph that is wrong in one corner can't pass.

Drafts (posexport.verify.drafts) say what each set is for. One set has exactly the traced sizes. No other set has a
traced length, so a length that was baked in is noticed. Dimensions that a graph or a plan fixes or bounds restrict all
of this.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.errors import RequestError
from posexport.graphs.numbers import every_number
from posexport.machine import available, size_text
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.arrays import Array
from posexport.spec.contract import TRACED_SIZES, Bounds, graph_inputs, resolved, within
from posexport.spec.spec import Spec
from posexport.verify.aligned import Directions
from posexport.verify.draft import Draft, memory
from posexport.verify.drafts import corners, further
from posexport.verify.far_keys import shown_where_keys_are_far
from posexport.verify.first_positions import first_positions
from posexport.verify.padding import ALL_ROWS, ANEW, ANEW_OF_MANY, attention_mask
from posexport.verify.positions import is_far_out, position_ids
from posexport.verify.reach import Reach, default_reach
from posexport.verify.values import LOUD_LAYERS, VALUES, Tokens, is_normed_first, is_rounded_apart, usual_size

USUAL_POSITIONS = 2**16
"""Cases whose positions all lie below this are within the usual range. Verdicts state their worst error separately."""

REPEATED = 0.05
"""The part of the tokens that repeat the token before."""


@attrs.frozen(kw_only=True)
class Case:
    """One set of inputs by the graph's names, its name, and its sizes by dimension (posexport.spec.contract)."""

    name: str
    arrays: Arrays
    sizes: Mapping[str, int]

    @property
    def keys(self) -> int:
        """How many keys the last query has, including its own, without those of an encoder."""
        before = self.arrays["write_indices"].max() if "write_indices" in self.arrays else self.sizes.get("past_seq", 0)
        return int(before) + self.sizes["seq"]

    @property
    def positions(self) -> Array | None:
        """The positions of all new tokens, [batch, seq] or [batch, seq, axes]; None if the graph takes none."""
        positions = self.arrays.get("position_ids")
        if positions is None or positions.ndim > 2 or positions.shape[1] == self.sizes["seq"]:
            return positions
        return np.asarray(positions + np.arange(self.sizes["seq"]))  # consecutive: only the first is given

    @property
    def farthest(self) -> int:
        """The position farthest from 0, as a distance; 0 without positions."""
        positions = self.positions
        return 0 if positions is None or not positions.size else max(int(positions.max()), -int(positions.min()))

    @property
    def far_out(self) -> bool:
        """Whether a position lies beyond the usual range."""
        return self.farthest >= USUAL_POSITIONS


@attrs.define
class _Turns:
    """What cases take turns in.

    These are the ids of tokens, the layer of a deep stack whose cached keys are loud, and the heads along whose
    `directions` tokens lie. `seen` has the sizes and kinds of the cases so far.
    """

    token_ids: Iterator[int]
    loud_layers: Iterator[int]
    heads: Iterator[int]
    directions: Directions | None
    seen: set[object] = attrs.field(factory=set)


def make_cases(
    spec: Spec,
    seed: int,
    bounds: Bounds,
    form: str = "decomposed",
    *,
    reach: Reach | None = None,
    more: int = 0,
    directions: Directions | None = None,
) -> list[Case]:
    """The cases for an artifact of `spec` in `form` whose dimensions lie within `bounds`; the same for the same seed.

    `reach` says how long they are (default: default_reach of the spec), `more` how many further ones are drawn. Hidden
    states of some cases lie along the `directions` of weights.

    `hidden_states`, cached keys and values are rounded to the graph's dtype. They are unit normal, unless their kind
    says otherwise, or logits would become large in half precision (posexport.verify.values.usual_size). `input_ids` lie
    within the vocabulary. The free slots of a shared cache hold what an earlier sequence left there. The form contrib
    has zeros there, since ONNX Runtime's GroupQueryAttention leaves nothing else. It takes several tokens after cached
    ones only for one row, so a chunk for a shared cache has batch 1 in that form. RequestError if the inputs don't fit
    into memory.
    """
    reach = reach or default_reach(spec)
    rng, others = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    heads = every_number(1 if directions is None else len(directions.heads), seed, 4)
    turns = _Turns(every_number(spec.vocab_size or 1, seed, 2), every_number(spec.layers, seed, 3), heads, directions)
    drafts = list(corners(spec, rng, reach))
    _check_memory(memory(spec, drafts, bounds), reach)
    cases = [case for draft in drafts for case in _case(draft, spec, rng, bounds, form, turns)]
    for draft in itertools.islice(further(spec, others, reach), more):
        turns.seen.clear()
        cases += _case(draft, spec, others, bounds, form, turns)
    return _named_apart(cases)


def _check_memory(needed: int, reach: Reach) -> None:
    """RequestError if inputs of this reach, with their logits, don't fit into memory."""
    if needed > (free := available()):
        raise RequestError(
            f"inputs with {reach.seq} keys need about {size_text(needed)} of memory, logits included, and "
            f"{size_text(free)} are free: give a smaller --reach."
        )


def _named_apart(cases: list[Case]) -> list[Case]:
    """The cases. Bounds may make several names the same: the later ones get a number after their name."""
    seen: Counter[str] = Counter()
    named = []
    for case in cases:
        seen[case.name] += 1
        number = seen[case.name]
        named.append(case if number == 1 else attrs.evolve(case, name=f"{case.name} ({number})"))
    return named


def _other_than(draft: Draft, dim: str, size: int) -> int:
    """The size, or the next one if it is the traced size and the draft is not the traced one."""
    return size + (size == TRACED_SIZES[dim] and not draft.traced)


def _case(
    draft: Draft, spec: Spec, rng: np.random.Generator, bounds: Bounds, form: str, turns: _Turns
) -> Iterator[Case]:
    """The case of a draft; none if bounds make its sizes and kinds those of an earlier case."""
    sizes, before = _sizes(draft, spec, rng, bounds, form)
    padding = draft.padding if spec.padding_mask else None
    kinds = (draft.positions if isinstance(draft.positions, str) else draft.name, padding, draft.values)
    if (key := (*sizes.items(), int(before.max()), *kinds)) in turns.seen:
        return
    turns.seen.add(key)
    rows = _rows(draft, spec, rng, sizes, before)
    loud = _loud_inputs(draft, spec, turns)
    arrays: Arrays = {}
    for name, (shape, dtype) in graph_inputs(spec).items():
        dims = tuple(resolved(dim, sizes) for dim in shape)
        if name == "position_ids" and rows.positions is not None:
            arrays[name] = rows.positions
        elif name == "attention_mask":
            arrays[name] = rows.mask
        elif name == "write_indices":
            arrays[name] = before
        elif name == "input_ids" and spec.vocab_size is not None:
            arrays[name] = _token_ids(rng, dims, spec.vocab_size, turns.token_ids)
        else:
            tokens = _unscaled(name, dims, spec, rng, rows, turns, name in loud)
            values = VALUES[draft.values](tokens)
            if spec.kv_cache == "shared" and form == "contrib" and tokens.cached:
                values = values * (np.arange(dims[2]) < before[:, None])[:, None, :, None]
            arrays[name] = values.astype(NUMPY_DTYPES[dtype])
    more = "".join(f" {dim}={size}" for dim, size in sizes.items() if dim not in ("batch", "seq"))
    yield Case(name=f"{draft.name} [{sizes['batch']}, {sizes['seq']}]{more}", arrays=arrays, sizes=sizes)


@attrs.frozen(kw_only=True)
class _Rows:
    """The rows of a case.

    `before` [batch] is the number of cached tokens of each row. `mask` [batch, width] is 1 for keys that are not
    padding; `new_padding` bool [batch, seq] is true for new tokens that are padding. `positions` are those of the new
    tokens, None if the graph takes none.
    """

    before: Array
    mask: Array
    new_padding: Array
    positions: Array | None


def _rows(draft: Draft, spec: Spec, rng: np.random.Generator, sizes: Mapping[str, int], before: Array) -> _Rows:
    lengths = before + sizes["seq"] if not spec.cross else np.full(sizes["batch"], sizes["encoder_seq"])
    width = sizes.get("max_seq", int(lengths.max()))
    mask = np.ones((sizes["batch"], width), np.int64)
    if spec.padding_mask:
        mask = attention_mask(draft.padding, rng, lengths, before, width)
    slots = places = before[:, None] + np.arange(sizes["seq"])
    half = spec.dtype != "fp32" and not spec.cross
    if half and is_far_out(spec, draft.positions):
        np.put_along_axis(mask, slots, 1, 1)  # so that each query sees its own key
    new_padding = np.zeros((sizes["batch"], sizes["seq"]), bool)
    if not spec.cross:  # the place of a token is counted as pipelines do, without padding
        new_padding = np.take_along_axis(mask, slots, 1) == 0
        places = np.take_along_axis(np.maximum(mask.cumsum(1) - 1, 0), slots, 1)
    positions = None
    if "position_ids" in graph_inputs(spec):
        if spec.consecutive:
            positions = first_positions(draft.positions, rng, places, new_padding, spec)
        else:
            positions = position_ids(draft.positions, rng, places, spec)
    if half and new_padding.any():
        at = slots if spec.consecutive or positions is None else positions
        mask = shown_where_keys_are_far(spec, mask, before, at)
        new_padding = np.take_along_axis(mask, slots, 1) == 0
    return _Rows(before=before, mask=mask, new_padding=new_padding, positions=positions)


def _loud_inputs(draft: Draft, spec: Spec, turns: _Turns) -> set[str]:
    """The caches that may be louder than others: in a deep stack, those of one layer."""
    layers = range(spec.layers)
    if draft.values == "peaks" or (draft.values == "loud" and spec.layers > LOUD_LAYERS):
        layers = range(layer := next(turns.loud_layers), layer + 1)
    sides = ("past_key", "past_value") if draft.values == "peaks" else ("past_key",)
    return {name for side in sides for name in (side, *(f"{side}.{layer}" for layer in layers))}


def _unscaled(
    name: str, dims: tuple[int, ...], spec: Spec, rng: np.random.Generator, rows: _Rows, turns: _Turns, loud: bool
) -> Tokens:
    """Hidden states, those of an encoder, or cached keys or values, before a kind of values scales them."""
    cached, encoder, keys = name.startswith("past_"), name.startswith("encoder"), not name.startswith("past_value")
    masked = rows.mask[:, : dims[2]] == 0 if cached else rows.mask == 0 if encoder else rows.new_padding
    if cached and spec.kv_cache == "shared":
        masked = masked | (np.arange(dims[2]) >= rows.before[:, None])
    size = usual_size(spec) if keys else 1.0
    return Tokens(
        values=rng.standard_normal(dims, np.float32) * np.float32(size),
        masked=masked,
        cached=cached,
        normed=name == "hidden_states" and is_normed_first(spec),
        spec=spec,
        rng=rng,
        keys=keys,
        alone=loud,
        encoder=encoder,
        rounded=is_rounded_apart(spec, keys=rows.mask.shape[1]),
        directions=turns.directions,
        heads=turns.heads,
    )


def _token_ids(rng: np.random.Generator, dims: tuple[int, ...], vocab_size: int, tokens: Iterator[int]) -> Array:
    """The next tokens, with a few repeated, and with the first and the last id of the vocabulary."""
    new = rng.random(math.prod(dims)) >= REPEATED
    new[:1] = True
    ids: Array = np.fromiter(itertools.islice(tokens, int(new.sum())), np.int64)[new.cumsum() - 1].reshape(dims)
    ids[-1, -1] = vocab_size - 1
    ids[0, 0] = 0 if ids.size > 1 else rng.choice((0, vocab_size - 1))
    return ids


def _sizes(
    draft: Draft, spec: Spec, rng: np.random.Generator, bounds: Bounds, form: str
) -> tuple[dict[str, int], Array]:
    """The sizes of a case, and the number of cached tokens of each row."""
    batch, past = within(draft.batch, bounds["batch"]), draft.past if spec.kv_cache else 0
    seq = _other_than(draft, "seq", draft.seq)
    if spec.consecutive:  # all positions of a row differ
        seq = within(seq, (1, spec.token_limit()))
    if spec.kv_cache == "shared":
        seq = within(seq, (1, bounds["max_seq"][1]))
    seq = within(seq, bounds["seq"])
    sizes = {"batch": batch, "seq": seq}
    before = np.zeros(batch, np.int64)
    if spec.cross:
        sizes["encoder_seq"] = within(_other_than(draft, "encoder_seq", draft.encoder), bounds["encoder_seq"])
    if spec.kv_cache == "concat":
        while not draft.traced and (past == TRACED_SIZES["past_seq"] or past + seq == TRACED_SIZES["total_seq"]):
            past += 1
        sizes["past_seq"] = within(past, bounds["past_seq"])
        before += sizes["past_seq"]
    if spec.kv_cache == "shared":
        if form == "contrib" and not fits_grouped_batch(batch, seq, past):
            batch = sizes["batch"] = within(1, bounds["batch"])
            past = past if batch == 1 else 0
        sizes["max_seq"] = within(_other_than(draft, "max_seq", past + seq + draft.spare), bounds["max_seq"])
        room = max(sizes["max_seq"] - seq, 0)
        pasts = [past] * batch
        if draft.positions not in ("alike", ALL_ROWS):  # some are almost as long as the longest, others any shorter
            pasts = [max(past - 4 * row, min(past, 1)) for row in range(batch)]
            pasts[1::2] = rng.integers(min(past, 1), past + 1, len(pasts[1::2])).tolist()
            if batch > 1 and rng.random() < (ANEW if batch < 4 else ANEW_OF_MANY):  # one row begins, others go on
                pasts[1] = 0
        # any row may be the longest: an artifact that uses one row's length for all rows is noticed
        before = rng.permutation(np.array([min(past, room) for past in pasts], np.int64))
    return sizes, before
