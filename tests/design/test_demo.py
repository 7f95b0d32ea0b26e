"""The demo runs on the photograph, and the README shows the table that it ends with."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def table(text: str) -> dict[str, tuple[str, str]]:
    """Step to (result, file) from the table in `text`."""
    rows = re.findall(r"^ (\w+(?: [\w-]+)?) {2,}(\S.*?) {2,}(demo-output/\S+) *$", text, flags=re.MULTILINE)
    return {step: (result, file) for step, result, file in rows}


def test_demo(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, shown = table(done.stdout), table((ROOT / "README.md").read_text())
    assert {step: file for step, (_, file) in found.items()} == {step: file for step, (_, file) in shown.items()}
    assert found["verify torch"][0].startswith("passed: error")
    assert found["verify ort-cpu"][0].startswith("passed: error")
    assert found["verify tensorrt-import"][0].startswith("passed: error")
    assert found["verify tensorrt-import"][0].endswith("kernels were not run")
    assert found["compile"][0].startswith("TensorRT-RTX, 6 kernels, attention fused")
    for _, file in found.values():
        assert (tmp_path / file).stat().st_size
    with np.load(tmp_path / "demo-output" / "photograph.npz") as inputs:
        assert inputs["hidden_states"].shape == (1, 196, 768)
        assert inputs["hidden_states"].astype(float).std() > 0.3, "a photograph is not flat"
        assert inputs["position_ids"][0, 1].tolist() == [1, 0], "x, the column, comes first"
        assert inputs["position_ids"][0, 14].tolist() == [0, 1]
