"""`scripts/gpu_acceptance`: prepared files are verified with only their references, and every fault there is found."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from posexport.errors import Reason
from posexport.files import sha256_of
from posexport.runtimes import gpu_missing, ort
from posexport.runtimes.tensors import load_arrays, save_arrays

pytestmark = pytest.mark.few_inputs

SCRIPTS = Path(__file__).parents[2] / "scripts"
BLOCK = "rope-decomposed-fp32-prefill"

sys.path.insert(0, str(SCRIPTS))
acceptance: Any = importlib.import_module("acceptance")
items: Any = importlib.import_module("acceptance_items")

without_gpu = pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU")


def accept(*arguments: object) -> Result:
    return CliRunner().invoke(acceptance.main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one prepared tiny block."""
    folder = tmp_path_factory.mktemp("prepared") / "block"
    chosen = ("--encoding", "rope", "--form", "decomposed", "--dtype", "fp32", "--mode", "prefill")
    done = accept("--prepare", folder, "--quick", *chosen)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"part-01/{BLOCK}"), done.output
    return folder


@pytest.fixture
def folder(block: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which tests may damage."""
    return Path(shutil.copytree(block, tmp_path / "prepared"))


def rows(folder: Path, tmp_path: Path, *options: str, runtime: str = "ort-cpu") -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the written rows."""
    output = tmp_path / "out"
    done = accept("--from-prepared", folder, "--runtime", runtime, "--output", output, "--no-time", *options)
    assert done.exit_code in (0, 1, 3), done.output
    return done.exit_code, json.loads((output / "acceptance.json").read_bytes())["rows"]


def test_a_prepared_file_passes(block: Path, tmp_path: Path) -> None:
    code, (row,) = rows(block, tmp_path)
    assert (code, row["file"], row["runtime"], row["check"], row["state"]) == (0, BLOCK, "ort-cpu", "parity", "passed")
    assert 0 < row["error"] <= row["limit"] < 1e-3
    assert row["cases"] > 3
    page = (tmp_path / "out/acceptance.md").read_text()
    assert f"| {BLOCK} | ort-cpu | parity | ✓ passed |" in page
    listed = items.read_list(block)
    assert all(sha256_of(block / listed.items[0].place / name) for name in listed.items[0].file.sha256)


def test_what_passed_stands_when_it_runs_again(block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows(block, tmp_path)
    monkeypatch.setattr(acceptance, "check_file", lambda prepared, folder, pool, runtimes, missing: iter(()))
    assert rows(block, tmp_path) == first


def kept(folder: Path, missing: Reason | None, in_time: bool = True, **fields: Any) -> bool:
    """Whether a row of an earlier run is kept."""
    row = acceptance.Row(**{"file": "a", "runtime": "ort-cuda", "check": "parity", "state": "passed", **fields})
    results = acceptance.Results(folder=folder, header={})
    results.earlier["a", "ort-cuda"] = [row]
    found = results.standing("a", "ort-cuda", missing, "1", in_time)
    assert found in ([], [row])
    return bool(found)


def test_only_rows_that_may_not_be_others_now_stand(tmp_path: Path) -> None:
    no_gpu = Reason("no-gpu", "no GPU")
    assert kept(tmp_path, None, sha256="1")
    assert not kept(tmp_path, None, sha256="2")
    assert not kept(tmp_path, None, state="failed")
    assert not kept(tmp_path, None, state="not run", reason="no GPU", code="no-gpu")
    assert kept(tmp_path, no_gpu, state="not run", reason="no GPU", code="no-gpu")
    assert kept(tmp_path, None, state="not run", reason="no kernels", code="unsupported")
    assert not kept(tmp_path, no_gpu, state="not run", reason=acceptance.OUT_OF_TIME)
    assert kept(tmp_path, None, in_time=False, state="failed", sha256="1")
    assert not kept(tmp_path, None, in_time=False, state="failed", sha256="2")


@pytest.mark.slow
def test_several_are_verified_at_a_time_and_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    chosen = ("--encoding", "rope", "--encoding", "alibi", "--encoding", "t5", "--form", "decomposed")
    done = accept("--prepare", folder, "--quick", *chosen, "--dtype", "fp32", "--mode", "prefill")
    assert done.exit_code == 0, done.output
    broken = folder / "part-01" / BLOCK / "model.onnx"
    broken.write_bytes(broken.read_bytes()[:-1] + b"\0")
    (tmp_path / "one").mkdir()
    alone, several = rows(folder, tmp_path / "one", "--jobs", "1"), rows(folder, tmp_path, "--jobs", "3")
    assert alone == several
    assert [row["state"] for row in several[1]] == ["failed", "passed", "passed"]
    assert [row["file"].partition("-")[0] for row in several[1]] == ["rope", "alibi", "t5"]
    code, late = rows(folder, tmp_path / "one", "--jobs", "3", "--minutes", "0")
    assert (code, late) == alone, "what was found before stands"


def test_rows_of_other_files_stay(block: Path, tmp_path: Path) -> None:
    _, (row,) = rows(block, tmp_path)
    path = tmp_path / "out/acceptance.json"
    data = json.loads(path.read_bytes())
    data["rows"].append({**row, "file": "another"})
    path.write_text(json.dumps(data))
    assert [row["file"] for row in rows(block, tmp_path)[1]] == [BLOCK, "another"]


def model_of(folder: Path) -> Path:
    return folder / "part-01" / BLOCK / "model.onnx"


def changed_weight(folder: Path) -> None:
    path = model_of(folder)
    model = onnx.load(path)
    weight = next(one for one in model.graph.initializer if "v_proj" in one.name or "o_proj" in one.name)
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    onnx.save(model, path)


def wrong_reference(folder: Path) -> None:
    path = model_of(folder).with_name("references.tensors")
    arrays = {name: np.array(array) for name, array in load_arrays(path).items()}
    name = max((name for name in arrays if "/exact/" in name), key=lambda name: arrays[name].shape[1])
    arrays[name] = arrays[name][:, ::-1]  # the tokens in another order
    save_arrays(path, arrays)


def damaged(folder: Path) -> None:
    path = model_of(folder)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def lost(folder: Path) -> None:
    model_of(folder).with_name("references.tensors").unlink()


def signed_again(folder: Path) -> None:
    """Update the hashes so that the changed files count as the prepared ones."""
    listed = json.loads((folder / items.LIST).read_bytes())
    known = listed["items"][0]["file"]["sha256"]
    known.update({name: sha256_of(model_of(folder).with_name(name)) for name in known})
    (folder / items.LIST).write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("fault", "again", "reason"),
    [
        (changed_weight, True, "output 'output' is off by"),
        (wrong_reference, True, "the reference of "),
        (wrong_reference, False, "'references.tensors' is not the file that was prepared"),
        (changed_weight, False, "'model.onnx' is not the file that was prepared"),
        (damaged, False, "'model.onnx' is not the file that was prepared"),
        (lost, False, "'references.tensors' can't be read"),
    ],
)
def test_every_fault_fails(
    fault: Callable[[Path], None], again: bool, reason: str, folder: Path, tmp_path: Path
) -> None:
    fault(folder)
    if again:
        signed_again(folder)
    code, (row,) = rows(folder, tmp_path)
    assert (code, row["state"]) == (1, "failed")
    assert row["reason"].startswith(reason)


@without_gpu
def test_without_a_gpu_rows_are_not_run_with_their_reason(block: Path, tmp_path: Path) -> None:
    code, (row,) = rows(block, tmp_path, runtime="torch-cuda")
    assert (code, row["state"], row["reason"]) == (3, "not run", gpu_missing())
    code, found = rows(block, tmp_path, "--runtime", "ort-cpu", runtime="torch-cuda")
    assert (code, [row["state"] for row in found]) == (3, ["not run", "passed"])


def test_what_is_not_there_or_out_of_time_is_not_run(folder: Path, tmp_path: Path) -> None:
    code, (row,) = rows(folder, tmp_path, "--minutes", "0")
    assert (code, row["state"], row["reason"]) == (3, "not run", acceptance.OUT_OF_TIME)
    shutil.rmtree(folder / "part-01")
    code, (row,) = rows(folder, tmp_path)
    assert (code, row["state"], row["reason"]) == (3, "not run", f"part-01/{BLOCK} is not here: copy its part")


def test_an_old_onnxruntime_that_cannot_open_a_file_says_nothing_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(folder).write_bytes(b"no graph")
    signed_again(folder)
    code, (row,) = rows(folder, tmp_path)
    assert (code, row["state"]) == (1, "failed")
    monkeypatch.setattr(ort.onnxruntime, "__version__", "1.22.1")
    code, (row,) = rows(folder, tmp_path)
    assert (code, row["state"]) == (3, "not run")
    assert row["reason"].startswith(f"this onnxruntime is older than {ort.OLDEST} and can't open the file: ")
    assert f'"onnxruntime-gpu>={ort.OLDEST};' in (SCRIPTS.parent / "pyproject.toml").read_text()


@pytest.mark.slow
def test_a_whole_decoder_is_verified_makes_tokens_and_is_timed(tmp_path: Path) -> None:
    """The script runs with wheels from a folder. A token that is not the most likely one fails."""
    pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHON_GPU": sys.executable}

    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPTS / "gpu_acceptance"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    folder, output = tmp_path / "prepared", tmp_path / "out"
    chosen = ("--model", "decoder-grown-decomposed", "--model", "vit-decomposed", "--dtype", "fp32")
    done = accept("--prepare", folder, "--quick", *chosen)
    assert done.exit_code == 0, done.output
    timed = ("--from-prepared", folder, "--runtime", "ort-cpu", "--output", output)
    done = script(*timed)
    assert done.returncode == 0, done.stderr
    found = json.loads((output / "acceptance.json").read_bytes())["rows"]
    decoder, vit = "decoder-grown-decomposed-fp32", "vit-decomposed-fp32"
    checks = [(decoder, "parity"), (decoder, "generation"), (decoder, "time"), (vit, "parity"), (vit, "time")]
    assert [(row["file"], row["check"], row["state"]) for row in found] == [(*check, "passed") for check in checks]
    assert "192 of 192 tokens are those of float64" in found[1]["measured"]
    assert found[2]["times"][0]["tokens_per_second"] > 1
    listed = json.loads((folder / items.LIST).read_bytes())
    listed["items"][0]["file"]["tokens"]["prompts"][1][0] += 1
    (folder / items.LIST).write_text(json.dumps(listed))
    shutil.rmtree(output)
    assert script(*timed, "--no-time").returncode == 1
    found = json.loads((output / "acceptance.json").read_bytes())["rows"]
    assert [row["state"] for row in found] == ["passed", "failed", "passed"]


def test_the_script_says_which_wheels_it_lacks(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "gpu_acceptance"), "--from-prepared", str(tmp_path), "--wheels", str(tmp_path)]
    environment = {**os.environ, "PYTHON_GPU": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        f"Error: there are no wheels in '{tmp_path}': give a folder of .whl files.\n",
    )


def test_the_most_telling_files_come_first() -> None:
    order = list(items.items())
    assert [item.name for item in order[:3]] == [f"{name}-fp16" for name in list(items.MODELS)[:3]]
    blocks = [item for item in order if not item.model]
    first = blocks[: len({item.encoding for item in blocks})]
    assert {(item.form, item.dtype, item.mode) for item in first} == {("native", "fp16", "decode")}
    assert len({item.name for item in order}) == len(order) > 1000
    assert [item.name for item in items.items(model=["vit-native"], dtype=["fp32"])] == ["vit-native-fp32"]
    assert not any(item.model for item in items.items(encoding=["rope"]))


def test_no_part_is_too_large_and_the_list_ends_where_the_room_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(self: Any, folder: Path, checkpoints: Path) -> None:
        (folder / "model.onnx").write_bytes(bytes(600))

    monkeypatch.setattr(items.Item, "make", make)
    monkeypatch.setattr(items, "PART_BYTES", 1500)
    prepared = importlib.import_module("posexport.verify.prepared.make")
    monkeypatch.setattr(prepared, "prepare_file", lambda *args, **options: None)
    *_, last = items.prepare(tmp_path, items.items(encoding=["rope"]), 3100, quick=True)
    assert [item.place.split("/")[0] for item in last.items] == ["part-01"] * 2 + ["part-02"] * 2 + ["part-03"]
    assert items.read_list(tmp_path) == last


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
def test_only_what_passed_is_a_success(states: list[str], lacking: bool, code: int, tmp_path: Path) -> None:
    found = [acceptance.Row(file="a", runtime="ort-cpu", check="parity", state=state) for state in states]
    assert acceptance.Results(folder=tmp_path, header={}, rows=found).exit_code(lacking) == code


def test_the_script_is_executable() -> None:
    assert os.access(SCRIPTS / "gpu_acceptance", os.X_OK)
    assert os.access(SCRIPTS / "benchmark", os.X_OK)


@without_gpu
def test_without_a_gpu_nothing_is_prepared_for_it(tmp_path: Path) -> None:
    output = tmp_path / "results"
    done = accept("--runtime", "torch-cuda", "--output", output)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == f"not run: {gpu_missing()}\n"
    assert not output.exists()
    assert accept("--output", output).exit_code == 3


def test_a_file_that_fails_when_it_is_timed_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("no such kernel\nand more")

    monkeypatch.setattr(acceptance, "bench", fail)
    prepared = items.Prepared(name="a", place="part-01/a", is_model=True, shapes=())
    (row,) = acceptance._times(Path("model.onnx"), prepared, ["ort-cuda"], "time with CUDA graphs", True)
    assert (row.state, row.reason) == ("failed", "no such kernel")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runtime", "ort-cup"), "did you mean 'ort-cpu'"),
        (("--dtype", "fp64"), "'fp64' is not one of"),
        (("--runtime", "ort-cpu", "--encoding", "rop"), "did you mean 'rope'"),
        (("--prepare", "a", "--from-prepared", "b"), "give one of them"),
        (("--from-prepared", "nowhere"), "can't be read (No such file or directory)"),
        (("--prepare", str(SCRIPTS)), "is not empty: give a new folder"),
    ],
)
def test_bad_requests_exit_2(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = accept(*options, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert message in done.stderr


def test_tokens_behind_another_right_one_are_not_judged() -> None:
    """Row 1 takes the other one of two tokens within the limit. The logits after it differ."""
    from posexport.verify.graph.judge_tokens import judge_tokens
    from posexport.verify.parity import TOLERANCES

    exact = np.zeros((2, 3, 4))
    exact[..., 1] = 5.0
    exact[0, 0, 2] = 5.0 - 1e-7
    made, known = np.array([[2, 3, 3], [1, 1, 1]]), np.array([[True, False, False], [True, True, True]])
    given = ("model.onnx", "ort-cpu", made, exact, exact, TOLERANCES["fp32"])
    assert judge_tokens(*given).state == "failed"
    verdict = judge_tokens(*given, known)
    assert (verdict.state, verdict.measured) == ("passed", "3 of 4 tokens are those of float64")
    assert verdict.notes[-1] == "2 tokens after a place where either is right were not compared"
    made[1, 2] = 3
    assert judge_tokens(*given, known).state == "failed"


def test_extras_are_installed_and_belong_to_the_stamp(tmp_path: Path) -> None:
    """Other extras create the environment again. pip is a stand-in that records its arguments."""
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
