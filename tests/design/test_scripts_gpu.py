"""`scripts/gpu_acceptance`: it says so where there is no GPU, and its plumbing runs on the CPU's runtimes."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from posexport.bench.options import BenchOptions
from posexport.runtimes import gpu_missing
from posexport.verify.matrix.table import read

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("acceptance")


@pytest.mark.parametrize(
    ("states", "verified", "lacking", "code"),
    [
        (["passed", "not run"], 0, False, 0),
        (["passed", "not run"], 0, True, 3),
        (["not run", "not run"], 3, False, 3),
        ([], 3, False, 3),
        (["passed", "failed"], 0, True, 1),
        (["passed"], 1, True, 1),
    ],
)
def test_only_what_passed_is_a_success(
    acceptance: Any, states: list[str], verified: int, lacking: bool, code: int
) -> None:
    assert acceptance._exit_code(states, verified, lacking) == code


def test_the_script_is_executable() -> None:
    assert os.access(SCRIPTS / "gpu_acceptance", os.X_OK)
    assert os.access(SCRIPTS / "benchmark", os.X_OK)


@pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3(acceptance: Any, tmp_path: Path) -> None:
    output = tmp_path / "results"
    done = CliRunner().invoke(acceptance.main, ["--runtime", "torch-cuda", "--output", str(output)])
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == f"not run: {gpu_missing()}\n"
    assert not output.exists()
    assert CliRunner().invoke(acceptance.main, ["--output", str(output)]).exit_code == 3


@pytest.mark.slow
@pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")
def test_files_are_verified_and_timed_and_missing_runtimes_are_rows_with_their_reason(tmp_path: Path) -> None:
    """On the CPU's runtimes; run again, it times nothing anew, and without time all is "not run"."""

    def accept(*more: str) -> str:
        command = [sys.executable, str(SCRIPTS / "acceptance.py"), "--output", str(tmp_path), "--quick"]
        command += ["--runtime", "ort-cpu", "--runtime", "torch-cuda", "--encoding", "rope", "--dtype", "fp32"]
        command += ["--mode", "decode", "--mode", "decode-shared", "--form", "contrib"]
        environment = {**os.environ, "CXX": "no-such-compiler"}
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 3, done.stderr  # torch-cuda was named
        return done.stdout

    first = accept()
    cells = {(cell.entry.mode, cell.column): cell for cell in read(tmp_path / "matrix.json").cells.values()}
    assert {key: cell.state for key, cell in cells.items()} == {
        ("decode", "ort-cpu"): "passed",
        ("decode", "torch-cuda"): "not run",
        ("decode-shared", "ort-cpu"): "refused",
        ("decode-shared", "torch-cuda"): "refused",
    }
    found = json.loads((tmp_path / "timings.json").read_bytes())
    assert found["device"] == "cpu-acceptance"
    ours, cuda = found["results"]
    assert (ours["block"], ours["form"], ours["runtime"], ours["state"]) == (
        "rope fp32 decode",
        "contrib",
        "ort-cpu",
        "passed",
    )
    [timed] = ours["times"]
    assert (timed["seq"], timed["past_seq"], timed["seconds"]["median"] > 0) == (1, 16, True)
    assert {"torch", "lower_bound"} <= set(timed["ratios"])
    assert (cuda["state"], cuda["reason"], cuda["times"]) == ("not run", gpu_missing(), [])
    assert "1 passed, 0 failed, 0 refused, 1 not run" in first
    accept()
    assert json.loads((tmp_path / "timings.json").read_bytes()) == found
    (tmp_path / "timings.json").unlink()
    assert "0 passed, 0 failed, 0 refused, 2 not run" in accept("--bench-minutes", "0")
    late = json.loads((tmp_path / "timings.json").read_bytes())["results"]
    assert [row["reason"] for row in late] == ["out of time", gpu_missing()]


def test_a_file_that_fails_is_a_row(acceptance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("no such kernel\nand more")

    monkeypatch.setattr(acceptance, "bench", fail)
    monkeypatch.setattr(acceptance, "write_block", lambda *args, **options: None)
    file = acceptance.File(encoding="rope", form="native", dtype="fp16", mode="decode", quick=True)
    rows = file.time(["ort-cpu", "torch-cuda"], {"torch-cuda": "no GPU"}, tmp_path, BenchOptions(), in_time=True)
    assert [(row.state, row.reason) for row in rows] == [("failed", "no such kernel"), ("not run", "no GPU")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runtime", "ort-cup"), "did you mean 'ort-cpu'"),
        (("--dtype", "fp64"), "'fp64' is not one of"),
        (("--runtime", "ort-cpu", "--encoding", "rop"), "did you mean 'rope'"),
    ],
)
def test_bad_requests_exit_2(
    acceptance: Any, options: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = CliRunner().invoke(acceptance.main, (*options, "--output", str(tmp_path / "out")))
    assert done.exit_code == 2
    assert message in done.stderr + capfd.readouterr().err


def test_extras_are_installed_and_belong_to_the_stamp(tmp_path: Path) -> None:
    """The environment is made anew where other extras are asked for; pip is a stand-in that notes its arguments."""
    root = tmp_path / "checkout"
    for name in ("scripts", ".venv/bin"):
        (root / name).mkdir(parents=True)
    for name in ("scripts/environment.sh", "scripts/constraints.txt", "pyproject.toml"):
        shutil.copy(SCRIPTS.parent / name, root / name)
    pip = root / ".venv/bin/python"
    pip.write_text('#!/bin/sh\necho "$@" >>asked\n')
    pip.chmod(0o755)
    (root / "scripts/go").write_text('source "$(dirname "$0")/environment.sh"\nmake_environment\n')
    for extras in ("", "", "tensorrt", "tensorrt"):
        environment = {**os.environ, "EXTRAS": extras, "PYTHON": sys.executable}
        subprocess.run(["bash", str(root / "scripts/go")], env=environment, check=True, capture_output=True)
    installs = [line.split()[-1] for line in (root / "asked").read_text().splitlines() if " install " in line]
    assert installs == [".[dev,rtx]", ".[dev,rtx,tensorrt]"]
