"""The user's own inputs: if no runtime can compute them, or if they show nothing, a sound artifact must not fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import cli

from posexport.runtimes import RUNTIMES
from posexport.verify.parity import TOLERANCES, compare, judge
from posexport.verify.result import FAILED, NOT_RUN, PASSED, Comparison, Verdict
from posexport.verify.verifier import verify

pytestmark = pytest.mark.few_inputs

Array = np.ndarray[Any, Any]
TRUTH = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
TOKENS = 9


def given(truth: Array, by_torch: Array, got: Array, own: bool = True) -> Comparison:
    arrays = ({"output": array} for array in (truth.astype(np.float64), by_torch, got))
    (found,) = compare("c", *arrays, {"output": "fp32"}, TOLERANCES["fp32"], given=own)
    return found


def with_row(value: float) -> Array:
    changed = TRUTH.copy()
    changed[1, 2] = value
    return changed


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_where_torch_overflows_a_runtime_may_too_and_the_rest_is_compared(value: float) -> None:
    assert given(TRUTH, with_row(value), with_row(value)).state == PASSED
    assert given(TRUTH, with_row(value), TRUTH).state == PASSED
    assert given(TRUTH, with_row(value), with_row(value), own=False).state == FAILED
    elsewhere = with_row(value)
    elsewhere[0, 1, 2] += 0.01
    assert given(TRUTH, with_row(value), elsewhere).index == (0, 1, 2)


def test_a_finite_wrong_number_fails_where_torch_overflows() -> None:
    found = given(TRUTH, with_row(np.nan), with_row(7.0))
    assert (found.state, found.reason_code, found.index) == (FAILED, "over-limit", (1, 2, 0))


def test_nan_where_torch_computes_fails() -> None:
    for by_torch in (TRUTH, with_row(np.inf)):
        got = with_row(np.nan)
        got[0, 0, 0] = np.nan
        assert given(TRUTH, by_torch, got).reason_code == "not-finite"


def test_nan_where_torch_gives_a_number_that_means_nothing_is_left_out() -> None:
    assert given(TRUTH, with_row(50.0), with_row(np.nan)).state == PASSED
    assert given(TRUTH, with_row(50.0), with_row(np.nan), own=False).state == FAILED
    assert given(TRUTH, with_row(50.0), with_row(50.0)).state == FAILED


def test_a_reference_that_is_not_finite_fails() -> None:
    assert given(*[with_row(np.nan)] * 3).reason_code == "not-finite"


def test_zeros_or_nothing_compared_is_no_verdict_on_the_artifact() -> None:
    zeros, beyond = TRUTH * 0, TRUTH * np.float32(np.nan)
    for found in (given(zeros, zeros, zeros), given(TRUTH, beyond, beyond)):
        verdict = judge("a", "r", [found], 1, given=True)
        assert (verdict.state, verdict.reason_code) == (NOT_RUN, "nothing-compared")
        assert judge("a", "r", [found], 1).state == FAILED
    assert judge("a", "r", [given(zeros, zeros, TRUTH)], 1, given=True).state == FAILED
    other = Comparison(case="c", output="present_key", state=PASSED, max_error=0.1, limit=1.0, reference_rms=1.0)
    verdict = judge("a", "r", [given(zeros, zeros, zeros), other], 1, given=True)
    assert (verdict.state, verdict.not_shown) == (PASSED, ("output 'output' is zero for all inputs",))
    assert verdict.inconclusive


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("block") / "block.onnx"
    assert cli("export", "--encoding", "rope", "--hidden-size", "32", "--num-heads", "2", "-o", path).exit_code == 0
    return path


def verdict_on(path: Path, states: Array) -> Verdict:
    positions = np.tile(np.arange(TOKENS), (2, 1))
    np.savez(path.with_suffix(".npz"), hidden_states=states, position_ids=positions)
    runtimes = {"ort-cpu": RUNTIMES["ort-cpu"]}
    (verdict,) = verify([path], runtimes=runtimes, inputs=path.with_suffix(".npz")).verdicts
    return verdict


STATES = np.random.default_rng(1).standard_normal((2, TOKENS, 32)).astype(np.float32)
MIXED = STATES.copy()
MIXED[1] = 3e38


@pytest.mark.slow
def test_a_sound_artifact_is_not_called_wrong(block: Path) -> None:
    for states in (STATES * 0, np.full_like(STATES, 3e38)):
        assert verdict_on(block, states).state == NOT_RUN
    for size in (1e18, 1e22, 1e30, 1e36):
        assert verdict_on(block, STATES * np.float32(size)).state != FAILED or size < 1e22
    verdict = verdict_on(block, MIXED)
    assert (verdict.state, verdict.inconclusive) == (PASSED, True)
    assert "288 of 576 values of 'output'" in verdict.note
    assert "torch can't compute them in fp32 either: give smaller inputs" in verdict.note


@pytest.mark.slow
def test_a_wrong_one_still_fails_and_is_located(block: Path) -> None:
    model = onnx.load(block)
    twice = onnx.numpy_helper.from_array(np.float32(1.5), "wrong_factor")
    model.graph.initializer.append(twice)
    last = next(node for node in model.graph.node if "output" in node.output)
    last.output[list(last.output).index("output")] = "right"
    model.graph.node.append(onnx.helper.make_node("Mul", ["right", "wrong_factor"], ["output"], "wrong"))
    path = block.with_name("wrong.onnx")
    onnx.save(model, path)
    for states, state in ((STATES * 0, NOT_RUN), (STATES, FAILED), (MIXED, FAILED)):
        verdict = verdict_on(path, states)
        assert verdict.state == state
    assert verdict.where is not None and "node_linear" not in verdict.where.split(";")[-1]
