"""Positions, padding, values and reach of verify's inputs: the properties of each kind, for any seed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers import MORE_CASES, case, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.spec.arrays import Array
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases
from posexport.verify.coverage import distances, grid_offsets, not_shown, reached
from posexport.verify.padding import PADDING, attention_mask
from posexport.verify.positions import FAR, FAR_EXACT, POSITIONS, position_ids
from posexport.verify.reach import default_reach
from posexport.verify.values import CACHED_PEAK, QUIET, VALUES, Tokens, is_normed_first, is_rounded_apart

SEEDS = st.integers(0, 2**31)


def made(spec: Spec, seed: int = 0, **bounds: tuple[int, int | None]) -> list[Case]:
    return make_cases(spec, seed, {**bounds_of(graph_inputs(spec), {}), **bounds})


@pytest.mark.parametrize("kind", POSITIONS)
@given(seed=SEEDS, batch=st.integers(1, 5), seq=st.integers(1, 70), limit=st.integers(1, 3000))
@settings(max_examples=25, deadline=None)
def test_positions_lie_below_the_limit(kind: str, seed: int, batch: int, seq: int, limit: int) -> None:
    rng, places = np.random.default_rng(seed), np.tile(np.arange(seq), (batch, 1))
    found = POSITIONS[kind](rng, places, limit)
    assert found.shape == (batch, seq)
    assert found.max() < max(limit, seq)
    assert kind == "negative" or (found.min() >= 0 and found.max() < limit)


@given(seed=SEEDS, length=st.integers(1, 400), part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_padding_leaves_keys_where_its_kind_says(seed: int, length: int, part: float) -> None:
    cached = int(part * (length - 1))
    rows = {kind: draw(np.random.default_rng(seed), length, cached) for kind, draw in PADDING.items()}
    assert all(row.shape == (length,) and row.dtype == bool for row in rows.values())
    assert rows["none"].all()
    assert not rows["all"].any()
    assert rows["one"].sum() == 1
    for kind in ("left", "tail", "right"):
        assert rows[kind].any(), kind
    assert rows["left"][-1]
    assert rows["tail"][0]
    assert (np.diff(rows["left"].astype(int)) >= 0).all()
    assert (np.diff(rows["tail"].astype(int)) <= 0).all()


@pytest.mark.parametrize("at", [30, 200, 290])
def test_long_rows_are_padded_far_in(at: int) -> None:
    """The inputs show a mask that is ignored from some key on, with padding at either end."""
    for seed in range(3):
        masks = [each.arrays["attention_mask"] for each in made(small_spec("rope", padding_mask=True), seed)]
        wide = [mask for mask in masks if mask.shape[1] > at]
        assert any((mask[:, at:] == 0).any() for mask in wide)
        assert any((mask[:, :at] == 1).any() and (mask[:, at:] == 0).any() for mask in wide)


@pytest.mark.slow
def test_rows_of_one_batch_differ() -> None:
    spec = small_spec("rope", padding_mask=True, kv_cache="shared", causal=True)
    for seed in range(3):
        named = {each.name.split(" [")[0]: each.arrays for each in made(spec, seed)}
        assert len({tuple(row) for row in named["rows"]["attention_mask"].tolist()}) > 4
        assert len({tuple(row) for row in named["rows"]["position_ids"].tolist()}) > 4
        writes = named["step of many"]["write_indices"]
        assert len({*writes.tolist()}) == len(writes)


def test_slots_behind_the_last_key_are_marked_in_every_way() -> None:
    rng = np.random.default_rng(0)
    mask = attention_mask("none", rng, np.full(60, 3), np.zeros(60, int), 40)[:, 3:]
    assert {"none", "all", "some"} == {"none" if not row.any() else "all" if row.all() else "some" for row in mask}


def _tokens(spec: Spec, values: Array, masked: Array, cached: bool = False) -> Tokens:
    normed = is_normed_first(spec) and not cached
    return Tokens(
        values=values,
        masked=masked,
        cached=cached,
        normed=normed,
        keys=True,
        alone=cached,
        rounded=is_rounded_apart(spec),
        spec=spec,
        rng=np.random.default_rng(3),
    )


def test_values_have_the_magnitudes_of_their_kind() -> None:
    spec, plain = small_spec("rope"), np.random.default_rng(0).standard_normal((2, 30, 32))
    masked = np.zeros((2, 30), bool)
    masked[:, 4] = True
    hidden = _tokens(spec, plain, masked)
    assert (VALUES["normal"](hidden) == plain).all()
    assert np.abs(VALUES["quiet"](hidden)).max() < 6 * QUIET
    zeros = VALUES["zeros"](hidden)
    assert not zeros[0, 0].any()
    assert zeros.any(-1).any()
    even = [row[(np.ptp(row, axis=-1) == 0) & row.any(-1), 0] for row in VALUES["zeros"](_tokens(spec, plain, masked))]
    assert any(map(len, even)) and all((np.sign(row) == np.sign(row[:1])).all() for row in even)
    assert np.abs(VALUES["outlier"](hidden)).max() > 50
    peaks = VALUES["peaks"](hidden)
    assert np.abs(peaks[:, 4]).mean() > 10 * np.abs(peaks[:, 5]).mean()
    keys = np.random.default_rng(0).standard_normal((2, 4, 30, 8))
    cached = VALUES["peaks"](_tokens(spec, keys, masked, cached=True))
    assert cached[:, :, 4].std() > CACHED_PEAK / 2
    assert np.abs(cached[:, :, 5:]).max() > 8
    assert (VALUES["outlier"](_tokens(spec, keys, masked, cached=True)) == keys).all()


def test_a_norm_makes_every_token_have_the_outlier() -> None:
    plain, masked = np.ones((2, 9, 32)), np.zeros((2, 9), bool)
    normed = VALUES["outlier"](_tokens(small_spec("rope", block="transformer"), plain, masked))
    bare = VALUES["outlier"](_tokens(small_spec("rope"), plain, masked))
    deep = VALUES["outlier"](_tokens(small_spec("rope", layers=2), plain, masked))
    half = VALUES["outlier"](_tokens(small_spec("rope", dtype="fp16"), plain, masked))
    large = [(abs(values) > 100).any(-1).sum() for values in (normed, bare, half, deep)]
    assert large == [18, 1 + 9, 2, 0]  # bare in fp32: one token of a row, and all of the other
    assert bare.min() < -100  # both signs occur
    assert bare.max() > 100
    assert abs(deep).max() > 5


def test_behind_a_norm_cached_keys_are_loud_and_one_feature_is_massive() -> None:
    """Exp overflows in a softmax without its maximum, a cap of 50 shows, and squares of 8,000 overflow in fp16."""
    keys = np.random.default_rng(0).standard_normal((2, 4, 30, 8))
    plain, masked = np.ones((2, 30, 32)), np.zeros((2, 30), bool)
    for dtype, least in (("fp32", 30), ("fp16", 20), ("bf16", 7)):
        for more in ({"block": "transformer"}, {"softcap": 50.0}):
            spec = small_spec("rope", dtype=dtype, causal=True, kv_cache="concat", **more)
            assert VALUES["loud"](_tokens(spec, keys, masked, cached=True)).std() > least
    massive = VALUES["massive"](_tokens(small_spec("rope", block="transformer"), plain, masked))
    assert (massive > 7_000).sum() == (massive < -7_000).sum() == 1
    # each token of one row has a massive feature, unless runtimes round terms of the encoding differently
    for bare, count in ((small_spec("rope"), 1 + 30), (small_spec("cope", causal=True), 2)):
        assert (abs(VALUES["massive"](_tokens(bare, plain, masked))) > 400).sum() == count
    assert abs(VALUES["outlier"](_tokens(small_spec("cope", causal=True), plain, masked))).max() < 100


@pytest.mark.parametrize("encoding", ["relative", "cope"])
def test_values_are_large_if_keys_are_so_few_that_rounding_does_not_matter(encoding: str) -> None:
    cases = made(small_spec(encoding, causal=encoding == "cope"))
    large = [each.keys for each in cases if abs(each.arrays["hidden_states"]).max() > 300]
    few, many = (28, 28) if encoding == "cope" else (200, 700)
    assert any(few / 2 < keys <= few for keys in large) and max(large) <= many


@pytest.mark.parametrize("name", ["swin", "swinv2", "rope-dinov3-small"])
def test_every_cell_and_every_offset_of_a_small_grid_is_tried(name: str) -> None:
    small = {"rope-dinov3-small": small_spec("rope-dinov3", grid=[14, 14])}
    spec = small.get(name) or small_spec(name, window_size=7)
    side = spec.position_limit() or 0
    for seed in range(2):
        cases = made(spec, seed)
        assert not_shown(spec, cases) == ()
        pairs = next(each for each in cases if each.name.startswith("pairs")).arrays["position_ids"]
        offsets = {tuple(row) for row in (pairs[:, 1] - pairs[:, 0]).tolist()}
        wanted = set(product(range(1 - side, side), repeat=2))
        assert offsets | {(-x, -y) for x, y in offsets} == wanted
        assert {tuple(cell) for cell in pairs.reshape(-1, 2).tolist()} == set(product(range(side), repeat=2))
        drawn = np.concatenate([each.arrays["position_ids"].reshape(-1, 2) for each in cases])
        assert drawn.max(0).tolist() == [side - 1, side - 1]


def test_a_grid_with_many_offsets_is_left_to_drawn_cells() -> None:
    assert grid_offsets(small_spec("swin", window_size=64)) is None
    assert grid_offsets(small_spec("rope2d")) is None


@pytest.mark.parametrize("rows", [3, 64, 512, 1500, 2048])
def test_every_row_of_a_table_is_read(rows: int) -> None:
    spec = small_spec("learned", max_positions=rows)
    cases = made(spec)
    assert {*np.concatenate([each.arrays["position_ids"].ravel() for each in cases]).tolist()} == {*range(rows)}
    assert not_shown(spec, cases) == ()
    if rows < 9:
        return
    few = [each for each in cases if each.sizes["seq"] == 1]
    assert not_shown(spec, few)[0].endswith(f"of {rows} rows of the table of positions were not read")


@pytest.mark.parametrize("name", ["t5", "t5-causal", "shaw", "deberta-buckets", "relative-table"])
def test_every_distance_that_differs_is_tried_alone(name: str) -> None:
    spec = case(name)
    pairs = distances(spec, 1200, np.random.default_rng(0))
    assert pairs is not None
    apart = {*(pairs[:, 1, 0] - pairs[:, 0, 0]).tolist()}
    reach = spec.saturation_distance()
    assert apart >= {*range(reach + 3)}
    assert spec.causal or apart >= {*range(-reach - 2, 1)}


def test_of_many_distances_both_ends_are_tried() -> None:
    spec = small_spec("t5", max_distance=100_000)
    pairs = distances(spec, 1200, np.random.default_rng(0))
    assert pairs is not None
    assert len(pairs) <= 1200
    apart = {*(pairs[:, 1, 0] - pairs[:, 0, 0]).tolist()}
    assert {0, 1, 100, -1, 100_000, 100_001, -100_000} <= apart


@pytest.mark.parametrize("name", ["rope-dynamic", "rope-longrope", "temperature"])
def test_both_sides_of_a_trained_length_are_tried(name: str) -> None:
    spec = case(name)
    assert spec.position_edges()
    ends = {int(each.arrays["position_ids"].max()) for each in made(spec)}
    for edge in spec.position_edges():
        assert {edge - 1, edge} <= ends


@pytest.mark.parametrize("name", ["rope-dynamic", "rope-longrope", "temperature"])
def test_the_farthest_token_may_be_any(name: str) -> None:
    spec = case(name)
    (edge, *_) = spec.position_edges()
    beyond = [each.arrays["position_ids"] >= edge for seed in range(3) for each in made(spec, seed)]
    one = [rows[0] for rows in beyond if len(rows) == 1 and rows.any()]
    several = [rows.any(1) for rows in beyond if len(rows) > 1]
    for place in (0, -1):
        assert any(not row[place] for row in one)
        assert any(rows.any() and not rows[place] for rows in several)


def test_exact_angles_are_tried_as_far_as_they_are_exact() -> None:
    assert max(each.farthest for each in made(case("rope-exact"))) == FAR_EXACT - 1
    assert max(each.farthest for each in made(case("rope"))) == FAR - 1


@pytest.mark.parametrize("name", ["rope", "alibi", "learned", "temperature", "xpos", "swin", "rope-dinov3"])
def test_positions_are_negative_only_where_they_may_be(name: str) -> None:
    spec = case(name)
    least = min(int(each.arrays["position_ids"].min()) for each in made(spec))
    assert (least < 0) == spec.negative_positions == (name in ("rope", "alibi"))


@pytest.mark.parametrize("name", [*MORE_CASES][::4])
def test_ordered_positions_do_not_decrease_and_shapes_are_the_graphs(name: str) -> None:
    spec = case(name)
    places = np.tile(np.arange(9), (3, 1))
    for kind in (*POSITIONS, "mixed"):
        if spec.position_axes:
            found = position_ids(kind, np.random.default_rng(0), places, spec)
            assert found.shape[:2] == (3, 9)
            assert found.dtype == np.int64
            assert not spec.ordered or (np.diff(found) >= 0).all()


def test_reach_is_beyond_what_the_spec_names() -> None:
    assert default_reach(small_spec("rope", window=4096, causal=True)).seq > 4096
    assert default_reach(small_spec("rope", attention_chunk_size=3000, causal=True)).seq > 6000
    spec = small_spec("rope", kv_cache="concat", causal=True, window=9000)
    cases = made(spec)
    found = reached(cases)
    assert found is not None
    assert found.keys > 9000  # a step over a long cache, which is cheap
    assert max(each.sizes["seq"] for each in cases) < 7000
    said = "no prompt was longer than the window of 9000, so it did not show there"  # such prompts are slow
    assert not_shown(spec, cases) == (said,)


def test_what_bounds_keep_from_being_reached_is_named() -> None:
    spec = small_spec("t5", max_distance=500, window=300, causal=True)
    cases = made(spec, seq=(1, 40))
    assert [clause.split(",")[0] for clause in not_shown(spec, cases)] == [
        "no sequence was longer than the window of 300"
    ]
    near = [each for each in cases if each.farthest < 100]
    assert any("500 positions apart" in clause for clause in not_shown(spec, near))


@pytest.mark.slow
def test_further_cases_are_drawn_on_demand() -> None:
    spec = small_spec("rope", padding_mask=True, kv_cache="concat", causal=True)
    bounds = bounds_of(graph_inputs(spec), {})
    usual, more = make_cases(spec, 5, bounds), make_cases(spec, 5, bounds, more=40)
    assert len(more) == len(usual) + 40
    assert len({each.name for each in more}) == len(more)
    for one, other in zip(usual, more, strict=False):
        assert one.name == other.name
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


@pytest.mark.slow
def test_any_row_may_have_the_longest_cache() -> None:
    spec = small_spec("rope", kv_cache="shared", causal=True)
    first = [
        int(each.arrays["write_indices"].argmax())
        for seed in range(4)
        for each in made(spec, seed)
        if each.sizes["batch"] > 3 and each.arrays["write_indices"].any()
    ]
    assert len({*first}) > 2


@pytest.mark.slow
def test_many_rows_are_long_too() -> None:
    for over in ({}, {"kv_cache": "concat", "causal": True}, {"kv_cache": "shared", "causal": True}):
        cases = made(small_spec("rope", **over))
        assert any(each.sizes["batch"] > 2 and each.keys > 400 for each in cases)
        assert not over or any(each.sizes["batch"] > 2 and each.keys > 1200 for each in cases)
        assert not over or any(each.sizes["seq"] > 390 and each.keys > each.sizes["seq"] for each in cases)
    full = [each for each in made(small_spec("rope", kv_cache="shared", causal=True)) if each.sizes["seq"] == 1]
    assert any(each.keys == each.sizes["max_seq"] for each in full)  # a step into the last slot
