"""Torch runs on small inputs, and on large ones only if a runtime is above the limit of torch's usual error."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import case
from verify_helpers import write

from posexport.errors import Reason
from posexport.processes import TIMED_OUT, Worker, failure
from posexport.runtimes import RUNTIMES, TORCH_WORKER
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer
from posexport.verify.cases import Case
from posexport.verify.parity import TOLERANCES, compare
from posexport.verify.result import NOT_RUN, PASSED, REFERENCE_FAILED, Comparison
from posexport.verify.torch_outputs import ENOUGH, MANY, TorchOutputs, usual_shares, within_usual
from posexport.verify.verifier import verify

SHARES = {"output": 1e-6}
LIMIT = 8e-6 + 2.0**-20
DTYPES = {"output": "fp32"}


def case_of(name: str, tokens: int) -> Case:
    sizes = {"batch": 1, "seq": tokens}
    return Case(name=name, arrays={"hidden_states": np.ones((1, tokens, 2), np.float32)}, sizes=sizes)


def answered(*outputs: Arrays, why: Reason | None = None) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result(Answer(outputs=outputs, failure=why))
    return future


EXACT = {"output": np.tile([1.0, -1.0], (1, 4, 1))}


def off(error: float) -> Arrays:
    values = EXACT["output"].astype(np.float32)
    values[0, 2, 1] += error
    return {"output": values}


class Torch:
    """A fake torch whose error is `error`. If there is a `failure`, it fails from its second request on."""

    def __init__(self, error: float, failure: Reason | None = None) -> None:
        self.asked: list[int] = []
        self._error, self._failure = error, failure

    def run(self, inputs: Sequence[Arrays], options: dict[str, Any]) -> Future[Answer]:
        why = self._failure if self.asked else None
        self.asked.append(len(inputs))
        return answered(*[off(self._error) for _ in inputs], why=why)


CASES = [case_of(f"small {index}", 1 + index) for index in range(ENOUGH)]
LARGE = [case_of("large", MANY + 1), case_of("larger", 4 * MANY)]


def compared(by_torch: TorchOutputs, errors: Sequence[float]) -> dict[int, list[Comparison]] | Reason:
    """The comparisons of a runtime that has these errors on the cases, in order."""

    def with_torch(index: int, own: Arrays) -> list[Comparison]:
        name, got = by_torch.cases[index].name, off(errors[index])
        return compare(name, EXACT, own, got, DTYPES, TOLERANCES["fp32"])

    def within(index: int, shares: Any) -> list[Comparison] | None:
        return within_usual(by_torch.cases[index], EXACT, off(errors[index]), DTYPES, TOLERANCES["fp32"], shares)

    return by_torch.compared(range(len(by_torch.cases)), with_torch, within)


@pytest.mark.parametrize(
    ("on_all", "cases", "asked"),
    [(False, [*CASES, *LARGE], ENOUGH), (True, [*CASES, *LARGE], ENOUGH + 2), (False, [CASES[0], *LARGE], 3)],
)
def test_torch_runs_on_small_inputs_at_once_and_on_all_where_these_are_few(
    on_all: bool, cases: list[Case], asked: int
) -> None:
    torch = Torch(1e-6)
    by_torch = TorchOutputs.submitted(torch.run, cases, on_all)
    assert torch.asked == [asked] and len(by_torch.known()) == asked


@pytest.mark.parametrize(("error", "ran", "state"), [(0.0, 0, "passed"), (7e-6, 0, "passed"), (1e-3, 1, "failed")])
def test_torch_runs_on_a_large_input_only_where_a_runtime_is_over_the_limit_of_its_usual_error(
    error: float, ran: int, state: str
) -> None:
    torch = Torch(1e-6)
    by_torch = TorchOutputs.submitted(torch.run, [*CASES, *LARGE], False)
    found = compared(by_torch, [*[0.0] * ENOUGH, error, 0.0])
    assert not isinstance(found, Reason)
    assert torch.asked == [ENOUGH, *[1] * ran], "on the one that needs it alone"
    assert [*found] == [*range(ENOUGH + 2)]
    (large,), (larger,) = found[ENOUGH], found[ENOUGH + 1]
    assert (large.state, larger.state) == (state, PASSED)
    assert large.limit == pytest.approx(LIMIT, rel=0.1) and large.case == "large"
    again = compared(by_torch, [*[0.0] * ENOUGH, error, 0.0])
    assert again == found and torch.asked == [ENOUGH, *[1] * ran], "another runtime asks for no further run"


def test_a_large_input_on_which_torch_is_far_off_passes_by_that_error() -> None:
    torch = Torch(1e-4)
    by_torch = TorchOutputs.submitted(torch.run, [*CASES, *LARGE], False)
    by_torch.answer = answered(*[off(1e-6)] * ENOUGH)  # less on small ones
    found = compared(by_torch, [*[0.0] * ENOUGH, 5e-4, 0.0])
    assert not isinstance(found, Reason) and found[ENOUGH][0].state == PASSED
    assert found[ENOUGH][0].torch_error == pytest.approx(1e-4, rel=1e-2)


def test_why_torch_failed_on_a_large_input_is_said() -> None:
    torch = Torch(1e-6, Reason(TIMED_OUT, "it ended"))
    by_torch = TorchOutputs.submitted(torch.run, [*CASES, *LARGE], False)
    found = compared(by_torch, [*[0.0] * ENOUGH, 1e-3, 0.0])
    assert isinstance(found, Reason) and found.code == TIMED_OUT


def sizes_asked(monkeypatch: pytest.MonkeyPatch, code: str | None = None) -> list[tuple[str, int]]:
    """The dtype and the number of sets of inputs of each later request to torch. With a `code`, the second request in
    the artifact's dtype fails."""
    ask, asked = Worker.ask, list[tuple[str, int]]()

    def noting(worker: Worker, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        if request["module"] == RUNTIMES[TORCH_WORKER].module:
            asked.append((request["options"].get("dtype", "own"), len(request["inputs"])))
            if code and [dtype for dtype, _ in asked].count("own") == 2:
                return failure(code, "it ended")
        return ask(worker, request, time_limit)

    monkeypatch.setattr(Worker, "ask", noting)
    return asked


def test_a_sound_artifact_needs_torch_on_small_inputs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sizes_asked(monkeypatch)
    report = verify([write(tmp_path, "rope", case("rope"))], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]})
    (verdict,) = report.verdicts
    exact, own = ([count for dtype, count in asked if dtype == each] for each in ("fp64", "own"))
    assert verdict.state == PASSED and exact == [verdict.cases]
    assert own[0] >= ENOUGH and sum(own) < verdict.cases - 3


def test_no_verdict_hangs_on_a_large_input_that_torch_could_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sizes_asked(monkeypatch, TIMED_OUT)
    monkeypatch.setattr("posexport.verify.judge.within_usual", lambda *given: None)
    report = verify([write(tmp_path, "rope", case("rope"))], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]})
    (verdict,) = report.verdicts
    assert len(asked) == 3 and (verdict.state, verdict.reason_code) == (NOT_RUN, REFERENCE_FAILED)
    assert "torch eager could not be computed: it ended" in str(verdict.reason)


def test_the_usual_error_is_the_median_of_those_that_were_measured() -> None:
    made = [
        Comparison(case=str(share), output=name, state=PASSED, torch_error=2 * share, reference_rms=2.0)
        for name, share in (("a", 3e-6), ("a", 1e-6), ("a", 1e-3), ("b", 0.0))
    ]
    zeros = Comparison(case="zeros", output="a", state=PASSED, torch_error=0.0, reference_rms=0.0)
    unknown = Comparison(case="no numbers", output="a", state=PASSED)
    assert usual_shares([*made, zeros, unknown]) == {"a": 3e-6, "b": 0.0}


def changed(what: str) -> tuple[Arrays, Arrays]:
    """A reference and outputs that differ only in `what`."""
    exact, got = {"output": EXACT["output"].copy()}, off(0)
    if what == "missing":
        got = {}
    elif what == "another output":
        got["other"] = got["output"]
    elif what == "shape":
        got["output"] = got["output"][:, :3]
    elif what == "dtype":
        got["output"] = got["output"].astype(np.float16)
    elif what == "not finite":
        got["output"][0, 0, 0] = np.nan
    elif what == "infinite in the reference":
        exact["output"][0, 0, 0] = np.inf
    elif what == "not finite in both":
        exact["output"][0, 0, 0] = got["output"][0, 0, 0] = np.nan
    elif what == "zeros":
        exact["output"][:], got["output"][:] = 0.0, 0.0
    elif what == "far larger values":
        exact["output"][0, 0, 0] = got["output"][0, 0, 0] = 1e4
    elif what == "empty":
        exact["output"], got["output"] = exact["output"][:0], got["output"][:0]
    return exact, got


CHANGES = [
    *("missing", "another output", "shape", "dtype", "not finite", "infinite in the reference"),
    *("not finite in both", "zeros", "far larger values", "empty"),
]


@pytest.mark.parametrize("what", ["", *CHANGES])
def test_what_is_no_array_of_ordinary_numbers_is_held_against_torch_itself(what: str) -> None:
    exact, got = changed(what)
    found = within_usual(LARGE[0], exact, got, DTYPES, TOLERANCES["fp32"], SHARES)
    assert (found is None) == bool(what)
    assert within_usual(LARGE[0], EXACT, off(0), DTYPES, TOLERANCES["fp32"], {}) is None, "no error of torch is known"


@pytest.mark.parametrize(("error", "passes"), [(0.9 * LIMIT, True), (1.1 * LIMIT, False)])
def test_the_limit_is_that_of_the_usual_error(error: float, passes: bool) -> None:
    found = within_usual(LARGE[0], EXACT, off(error), DTYPES, TOLERANCES["fp32"], SHARES)
    assert (found is not None) == passes
    if found:
        (comparison,) = found
        assert comparison.index == (0, 2, 1) and comparison.max_error == pytest.approx(error, rel=0.02)
        assert comparison.torch_error == pytest.approx(1e-6) and comparison.limit == pytest.approx(LIMIT)
