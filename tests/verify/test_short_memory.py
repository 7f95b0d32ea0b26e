"""If memory is short, a runtime gets only the inputs that fit, and the verdict says which were left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from graph_files import foreign
from helpers import CHILD_PATH, case
from verify_helpers import write

from posexport.runtimes import Runtime
from posexport.verify import verify
from posexport.verify.result import FAILED, PASSED, Verdict

pytestmark = [pytest.mark.usefixtures("real_processes"), pytest.mark.few_inputs]


@pytest.fixture(autouse=True, scope="module")
def _findable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", CHILD_PATH)
        yield


def verdict_of(path: Path, room: int, killed: bool = False) -> Verdict:
    options = {"room": room, "killed": killed}
    row = Runtime(name="short", summary="", module="engines.short", package="os", install="", options=options)
    report = verify([path], runtimes={"short": row}, reach={"seq": 64})
    assert report.unreadable == ()
    (verdict,) = report.verdicts
    return verdict


@pytest.mark.sampled(2)
@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_larger_inputs_are_left_out_and_said(killed: bool, tmp_path: Path) -> None:
    verdict = verdict_of(write(tmp_path, "block", case("none")), 4000, killed)
    assert (verdict.state, verdict.reason) == (PASSED, None)
    (left,) = (text for text in verdict.not_shown if "memory" in text)
    tried, total = (int(word) for word in left.split() if word.isdigit())
    assert left.startswith("memory ran out on larger inputs: ")
    assert verdict.cases == tried and 0 < tried < total
    assert verdict.inconclusive


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_that_never_fits_fails(killed: bool, tmp_path: Path) -> None:
    verdict = verdict_of(write(tmp_path, "block", case("none")), 0, killed)
    assert verdict.state == FAILED
    assert ("SIGKILL" if killed else "no room") in str(verdict.reason)


@pytest.mark.slow
def test_a_file_of_anyone_is_tried_on_each_set_of_inputs(tmp_path: Path) -> None:
    verdict = verdict_of(foreign(tmp_path, "any", case("rope-half", causal=True)), 4000)
    assert (verdict.state, verdict.reason) == (PASSED, None)
    assert any("no room" in text for text in verdict.not_shown)
    assert not any("no room" in text for text in verdict.notes)
    assert verdict.cases
