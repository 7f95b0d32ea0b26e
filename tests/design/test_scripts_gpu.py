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

from posexport.runtimes import gpu_missing

SCRIPTS = Path(__file__).parents[2] / "scripts"


def accept(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "acceptance.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("acceptance")


@pytest.mark.parametrize(
    ("states", "lacking", "code"),
    [
        (["passed", "not run"], False, 0),
        (["passed", "not run"], True, 3),
        (["not run", "not run"], False, 3),
        ([], False, 3),
        (["passed", "failed"], True, 1),
    ],
)
def test_only_what_passed_is_a_success(acceptance: Any, states: list[str], lacking: bool, code: int) -> None:
    assert acceptance._exit_code(states, lacking) == code


def test_the_script_is_executable() -> None:
    assert os.access(SCRIPTS / "gpu_acceptance", os.X_OK)
    assert os.access(SCRIPTS / "benchmark", os.X_OK)


@pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3(acceptance: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = CliRunner().invoke(acceptance.main, ["--output", str(output)])
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == f"not run: {gpu_missing()}\n"
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")
def test_cells_run_and_missing_runtimes_are_rows_with_their_reason(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ("--quick", "--encoding", "rope", "--form", "contrib", "--dtype", "fp32", "--output", output)
    options += ("--mode", "decode", "--mode", "decode-shared")
    done = accept("--runtimes", "ort-cpu,tensorrt-import,torch-cuda", *options, CXX="no-such-compiler")
    assert done.returncode == 3, done.stderr  # torch-cuda was named
    found = json.loads(output.read_bytes())
    assert found["device"] == "cpu-acceptance"
    ours, imported, cuda, *shared = found["results"]
    assert (ours["cell"], ours["runtime"], ours["state"], ours["reason"]) == (
        "rope contrib fp32 decode",
        "ort-cpu",
        "passed",
        "",
    )
    assert 0 <= ours["error"] <= ours["limit"]
    assert [(each["seq"], each["past_seq"], each["against"]) for each in ours["times"]] == [(1, 16, "torch")]
    assert (imported["state"], imported["times"]) == ("passed", [])  # which runs no kernels that could be timed
    assert (cuda["state"], cuda["reason"], cuda["times"]) == ("not run", gpu_missing(), [])
    assert {each["cell"] for each in shared} == {"rope contrib fp32 decode-shared"}
    assert [each["state"] for each in shared] == ["refused"] * 3
    assert all("GroupQueryAttention" in each["reason"] for each in shared)
    assert "2 passed, 0 failed, 3 refused, 1 not run" in done.stdout


def test_a_cell_that_fails_does_not_stop_the_rest(acceptance: Any) -> None:
    results = [acceptance.Result(cell="rope", runtime=name) for name in ("ort-cpu", "torch")]
    assert not acceptance._step("export", results, lambda: 1 // 0)
    assert [(each.state, each.reason) for each in results] == [
        ("failed", "export: integer division or modulo by zero")
    ] * 2
    assert acceptance._step("verify", results[:1], lambda: None)
    assert results[0].state == "failed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runtimes", "ort-cup"), "did you mean 'ort-cpu'"),
        (("--encoding", "rop"), "did you mean 'rope'"),
        (("--dtype", "fp64"), "'fp64' is not one of"),
    ],
)
def test_bad_requests_exit_2(acceptance: Any, options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(acceptance.main, options)
    assert done.exit_code == 2
    assert message in done.stderr


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
