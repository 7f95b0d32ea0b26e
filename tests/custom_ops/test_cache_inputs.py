"""Inputs with caches, masks and encoders: what verify's cases cover, and which inputs of a user are refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from helpers import Array, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.artifact.loaded import LoadedArtifact, _profile_bounds, contract_violation
from posexport.artifact.profiles import check_shapes, profiles_of
from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES
from posexport.spec.contract import (
    SUMS,
    TRACED_SIZES,
    Bounds,
    bounds_of,
    dimensions,
    graph_inputs,
    graph_outputs,
    resolved,
    sizes_of,
)
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases
from posexport.verify.positions import FAR
from posexport.verify.reach import Reach
from posexport.verify.submission import run_options
from posexport.verify.user_inputs import fit_inputs

GROWN = small_spec("rope", kv_cache="concat", padding_mask=True, causal=True)
SHARED = small_spec("alibi", kv_cache="shared", padding_mask=True, causal=True)
CROSS = small_spec("learned", cross=True, padding_mask=True)
PADDED = small_spec("t5", padding_mask=True)
SPECS = {"grown": GROWN, "shared": SHARED, "cross": CROSS, "padded": PADDED}
SPECS |= {
    "grown grid": small_spec("rope2d", kv_cache="concat", padding_mask=True),
    "shared window": small_spec("none", kv_cache="shared", window=700, layers=2),
}


@functools.cache
def made(spec: Spec, seed: int = 0, form: str = "decomposed", **bounds: tuple[int, int | None]) -> list[Case]:
    """Cases that are made once and must not be changed."""
    return make_cases(spec, seed, {**bounds_of(graph_inputs(spec), {}), **bounds}, form)


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    made.cache_clear()


def lengths(case: Case) -> Array:
    """The number of keys of each row, including new ones, without those of an encoder."""
    first = case.arrays.get("write_indices", np.full(case.sizes["batch"], case.sizes.get("past_seq", 0)))
    return first + case.sizes["seq"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPECS)
def test_no_length_is_the_traced_one_but_in_one_set_of_inputs(name: str) -> None:
    spec = SPECS[name]
    for each in made(spec):
        named = {dim for shape, _ in graph_inputs(spec).values() for dim in shape if isinstance(dim, str)} - {"batch"}
        is_traced = each.name.startswith("traced sizes")
        for dim in named:
            assert (resolved(dim, each.sizes) == TRACED_SIZES[dim]) == is_traced, (each.name, dim)
        assert each.sizes == sizes_of(graph_inputs(spec), each.arrays)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["grown", "grown grid", "shared", "shared window"])
def test_caches_get_prefills_steps_and_chunks(name: str) -> None:
    found = [(lengths(each) - each.sizes["seq"], each.sizes["seq"]) for each in made(SPECS[name])]
    assert any(not past.any() and seq > 1 and len(past) > 1 for past, seq in found)  # a prefill
    assert any(not past.any() and seq == 1 for past, seq in found)  # the very first token
    assert any(past.all() and seq == 1 and len(past) > 1 for past, seq in found)  # a step
    assert any(past.all() and seq > 1 and len(past) > 1 for past, seq in found)  # a chunk
    assert max(past.max() for past, seq in found if seq == 1) >= 600  # a step with many cached tokens
    assert max(each.keys for each in made(SPECS[name])) > (SPECS[name].window or 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "form"), [("grown", "function"), ("shared", "contrib"), ("shared", "function")])
def test_cached_values_are_unit_normal_and_zero_where_contrib_leaves_nothing(name: str, form: str) -> None:
    stale, fresh = set(), set()  # whether unwritten slots, if there are any, contain anything
    for each in made(SPECS[name], form=form):
        normal = each.name.split(" [")[0] in ("consecutive", "step", "late step", "chunk near the end")
        used = lengths(each) - each.sizes["seq"]
        for key in ("past_key", "past_value"):
            array = each.arrays[key]
            behind = np.arange(array.shape[2]) >= used[:, None]
            assert array.dtype == np.float32
            left = np.where(behind[:, None, :, None], array, 0).any()
            (stale if behind.any() else fresh).add(bool(left))
            kept = array.transpose(0, 2, 1, 3)[~behind]
            if kept.size > 500 and normal:
                assert 0.9 < kept.std() < 1.1
    assert fresh <= {False}
    if name == "shared":
        assert stale == ({False} if form == "contrib" else {False, True})


@pytest.mark.parametrize("name", ["grown", "shared", "cross", "padded"])
def test_rows_are_padded_left_right_wholly_and_not_at_all(name: str) -> None:
    spec = SPECS[name]
    left = right = whole = free = inside = 0
    for each in made(spec):
        mask = each.arrays["attention_mask"]
        assert set(np.unique(mask)) <= {0, 1}
        ends = np.full(len(mask), mask.shape[1]) if spec.cross else lengths(each)
        for row, end in zip(mask, ends, strict=True):
            seen = row[:end]
            left += seen.any() and not seen[0]
            right += seen.any() and not seen[-1]
            inside += (np.diff(seen) < 0).any()
            whole += not seen.any()
            free += bool(seen.all())
    assert min(left, right, whole, free, inside) > 0


def test_positions_count_what_is_no_padding() -> None:
    found = {each.name.split(" [")[0]: each for each in made(GROWN)}
    for name in ("consecutive", "step", "prefill"):
        each = found[name]
        mask, seq = each.arrays["attention_mask"], each.sizes["seq"]
        counted = np.cumsum(mask, 1)[:, -seq:] - 1
        kept = mask[:, -seq:] == 1
        assert (each.arrays["position_ids"][kept] == counted[kept]).all()
    assert (found["offset"].arrays["position_ids"].min(1) > 30).all()
    assert found["far out"].arrays["position_ids"].max() == FAR - 1
    scattered = np.diff(found["scattered"].arrays["position_ids"])
    assert scattered.min() < 0 < 1 < scattered.max()


def test_shared_caches_are_written_where_each_row_ends() -> None:
    steps = [each.arrays["write_indices"] for each in made(SHARED) if each.sizes["seq"] == 1]
    assert any(len({*writes}) == len(writes) > 1 for writes in steps)
    spare = [each.sizes["max_seq"] - lengths(each).max() for each in made(SHARED)]
    assert min(spare) == 0 < max(spare)
    masks = [(each.arrays["attention_mask"], lengths(each)) for each in made(SHARED)]
    assert any((mask[row, end:] == 1).any() for mask, ends in masks for row, end in enumerate(ends))


def test_group_query_attention_gets_chunks_of_one_row_alone() -> None:
    """It refuses others: batch_size must be 1 when sequence_length > 1 and past context is given."""
    found = made(SHARED, form="contrib")
    chunks = [each for each in found if each.sizes["seq"] > 1 and each.arrays["write_indices"].any()]
    assert chunks
    assert all(each.sizes["batch"] == 1 for each in chunks)
    assert any(each.sizes["batch"] > 1 for each in found if each.sizes["seq"] == 1)
    fixed = made(SHARED, form="contrib", batch=(4, 4))
    assert not [each for each in fixed if each.sizes["seq"] > 1 and each.arrays["write_indices"].any()]


def _bounds(draw: Any, spec: Spec) -> Bounds:
    found: Bounds = {}
    for dim in dimensions(graph_inputs(spec)):
        low = draw(st.integers(0 if dim == "past_seq" else 1, 40))
        found[dim] = (low, draw(st.none() | st.integers(low, low + 40)))
    if "max_seq" in found and (found["max_seq"][1] or 99) < found["seq"][0]:
        found["max_seq"] = (found["seq"][0], None)
    return found


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_cases_stay_within_the_bounds(data: st.DataObject) -> None:
    spec = SPECS[data.draw(st.sampled_from(list(SPECS)))]
    spec = attrs.evolve(spec, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4)
    bounds = _bounds(data.draw, spec)
    form = data.draw(st.sampled_from(["decomposed", "contrib"]))
    found = make_cases(spec, 3, bounds, form, reach=Reach(seq=data.draw(st.sampled_from([40, 150, 600]))))
    for each in found:
        assert set(each.sizes) == set(bounds)
        for dim, (low, high) in bounds.items():
            assert low <= each.sizes[dim] <= (high or 10**6)
        for name, (shape, _) in graph_inputs(spec).items():
            assert each.arrays[name].shape == tuple(resolved(dim, each.sizes) for dim in shape)
        if "write_indices" in each.arrays:
            assert each.arrays["write_indices"].min() >= 0
            assert lengths(each).max() <= each.sizes["max_seq"]
        fit_inputs(Path("own.npz"), each.arrays, spec, graph_inputs(spec), bounds)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPECS)
def test_a_plan_built_on_the_fly_takes_every_case(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    bounds = bounds_of(graph_inputs(spec), {})
    subject = LoadedArtifact(
        path=tmp_path / "a.onnx", source=None, inputs=graph_inputs(spec), outputs={}, bounds=bounds
    )  # type: ignore[arg-type]
    found = made(spec)
    requests = run_options(subject, RUNTIMES["tensorrt-rtx"], [each.sizes for each in found])["profile"]
    profiles = profiles_of({key: shape for key, (shape, _) in graph_inputs(spec).items()}, requests)
    for each in found:
        check_shapes(profiles, {key: array.shape for key, array in each.arrays.items()})
    of_plan, tuned = _profile_bounds(spec, graph_inputs(spec), profiles)
    assert set(of_plan) == set(tuned) == set(bounds)
    for dim, (low, high) in of_plan.items():
        sizes = [each.sizes[dim] for each in found]
        assert (low, high, tuned[dim]) == (min(sizes), max(sizes), max(sizes))


def _own(spec: Spec, name: str, form: str = "decomposed") -> dict[str, Array]:
    """The arrays of a sound case, to be damaged."""
    (found,) = (each for each in made(spec, form=form) if each.name.startswith(f"{name} ["))
    return {key: array.copy() for key, array in found.arrays.items()}


def _fit(spec: Spec, arrays: dict[str, Array], form: str = "decomposed", **bounds: tuple[int, int | None]) -> Case:
    within = {**bounds_of(graph_inputs(spec), {}), **bounds}
    return fit_inputs(Path("own.npz"), arrays, spec, graph_inputs(spec), within, form)[0]


PAST = next(each for each in made(GROWN) if each.name.startswith("step [")).sizes["past_seq"]
"""The number of cached tokens in the sound case whose arrays are damaged."""

NAN = np.full((3, 4, PAST, 8), np.nan, np.float32)
BAD: dict[str, tuple[Spec, dict[str, Array], str]] = {
    "total": (
        GROWN,
        {"attention_mask": np.ones((3, PAST), int)},
        f"total_seq {PAST}, it must be past_seq + seq, {PAST} + 1",
    ),
    "past": (GROWN, {"past_value": NAN[:, :, 1:]}, f"with one size of past_seq, and 'past_key' has {PAST}"),
    "past's batch": (GROWN, {"past_key": NAN[:2]}, "with one size of batch"),
    "past's heads": (GROWN, {"past_key": NAN[:, :3]}, "the graph takes ['batch', 4, 'past_seq', 8]"),
    "past's dtype": (GROWN, {"past_key": NAN.astype(np.float64)}, "'past_key' is float64"),
    "past's values": (GROWN, {"past_value": NAN}, "'past_value' holds NaN"),
    "mask of others": (GROWN, {"attention_mask": np.full((3, PAST + 1), 2)}, "holds other numbers than 0 and 1"),
    "mask of floats": (GROWN, {"attention_mask": np.ones((3, PAST + 1))}, "'attention_mask' is float64"),
    "writes too far": (
        SHARED,
        {"write_indices": np.array([24, 925, 1])},
        "reach from 1 to 925, 1 new tokens in a cache",
    ),
    "writes before": (SHARED, {"write_indices": np.array([3, -1, 1])}, "reach from -1 to 3"),
    "writes' shape": (SHARED, {"write_indices": np.zeros((3, 1), int)}, "the graph takes ['batch']"),
    "encoder's mask": (CROSS, {"attention_mask": np.ones((3, 4), int)}, "with one size of encoder_seq"),
    "encoder": (CROSS, {"encoder_hidden_states": np.ones((3, 5, 31), np.float32)}, "has shape [3, 5, 31]"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BAD)
def test_inputs_that_do_not_fit_are_refused_in_one_sentence(name: str) -> None:
    spec, wrong, said = BAD[name]
    sound = _own(spec, "step" if spec.kv_cache else "consecutive")
    _fit(spec, sound)
    with pytest.raises(RequestError) as caught:
        _fit(spec, {**sound, **wrong})
    assert said in str(caught.value), caught.value
    assert "own.npz" in str(caught.value)
    assert str(caught.value).endswith(".")


def test_sizes_outside_a_plan_are_refused() -> None:
    with pytest.raises(RequestError, match="past_seq from 0 to 16"):
        _fit(GROWN, _own(GROWN, "step"), past_seq=(0, 16))


@pytest.mark.slow
def test_what_group_query_attention_cannot_take_is_refused() -> None:
    _fit(SHARED, _own(SHARED, "step", "contrib"), "contrib")
    _fit(SHARED, _own(SHARED, "prefill", "contrib"), "contrib")
    with pytest.raises(RequestError, match=r"add [0-9]+ tokens to caches of 3 rows"):
        _fit(SHARED, _own(SHARED, "consecutive"), "contrib")
    behind = _own(SHARED, "step", "contrib")
    behind["past_value"][0, 0, -1, 0] = 1.0
    _fit(SHARED, behind)
    with pytest.raises(RequestError, match="'past_value' is not zero from write_indices on"):
        _fit(SHARED, behind, "contrib")


def _graph(spec: Spec, **sizes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs and outputs of a graph that fixes some dimensions."""
    return tuple(  # type: ignore[return-value]
        {name: (tuple(sizes.get(str(dim), dim) for dim in shape), dtype) for name, (shape, dtype) in values.items()}
        for values in (graph_inputs(spec), graph_outputs(spec))
    )


TOTAL, PRESENT = "total_seq", "past_seq + seq"
FIXED: dict[str, tuple[Spec, dict[str, int], str | None]] = {
    "parts": (GROWN, {"past_seq": 5, "seq": 7}, None),
    "sums": (GROWN, {"past_seq": 5, "seq": 7, TOTAL: 12, PRESENT: 12}, None),
    "an empty cache": (GROWN, {"past_seq": 0, "seq": 7, TOTAL: 7}, None),
    "another sum": (GROWN, {"past_seq": 5, "seq": 7, TOTAL: 13}, "total_seq in 'attention_mask' is fixed to 13"),
    "another present": (GROWN, {"past_seq": 5, "seq": 7, PRESENT: 5}, "in 'present_key' is fixed to 5"),
    "a sum alone": (GROWN, {TOTAL: 12, "seq": 7}, "it must be the sum of past_seq free + seq 7"),
    "no tokens": (GROWN, {"seq": 0}, "'hidden_states' has shape"),
    "a buffer": (SHARED, {"max_seq": 64}, None),
    "no buffer": (SHARED, {"max_seq": 0}, "has shape"),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_a_graph_fixes_must_add_up(name: str) -> None:
    spec, sizes, said = FIXED[name]
    inputs, outputs = _graph(spec, **sizes)
    found = contract_violation(spec, inputs, outputs)
    assert found == said if said is None else said in (found or ""), found
    bounds = bounds_of(graph_inputs(spec), inputs)
    assert {dim: low for dim, (low, high) in bounds.items() if low == high} == {
        dim: size for dim, size in sizes.items() if dim not in SUMS
    }


def test_one_buffer_of_another_size_is_uneven() -> None:
    inputs, outputs = _graph(SHARED, max_seq=64)
    inputs["attention_mask"] = (("batch", 65), "int64")
    assert "max_seq is 65 in 'attention_mask' and 64 in 'past_key'" in (
        contract_violation(SHARED, inputs, outputs) or ""
    )
