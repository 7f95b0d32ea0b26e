"""Faults that only the right inputs show, the numbers of a sound artifact, and a truncated file among others."""

from __future__ import annotations

import math
from pathlib import Path

import mutants as to
import numpy as np
import onnx
import pytest
import verify_helpers as plant
from helpers import case
from onnx import helper

from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.result import FAILED, PASSED, Report, Verdict

pytestmark = pytest.mark.few_inputs


def _far_buckets(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    values[:9] = 0  # keys 120 to 128 before the query
    return values


def _slice(value: str, end: int, axis: int, out: str) -> list[onnx.NodeProto]:
    names = ("start", "end", "axis")
    made = [
        helper.make_node("Constant", [], [f"{out}_{name}"], name=f"{out} {name}", value_ints=[number])
        for name, number in zip(names, (0, end, axis), strict=True)
    ]
    return [*made, helper.make_node("Slice", [value, *(f"{out}_{name}" for name in names)], [out], name=f"{out} cut")]


def _first_row(value: str) -> list[onnx.NodeProto]:
    return _slice(value, 1, 0, "planted")


FAULTS: dict[str, tuple[str, str, to.Mutate, str, str]] = {
    # name: (case, dtype, fault, text of the reason, text of the place)
    "far bucket": ("t5", "fp32", to.initializer("encoding.buckets", _far_buckets), "off by", "buckets"),
    "mask of -20": ("t5-causal", "fp32", to.constant_read("Where", 2, np.float32(-20)), "off by", "planted"),
    "first row for all": ("rope", "fp32", to.before("Cast", 0, _first_row, "position_ids"), "off by", "planted"),
}
"""Faults that only far distances, loud inputs or rows that differ show. Faults of long caches are in
test_long_caches.py."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, dict[str, Verdict]]:
    """All faults and two sound artifacts, verified together."""
    folder = tmp_path_factory.mktemp("faults")
    for name, (which, dtype, mutate, _, _) in FAULTS.items():
        plant.plant(folder, name, case(which, dtype=dtype), mutate)
    plant.write(folder, "sound-alibi", case("alibi"))
    plant.write(folder, "sound-rope2d", case("rope2d"), "function")
    cut = plant.write(folder, "truncated", case("none"))
    cut.write_bytes(cut.read_bytes()[:-40])
    cut.with_name("truncated.onnx.json").unlink()
    found = verify([folder], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach={"seq": 150})
    return found, {Path(verdict.artifact).stem: verdict for verdict in found.verdicts}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_and_is_found(report: tuple[Report, dict[str, Verdict]], name: str) -> None:
    verdict = report[1][name]
    assert verdict.state == FAILED
    assert verdict.reason is not None
    assert verdict.where is not None
    assert FAULTS[name][3] in verdict.reason, verdict.reason
    assert FAULTS[name][4] in verdict.where, verdict.where


@pytest.mark.parametrize("name", ["sound-alibi", "sound-rope2d"])
def test_a_sound_artifact_passes_with_its_numbers(report: tuple[Report, dict[str, Verdict]], name: str) -> None:
    verdict = report[1][name]
    assert verdict.state == PASSED
    assert verdict.reason is None
    assert verdict.where is None
    assert verdict.cases >= 13
    worst = verdict.worst
    assert worst is not None
    assert worst.max_error is not None
    assert worst.limit is not None
    assert worst.torch_error is not None
    assert worst.rms_error is not None
    assert 0 < worst.rms_error <= worst.max_error <= worst.limit
    assert worst.limit < 100 * worst.torch_error
    assert worst.index is not None
    assert len(worst.index) == 3
    assert worst.got is not None
    assert worst.reference is not None
    assert math.isclose(abs(worst.got - worst.reference), worst.max_error)


def test_a_truncated_file_is_unreadable_and_the_others_are_still_told(
    report: tuple[Report, dict[str, Verdict]],
) -> None:
    found = report[0]
    assert len(found.unreadable) == 1
    assert "truncated.onnx" in found.unreadable[0].artifact
    assert len(found.verdicts) == len(FAULTS) + 2
    assert found.exit_code() == 2
