"""The corners that the inputs of every seed reach: bands of lengths, rows and caches, the block's own numbers, every
token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from draws import draw_once
from helpers import small_spec
from hypothesis import given
from hypothesis import strategies as st

from posexport.errors import RequestError
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases
from posexport.verify.coverage import not_shown, spread_cells, too_costly
from posexport.verify.draft import Draft, memory
from posexport.verify.drafts import corners
from posexport.verify.reach import Reach, default_reach, read_reach

BANDS = ((65, 127), (129, 255), (257, 511), (513, 1023), (1025, 2047), (2049, 2300))
"""Lengths between powers of two."""

PASTS = ((8, 32), (33, 127), (129, 511), (513, 2047))
"""Numbers of cached tokens, roughly between powers of two."""

ROWS = ((1, 1), (2, 5), (6, 9))
TOKENS = {"step": (1, 1), "short chunk": (2, 7), "chunk": (8, 55), "wide chunk": (56, 300)}


def _made(spec: Spec, seed: int = 0) -> list[Case]:
    return draw_once(spec, seed, bounds_of(graph_inputs(spec), {}))


def _cached(each: Case) -> int:
    return each.keys - each.sizes["seq"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_each_band_of_lengths_meets_one_row_and_several(seed: int) -> None:
    sizes = [(each.sizes["batch"], each.sizes["seq"]) for each in _made(small_spec("rope"), seed)]
    for low, high in BANDS:
        assert any(batch == 1 and low <= seq <= high for batch, seq in sizes), (low, high)
    for low, high in ((65, 127), (129, 255), (257, 511)):
        assert any(batch > 1 and low <= seq <= high for batch, seq in sizes), (low, high)
    assert any(batch >= 12 for batch, _ in sizes)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(50))
def test_no_band_of_lengths_whose_end_is_half_more_than_its_beginning_is_left_out(seed: int) -> None:
    for hidden, last in ((64, 2_200), (768, 150)):
        lengths = sorted({draft.seq for draft in _drafts(hidden, seed) if 16 <= draft.seq <= last})
        gaps = [(low + 1, high - 1) for low, high in itertools.pairwise(lengths)]
        assert all(high < 1.5 * low for low, high in gaps), gaps
        alone = sorted({draft.seq for draft in _drafts(hidden, seed) if draft.batch == 1 and 64 <= draft.seq <= last})
        assert all(high < 1.5 * low for low, high in itertools.pairwise(alone)), alone


def _drafts(hidden_size: int, seed: int) -> list[Draft]:
    spec = small_spec("rope", hidden_size=hidden_size, num_heads=hidden_size // 32)
    return list(corners(spec, np.random.default_rng(seed), Reach(seq=2_200)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_large_blocks_get_fewer_rows_of_many_tokens_but_as_many_of_few(seed: int) -> None:
    small, large = (
        [draft for draft in _drafts(hidden, seed) if draft.name.startswith("few tokens")] for hidden in (64, 1024)
    )
    for many, few in zip(small, large, strict=True):
        assert many.seq == few.seq
        assert few.batch == many.batch if many.seq < 12 or many.batch < 6 else 6 <= few.batch <= many.batch
    assert sum(draft.batch for draft in large) < sum(draft.batch for draft in small)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_more_than_a_hundred_tokens_leave_one_over_and_have_any_length(seed: int) -> None:
    names = ("rows", "several rows", "long rows", "longer rows")
    small = {draft.name: draft for draft in _drafts(64, seed)}
    assert [small[name].seq for name in names] == [129, 255, 257, 513]
    for name, (low, high) in zip(names, ((130, 254), (130, 511), (258, 511), (514, 1023)), strict=True):
        other = small[f"{name} of any length"]
        assert low <= other.seq <= high
        assert other.batch == small[name].batch > 1
    large = {draft.name: draft for draft in _drafts(1024, seed)}
    for name, least in (("rows", 6), ("longer rows", 2)):  # one of the two if both are expensive
        assert (name in large) != (f"{name} of any length" in large)
        assert name not in large or large[name].batch == least
    assert large["long rows of any length"].batch == 5
    assert not {"long rows", "several rows", "several rows of any length"} & large.keys()
    assert "two long rows" in small
    assert "two long rows" not in large


def test_prompts_that_end_early_for_their_cost_are_said() -> None:
    bounds = bounds_of(graph_inputs(small_spec("rope")), {})
    for spec, text in (
        (small_spec("rope"), None),
        (small_spec("rope", hidden_size=2048, num_heads=32), "no prompt was longer than"),
        (small_spec("none", hidden_size=2048, num_heads=32, cross=True), "no prompt was longer than"),
    ):
        cases = [
            Case(name=draft.name, arrays={}, sizes={"batch": 1, "seq": draft.seq, "encoder_seq": draft.encoder})
            for draft in corners(spec, np.random.default_rng(0), default_reach(spec))
        ]
        clauses = too_costly(spec, cases, 2_200, {**bounds, "encoder_seq": (1, None)})
        assert clauses[:1] == () if text is None else (clauses[0].startswith(text) and "--reach seq=2200" in clauses[0])
        fixed = {"seq": (300, 300), "encoder_seq": (300, 300)}
        assert too_costly(spec, [attrs.evolve(cases[0], sizes=dict.fromkeys(fixed, 300))], 2_200, fixed) == ()


@pytest.mark.parametrize("hidden_size", [2048, 4096])
def test_rows_that_cost_too_much_leave_one_token_over_too(hidden_size: int) -> None:
    drafts = [draft for seed in range(4) for draft in _drafts(hidden_size, seed)]
    shortened = {draft.seq for draft in drafts if draft.name in ("rows", "long rows", "longer rows")}
    assert shortened <= {17, 33, 65, 129, 257, 513}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["concat", "shared"])
def test_steps_and_chunks_of_any_rows_meet_each_band_of_cached_tokens(kind: str) -> None:
    for seed in range(3):
        cases = _made(small_spec("rope", kv_cache=kind, causal=True), seed)
        for what, (few, more) in TOKENS.items():
            for least, most in ROWS:
                for low, high in PASTS:
                    assert any(
                        few <= each.sizes["seq"] <= more
                        and least <= each.sizes["batch"] <= most
                        and low <= _cached(each) <= high
                        for each in cases
                    ), (what, least, low)


def test_far_positions_meet_long_rows_steps_and_chunks() -> None:
    cases = _made(small_spec("rope", kv_cache="concat", causal=True))
    far = [each for each in cases if each.farthest > 2**16]
    assert {"step", "chunk", "wide chunk"} <= {each.name.split(" of ")[0] for each in far}
    assert any(each.sizes["seq"] > 1024 for each in far)
    assert any(_cached(each) > 1024 and each.sizes["seq"] == 1 for each in far)


def test_shared_buffers_have_many_free_slots_and_some_are_zero() -> None:
    cases = _made(small_spec("rope", kv_cache="shared", causal=True))
    assert any(each.sizes["max_seq"] - each.keys > 64 and each.sizes["batch"] == 1 for each in cases)
    behind = [
        bool((np.asarray(each.arrays["past_key"])[:, :, each.keys :] == 0).all())
        for each in cases
        if each.sizes["max_seq"] > each.keys
    ]
    assert {True, False} == {*behind}


def test_rows_may_be_alike() -> None:
    spec = small_spec("rope3d", kv_cache="shared", causal=True)
    alike = [each for each in _made(spec) if each.sizes["batch"] > 3 and each.name.startswith("steps of rows alike")]
    assert alike
    for each in alike:
        positions = each.arrays["position_ids"]
        assert (positions == positions[:1, :, :1]).all()  # in all rows and along all axes
        assert len({*each.arrays["write_indices"].tolist()} - {0}) >= 1
        assert (each.arrays["write_indices"] > 0).all()


def _own_sizes() -> Iterator[tuple[Spec, int]]:
    yield small_spec("swin", window_size=5), 25
    yield small_spec("rope-dinov3", grid=(6, 6), prefix_tokens=1), 37
    yield small_spec("learned", max_positions=700), 700
    yield small_spec("rope", window=333, causal=True), 333
    yield small_spec("t5", max_distance=140), 140
    yield small_spec("cope", npos_max=90, causal=True), 90


@pytest.mark.parametrize(("spec", "size"), list(_own_sizes()))
def test_the_blocks_own_numbers_are_lengths_too(spec: Spec, size: int) -> None:
    assert any(each.sizes["seq"] == size for each in _made(spec))


@given(side=st.integers(2, 300))
def test_two_spread_cells_are_any_offset_apart(side: int) -> None:
    cells = spread_cells(small_spec("swin", window_size=side))
    assert cells is not None
    assert cells.min() == 0
    assert cells.max() == side - 1
    for axis in range(2):  # cells are all pairs of the same places on each axis
        places = np.unique(cells[:, axis])
        assert len(places) ** 2 == len(cells)
        assert {*range(side)} <= {int(b - a) for a in places for b in places}


def test_each_token_of_a_small_vocabulary_is_read_and_a_large_one_is_inconclusive() -> None:
    for size, read in ((3000, True), (50_000, False)):
        spec = small_spec("rope", vocab_size=size)
        cases = _made(spec)
        ids = np.unique(np.concatenate([each.arrays["input_ids"].ravel() for each in cases]))
        assert (len(ids) == size) == read
        said = [text for text in not_shown(spec, cases) if "token ids" in text]
        assert said == ([] if read else [f"{size - len(ids)} of {size} token ids were not read"])


@pytest.mark.parametrize("asked", ["seq=1048577", "batch=4097", "batch=16777215", "seq=0", "rows=3", "seq=1,seq=2"])
def test_a_reach_is_bounded(asked: str) -> None:
    assert read_reach("seq=1048576,batch=4096") == {"seq": 2**20, "batch": 2**12}
    with pytest.raises(ValueError):  # noqa: PT011
        read_reach(asked)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_prompts_and_caches_of_a_few_tokens_meet_one_row_and_many(seed: int) -> None:
    plain = [(each.sizes["batch"], each.sizes["seq"]) for each in _made(small_spec("rope", causal=True), seed)]
    for low, high in ((2, 2), (3, 3), (4, 5), (6, 7), (8, 12), (12, 17), (17, 25), (25, 37)):
        for least, most in ((1, 1), (2, 9), *([(10, 16), (17, 40)] if high < 12 else [(10, 40)])):
            assert any(least <= batch <= most and low <= seq <= high for batch, seq in plain), (low, least)
    assert any(batch > 24 and seq > 1 for batch, seq in plain)
    for kind in ("concat", "shared"):
        cases = _made(small_spec("rope", kv_cache=kind, causal=True), seed)
        sizes = [(each.sizes["batch"], each.sizes["seq"], _cached(each)) for each in cases]
        for least, most in ROWS:
            steps = {past for batch, seq, past in sizes if seq == 1 and least <= batch <= most}
            assert {1, 2, 3} <= steps
            assert steps & {*range(4, 8)}
            assert steps & {*range(7, 14)}
            short = {past for batch, seq, past in sizes if 2 <= seq <= 8 and least <= batch <= most}
            assert all(
                any(low <= past <= high for past in short) for low, high in ((2, 2), (7, 21), (67, 118), (118, 210))
            )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("more", [{}, {"causal": True, "kv_cache": "concat"}, {"cross": True}])
def test_no_size_of_a_batch_is_left_out(more: dict[str, object], seed: int) -> None:
    encoding = "none" if "cross" in more else "rope"
    sizes = [(each.sizes["batch"], each.sizes["seq"]) for each in _made(small_spec(encoding, **more), seed)]
    shown = {batch for batch, _ in sizes}
    assert {*range(1, 17)} <= shown if more else len({*range(1, 17)} & shown) >= 12
    assert len({*range(17, 41)} & shown) > (12 if more else 4)
    assert {2, 4, 8, 12, 16, 24, 32} <= {batch for batch, seq in sizes if seq == 1}
    assert {2, 4, 8, 16, 32} <= {batch for batch, seq in sizes if seq > 1}


def test_a_batch_that_is_asked_for_is_in_steps_and_in_prompts() -> None:
    spec = small_spec("rope", causal=True, kv_cache="concat")
    reach = Reach(seq=300, batch=64, given=True)
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}), reach=reach)
    sizes = [(each.sizes["batch"], each.sizes["seq"], _cached(each)) for each in cases]
    assert sum(batch == 64 and seq == 1 and past > 0 for batch, seq, past in sizes) > 3
    assert any(batch == 64 and seq > 20 and past == 0 for batch, seq, past in sizes)
    assert any(17 <= batch <= 40 for batch, _, _ in sizes)


def test_rows_of_a_shared_buffer_are_far_apart_and_buffers_are_long() -> None:
    cases = _made(small_spec("rope", kv_cache="shared", causal=True))
    apart = [
        each.arrays["write_indices"].max() - each.arrays["write_indices"][each.arrays["write_indices"] > 0].min()
        for each in cases
        if each.arrays["write_indices"].any()
    ]
    assert sum(gap > 200 for gap in apart) > 5
    assert {1, 3} <= {each.sizes["batch"] for each in cases if each.sizes["max_seq"] > 2000 and each.keys < 200}


@pytest.mark.slow
def test_padding_is_long_too() -> None:
    for more, width in (({}, 1000), ({"cross": True}, 1000), ({"kv_cache": "concat"}, 500)):
        cases = _made(small_spec("t5", padding_mask=True, **more))
        masks = [np.asarray(each.arrays["attention_mask"]) for each in cases]
        assert any(mask.shape[1] >= width and (mask[:, : width // 2] == 0).all(1).any() for mask in masks), more


def test_negative_positions_go_far_and_far_ones_to_the_end_of_each_axis() -> None:
    cases = _made(small_spec("rope2d"))
    positions = [each.arrays["position_ids"].reshape(-1, 2) for each in cases]
    assert min(array.min() for array in positions) < -(2**9)
    for axis in range(2):
        assert max(array[:, axis].max() for array in positions) == 2**20 - 1
    far = [array for array in positions if len(array) > 40 and array.max() > 2**17]
    assert any((array[:, 0] != array[:, 1]).mean() > 0.5 for array in far)


@pytest.mark.parametrize("name", ["rope", "rope2d", "mrope"])
def test_axes_stand_still(name: str) -> None:
    spec = small_spec(name, **({"head_dim": 8} if name == "mrope" else {}))
    rows = [
        row.reshape(len(row), -1)
        for each in _made(spec)
        if each.name.startswith("still")
        for row in each.arrays["position_ids"]
    ]
    for axis in range(max(spec.position_axes, 1)):
        assert any((row[:, axis] == row[0, axis]).all() for row in rows)
        assert any((row[:, axis] != row[0, axis]).any() for row in rows)


def test_whole_rows_are_zero() -> None:
    hidden = [np.asarray(each.arrays["hidden_states"]) for each in _made(small_spec("rope"))]
    assert any((states[-1] == 0).all() for states in hidden if len(states) == 1)
    assert any((states[-1] == 0).all() and (states[0] != 0).any() for states in hidden if len(states) > 1)


def test_tokens_repeat() -> None:
    ids = [each.arrays["input_ids"] for each in _made(small_spec("rope", vocab_size=3000))]
    assert any((row[1:] == row[:-1]).any() for array in ids for row in array)


@pytest.mark.parametrize("kind", ["concat", "shared"])
@given(seq=st.integers(1, 300), batch=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_any_reach_that_is_given_is_kept(kind: str, seq: int, batch: int, seed: int) -> None:
    spec = small_spec("rope", kv_cache=kind, causal=True)
    found = list(corners(spec, np.random.default_rng(seed), Reach(seq=seq, batch=batch, given=True)))
    assert max(each.batch for each in found) >= batch
    assert all(each.seq <= seq and each.past <= seq for each in found if isinstance(each.positions, str))


def test_a_reach_that_does_not_fit_into_memory_is_refused_before_inputs_are_made() -> None:
    for more, sizes in (({"kv_cache": "concat"}, {"seq": 2**20}), ({}, {"seq": 2**20, "batch": 4096})):
        spec = small_spec("rope", causal=True, **more)
        with pytest.raises(RequestError, match=r"need about .* GB of memory, .* give a smaller --reach"):
            make_cases(spec, 0, bounds_of(graph_inputs(spec), {}), reach=Reach(given=True, **{"batch": 1, **sizes}))


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "concat", "shared"])
def test_more_cases_have_any_number_of_rows_and_tokens(cache: str | None) -> None:
    spec = small_spec("rope", causal=True, kv_cache=cache)
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}), more=60)[-60:]
    sizes = {(each.sizes["batch"], each.sizes["seq"]) for each in cases if each.name.startswith("any size")}
    assert len(sizes) > 15
    assert any(batch > 8 and seq > 8 for batch, seq in sizes)


def test_a_batch_that_is_asked_for_leaves_smaller_ones() -> None:
    spec = small_spec("rope", causal=True, kv_cache="concat")
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}), reach=Reach(seq=300, batch=64, given=True))
    sizes = {(each.sizes["batch"], each.sizes["seq"] > 1) for each in cases}
    for several in (True, False):
        assert {1, 64} < {batch for batch, tokens in sizes if tokens == several}
        assert any(2 < batch < 10 for batch, tokens in sizes if tokens == several)


def test_inputs_of_large_stacks_stay_small_and_those_that_bounds_make_alike_come_once() -> None:
    large = small_spec("rope", causal=True, kv_cache="concat", hidden_size=4096, num_heads=32, layers=32)
    bounds = bounds_of(graph_inputs(large), {})
    drafts = list(corners(large, np.random.default_rng(0), default_reach(large)))
    assert memory(large, drafts, bounds) < 9e9
    spec = small_spec("rope", causal=True, kv_cache="concat")
    fixed = {**bounds, "batch": (1, 1), "seq": (1, 1), "past_seq": (12, 12), "total_seq": (13, 13)}
    assert len(make_cases(spec, 0, fixed)) < len(make_cases(spec, 0, bounds)) / 3


@pytest.mark.parametrize("grid", [(10, 20), (7, 3), (40, 25)])
def test_grids_that_are_not_square_are_seen_whole(grid: tuple[int, int]) -> None:
    """Positions are (x, y): columns first."""
    spec = small_spec("rope-dinov3", grid=grid, prefix_tokens=1)
    rows, columns = grid
    cases = _made(spec)
    positions = np.concatenate([each.arrays["position_ids"].reshape(-1, 2) for each in cases])
    assert positions.max(0).tolist() == [columns - 1, rows - 1]
    assert positions.min() == 0
    assert not_shown(spec, cases) == ()
    assert any(each.sizes["seq"] == rows * columns + 1 for each in cases)
    one = [each for each in cases if each.sizes["seq"] == 1]
    assert not_shown(spec, one) != ()
