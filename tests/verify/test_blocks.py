"""Sums over blocks equal the sums over whole arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.verify.blocks import BLOCK, absolute_errors, root_mean_square
from posexport.verify.ordinary import APART, ordinary
from posexport.verify.parity import largest_error

SHAPES = [(), (1,), (3, 5), (BLOCK,), (2, BLOCK // 2 + 1), (BLOCK - 1,), (3, 7, BLOCK // 5)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_whole_arrays(shape: tuple[int, ...], dtype: type) -> None:
    generator = np.random.default_rng(len(shape))
    exact = np.asarray(generator.standard_normal(shape))
    array = np.asarray(exact + 0.01 * generator.standard_normal(shape)).astype(dtype)
    errors = np.abs(array.astype(np.float64) - exact)
    np.testing.assert_array_equal(absolute_errors(array, exact), errors)
    assert largest_error(array, exact) == errors.max()
    assert root_mean_square(exact) == pytest.approx(np.sqrt(np.mean(exact**2)), rel=1e-12)
    if array.size > 1:
        array.flat[[0, -1]] = np.nan, np.inf
        assert largest_error(array, exact) == errors.reshape(-1)[1:-1].max(initial=0.0)


@pytest.mark.parametrize("turned", [lambda array: array.T, lambda array: array[:, ::-1]])
def test_arrays_may_lie_in_any_order(turned: object) -> None:
    assert callable(turned)
    exact = np.random.default_rng(0).standard_normal((300, 400))
    array = exact.astype(np.float32)
    errors = np.abs(array.astype(np.float64) - exact)
    np.testing.assert_array_equal(absolute_errors(turned(array), turned(exact)), turned(errors))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 50),
    spread=st.floats(0.0, 4.0),
    zeros=st.floats(0.0, 1.0),
    left_out=st.none() | st.floats(0.0, 1.0),
)
def test_what_is_ordinary_is_told_by_the_median(
    seed: int, size: int, spread: float, zeros: float, left_out: float | None
) -> None:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size) * np.exp(spread * generator.standard_normal(size))
    values[generator.random(size) < zeros] = 0.0
    counted = None if left_out is None else generator.random(size) >= left_out
    those = np.ones(size, bool) if counted is None else counted
    sizes = np.abs(values[those & (values != 0)])
    usual = those & (np.abs(values) <= APART * np.median(sizes)) if sizes.size else those
    found = ordinary(values, counted)
    if np.array_equal(usual, those):
        assert found is None
    else:
        np.testing.assert_array_equal(found, usual)
