"""Kinds of numbers and of positions of graphs without a spec: in every ladder of sizes, and what they hold."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
from faulty_graphs import states_of

from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.graphs.bands import POSITIONS, VALUES, Cost, band_corners
from posexport.graphs.draw import Kinds, draw_inputs
from posexport.graphs.numbers import BETWEEN
from posexport.graphs.roles import Role

X = Role(name="x", kind="features", dtype="fp32", shape=("b", "s", 8), axes=(BATCH, SEQ, 8))
CACHE = attrs.evolve(X, name="past", kind="past", shape=("b", 2, "p", 4), axes=(BATCH, 2, PAST, 4))
PLACES = attrs.evolve(X, name="position_ids", kind="position_ids", dtype="int64", shape=("b", "s"), axes=(BATCH, SEQ))
IDS = attrs.evolve(PLACES, name="input_ids", kind="token_ids")


@pytest.mark.parametrize("seed", range(4))
def test_every_ladder_has_every_kind_of_numbers_and_of_positions(seed: int) -> None:
    corners = list(band_corners({"x": X, "position_ids": PLACES, "past": CACHE}, seed, Cost()))
    ladders = {corner.label for corner in corners if corner.label.startswith("band of") and "rows" not in corner.label}
    assert ladders == {"band of prompts", "band of steps", "band of chunks"}
    for ladder in ladders:
        kinds = [corner.kinds for corner in corners if corner.label == ladder]
        assert {each.values for each in kinds} == {*VALUES}
        assert {each.positions for each in kinds} == {*POSITIONS}
    assert {(one.kinds.values, one.kinds.positions) for one in corners} >= {("normal", each) for each in POSITIONS}


def test_caches_beside_tokens_stay_normal() -> None:
    corners = band_corners({"input_ids": IDS, "past": CACHE}, 0, Cost())
    assert {corner.kinds.values for corner in corners} == {"normal"}


def _features(values: str, batch: int = 40) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    sizes = {BATCH: batch, SEQ: 30, PAST: 0}
    return draw_inputs({"x": X}, sizes, np.random.default_rng(0), Kinds(values=values)).arrays["x"]


def test_zeros_are_tokens_and_a_row_and_some_tokens_have_one_number() -> None:
    values = _features("zeros")
    assert not values[-1].any()
    zero = (values == 0).all(-1)
    even = (np.ptp(values, axis=-1) == 0) & ~zero
    assert 0.2 < zero[:-1].mean() < 0.4
    assert 0.05 < even[:-1].mean() < 0.15
    assert (np.log2(np.abs(values[even][:, 0])) % 1 == 0).all()


def test_numbers_between_have_a_size_for_each_row() -> None:
    sizes = _features("between").std((1, 2))
    assert BETWEEN[0] * 0.7 < sizes.min() < 0.03
    assert 0.1 < sizes.max() < BETWEEN[1] * 1.3


def test_positions_that_stand_still_are_one_number_in_a_row() -> None:
    sizes = {BATCH: 3, SEQ: 30, PAST: 0}
    roles = {"x": X, "position_ids": PLACES}
    places = draw_inputs(roles, sizes, np.random.default_rng(0), Kinds(positions="still")).arrays["position_ids"]
    assert (places == places[:, :1]).all()
    assert len({*places[:, 0].tolist()}) > 1


FAULTS = {
    "right": "y = Identity(x)",
    "between": "s = Mul(x, x) m = ReduceMean<keepdims = 0>(s) r = Sqrt(m) a = Less(r, high) b = Greater(r, low) "
    "c = And(a, b) t = Mul(x, two) y = Where(c, t, x)",
    "even": "h = ReduceMax(x, last) l = ReduceMin(x, last) e = Equal(h, l) n = Not(zero_row) c = And(e, n) "
    "t = Mul(x, two) y = Where(c, t, x)",
    "still": "p = Cast<to = 1>(position_ids) h = ReduceMax(p, one) l = ReduceMin(p, one) e = Equal(h, l) "
    "k = Unsqueeze(e, last) g = Greater(tokens, thirty) c = And(k, g) t = Mul(x, two) y = Where(c, t, x)",
}


@pytest.mark.slow
def test_faults_that_only_such_kinds_show_fail(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[batch, sequence, 8] x, int64[batch, sequence] position_ids) => (float[batch, sequence, 8] y) {
        last = Constant<value_ints = [-1]>() one = Constant<value_ints = [1]>() thirty = Constant<value_ints = [30]>()
        two = Constant<value_float = 2.0>() low = Constant<value_float = 0.02>() high = Constant<value_float = 0.25>()
        tokens = Shape<start = 1, end = 2>(x) absolute = Abs(x) largest = ReduceMax(absolute, last)
        nil = Constant<value_float = 0.0>() zero_row = Equal(largest, nil)
        FAULT
    }"""
    assert states_of(text, FAULTS, tmp_path) == {name: "passed" if name == "right" else "failed" for name in FAULTS}
