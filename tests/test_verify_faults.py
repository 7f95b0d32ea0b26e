"""Every check of verify has a planted fault that it catches, and says where the graph departs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import verify_helpers as plant
from helpers import case

from posexport.parity import FAILED, PASSED, Verdict
from posexport.runtimes import RUNTIMES
from posexport.verify import Report, verify


def _swap_axes(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return values[::-1]


def _slightly(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return values * np.float32(1.001)


def _one_bucket(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    values[values.size // 2 + 3] += 1
    return values


FAULTS: dict[str, tuple[str, str, plant.Mutate, str, str]] = {
    # name: (case, form, fault, what the reason says, what the place says)
    "slope": ("alibi", "decomposed", plant.constant("encoding.slopes", _slightly), "off by", "slopes"),
    "slope-function": ("alibi", "function", plant.constant("encoding.slopes", lambda v: -v), "off by", "slopes"),
    "frequency": ("rope", "decomposed", plant.constant("encoding.frequencies", _slightly), "off by", "frequencies"),
    "layout": ("rope", "decomposed", plant.other_spec(case("rope", layout="half")), "off by", "fresh export"),
    "theta": ("sinusoidal", "function", plant.other_spec(case("sinusoidal", theta=500.0)), "off by", "fresh export"),
    "x-and-y": ("rope2d", "decomposed", plant.constant("encoding.frequencies", _swap_axes), "off by", "frequencies"),
    "bucket": ("t5", "decomposed", plant.constant("encoding.buckets", _one_bucket), "off by", "buckets"),
    "off-by-one": ("sinusoidal", "decomposed", plant.later_positions, "off by", "Add 'late'"),
    "baked-length": ("none", "decomposed", plant.baked_length, "Reshape", "'baked'"),
    "nan-constant": ("rope", "decomposed", plant.constant("encoding.frequencies", plant.nan_at), "finite", "enc"),
    "nan-weight": ("rope", "decomposed", plant.constant("k_proj.weight", plant.nan_at), "not finite", "not finite"),
    "renamed": ("none", "decomposed", plant.renamed_output, "lacks the output 'output'", "result"),
    "extra": ("none", "decomposed", plant.second_output, "output 'again'", "again"),
    "no-causal": ("alibi", "decomposed", plant.other_spec(case("alibi", causal=True)), "off by", "fresh export"),
    "window": ("rope", "decomposed", plant.other_spec(case("rope", window=30)), "off by", "fresh export"),
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, dict[str, Verdict]]:
    """All the faults, and two sound artifacts, verified in one go."""
    folder = tmp_path_factory.mktemp("faults")
    for name, (which, form, mutate, _, _) in FAULTS.items():
        plant.plant(folder, name, case(which), mutate, form)
    plant.write(folder, "sound-alibi", case("alibi"))
    plant.write(folder, "sound-rope2d", case("rope2d"), "function")
    cut = plant.write(folder, "truncated", case("none"))
    cut.write_bytes(cut.read_bytes()[:-40])
    rows = {name: RUNTIMES[name] for name in ("ort-cpu",)}
    found = verify([folder], runtimes=rows)
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
    assert verdict.cases == 6
    worst = verdict.worst
    assert worst is not None
    assert worst.max_error is not None
    assert worst.allowed is not None
    assert worst.eager_error is not None
    assert worst.rms_error is not None
    assert 0 < worst.rms_error <= worst.max_error <= worst.allowed
    assert worst.allowed < 100 * worst.eager_error
    assert worst.index is not None
    assert len(worst.index) == 3
    assert worst.got is not None
    assert worst.truth is not None
    assert math.isclose(abs(worst.got - worst.truth), worst.max_error)


def test_a_truncated_file_is_unreadable_and_the_others_are_still_told(
    report: tuple[Report, dict[str, Verdict]],
) -> None:
    found = report[0]
    assert len(found.broken) == 1
    assert "truncated.onnx" in found.broken[0][0]
    assert len(found.verdicts) == len(FAULTS) + 2
    assert found.exit_code() == 2
