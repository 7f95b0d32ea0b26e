"""A reference that can't be computed: which of its failures say something about the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import case
from verify_helpers import write

from posexport import processes
from posexport.processes import Worker, failure
from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.result import FAILED, NOT_RUN

pytestmark = pytest.mark.few_inputs

ENDINGS = ("KILLED", "CRASHED", "EXITED", "TIMED_OUT", "MEMORY", "LIMITED", "STOPPED")
"""Codes that say how the process ended or which resource it lacked. They say nothing about the artifact."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("which", "code"), [*(("fp64", name) for name in (*ENDINGS, "FAILED")), ("fp32", "CRASHED"), ("fp32", "FAILED")]
)
def test_only_an_ordinary_error_is_charged_to_the_artifact(
    which: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Worker.ask

    def failing(worker: Worker, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        by_torch = request["module"] == RUNTIMES["torch"].module
        if by_torch and (request["options"].get("dtype") == "fp64") == (which == "fp64"):
            return failure(getattr(processes, code), "it ended")
        return ask(worker, request, time_limit) if by_torch else failure(processes.TIMED_OUT, "not asked")

    monkeypatch.setattr(Worker, "ask", failing)
    path = write(tmp_path, "rope", case("rope"))
    report = verify([path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, time_limit=60)
    (verdict,) = report.verdicts
    assert (verdict.state, report.exit_code()) == ((NOT_RUN, 3) if code in ENDINGS else (FAILED, 1))
    assert "could not be computed: it ended" in str(verdict.reason)
