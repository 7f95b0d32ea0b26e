"""`posexport verify` on every kind of artifact: fixed shapes, tokens, short tables, external weights, plans, hostile
files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import case, cli, exported, refused, tree
from safetensors.torch import save_file
from trt_helpers import RTX, needs_rtx
from trt_helpers import exported as exported_file
from verify_helpers import write

from posexport.artifact.loaded import load_artifact
from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.export.compile import compile_plan
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.spec.spec import Spec
from posexport.verify import eligibility, verify

pytestmark = pytest.mark.few_inputs

ENGINES = ("--runtime", "torch", "--runtime", "ort-cpu", "--reach", "seq=100")
VERDICT = {
    "artifact", "sha256", "weights", "signature", "runtime", "check", "state", "reason", "reason_code", "worst",
    "worst_usual", "tolerance", "cases", "reach", "not_shown", "notes", "where", "departure", "describe", "measured",
    "limit_text",
}  # fmt: skip
COMPARISON = {
    "case", "far_out", "output", "state", "reason", "reason_code", "max_error", "rms_error", "torch_error", "limit",
    "index", "got", "reference", "reference_rms",
}  # fmt: skip


def _write(folder: Path, name: str, spec: Spec, **fixed: int) -> Path:
    path = folder / f"{name}.onnx"
    write_onnx(exported(spec, **fixed), path)
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """Sound artifacts of every kind in one folder, verified with --json: the whole report, and verdicts by (name,
    runtime)."""
    folder = tmp_path_factory.mktemp("kinds")
    _write(folder, "fixed", case("alibi"), batch=1, seq=5)
    _write(folder, "fixed-length", case("rope"), seq=5)
    _write(folder, "long", case("none"), batch=2, seq=13)
    _write(folder, "tokens", case("rope", vocab_size=5))
    _write(folder, "short-table", case("learned", max_positions=3))
    _write(folder, "window", case("rope", window=2000), seq=9)
    write(folder, "gathers", case("relative-table", max_distance=40), "function")
    write_onnx(exported(case("t5")), folder / "outside.onnx", external_from=0)
    assert (folder / "outside.onnx.data").is_file()
    result = cli("verify", folder, *ENGINES, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    return data, {(Path(each["artifact"]).stem, each["runtime"]): each for each in data["verdicts"]}


@pytest.mark.parametrize("runtime", ["torch", "ort-cpu"])
@pytest.mark.parametrize(
    "name", ["fixed", "fixed-length", "long", "tokens", "short-table", "window", "outside", "gathers"]
)
def test_every_kind_of_artifact_passes(
    found: tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]], name: str, runtime: str
) -> None:
    verdict = found[1][name, runtime]
    assert verdict["state"] == "passed"
    assert verdict["cases"] >= 13
    assert verdict["reach"]["keys"] == {"fixed": 5, "fixed-length": 5, "window": 9, "long": 13}.get(name, 100)


@pytest.mark.slow
def test_onnx_reference_gathers_what_onnx_itself_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, "gathers", case("relative-table", max_distance=40), "function")
    result = cli("verify", path, "--runtime", "onnx-reference", "--reach", "seq=100")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_slow_runtime_takes_small_inputs_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "rope", case("rope"))
    runtimes = {name: RUNTIMES[name] for name in ("ort-cpu", "onnx-reference")}
    monkeypatch.setattr(eligibility, "WORK", {"onnx-reference": 2e5})
    every, some = verify([path], runtimes=runtimes).verdicts
    assert (some.state, 0 < some.cases < every.cases) == ("passed", True)
    assert f"only {some.cases} of {every.cases} sets of inputs" in some.notes[0]
    monkeypatch.setattr(eligibility, "WORK", {"onnx-reference": 1.0})
    none = verify([path], runtimes=runtimes).verdicts[1]
    assert none.state == "not run"
    assert "multiply-adds" in (none.reason or "")


def test_a_window_that_no_sequence_reached_over_is_inconclusive(
    found: tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]],
) -> None:
    missed = {name: verdict["not_shown"] for (name, runtime), verdict in found[1].items() if runtime == "ort-cpu"}
    assert missed["window"] == ["no sequence was longer than the window of 2000, so it did not show"]
    assert missed["fixed"] == missed["gathers"] == missed["short-table"] == []
    assert found[0]["inconclusive"] == sum(bool(verdict["not_shown"]) for verdict in found[1].values())


def test_strict_takes_no_inconclusive_verdict(tmp_path: Path) -> None:
    path = tmp_path / "window.onnx"
    write_onnx(exported(case("rope", window=2000), seq=9), path)
    command = ("verify", path, "--runtime", "ort-cpu")
    loose = cli(*command, "--junit", tmp_path / "loose.xml")
    assert loose.exit_code == 0
    assert "inconclusive" in loose.stdout
    assert "1 passed (1 of them inconclusive)" in loose.stdout
    strict = cli(*command, "--strict", "--junit", tmp_path / "strict.xml")
    assert strict.exit_code == 1
    assert 'failures="0"' in (tmp_path / "loose.xml").read_text()
    assert "inconclusive: no sequence was longer than the window of 2000" in (tmp_path / "loose.xml").read_text()
    assert 'failures="1"' in (tmp_path / "strict.xml").read_text()


def test_the_json_keeps_its_keys(found: tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]) -> None:
    data = found[0]
    assert set(data) == {
        *("kind", "version", "exit_code", "seed", "strict", "counts", "inconclusive", "verdicts", "unreadable")
    }
    assert set(data["counts"]) == {"passed", "failed", "not run"}
    assert data["exit_code"] == 0
    assert data["seed"] == 0
    assert data["unreadable"] == []
    for verdict in data["verdicts"]:
        assert set(verdict) == VERDICT
        assert verdict["weights"] == {"code": "as-manifest", "text": "as its manifest says"}
        assert verdict["signature"] == {"code": "unsigned", "text": "not signed"}
        assert verdict["sha256"] == json.loads(Path(f"{verdict['artifact']}.json").read_bytes())["sha256"]
        if verdict["state"] == "passed":
            assert set(verdict["worst"]) == set(verdict["worst_usual"]) == COMPARISON
            assert verdict["worst_usual"]["far_out"] is False
            assert set(verdict["tolerance"]) == {"multiple", "floor", "ceiling"}
            assert set(verdict["describe"]) == {"engine", "version", "device"}


@pytest.mark.slow
def test_the_seed_changes_the_inputs_and_one_seed_gives_one_answer(tmp_path: Path) -> None:
    path = write(tmp_path, "none", case("none"))
    errors = [
        json.loads(cli("verify", path, "--runtime", "torch", "--seed", seed, "--json").stdout)["verdicts"][0]["worst"]
        for seed in ("0", "0", "1")
    ]
    assert errors[0] == errors[1]
    assert errors[0] != errors[2]


def test_own_inputs_are_used_and_those_that_do_not_fit_are_told_by_artifact(tmp_path: Path) -> None:
    write(tmp_path, "alibi", case("alibi"))
    write(tmp_path, "none", case("none"))
    values = {"hidden_states": np.ones((1, 3, 32), np.float32) / 3, "position_ids": np.array([[5, 1, 900]])}
    np.savez(tmp_path / "own.npz", **values)
    result = cli("verify", tmp_path, "--runtime", "ort-cpu", "--inputs", tmp_path / "own.npz", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == data["exit_code"] == 2
    (verdict,) = data["verdicts"]
    assert (verdict["state"], verdict["cases"], verdict["worst"]["case"]) == ("passed", 1, "own.npz")
    assert verdict["notes"] == []
    (unreadable,) = data["unreadable"]
    assert Path(unreadable["artifact"]).name == "none.onnx"
    assert "'position_ids'" in unreadable["error"]
    assert "none.onnx" in result.stderr
    assert result.stderr.count("\n") == 1


def _edited(path: Path, change: Any) -> Path:
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    path.with_name(path.name + ".json").unlink()  # its sha256 would show that the file was changed
    return path


def _outside(folder: Path) -> Path:
    (folder / "inner").mkdir()
    path = folder / "inner" / "outside.onnx"
    write_onnx(exported(case("none")), path, external_from=0)
    shutil.move(folder / "inner" / "outside.onnx.data", folder)

    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../outside.onnx.data"

    return _edited(path, change)


def _no_data(folder: Path) -> Path:
    path = folder / "outside.onnx"
    write_onnx(exported(case("none")), path, external_from=0)
    (folder / "outside.onnx.data").unlink()
    return path


def _without(key: str) -> Any:
    def change(model: onnx.ModelProto) -> None:
        kept = [entry for entry in model.metadata_props if entry.key != key]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)

    return lambda folder: _edited(write(folder, "none", case("none")), change)


def _impossible(model: onnx.ModelProto) -> None:
    entry = next(each for each in model.metadata_props if each.key == "posexport.spec")
    entry.value = json.dumps({**json.loads(entry.value), "num_heads": 5})


def _weightless(model: onnx.ModelProto) -> None:
    tensor = next(each for each in model.graph.initializer if each.name == "o_proj.weight")
    tensor.name = "o.weight"


UNREADABLE: dict[str, Any] = {
    "not there": lambda folder: folder / "nothing.onnx",
    "empty": lambda folder: _bytes(folder, b""),
    "text": lambda folder: _bytes(folder, b"a block with rope"),
    "junk": lambda folder: _bytes(folder, np.random.default_rng(0).bytes(5000)),
    "not ours": _without("posexport.spec"),
    "no form": _without("posexport.form"),
    "an impossible spec": lambda folder: _edited(write(folder, "none", case("none")), _impossible),
    "a weight missing": lambda folder: _edited(write(folder, "none", case("none")), _weightless),
    "data outside the folder": _outside,
    "data gone": _no_data,
    "a plan without a manifest": lambda folder: _bytes(folder, b"plan", "a.plan"),
}


def _bytes(folder: Path, content: bytes, name: str = "a.onnx") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_one_sentence_and_exit_2(tmp_path: Path, name: str) -> None:
    path = UNREADABLE[name](tmp_path)
    before = tree(tmp_path)
    refused(cli("verify", path, "--runtime", "torch", "--runtime", "ort-cpu"), path.name)
    assert tree(tmp_path) == before


def test_a_file_cut_anywhere_is_unreadable(tmp_path: Path) -> None:
    whole = write(tmp_path, "none", case("none")).read_bytes()
    cut = tmp_path / "cut.onnx"
    for length in [*range(0, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(RequestError, match=r"cut\.onnx"):
            load_artifact(cut)


def test_a_dimension_without_a_name_is_free_and_one_of_zero_breaks_the_contract(tmp_path: Path) -> None:
    def nameless(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_param")

    def zero(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 0

    def fixed(model: onnx.ModelProto) -> None:
        model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 1

    uneven = load_artifact(_edited(write(tmp_path, "uneven", case("rope")), fixed))
    assert uneven.contract_violation is not None
    assert "batch is free in 'hidden_states' and 1 in 'position_ids'" in uneven.contract_violation
    free = load_artifact(_edited(write(tmp_path, "free", case("none")), nameless))
    assert free.contract_violation is None
    assert free.bounds["seq"] == (1, None)
    path = _edited(write(tmp_path, "zero", case("none")), zero)
    result = cli("verify", path, "--runtime", "torch")
    assert result.exit_code == 1
    assert "'hidden_states' has shape" in " ".join(result.stdout.split())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and the artifact that it was built from."""
    folder = tmp_path_factory.mktemp("plan")
    if api.can_build(RTX) is None:
        source = Path(shutil.copy(exported_file("rope"), folder / "rope.onnx"))
        compile_plan(source, folder / "rope.plan", BuildOptions(runtime=RTX, profile=("seq=1:4:32",)))
    return folder


def _copied(plan: Path, folder: Path) -> Path:
    shutil.copytree(plan, folder, dirs_exist_ok=True)
    return folder / "rope.plan"


@needs_rtx
@pytest.mark.skipif(RUNTIMES[RTX].missing() is None, reason="there is a GPU")
def test_a_plan_is_not_run_without_its_gpu(plan: Path) -> None:
    subject = load_artifact(plan / "rope.plan")
    assert subject.bounds == {"batch": (1, 8), "seq": (1, 32)}
    assert subject.contract_violation is None
    result = cli("verify", plan / "rope.plan", "--json")
    (verdict,) = json.loads(result.stdout)["verdicts"]
    assert (verdict["runtime"], verdict["state"]) == (RTX, "not run")
    assert verdict["reason"] == str(RUNTIMES[RTX].missing())
    assert result.exit_code == 3
    assert "nothing was verified" in result.stderr
    asked = cli("verify", plan / "rope.plan", "--runtime", "ort-cpu", "--json")
    assert asked.exit_code == 3
    assert "runs on nothing else" in json.loads(asked.stdout)["verdicts"][0]["reason"]
    both = cli("verify", plan, "--runtime", "ort-cpu", "--runtime", RTX, "--reach", "seq=32")
    assert both.exit_code == 0
    assert "1 passed" in both.stdout


def _tampered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _other_source(path: Path) -> None:
    write(path.parent, "rope", case("rope"))


def _manifest(**over: Any) -> Any:
    def change(path: Path) -> None:
        beside = path.with_name(path.name + ".json")
        beside.write_text(json.dumps({**json.loads(beside.read_text()), **over}))

    return change


CHANGED: dict[str, Any] = {"tampered": _tampered, "another source": _other_source}

SPOILT: dict[str, Any] = {
    "no manifest": lambda path: path.with_name("rope.plan.json").unlink(),
    "no source": lambda path: path.with_name("rope.onnx").unlink(),
    "a manifest without profiles": _manifest(profiles={}),
    "a manifest of nothing": _manifest(sha256=1),
}


@needs_rtx
@pytest.mark.parametrize("name", CHANGED)
def test_a_plan_that_was_changed_fails_on_its_runtime_unopened(plan: Path, tmp_path: Path, name: str) -> None:
    path = _copied(plan, tmp_path)
    CHANGED[name](path)
    result = cli("verify", path, "--json")
    (verdict,) = json.loads(result.stdout)["verdicts"]
    assert (result.exit_code, verdict["runtime"], verdict["state"]) == (1, RTX, "failed")
    assert verdict["reason_code"] == "manifest"
    refused(cli("bench", path), "rope.", "their sha256 differ")


@needs_rtx
def test_a_plan_is_held_against_its_original_by_its_source(plan: Path, tmp_path: Path) -> None:
    weights = dict(load_artifact(plan / "rope.plan").source.weights())
    file = tmp_path / "w.safetensors"
    save_file({**weights, "v_proj.weight": weights["v_proj.weight"].flip(0)}, file)
    result = cli("verify", plan / "rope.plan", "--weights", file, "--json")
    (verdict,) = json.loads(result.stdout)["verdicts"]
    assert (result.exit_code, verdict["runtime"], verdict["reason_code"]) == (1, RTX, "other-weights")
    save_file(weights, file)
    result = cli("verify", plan / "rope.plan", "--weights", file, "--json")
    (verdict,) = json.loads(result.stdout)["verdicts"]
    assert verdict["weights"]["code"] == "as-original"


@needs_rtx
@pytest.mark.parametrize("name", SPOILT)
def test_a_plan_that_is_not_what_it_says_is_refused(plan: Path, tmp_path: Path, name: str) -> None:
    path = _copied(plan, tmp_path)
    SPOILT[name](path)
    refused(cli("verify", path), "rope.")


@needs_rtx
@pytest.mark.parametrize("shape", [[1], [1, 4, 256, 1], [9, 9, 9]])
def test_profiles_of_any_shape_end_in_a_sentence(plan: Path, tmp_path: Path, shape: list[int]) -> None:
    path = _copied(plan, tmp_path)
    profiles = json.loads((tmp_path / "rope.plan.json").read_text())["profiles"]
    _manifest(profiles={name: {"min": shape, "opt": shape, "max": shape} for name in profiles})(path)
    result = cli("verify", path)
    assert result.exit_code in (2, 3), result.output
    assert result.stderr.startswith("Error: ")
