"""Cells of many matrix jobs become one matrix. Real jobs, on this machine and on Ray, give the same results as the
commands."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import cli, exported, small_spec

from posexport.artifact.onnx_artifact import write_onnx
from posexport.verify.matrix.table import Cell, Entry, Matrix, read
from posexport.workflows.sweep.folder import file_name, merged

ROPE = Entry(encoding="rope", form="native", dtype="fp32", mode="prefill")
SWIN = {"encoding": "swin", "form": "native", "dtype": "fp32", "mode": "decode"}


def part(folder: Path, name: str, *cells: tuple[Entry, str, str], target: str = "portable", torch: str = "1") -> Path:
    matrix = Matrix(target=target, made_by={"torch": torch})
    matrix.put(Cell(entry=entry, column=column, state=state, reason=name) for entry, column, state in cells)
    matrix.write(folder / name)
    return folder / name


def test_the_cell_that_says_most_stands(tmp_path: Path) -> None:
    parts = [
        part(tmp_path, "a", (ROPE, "ort-cpu", "failed"), (ROPE, "ort-cuda", "not run"), (ROPE, "torch", "passed")),
        part(tmp_path, "b", (ROPE, "ort-cpu", "passed"), (ROPE, "ort-cuda", "passed"), (ROPE, "torch", "failed")),
        part(tmp_path, "c", (ROPE, "ort-cpu", "not run"), (ROPE, "ort-cuda", "not run"), (ROPE, "torch", "not run")),
        part(tmp_path, "d", (ROPE, "torch", "passed"), target="ort"),
        part(tmp_path, "e", (ROPE, "build", "failed"), torch="2"),
    ]
    for order in (parts, [*parts[3::-1], parts[4]]):
        found, others = merged(order, [(SWIN, "no order"), ({**SWIN, "target": "tensorrt"}, "unasked")])
        cells = {(cell.entry.encoding, cell.column): cell for cell in found["portable"].ordered()}
        assert {key: cell.reason for key, cell in cells.items() if key[0] == "rope"} == {
            ("rope", "ort-cpu"): "a", ("rope", "ort-cuda"): "b", ("rope", "torch"): "b",
        }  # fmt: skip
        assert {cell.state for key, cell in cells.items() if key[0] == "swin"} == {"refused"}
        assert others == 1
        assert {file_name(target): len(matrix.cells) for target, matrix in found.items()} == {
            "matrix.json": 6,
            "matrix-ort.json": 1,
        }


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "ray"])
def test_real_jobs(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix, artifacts that pass and fail, and a timing. The report page accepts the folder."""
    for name, spec in {"rope": small_spec("rope"), "none": small_spec("none")}.items():
        write_onnx(exported(spec), tmp_path / f"{name}.onnx", external_from=0 if name == "none" else 10**9)
    data = tmp_path / "none.onnx.data"
    data.write_bytes(data.read_bytes()[:-4] + b"\x00\x00\x80\x7f")  # an infinity among the weights
    toml = """
        [[job]]
        kind = "matrix"
        encoding = "none"
        form = ["native", "decomposed"]
        dtype = "fp32"
        mode = "prefill"
        runtime = "ort-cpu"
        [[job]]
        kind = "verify"
        artifact = "*.onnx"
        runtime = "ort-cpu"
        [[job]]
        kind = "bench"
        artifact = "rope.onnx"
        scenario = "prefill:16"
        runtime = "ort-cpu"
        rounds = 2
        seconds = 2
    """
    (tmp_path / "sweep.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    if where == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    # in its own process: other tests import Ray, which would keep their settings
    command = [sys.executable, "-m", "posexport", "sweep", "sweep.toml", "--json"]
    found = subprocess.run(command + ["--ray", "local"] * (where == "ray"), capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    jobs = {each["label"]: each for each in json.loads(found.stdout)["jobs"]}
    assert {label: each["state"] for label, each in jobs.items()} == {
        "matrix none native fp32 prefill": "passed",
        "matrix none decomposed fp32 prefill": "passed",
        "verify none.onnx": "failed",
        "verify rope.onnx": "passed",
        "bench rope.onnx prefill:16": "passed",
    }
    assert {cell.state for cell in read(Path("sweep/matrix.json")).ordered()} == {"passed"}
    assert len(read(Path("sweep/matrix.json")).cells) == 2
    timed = json.loads(Path("sweep", jobs["bench rope.onnx prefill:16"]["result"]).read_text())
    assert (timed["kind"], timed["file"]) == ("bench", "rope.onnx")
    assert cli("report", "sweep").exit_code == 0
    assert "ort-cpu" in Path("report.html").read_text()
