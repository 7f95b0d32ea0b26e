"""The demo runs on the photograph, and README.md shows its present output."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d[\d.]*(?:e-?\d+)?(?= MB|;|,|$)")


def rows(text: str) -> dict[str, str]:
    """Step to result, from the lines that the demo prints."""
    return dict(re.findall(r"^(input|export|compile|verify [\w-]+) {2,}(\S.*)$", text, flags=re.MULTILINE))


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed, shown = rows(done.stdout), rows((ROOT / "README.md").read_text(encoding="utf-8"))
    assert list(printed) == list(shown), "run ./scripts/demo --readme"
    for step, result in shown.items():
        if not result.startswith("not run"):  # the machine that wrote the README had no GPU
            assert NUMBER.sub("#", printed[step]) == NUMBER.sub("#", result), f"{step}: run ./scripts/demo --readme"
            numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed[step], result)]
            assert numbers[0] == pytest.approx(numbers[1], rel=0.3), f"{step}: run ./scripts/demo --readme"
    assert printed["verify ort-cpu"].startswith("passed: error")
    assert printed["verify tensorrt-import"].endswith("kernels were not run")
    assert "6 kernels, attention fused" in printed["compile"]
    for file in ("photograph.npz", "rope2d.onnx", "rope2d.plan"):
        assert (tmp_path / "demo-output" / file).stat().st_size
    with np.load(tmp_path / "demo-output" / "photograph.npz") as inputs:
        assert inputs["hidden_states"].shape == (1, 196, 768)
        assert inputs["hidden_states"].astype(float).std() > 0.3, "a photograph is not flat"
        assert inputs["position_ids"][0, 1].tolist() == [1, 0], "x, the column, comes first"
        assert inputs["position_ids"][0, 14].tolist() == [0, 1]
