"""The comparison of outputs: differences that must never pass, and differences that must pass."""

from __future__ import annotations

from typing import Any

import attrs
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from posexport.verify.parity import TOLERANCES, compare, judge, worst_of
from posexport.verify.result import FAILED, PASSED, Comparison

Array = np.ndarray[Any, Any]
NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)
DTYPES = st.sampled_from(sorted(TOLERANCES))


def one(truth: Array, got: Array, eager: Array | None = None, dtype: str = "fp32") -> Comparison:
    """Compare one output. By default, torch eager's output is the rounded truth."""
    eager = truth.astype(NUMPY[dtype]) if eager is None else eager
    (found,) = compare("c", {"output": truth}, {"output": eager}, {"output": got}, {"output": dtype}, TOLERANCES[dtype])
    return found


def random(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_rounded_truth_passes_and_twice_what_is_allowed_fails(dtype: str) -> None:
    truth = random((2, 5, 8))
    sound = one(truth, truth.astype(NUMPY[dtype]), dtype=dtype)
    assert sound.state == PASSED
    assert sound.limit is not None
    wrong = truth.copy()
    wrong[1, 2, 3] += 2 * sound.limit
    found = one(truth, wrong.astype(NUMPY[dtype]), dtype=dtype)
    assert found.state == FAILED
    assert found.index == (1, 2, 3)
    assert found.reason is not None
    assert "[1, 2, 3]" in found.reason


@given(shape=SHAPES, seed=st.integers(0, 99), dtype=DTYPES, bad=st.sampled_from(["nan", "inf"]))
def test_one_value_not_finite_never_passes(shape: tuple[int, ...], seed: int, dtype: str, bad: str) -> None:
    truth = random(shape, seed)
    got = truth.astype(NUMPY[dtype])
    got.flat[seed % got.size] = float(bad)
    found = one(truth, got, dtype=dtype)
    assert found.state == FAILED
    assert found.reason is not None
    assert "not finite" in found.reason
    assert one(got.astype(np.float64), got, got, dtype).state == FAILED  # also if the truth is not finite


@given(truth_shape=SHAPES, got_shape=SHAPES)
def test_unequal_shapes_never_pass_even_where_they_broadcast(
    truth_shape: tuple[int, ...], got_shape: tuple[int, ...]
) -> None:
    assume(truth_shape != got_shape)
    found = one(np.ones(truth_shape), np.ones(got_shape, np.float32))
    assert found.state == FAILED
    assert found.reason is not None
    assert "shape" in found.reason


@given(shape=SHAPES, seed=st.integers(0, 999), dtype=DTYPES)
def test_zeros_and_other_random_values_never_pass(shape: tuple[int, ...], seed: int, dtype: str) -> None:
    truth = random(shape, seed)
    assert one(truth, np.zeros(shape, NUMPY[dtype]), dtype=dtype).state == FAILED
    other = random(shape, seed + 1000).astype(NUMPY[dtype])
    assert one(truth, other, dtype=dtype).state == FAILED


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_a_wrong_yardstick_excuses_nothing(shape: tuple[int, ...], seed: int) -> None:
    truth = random(shape, seed)
    wrong = random(shape, seed + 1000).astype(np.float32)
    assert one(truth, wrong, eager=wrong).state == FAILED


def test_another_dtype_fails() -> None:
    truth = random((2, 3))
    found = one(truth, truth)
    assert found.state == FAILED
    assert found.reason == "output 'output' is fp64, it must be fp32"


def test_an_empty_output_is_not_a_pass() -> None:
    assert one(np.ones((0, 3)), np.ones((0, 3), np.float32)).state == FAILED


@pytest.mark.parametrize("given_names", [(), ("result",), ("output", "again")])
def test_outputs_pair_one_to_one_by_name(given_names: tuple[str, ...]) -> None:
    truth = {"output": random((2, 3))}
    eager = {"output": truth["output"].astype(np.float32)}
    got = dict.fromkeys(given_names, eager["output"])
    found = compare("c", truth, eager, got, {"output": "fp32"}, TOLERANCES["fp32"])
    assert {each.output for each in found} == {"output", *given_names}
    assert worst_of(found).state == FAILED


def test_a_truth_of_zeros_alone_proves_nothing() -> None:
    zeros = np.zeros((2, 3))
    dead, alive = one(zeros, zeros.astype(np.float32)), one(random((2, 3)), random((2, 3)).astype(np.float32))
    assert judge("a", "r", [alive, dead], 2).state == PASSED
    verdict = judge("a", "r", [dead, dead], 2)
    assert verdict.state == FAILED
    assert verdict.reason is not None and "zero for all inputs: nothing was compared" in verdict.reason
    other = attrs.evolve(dead, output="present_key")
    assert "'present_key'" in str(judge("a", "r", [alive, other], 2).reason)


def test_a_verdict_is_that_of_its_worst_comparison_and_nothing_compared_is_no_pass() -> None:
    truth = random((2, 3))
    passed = one(truth, truth.astype(np.float32))
    failed = attrs.evolve(one(truth, np.zeros((2, 3), np.float32)), case="other")
    verdict = judge("a", "r", [passed, failed, passed], 3)
    assert verdict.state == FAILED
    assert verdict.worst == failed
    assert str(verdict.reason).endswith("(inputs: other)")
    assert judge("a", "r", [passed], 1).state == PASSED
    assert judge("a", "r", [], 0).state == FAILED
