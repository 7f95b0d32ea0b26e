"""No false alarm: every encoding in every form and dtype passes on every runtime, whatever the seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import CASES, case, exported

from posexport.artifact import write_onnx
from posexport.parity import PASSED
from posexport.runtimes import RUNTIMES
from posexport.spec import FORMS
from posexport.verify import verify

ENGINES = tuple(
    name for name in ("torch", "ort-cpu", "onnx-reference", "tensorrt-import") if RUNTIMES[name].missing() is None
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case in every form and dtype."""
    made = tmp_path_factory.mktemp("sound")
    for name in CASES:
        for dtype in ("fp32", "fp16", "bf16"):
            for form in FORMS:
                write_onnx(exported(case(name, dtype=dtype), form), made / f"{name}-{form}-{dtype}.onnx")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sound_artifacts_pass_whatever_the_seed(folder: Path, seed: int) -> None:
    report = verify([folder], runtimes={name: RUNTIMES[name] for name in ENGINES}, seed=seed)
    assert report.broken == ()
    failed = [(each.artifact, each.runtime, each.reason) for each in report.verdicts if each.state == "failed"]
    assert failed == []
    unrun = {(Path(each.artifact).stem[-4:], each.runtime) for each in report.verdicts if each.state != PASSED}
    assert unrun == {("bf16", "ort-cpu")}
    assert len(report.verdicts) == len(CASES) * 3 * len(FORMS) * len(ENGINES)
