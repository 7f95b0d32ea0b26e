"""Values of ordinary size are judged separately if others are far larger, so that a fault in them is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import small_spec
from hypothesis import given
from hypothesis import strategies as st
from mutation.corners.ordinary import left_out
from verify_helpers import plant, write

from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.graph import parity as graph_parity
from posexport.verify.ordinary import AMONG, APART, judged_apart, ordinary
from posexport.verify.parity import TOLERANCES, compare
from posexport.verify.result import FAILED, PASSED, Comparison

Array = np.ndarray[Any, Any]
DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TRUTH = np.random.default_rng(3).standard_normal((2, 5, 64))
TRUTH[..., 7] = 400.3 + TRUTH[..., 7]


def one(truth: Array, eager: Array, got: Array, dtype: str, graph: bool) -> Comparison:
    """Compare one output, as for artifacts or as for other graphs (`graph`)."""
    if not graph:
        (found,) = compare("c", {"y": truth}, {"y": eager}, {"y": got}, {"y": dtype}, TOLERANCES[dtype])
        return found
    expected = graph_parity.Expected(
        name="y", exact=truth, own=[eager], select=None, dtype=dtype, tolerance=TOLERANCES[dtype]
    )
    ((found,), _) = graph_parity.compare("c", [expected], {"y": got})
    return found


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_feature_hides_nothing_of_the_others(dtype: str, graph: bool) -> None:
    rounded = TRUTH.astype(DTYPES[dtype])
    wrong = TRUTH.copy()
    wrong[1, 3, 20] += 0.7
    assert one(TRUTH, rounded, rounded, dtype, graph).state == PASSED
    found = one(TRUTH, rounded, wrong.astype(DTYPES[dtype]), dtype, graph)
    assert found.state == FAILED and found.reason is not None and found.reason.endswith(AMONG)
    assert found.index == (1, 3, 20)
    assert found.limit is not None and found.reference_rms is not None
    assert found.limit < 0.5 * found.reference_rms and 0.5 < found.reference_rms < 1.5
    everywhere = np.abs(rounded.astype(np.float64) - TRUTH).max()
    assert 8 * everywhere > 0.7, "without being judged apart it would pass"


@pytest.mark.parametrize("graph", [False, True])
def test_small_values_that_large_ones_cancel_out_to_say_nothing(graph: bool) -> None:
    """Torch's error there is above the ceiling, so a runtime's may be too."""
    truth = np.full((1, 3, 64), 500.0)
    truth[..., ::3] = np.random.default_rng(0).standard_normal((1, 3, 22))
    truth[..., 1::3] = 1.0
    eager, got = (truth + np.random.default_rng(seed).uniform(-0.2, 0.2, truth.shape) for seed in (1, 2))
    found = one(truth, eager.astype(np.float16), got.astype(np.float16), "fp16", graph)
    assert found.state == PASSED


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_no_normal_numbers_are_apart(seed: int, size: float) -> None:
    values = size * np.random.default_rng(seed).standard_normal((3, 40, 16))
    assert ordinary(values) is None
    values[1, 7, 3] = 8 * APART * size
    usual = ordinary(values)
    assert usual is not None and (~usual).sum() == 1 and not usual[1, 7, 3]
    assert ordinary(np.zeros((2, 3))) is None


def test_values_that_do_not_count_are_not_looked_at() -> None:
    counted = np.ones(TRUTH.shape, bool)
    counted[..., 7] = False
    assert ordinary(TRUTH, counted) is None
    counted[..., 7] = True
    counted[0] = False
    usual = ordinary(TRUTH, counted)
    assert usual is not None and not usual[0].any() and usual[1].sum() == 5 * 63
    errors = np.zeros(TRUTH.shape)
    errors[0] = 1.0
    assert judged_apart(TRUTH, [TRUTH], errors, TOLERANCES["fp16"], 0.0, counted) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sound", "left out"])
def test_a_block_in_half_precision_that_is_left_out_beside_a_large_feature(kind: str, tmp_path: Path) -> None:
    spec = small_spec("rope", block="transformer", norm_type="rmsnorm", dtype="fp16", causal=True)
    path = write(tmp_path, "a", spec) if kind == "sound" else plant(tmp_path, "a", spec, left_out(250.0))
    (verdict,) = verify([path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}).verdicts
    assert verdict.state == (PASSED if kind == "sound" else FAILED)
    if kind == "left out":
        assert AMONG in str(verdict.reason)
