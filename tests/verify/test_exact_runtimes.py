"""A runtime that computes in float64 may be off by less in half precision: it doesn't round each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import case
from mutants import last
from onnx import helper, numpy_helper
from verify_helpers import plant, write

from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.parity import TOLERANCES
from posexport.verify.result import VerifyOverrides

IMPORT = RUNTIMES["tensorrt-import"]


@pytest.mark.parametrize(
    ("runtime", "dtype", "multiple"),
    [
        ("tensorrt-import", "bf16", 2),
        ("tensorrt-import", "fp16", 2),
        ("tensorrt-import", "fp32", 8),
        ("ort-cpu", "fp16", 8),
        ("torch", "bf16", 8),
        ("onnx-reference", "bf16", 8),
    ],
)
def test_an_exact_runtime_has_a_smaller_multiple_of_torchs_error(runtime: str, dtype: str, multiple: int) -> None:
    usual = TOLERANCES[dtype]
    found = VerifyOverrides().on(RUNTIMES[runtime], dtype, usual)
    assert (found.multiple, found.floor, found.ceiling) == (multiple, usual.floor, usual.ceiling)
    stated = VerifyOverrides(tolerance={"multiple": 6.0}).on(RUNTIMES[runtime], dtype, usual)
    assert (stated.multiple, stated.floor) == (6.0, usual.floor)


def test_a_verdict_says_that_the_tolerance_is_the_projects_own() -> None:
    assert VerifyOverrides().notes() == ()
    said = VerifyOverrides(tolerance={"multiple": 6.0, "ceiling": 0.01}).notes()
    assert said == ("the project's own tolerance: multiple 6, ceiling 0.01",)


def larger(name: str) -> list[onnx.NodeProto]:
    """The output is 2 % larger: less than bf16 may be off by where each step rounds."""
    factor = numpy_helper.from_array(np.array(1.0234375, np.float32), "factor")
    nodes = [helper.make_node("Constant", [], ["factor"], name="factor", value=factor)]
    nodes.append(helper.make_node("CastLike", ["factor", name], ["like"], name="like"))
    return [*nodes, helper.make_node("Mul", [name, "like"], ["output"], name="larger")]


@pytest.mark.slow
@pytest.mark.skipif(IMPORT.missing() is not None, reason="TensorRT's parser is not installed")
@pytest.mark.parametrize("encoding", ["none", "rope"])
def test_small_faults_are_found_in_bf16(encoding: str, tmp_path: Path) -> None:
    spec = case(encoding, dtype="bf16")
    write(tmp_path, "sound", spec)
    plant(tmp_path, "wrong", spec, last(larger))
    verdicts = verify([tmp_path], runtimes={IMPORT.name: IMPORT}, reach={"seq": 40}).verdicts
    assert {Path(each.artifact).stem: each.state for each in verdicts} == {"sound": "passed", "wrong": "failed"}
    assert all(each.tolerance is not None and each.tolerance.multiple == 2 for each in verdicts)
