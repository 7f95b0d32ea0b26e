"""Ladders of sizes: if a fault shows only in a band of sizes, some set of inputs has a size in this band."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest
from faulty_graphs import states_of
from hypothesis import given
from hypothesis import strategies as st

from posexport.graphs.bands import (
    CROWD,
    FEWEST_ROWS,
    LONG_CROWD,
    LONGEST,
    MOST_ROWS,
    RATIO,
    SHORTEST,
    Cost,
    band_corners,
    ladder,
)
from posexport.graphs.cases import Corner, cases_of
from posexport.graphs.roles import Role

X = Role(name="x", kind="features", dtype="fp32", shape=("b", "s", 4), axes=("batch", "seq", 4), stated=("b", "s", "4"))
PAST = attrs.evolve(
    X, name="past", kind="past", shape=("b", 1, "p", 4), axes=("batch", 1, "past", 4), stated=("b", "1", "p", "4")
)
ENCODER = attrs.evolve(X, name="e", kind="encoder_features", axes=("batch", "encoder", 4))
ROLES = {role.name: role for role in (X, PAST, ENCODER)}

CLASSES: dict[str, tuple[Callable[[Corner], bool], Callable[[Corner], int | None], int]] = {
    "prompts": (lambda one: one.batch == 1 and not one.past, lambda one: one.seq, LONGEST),
    "rows of prompts": (lambda one: one.batch > 1 and not one.past, lambda one: one.seq, LONGEST // 2),
    "steps": (lambda one: one.batch == one.seq == 1, lambda one: one.past, LONGEST - 1),
    "rows of steps": (lambda one: one.batch > 1 and one.seq == 1, lambda one: one.past, LONGEST - 1),
    "chunks": (lambda one: bool(one.past) and one.seq > 1, lambda one: one.seq, LONGEST - 1),
    "what chunks follow": (lambda one: one.seq > 1, lambda one: one.past or None, LONGEST - 2),
    "rows": (lambda one: not one.past, lambda one: one.batch, MOST_ROWS),
    "rows of one token": (lambda one: one.seq == 1 and bool(one.past), lambda one: one.batch, MOST_ROWS),
    "encoder": (lambda one: True, lambda one: one.encoder, LONGEST),
}


def meets(sizes: set[int], first: int, last: int) -> list[int]:
    """The starts of bands that contain none of these sizes."""
    starts = (low for low in range(first, last + 1) if RATIO * low <= last)
    return [low for low in starts if not sizes & {*range(low, math.ceil(RATIO * low) + 1)}]


@given(st.integers(1, 20), st.integers(1, 900), st.integers(0, 99))
def test_every_band_holds_a_rung(first: int, last: int, seed: int) -> None:
    rungs = ladder(first, last, np.random.default_rng(seed))
    assert rungs == sorted({*rungs})
    assert ({first, last} <= {*rungs}) if first <= last else not rungs
    assert meets({*rungs}, first, last) == []
    if len(rungs) > 8:  # The check can fail.
        assert meets({*rungs} - {rungs[7]}, first, last)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", CLASSES)
def test_every_band_of_a_kind_is_met(kind: str, seed: int) -> None:
    chosen, size, last = CLASSES[kind]
    found = {size(one) for one in band_corners(ROLES, seed, Cost()) if chosen(one)} - {None}
    assert meets({one for one in found if one is not None}, 2, last) == []


@pytest.mark.parametrize("seed", range(4))
def test_many_rows_have_steps_behind_many_tokens(seed: int) -> None:
    steps = [one for one in band_corners(ROLES, seed, Cost()) if one.seq == 1 and one.batch > CROWD]
    assert max(one.past for one in steps) >= SHORTEST > min(one.past for one in steps)


@pytest.mark.parametrize("longest", [None, 96])
@pytest.mark.parametrize("seed", range(4))
def test_many_rows_have_prompts_of_many_tokens_unless_that_costs_much(seed: int, longest: int | None) -> None:
    def lengths(cost: Cost) -> list[int]:
        return [one.seq for one in band_corners(ROLES, seed, cost) if one.batch > CROWD and not one.past]

    found = lengths(Cost(longest=longest))
    assert LONG_CROWD >= max(found) >= SHORTEST > min(found)
    assert max(lengths(Cost(tokens=6 * 17 * SHORTEST - 1, longest=longest))) < 10


def test_what_a_graph_fixes_and_what_it_costs_end_ladders() -> None:
    fixed = {"x": attrs.evolve(X, shape=("b", 7, 4))}
    rows = [(one.batch, one.seq) for one in band_corners(fixed, 0, Cost())]
    assert meets({batch for batch, _ in rows}, 2, MOST_ROWS) == []
    assert max(one.batch for one in band_corners(fixed, 0, Cost(tokens=9))) == FEWEST_ROWS
    assert not any(one.past for one in band_corners({"x": X}, 0, Cost()))
    still = {"x": X, "past": attrs.evolve(PAST, shape=("b", 1, 9, 4))}
    assert not any(one.past for one in band_corners(still, 0, Cost()))
    dear = list(band_corners(ROLES, 0, Cost(tokens=10, cached=10)))
    assert max(max(one.seq, one.past) for one in dear) == SHORTEST
    assert max(one.seq + one.past for one in band_corners(ROLES, 0, Cost(longest=50))) == 50


@pytest.mark.parametrize(("rows", "last"), [(None, 2**20 - 1), (90, 89)])
def test_the_farthest_positions_are_tried(rows: int | None, last: int) -> None:
    ids = attrs.evolve(
        X,
        name="p",
        kind="position_ids",
        dtype="int64",
        shape=("b", "s"),
        axes=("batch", "seq"),
        stated=("b", "s"),
        rows=rows,
    )
    roles = {**ROLES, "p": ids}
    cases = cases_of(roles, 0, own=[one for one in band_corners(roles, 0, Cost()) if "farthest" in one.label])
    assert max(int(case.arrays["p"].max()) for case in cases) == last


WRITES = attrs.evolve(X, name="w", kind="write_indices", dtype="int64", shape=("b",), axes=("batch",), stated=("b",))
BUFFER = attrs.evolve(PAST, shape=("b", 1, "slots", 4), axes=("batch", 1, "slots", 4), stated=("b", "1", "slots", "4"))
MASK = attrs.evolve(
    WRITES, name="attention_mask", kind="attention_mask", shape=("b", "t"), axes=("batch", "total"), stated=("b", "t")
)


@pytest.mark.parametrize("seed", range(3))
def test_buffers_are_full_and_nearly_empty_and_their_rows_begin_apart(seed: int) -> None:
    roles = {role.name: role for role in (X, BUFFER, WRITES, MASK)}
    cases = cases_of(roles, seed, own=[*band_corners(roles, seed, Cost())])
    steps = [case for case in cases if case.sizes["seq"] == 1 and case.sizes["past"] > 0]
    for batch in (1, 2):
        free = {
            case.sizes["slots"] - int(case.begins.max()) - 1 for case in steps if min(case.sizes["batch"], 2) == batch
        }
        assert {0, 1} <= free and max(free) >= (LONGEST // 2 if batch == 1 else SHORTEST // 4), batch
    apart = [case for case in cases if len({*case.begins.tolist()}) > 1]
    assert max(int(case.begins.max()) for case in apart if case.sizes["seq"] == 1) > LONGEST // 2
    assert any(case.sizes["seq"] > 1 and case.begins.max() > 20 for case in apart)
    assert any(case.sizes["batch"] > 8 for case in apart)
    assert any(case.keys[row, : case.begins[row]].all() for case in apart for row in range(case.sizes["batch"]))
    assert any(not case.keys[row, : case.begins[row]].all() for case in apart for row in range(case.sizes["batch"]))
    for case in cases:
        assert case.tokens.any(1).all(), "each row has a new token"
        beyond = np.arange(case.keys.shape[1]) >= case.begins[:, None] + case.sizes["seq"]
        assert not case.keys[beyond].any(), "no row sees a slot after its last token"


def test_a_buffer_is_no_longer_than_the_table_of_its_positions() -> None:
    ids = attrs.evolve(MASK, name="p", kind="position_ids", axes=("batch", "seq"), stated=("b", "s"), rows=90)
    roles = {role.name: role for role in (X, BUFFER, WRITES, ids)}
    slots = [case.sizes["slots"] for case in cases_of(roles, 0, own=[*band_corners(roles, 0, Cost())])]
    assert 90 <= max(slots) <= 95
    roles.pop("p")
    corners = [*band_corners(roles, 0, Cost(longest=50))]
    assert max(one.seq + one.past + (one.spare or 0) for one in corners) == 50


FAULTS = {
    "rows": "b = Less(four, rows)",
    "long": "b = Less(fifty, keys)",
    "steps behind many": "old = Less(fifty, keys) one = Equal(tokens, unit) b = And(old, one)",
    "many long rows": "many = Constant<value_ints = [16]>() some = Constant<value_ints = [38]>()"
    " crowd = Less(many, rows) far = Less(some, tokens) b = And(crowd, far)",
    "chunks": "new = Less(four, tokens) behind = Less(tokens, keys) b = And(new, behind)",
}


@pytest.mark.slow
def test_faults_in_bands_fail(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[batch, sequence, 4] x, float[batch, 1, past, 4] past_key_values) => (float[batch, total, 4] y) {
        axis = Constant<value_ints = [1]>() four = Constant<value_ints = [4]>() fifty = Constant<value_ints = [50]>()
        unit = Constant<value_ints = [1]>() flat = Squeeze(past_key_values, axis) z = Concat<axis = 1>(flat, x)
        rows = Shape<start = 0, end = 1>(z) keys = Shape<start = 1, end = 2>(z) tokens = Shape<start = 1, end = 2>(x)
        FAULT
    }"""
    wrong = "two = Constant<value_float = 2.0>() twice = Mul(z, two) y = Where(b, twice, z)"
    ends = {"right": "y = Identity(z)", **{name: f"{fault} {wrong}" for name, fault in FAULTS.items()}}
    assert states_of(text, ends, tmp_path) == {name: "passed" if name == "right" else "failed" for name in ends}


@pytest.mark.parametrize("longest", [None, 20, 64])
def test_rows_have_no_more_tokens_than_the_model_was_trained_for(longest: int | None) -> None:
    corners = list(band_corners(ROLES, 0, Cost(longest=longest)))
    cases = cases_of(ROLES, 0, own=corners, longest=longest)
    most = max(case.sizes["seq"] + case.sizes["past"] for case in cases)
    assert most > 190 if longest is None else most <= longest
    beyond = cases_of(ROLES, 0, reach={"seq": 70}, longest=longest)
    assert max(case.sizes["seq"] + case.sizes["past"] for case in beyond) >= 70
