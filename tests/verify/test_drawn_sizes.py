"""Every seed draws sizes as servers have them: rows at one slot, large batches, whole blocks and large buffers."""

from __future__ import annotations

import numpy as np
import pytest
from draws import draw_once
from helpers import small_spec

from posexport.spec.contract import TRACED_SIZES, bounds_of, graph_inputs, resolved
from posexport.spec.spec import Spec
from posexport.verify.cases import Case
from posexport.verify.coverage import not_shown, reached, too_costly
from posexport.verify.draft import Draft
from posexport.verify.drafts import corners
from posexport.verify.over_keys import POWERS
from posexport.verify.padding import attention_mask
from posexport.verify.positions import NEAR, position_ids
from posexport.verify.reach import default_reach

SEEDS = range(4)

SHARED = {"causal": True, "kv_cache": "shared", "padding_mask": True}
GROWN = {"causal": True, "kv_cache": "concat", "padding_mask": True}
USUAL = {"hidden_size": 768, "num_heads": 12, **GROWN}
STEEP = {"num_heads": 12, "hidden_size": 96, "padding_mask": True}


def made(spec: Spec, seed: int = 0) -> list[Case]:
    return draw_once(spec, seed, bounds_of(graph_inputs(spec), {}))


def drafts_of(spec: Spec, seed: int) -> list[Draft]:
    return list(corners(spec, np.random.default_rng(seed), default_reach(spec)))


def is_padded(case: Case) -> bool:
    """Whether the mask hides a key that a query would see."""
    mask, before = case.arrays["attention_mask"], case.arrays["write_indices"]
    return bool(((mask == 0) & (np.arange(mask.shape[1]) < (before + case.sizes["seq"])[:, None])).any())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_shared_cache_are_at_one_slot_with_padding_or_all_go_on(seed: int) -> None:
    several = [
        (each, each.arrays["write_indices"])
        for each in made(small_spec("rope", **SHARED), seed)
        if each.sizes["batch"] > 3 and each.arrays["write_indices"].any()
    ]
    alike = [each for each, before in several if before.min() == before.max() and is_padded(each)]
    assert any(each.sizes["seq"] == 1 for each in alike)
    assert any(each.sizes["seq"] > 1 for each in alike)
    unequal = [(each, before) for each, before in several if before.min() < before.max()]
    for steps in (True, False):
        chosen = [before for each, before in unequal if (each.sizes["seq"] == 1) == steps]
        assert any(before.min() > 0 for before in chosen)
        assert any(before.min() == 0 for before in chosen)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hidden_size", [64, 768])
def test_prompts_of_many_rows_have_many_tokens_in_blocks_of_any_size(hidden_size: int, seed: int) -> None:
    spec = small_spec("rope", **{**USUAL, "hidden_size": hidden_size, "num_heads": 4})
    sizes = [(each.batch, each.seq) for each in drafts_of(spec, seed) if not each.past]
    cheap = ((6, 513), (10, 260), (17, 130)) if hidden_size == 64 else ()
    for rows, tokens in ((4, 705), (5, 258), (8, 100), (24, 64), *cheap):
        assert any(batch >= rows and seq >= tokens for batch, seq in sizes), (rows, tokens)
    assert any(2 <= batch <= 5 and seq % 64 == 0 for batch, seq in sizes)
    assert (1, 1024) in sizes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("rows", "tokens", "keys"),
    [
        (4, (1, 1), 705),
        (4, (2, 60), 705),
        (10, (1, 7), 260),
        (17, (1, 1), 130),
        (1, (8, 180), 600),
        (1, (56, 180), 1900),
    ],
)
def test_many_rows_have_many_keys_in_blocks_of_any_size(
    rows: int, tokens: tuple[int, int], keys: int, seed: int
) -> None:
    """A smaller batch does not show that a row is read in place of another, or that a mask ends."""
    wide = {"hidden_size": 768, "num_heads": 12}
    for kind in ("concat", "shared"):
        drafts = drafts_of(small_spec("rope", causal=True, kv_cache=kind, **wide), seed)
        assert any(rows <= each.batch and tokens[0] <= each.seq <= tokens[1] and each.past >= keys for each in drafts)
    drafts = drafts_of(small_spec("none", cross=True, **wide), seed)
    assert any(rows <= each.batch and tokens[0] <= each.seq <= tokens[1] and each.encoder >= keys for each in drafts)


@pytest.mark.parametrize("cache", [None, "concat"])
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_one_row_beyond_a_trained_length_is_beside_near_ones(scaling: str, cache: str | None) -> None:
    """In prompts and in steps, positions of the far row end just before, at and beyond the length. In prompts it is the
    last row."""
    length = 500
    more = {"factor": 4.0, "original_max_position_embeddings": length}
    if scaling == "longrope":
        more |= {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
    cases = made(small_spec("rope", scaling=scaling, causal=True, kv_cache=cache, **more))
    last, steps = set[int](), set[int]()
    for each in cases:
        farthest = each.arrays["position_ids"].max(1)
        if len(farthest) > 2 and farthest[:-1].max() < 10 and each.sizes["seq"] > 1:
            last.add(int(farthest[-1]))
        if len(farthest) > 2 and np.sort(farthest)[-2] < 10 and each.sizes["seq"] == 1:
            steps.add(int(farthest.max()))
    for found in (last, steps):
        assert {length - 1, length} <= found
        assert max(found) > length


def test_prompts_of_many_rows_get_no_more_than_the_longest_prompt_costs() -> None:
    sizes = [(each.batch, each.seq) for each in drafts_of(small_spec("rope", hidden_size=4096, num_heads=32), 0)]
    assert 40 <= max(seq for batch, seq in sizes if batch >= 8) < 100


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_of_a_prompt_are_long_and_whole_blocks(seed: int) -> None:
    pieces = {each.seq for each in drafts_of(small_spec("rope", **USUAL), seed) if each.batch == 1 and each.past}
    assert pieces & {256, 512}
    assert max(pieces) >= 900
    small = {each.seq for each in drafts_of(small_spec("rope", **GROWN), seed) if each.batch == 1}
    assert small & {1024, 2048}


def test_the_last_slot_of_buffers_of_a_power_of_two_is_written_and_one_is_large() -> None:
    cases = made(small_spec("rope", **SHARED))
    full = {each.sizes["max_seq"] for each in cases if each.sizes["seq"] == 1 and each.keys == each.sizes["max_seq"]}
    assert full >= {*POWERS}
    assert max(each.sizes["max_seq"] for each in cases) >= 8_000


def test_one_set_of_inputs_has_the_sizes_of_the_trace() -> None:
    for more in ({}, GROWN, SHARED, {"cross": True}):
        spec = small_spec("none" if "cross" in more else "rope", **more)
        dims = {dim for shape, _ in graph_inputs(spec).values() for dim in shape if isinstance(dim, str)}
        traced = [each for each in made(spec) if all(resolved(dim, each.sizes) == TRACED_SIZES[dim] for dim in dims)]
        assert [each.name.split(" [")[0] for each in traced] == ["traced sizes"], more


def test_rows_have_no_company_that_hides_a_fault() -> None:
    """A row without a key or a row with far positions can make a graph take another branch for the whole batch."""
    spec, lengths, before = small_spec("rope"), np.full(16, 30), np.zeros(16, int)
    draws = [np.random.default_rng(seed) for seed in range(30)]
    empty = {bool((attention_mask("mixed", rng, lengths, before, 30) == 0).all(1).any()) for rng in draws}
    assert empty == {True, False}
    far = {bool(position_ids("mixed", rng, np.tile(np.arange(30), (6, 1)), spec).max() > 4 * NEAR) for rng in draws}
    assert far == {True, False}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("encoding", ["alibi", "kerple"])
def test_padding_of_half_precision_meets_long_prompts_with_steep_biases(encoding: str, dtype: str) -> None:
    cases = made(small_spec(encoding, dtype=dtype, **STEEP))
    hidden = [(each.sizes["batch"], each.sizes["seq"]) for each in cases if (each.arrays["attention_mask"] == 0).any()]
    assert any(seq > 500 for batch, seq in hidden if batch == 1)
    assert any(seq > 500 for batch, seq in hidden if batch > 1)
    near = [each for each in cases if 1_000 < each.arrays["position_ids"].max() < NEAR and each.sizes["seq"] < 500]
    assert sum(bool((each.arrays["attention_mask"] == 0).any()) for each in near) > 10


def test_a_window_is_said_that_prompts_or_caches_did_not_reach() -> None:
    spec = small_spec("rope", window=300, **GROWN)
    sizes = {"long": (2_000, 0), "short": (20, 0), "late": (1, 2_000), "early": (1, 20)}
    cases = {
        name: Case(name=name, arrays={}, sizes={"batch": 1, "seq": seq, "past_seq": past})
        for name, (seq, past) in sizes.items()
    }

    def said(*names: str, **bounds: tuple[int, int | None]) -> list[str]:
        clauses = not_shown(spec, [cases[name] for name in names], bounds)
        return [clause.split(" was longer than the window of 300, so it did not show")[0] for clause in clauses]

    assert said("long", "late") == []
    assert said("long", "early") == ["no cache with its new tokens"]
    assert said("short", "late") == ["no prompt"]
    assert said("short", "early") == ["no sequence"]
    assert said("late") == []
    assert said("short", "late", seq=(1, 64)) == []  # no prompt may be longer than the window
    assert said("long", "early", past_seq=(0, 100)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_deep_stacks_have_chunks_over_long_caches_and_it_is_said_where_they_have_none(seed: int) -> None:
    spec = small_spec("rope", **USUAL, layers=12)
    drafts = drafts_of(spec, seed)
    assert any(each.past >= 2_000 and each.seq > 1 for each in drafts)
    keys = {each.past + 1 for each in drafts if each.seq == 1}
    assert {128, 256, 512, 2_200} <= keys
    cases = [
        Case(name=each.name, arrays={}, sizes={"batch": each.batch, "seq": each.seq, "past_seq": each.past})
        for each in drafts
        if each.seq == 1 or each.past < 1_000
    ]
    clauses = too_costly(spec, cases, 2_200, bounds_of(graph_inputs(spec), {}))
    assert any(clause.startswith("no cache under several tokens was longer than") for clause in clauses)


def test_rows_of_pairs_of_tokens_are_no_batch_that_was_reached() -> None:
    spec = small_spec("t5")
    found = reached(made(spec))
    assert found is not None
    assert 30 < found.batch <= 40
    assert (found.tokens_of_many or 0) >= 129
    assert str(found).startswith(f"2200 keys, {found.batch} rows (8 of {found.tokens_of_many} tokens)")
    single = [Case(name="token", arrays={}, sizes={"batch": rows, "seq": 1}) for rows in (3, 9)]
    assert getattr(reached(single), "batch", None) == 9
