"""Copies of a case that could not be computed for lack of memory or time. Runs that depend on them are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from test_rounding import CEILING, LIMIT, LUCKY, OPTIONS, answered, job_of, off

from posexport.errors import Reason
from posexport.processes import CRASHED, MEMORY
from posexport.runtimes import RUNTIMES, TORCH_WORKER
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer
from posexport.verify.parity import TOLERANCES, compare
from posexport.verify.result import REFERENCE_FAILED
from posexport.verify.rounding import DRAWS, NEAR, Draws, drawn
from posexport.verify.runs import Run


@pytest.mark.parametrize(("count", "code", "missing"), [(1, MEMORY, False), (5, MEMORY, True), (5, CRASHED, False)])
def test_torch_results_are_missing_where_most_could_not_be_computed(count: int, code: str, missing: bool) -> None:
    """If some of torch's runs on copies fail, the others still count."""
    arrays, seen = {"hidden_states": np.ones((2, 5, 8), np.float32)}, []

    def run(inputs: Sequence[Arrays], options: dict[str, Any]) -> Future[Answer]:
        seen.append(options["last_bits"])
        return answered(failure=Reason(code, "it ended")) if len(seen) <= count else answered(off(LUCKY))

    draws = drawn(run, arrays, 0, off(0), off(LUCKY), DRAWS)
    assert seen == list(range(DRAWS)) and len(draws.errors["output"]) == DRAWS + 1 - count
    assert (draws.failure is not None) == missing


@pytest.mark.parametrize(("code", "kept"), [(MEMORY, True), (CRASHED, False)])
def test_a_runtime_that_crashes_on_a_copy_is_judged_by_its_first_run(code: str, kept: bool) -> None:
    job = job_of(0.0)
    job.runs["ort-cpu"] = Run(answered(off(0)), [0], Path("a.onnx"), OPTIONS)
    job.pool.submit.return_value = answered(failure=Reason(code, "it ended"))  # type: ignore[attr-defined]
    assert job._on_copies(RUNTIMES["ort-cpu"], 0) is None
    assert (("ort-cpu", 0) in job.no_copies) == kept


OUT_OF_MEMORY = Reason(MEMORY, "memory ran out")


@pytest.mark.parametrize(
    ("error", "by_torch", "who", "undecided"),
    [
        (1.5 * LIMIT, 0.0, TORCH_WORKER, True),
        (1.1 * NEAR * LIMIT, 0.0, TORCH_WORKER, False),  # a fault, regardless of copies
        (1.5 * LIMIT, 0.0, "ort-cpu", False),  # ort-cpu's copies matter only for faults that torch's errors may hide
        (1.5 * CEILING, 0.4 * CEILING, "ort-cpu", True),
        (1.5 * CEILING, 0.4 * CEILING, "ort-cuda", False),  # copies on another runtime
        (1.5 * LIMIT, 0.0, None, False),
    ],
)
def test_no_verdict_hangs_on_copies_that_could_not_be_computed(
    error: float, by_torch: float, who: str | None, undecided: bool
) -> None:
    job, runtime = job_of(0.0), RUNTIMES["ort-cpu"]
    job.cases.append(attrs.evolve(job.cases[0], name="d"))
    found = compare("c", off(0), off(by_torch), off(error), {"output": "fp64"}, TOLERANCES["fp32"])
    if who == TORCH_WORKER:
        job.torch_again[0] = attrs.evolve(Draws.of(off(0), off(by_torch)), failure=OUT_OF_MEMORY)
    elif who is not None:
        job.no_copies[who, 0] = OUT_OF_MEMORY
    reason = job._undecided(runtime, found)
    assert (reason is not None) == undecided
    if reason is not None:
        assert reason.code == REFERENCE_FAILED and reason.text.endswith("could not be computed: memory ran out")
        assert job._undecided(runtime, [*found, attrs.evolve(found[0], case="d")]) is None, "another says something"
    passed = compare("c", off(0), off(0), off(0), {"output": "fp64"}, TOLERANCES["fp32"])
    assert job._undecided(runtime, passed) is None


@pytest.mark.parametrize(("code", "undecided"), [(MEMORY, True), (CRASHED, False)])
def test_a_reference_that_can_not_be_computed_again_decides_nothing(code: str, undecided: bool) -> None:
    found = compare("c", off(0), off(0.4 * CEILING), off(1.5 * CEILING), {"output": "fp64"}, TOLERANCES["fp32"])
    hidden = job_of(None, code=code)._hidden(RUNTIMES["ort-cpu"], found)
    assert (hidden is not None and hidden.code == REFERENCE_FAILED) == undecided
    plain = compare("c", off(0), off(0), off(1.5 * LIMIT), {"output": "fp64"}, TOLERANCES["fp32"])
    assert job_of(None, code=code)._hidden(RUNTIMES["ort-cpu"], plain) is None, "what needs no such copies"
