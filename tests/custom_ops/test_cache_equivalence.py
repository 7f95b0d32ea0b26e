"""A prefill and decode steps, fed with their own presents, equal one full pass over the same tokens.

The full pass is the torch block without a cache in float64, row by row and without padding. The steps run on ONNX
Runtime and through TensorRT's import. So the expected values do not depend on caches, masks or positions of cached
keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import onnx_ir as ir
import pytest
from form_helpers import HOWS
from helpers import CASES, Array, case, open_ort, run_block, weights_for
from hypothesis import given, settings
from hypothesis import strategies as st
from trt_import_helpers import imported

from posexport.export import export
from posexport.export.support import unsupported_reason
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec

KINDS = ("none", "learned", "relative", "t5", "rope-gqa-window", "rope2d", "alibi-6-heads", "layers")
"""One case for each way in which an encoding acts."""

FEW = ("relative", "rope-gqa-window")

MORE = (
    "xpos",
    "temperature",
    "kerple",
    "fire",
    "sandwich",
    "shaw",
    "shaw-sinks",
    "deberta",
    "cope-gqa",
    "pattern",
    "t5-gqa",
    "rope-chunks",
)
"""Further encodings. Each is tested in one form; the forms alternate."""

CACHES = ("concat", "shared")
ORT, IMPORT = "ort-cpu", "tensorrt-import"
PLAINEST = ("decomposed", "portable")
WHERE = {ORT: [*HOWS, ("decomposed", "ort")], IMPORT: [how for how in HOWS if how[1] == "portable"]}
"""Engine to the (form, target) pairs that it runs."""


def _quick(name: str, how: tuple[str, str], engine: str, cache: str) -> bool:
    """Whether a case is part of every run. On ONNX Runtime, each kind runs in the plainest form and a few run in all
    forms. Through TensorRT's import, each kind runs in one form and with one kind of cache, in turn. The slow sweep
    runs every case in every form on both engines."""
    if name in MORE:
        turn = MORE.index(name)
        return engine == ORT and how == HOWS[turn % len(HOWS)] and turn % (2 if cache == "concat" else 5) == 0
    if engine == ORT:
        turn = WHERE[ORT].index(how) % 2 == FEW.index(name) if name in FEW else False
        return turn or (name in KINDS and how == PLAINEST)
    if name not in KINDS or KINDS.index(name) % 2 != CACHES.index(cache):
        return False
    return KINDS.index(name) % len(WHERE[IMPORT]) == WHERE[IMPORT].index(how)


def _blocks(cache: str) -> list[Any]:
    """(case, (form, target), engine) for all forms that support this kind of cache."""
    found = []
    for engine, hows in WHERE.items():
        for name, how in itertools.product((*CASES, "layers", *MORE), hows):
            if unsupported_reason(case("none", kv_cache=cache), *how) is None:
                marks = () if _quick(name, how, engine, cache) else pytest.mark.slow
                found.append(pytest.param(name, how, engine, marks=marks))
    return found


BOUND = 5e-5
"""The largest error relative to the largest output, for angles up to 200 and sums of 32 products in fp32. A key or
position that is off by one gives more than 1e-3."""

Run = Callable[[dict[str, Array]], dict[str, Array]]


def _id(value: str | tuple[str, str]) -> str:
    return value if isinstance(value, str) else "-".join(value)


def _spec(name: str, **over: Any) -> Spec:
    if name == "layers":
        return case("rope-half", **{"causal": True, "layers": 2, "num_kv_heads": 2, "block": "transformer", **over})
    if name == "t5-gqa":
        return case("t5-causal", num_kv_heads=2, **{key: value for key, value in over.items() if key != "causal"})
    return case(name, **{"causal": True, **over})


@functools.cache
def _opened(spec: Spec, how: tuple[str, str], engine: str = ORT) -> Run:
    model = export(spec, weights_for(spec), form=how[0], target=how[1])
    if engine == ORT:
        return open_ort(model)
    with TemporaryDirectory() as folder:
        return imported(ir.to_proto(model), Path(folder)).run


@attrs.frozen
class Row:
    """One sequence: [T, hidden], and its positions [T] or [T, axes]."""

    x: Array
    positions: Array

    def __len__(self) -> int:
        return len(self.x)


def _row(spec: Spec, rng: np.random.Generator, length: int, offset: int) -> Row:
    at = offset + np.arange(length)
    positions = at if spec.encoding.axes < 2 else np.stack([at % 5, at // 5], -1)
    return Row(rng.standard_normal((length, spec.hidden_size)).astype(np.float32), positions)


def _full(spec: Spec, row: Row) -> Array:
    """The output [T, hidden] of the block without a cache, in float64."""
    plain = attrs.evolve(spec, kv_cache=None, padding_mask=False)
    inputs = {"hidden_states": row.x[None]}
    if plain.position_axes:
        inputs["position_ids"] = row.positions[None]
    return run_block(plain, weights_for(spec), inputs)[0]


def _check(spec: Spec, rows: list[Row], got: list[Array]) -> None:
    for row, made in zip(rows, got, strict=True):
        wanted = _full(spec, row)
        assert made.shape == wanted.shape
        assert np.abs(made - wanted).max() <= BOUND * max(1.0, np.abs(wanted).max())


def _inputs(spec: Spec, x: Array, positions: Array, **rest: Array) -> dict[str, Array]:
    given = {"hidden_states": x, "position_ids": positions, **rest}
    return {name: given[name] for name in graph_inputs(spec)}


def _names(spec: Spec) -> list[tuple[str, str]]:
    """Pairs of (past, present) names."""
    return [(name, name.replace("past", "present")) for name in graph_inputs(spec) if name.startswith("past_")]


def _spans(total: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Pieces of these sizes, repeated until they cover `total`."""
    start, at = 0, 0
    while start < total:
        end = min(start + sizes[at % len(sizes)], total)
        yield start, end
        start, at = end, at + 1


def _grown(spec: Spec, run: Run, rows: list[Row], chunks: list[int]) -> list[Array]:
    """The outputs of each row's tokens. Rows are padded on the left and processed in chunks over a growing cache."""
    total = max(map(len, rows))
    pads = [total - len(row) for row in rows]
    x = np.stack([np.pad(row.x, ((pad, 0), (0, 0))) for row, pad in zip(rows, pads, strict=True)])
    wide = [((pad, 0), (0, 0))[: row.positions.ndim] for row, pad in zip(rows, pads, strict=True)]
    positions = np.stack([np.pad(row.positions, each) for row, each in zip(rows, wide, strict=True)])
    mask = np.stack([np.arange(total) >= pad for pad in pads]).astype(np.int64)
    shape = (len(rows), spec.num_kv_heads, 0, spec.head_dim)
    cache = {past: np.zeros(shape, np.float32) for past, _ in _names(spec)}
    made = []
    for start, end in _spans(total, chunks):
        part = slice(start, end)
        found = run(_inputs(spec, x[:, part], positions[:, part], attention_mask=mask[:, :end], **cache))
        made.append(found["output"])
        cache = {past: found[present] for past, present in _names(spec)}
        assert all(each.shape[2] == end for each in cache.values())
    out = np.concatenate(made, 1)
    return [out[at, pad:] for at, pad in enumerate(pads)]


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("name", "how", "engine"), _blocks("concat"), ids=_id)
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_prefill_and_steps_over_a_grown_cache_equal_one_pass(
    name: str, how: tuple[str, str], engine: str, data: st.DataObject
) -> None:
    spec = _spec(name, kv_cache="concat", padding_mask=True)
    rng = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3), "lengths")
    rows = [_row(spec, rng, length, data.draw(st.integers(0, 50), "offset")) for length in lengths]
    chunks = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4), "chunks")
    _check(spec, rows, _grown(spec, _opened(spec, how, engine), rows, chunks))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "how"),
    [*zip(("t5", *FEW, "alibi-6-heads", *FEW), HOWS, strict=True), ("alibi-6-heads", PLAINEST)],
    ids=_id,
)
def test_a_grown_cache_without_a_mask(name: str, how: tuple[str, str]) -> None:
    spec = _spec(name, kv_cache="concat")
    rng = np.random.default_rng(0)
    rows = [_row(spec, rng, 9, offset) for offset in (0, 20)]
    for chunks in ([9], [1], [5, 1], [2, 4]):
        _check(spec, rows, _grown(spec, _opened(spec, how), rows, chunks))


def _shared(spec: Spec, run: Run, rows: list[Row], prompts: list[int], pads: list[int], beyond: Array) -> list[Array]:
    """The outputs of each row's tokens. Each row first processes its own prompt in its own buffer. Then all rows do
    steps of one token together. `beyond` [batch, max_seq] is the mask at places that are not written yet."""
    size = beyond.shape[1]
    made: list[list[Array]] = []
    caches: list[dict[str, Array]] = []

    def masks(at: int, end: int) -> Array:
        mask = beyond[at].copy()
        mask[:end] = np.arange(end) >= pads[at]
        return mask

    for at, (row, prompt, pad) in enumerate(zip(rows, prompts, pads, strict=True)):
        x = np.pad(row.x[:prompt], ((pad, 0), (0, 0)))
        positions = np.pad(row.positions[:prompt], ((pad, 0), (0, 0))[: row.positions.ndim])
        cache = {past: np.zeros((1, spec.num_kv_heads, size, spec.head_dim), np.float32) for past, _ in _names(spec)}
        mask, first = masks(at, pad + prompt)[None], np.zeros(1, np.int64)
        found = run(_inputs(spec, x[None], positions[None], attention_mask=mask, write_indices=first, **cache))
        made.append([found["output"][0, pad:]])
        caches.append({past: found[present] for past, present in _names(spec)})
    together = {past: np.concatenate([cache[past] for cache in caches]) for past, _ in _names(spec)}
    for step in range(len(rows[0]) - prompts[0]):
        at = np.array([prompt + step for prompt in prompts])
        x = np.stack([row.x[each : each + 1] for row, each in zip(rows, at, strict=True)])
        positions = np.stack([row.positions[each : each + 1] for row, each in zip(rows, at, strict=True)])
        writes = at + np.array(pads)
        mask = np.stack([masks(index, each + 1) for index, each in enumerate(writes)])
        found = run(_inputs(spec, x, positions, attention_mask=mask, write_indices=writes, **together))
        for index, out in enumerate(found["output"]):
            made[index].append(out)
        together = {past: found[present] for past, present in _names(spec)}
    return [np.concatenate(each) for each in made]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "how", "engine"), _blocks("shared"), ids=_id)
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_steps_in_shared_buffers_equal_one_pass(
    name: str, how: tuple[str, str], engine: str, data: st.DataObject
) -> None:
    spec = _spec(name, kv_cache="shared", padding_mask=True)
    rng = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    prompts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), "prompts")
    steps = data.draw(st.integers(0, 4), "steps")
    pads = [data.draw(st.integers(0, 3), "padding") for _ in prompts]
    rows = [_row(spec, rng, prompt + steps, data.draw(st.integers(0, 50), "offset")) for prompt in prompts]
    size = max(prompt + pad for prompt, pad in zip(prompts, pads, strict=True)) + steps + data.draw(st.integers(0, 5))
    beyond = rng.integers(0, 2, (len(rows), size))
    _check(spec, rows, _shared(spec, _opened(spec, how, engine), rows, prompts, pads, beyond))


def _rolled(given: dict[str, Array], found: dict[str, Array]) -> dict[str, Array]:
    return {name: np.roll(array, 1, 2) if name.startswith("present") else array for name, array in found.items()}


def _early(given: dict[str, Array], found: dict[str, Array]) -> dict[str, Array]:
    """Lose the newest cached token."""
    return {
        name: np.where(np.arange(array.shape[-2])[:, None] < array.shape[-2] - 1, array, 0)
        if name.startswith("present")
        else array
        for name, array in found.items()
    }


FAULTS: dict[str, tuple[str, Callable[[dict[str, Array]], dict[str, Array]], Any]] = {
    "cache in another order": ("rope-half", lambda given: given, _rolled),
    "last key lost": ("none", lambda given: given, _early),
    "mask inverted": ("none", lambda given: {**given, "attention_mask": 1 - given["attention_mask"]}, None),
    "mask not read": (
        "alibi-6-heads",
        lambda given: {**given, "attention_mask": np.ones_like(given["attention_mask"])},
        None,
    ),
    "positions start over": (
        "rope-half",
        lambda given: {**given, "position_ids": given["position_ids"] * 0 + np.arange(given["position_ids"].shape[1])},
        None,
    ),
    "cached keys misplaced": (
        "alibi-6-heads",
        lambda given: {
            **given,
            "position_ids": given["position_ids"]
            + (given["past_key"].shape[2] > 0) * np.eye(1, given["position_ids"].shape[1], dtype=np.int64),
        },
        None,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_the_way_is_seen(name: str) -> None:
    block, before, after = FAULTS[name]
    spec = _spec(block, kv_cache="concat", padding_mask=True)
    rng, sound = np.random.default_rng(0), _opened(spec, PLAINEST)
    rows = [_row(spec, rng, length, offset) for length, offset in ((9, 0), (6, 11))]

    def run(given: dict[str, Array]) -> dict[str, Array]:
        found = sound(before(given))
        return found if after is None else after(given, found)

    chunks = [4, 1, 2]
    _check(spec, rows, _grown(spec, sound, rows, chunks))
    with pytest.raises(AssertionError):
        _check(spec, rows, _grown(spec, run, rows, chunks))
