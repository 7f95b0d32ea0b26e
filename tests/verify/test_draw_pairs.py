"""Corners that must occur together in one set of inputs: lengths, rows and caches with magnitudes, far positions and
free slots."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers import small_spec

from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases
from posexport.verify.draft import Draft
from posexport.verify.drafts import corners
from posexport.verify.positions import FAR
from posexport.verify.reach import default_reach

SEEDS = range(3)
TOKENS = ((1, 1), (2, 7), (8, 29))
OCTAVES = tuple((2**power, 2 ** (power + 1)) for power in range(12, 20))
MAGNITUDES = (
    "quiet",
    "a fifth",
    "a hundredth",
    "aligned",
    "shifted",
    "outlier",
    "massive",
    "zeros",
    "peaks",
    "loud",
    "same",
)


def spec_of(dtype: str, kv_cache: str = "concat") -> Spec:
    return small_spec("rope", dtype=dtype, kv_cache=kv_cache, causal=True, padding_mask=True)


def drafts_of(spec: Spec, seed: int) -> list[Draft]:
    return list(corners(spec, np.random.default_rng(seed), default_reach(spec)))


def cases_of(spec: Spec, seed: int) -> list[Case]:
    return make_cases(spec, seed, bounds_of(graph_inputs(spec), {}))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_magnitude_meets_steps_few_tokens_and_short_prompts(dtype: str, seed: int) -> None:
    drafts = drafts_of(spec_of(dtype), seed)
    for magnitude, (low, high) in product(MAGNITUDES, TOKENS):
        assert any(each.values == magnitude and low <= each.seq <= high for each in drafts), (magnitude, low)
    for magnitude in MAGNITUDES:
        assert any(each.values == magnitude and each.past and each.seq == 1 for each in drafts), magnitude


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_steps_and_large_batches_reach_every_octave_of_positions(dtype: str) -> None:
    cases = [each for seed in SEEDS for each in cases_of(spec_of(dtype), seed)]

    def reached(chosen: list[Case], low: int, high: int) -> bool:
        positions = (each.arrays["position_ids"] for each in chosen)
        return any(bool(((low <= each) & (each < high)).any()) for each in positions)

    steps = [each for each in cases if each.sizes["seq"] == 1]
    for low, high in OCTAVES:
        assert reached(steps, low, high), f"steps never have a position from {low} to {high}"
        for rows in ((2, 5), (6, 9), (10, 16), (17, 40)):
            batches = [each for each in cases if rows[0] <= each.sizes["batch"] <= rows[1]]
            assert reached(batches, low, high), f"{rows} rows never have a position from {low} to {high}"


@pytest.mark.slow
def test_steps_far_out_are_not_all_at_the_last_position() -> None:
    for seed in SEEDS:
        steps = [each for each in cases_of(spec_of("fp16"), seed) if each.sizes["seq"] == 1]
        far = np.concatenate([each.arrays["position_ids"].ravel() for each in steps])
        assert ((far > 2**16) & (far < FAR - 1)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_many_free_slots_meet_rows_prompts_and_long_caches(seed: int) -> None:
    drafts = [each for each in drafts_of(spec_of("fp32", "shared"), seed) if each.spare > 400]
    assert any(each.batch >= 4 and each.seq > 1 for each in drafts)
    assert any(each.batch >= 4 and each.seq == 1 and each.past >= 128 for each in drafts)
    assert any(each.seq >= 32 for each in drafts)


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_batches_of_many_tokens_have_far_and_negative_positions(encoding: str, dtype: str) -> None:
    spec = small_spec(encoding, dtype=dtype, kv_cache="concat", causal=True, padding_mask=True, num_heads=4)
    cases = [each for seed in SEEDS for each in cases_of(spec, seed)]
    for rows, tokens in (((2, 5), 61), ((6, 16), 61), ((17, 40), 13)):
        several = [each for each in cases if rows[0] <= each.sizes["batch"] <= rows[1] and each.sizes["seq"] >= tokens]
        positions = [each.arrays["position_ids"] for each in several]
        assert any((each >= 2**16).any() for each in positions), f"no row of {rows} is far out"
        assert any((each < 0).any() for each in positions), f"no row of {rows} begins below zero"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_alike_are_far_out_and_fill_a_buffer(dtype: str) -> None:
    cases = [each for seed in SEEDS for each in cases_of(spec_of(dtype, "shared"), seed) if each.sizes["batch"] > 1]
    alike = [each for each in cases if (each.arrays["position_ids"] == each.arrays["position_ids"][:1]).all()]
    assert any((each.arrays["position_ids"] >= 2**16).any() for each in alike)
    ends = [each.arrays["write_indices"] + each.sizes["seq"] == each.sizes["max_seq"] for each in cases]
    assert any(end.all() and each.sizes["seq"] == 1 for end, each in zip(ends, cases, strict=True))
    assert any(end.all() and each.sizes["seq"] > 1 for end, each in zip(ends, cases, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_row_of_consecutive_positions_begins_far_out(seed: int) -> None:
    spec = small_spec("rope", causal=True, kv_cache="concat", positions="consecutive")
    starts = [each.arrays["position_ids"].max() for each in cases_of(spec, seed) if each.sizes["seq"] > 900]
    assert 0 in starts
    assert max(starts) > 2**16
