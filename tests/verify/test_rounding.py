"""Torch's error is taken again where a runtime is a little above its limit: luck is told apart from a fault."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from helpers import case
from verify_helpers import write

from posexport.runtimes import RUNTIMES
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.verify import judge, verify
from posexport.verify.cases import Case
from posexport.verify.judge import ArtifactJob
from posexport.verify.result import FAILED, PASSED, VerifyOverrides
from posexport.verify.rounding import DRAWS, NEAR, farther, last_bits_changed

TRUTH = np.random.default_rng(3).standard_normal((2, 5, 8))
FLOOR, MULTIPLE = 2.0**-20 * float(np.sqrt(np.mean(TRUTH**2))), 8
LUCKY = 1e-6
LIMIT = MULTIPLE * LUCKY + FLOOR


def off(error: float) -> Arrays:
    wrong = TRUTH.copy()
    wrong[1, 2, 3] += error
    return {"output": wrong}


def judged(error: float, later: Sequence[float]) -> tuple[str, int]:
    """The state of an output that is off by `error`, and how often torch ran again: its error was LUCKY before and is
    one of `later` then."""
    errors = iter(later)
    runs: list[Arrays] = []

    def run_torch(inputs: Sequence[Arrays], options: dict[str, Any]) -> Future[Answer]:
        runs.extend(inputs)
        future: Future[Answer] = Future()
        future.set_result(Answer(outputs=(off(next(errors)),)))
        return future

    spec, dtype = case("none"), "fp64"
    artifact: Any = SimpleNamespace(spec=spec, outputs={"output": (TRUTH.shape, dtype)})
    inputs = {"hidden_states": np.ones((2, 5, 8), np.float32)}
    job = ArtifactJob(
        artifact=artifact,
        pool=MagicMock(),
        runtimes={},
        overrides=VerifyOverrides(),
        cases=[Case(name="c", arrays=inputs, sizes={"batch": 2, "seq": 5})],
        notes=(),
        run_torch=run_torch,
    )
    answers = [Answer(outputs=(values,)) for values in (off(0), off(LUCKY), off(error))]
    (found,) = job._comparisons([0], *answers)
    assert job._comparisons([0], *answers) == [found]  # another runtime, without further runs
    return found.state, len(runs)


@pytest.mark.parametrize(
    ("error", "later", "state", "runs"),
    [
        (0.9 * LIMIT, (), PASSED, 0),
        (1.5 * LIMIT, (*[LUCKY] * (DRAWS - 1), 2 * LUCKY), PASSED, DRAWS),
        (1.5 * LIMIT, [1.2 * LUCKY] * DRAWS, FAILED, DRAWS),
        (1.1 * NEAR * LIMIT, (), FAILED, 0),  # a fault, whatever torch's next error is
    ],
)
def test_a_small_error_of_torch_by_luck_is_no_fault_of_the_runtime(
    error: float, later: Sequence[float], state: str, runs: int
) -> None:
    assert judged(error, later) == (state, runs)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_only_the_last_bit_of_floats_changes(dtype: str) -> None:
    kind = NUMPY_DTYPES[dtype]
    values = np.random.default_rng(1).standard_normal((4, 300)).astype(kind)
    given = {"hidden_states": values, "position_ids": np.arange(12).reshape(4, 3)}
    made = list(last_bits_changed(given, 0))
    assert len(made) == DRAWS
    bits = np.dtype(f"i{kind.itemsize}")
    for arrays in made:
        assert arrays["position_ids"] is given["position_ids"]
        assert arrays["hidden_states"].dtype == kind
        steps = arrays["hidden_states"].view(bits).astype(np.int64) - values.view(bits).astype(np.int64)
        assert {*np.unique(steps)} == {-1, 1}
    assert not np.array_equal(made[0]["hidden_states"], made[1]["hidden_states"])
    again = next(last_bits_changed(given, 0))
    assert np.array_equal(again["hidden_states"], made[0]["hidden_states"])


def test_a_result_that_is_not_finite_is_none() -> None:
    infinite = {"output": np.where(TRUTH > 1, np.inf, TRUTH)}
    assert farther(off(0), off(1e-3), infinite)["output"] is not infinite["output"]
    assert farther(off(0), off(1e-3), off(2e-3))["output"][1, 2, 3] == off(2e-3)["output"][1, 2, 3]


def test_torch_runs_again_with_other_last_bits_of_inputs_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[tuple[Arrays, Arrays]] = []

    def keep(reference: Arrays, one: Arrays, other: Arrays) -> Arrays:
        results.append((reference, other))
        return one

    monkeypatch.setattr(judge, "is_near", lambda comparison: comparison.case.startswith("packed"))
    monkeypatch.setattr(judge, "farther", keep)
    runtimes = {name: RUNTIMES[name] for name in ("ort-cpu", "onnx-reference")}
    report = verify([write(tmp_path, "rope", case("rope", vocab_size=30))], runtimes=runtimes)
    assert [verdict.state for verdict in report.verdicts] == [PASSED, PASSED]
    assert len(results) == DRAWS  # once for both runtimes
    made = [other["output"] for _, other in results]
    for (reference, _), output in zip(results, made, strict=True):
        assert 0 < abs(output - reference["output"]).max() < 1e-4
    assert all((one != other).any() for one, other in pairwise(made))
