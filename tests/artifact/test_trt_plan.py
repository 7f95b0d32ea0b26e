"""Checks before a plan is opened: its manifest fits it, is complete, and names this runtime and version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from manifest_data import plan_manifest
from manifest_data import read_manifest_data as read
from manifest_data import write_manifest_data as write

from posexport.artifact.manifest import BUILDERS
from posexport.artifact.plan import check_builder, check_plan, onnx_of
from posexport.errors import RequestError, RuntimeMissingError
from posexport.files import sha256_of
from posexport.jsondata import unstructure
from posexport.runtimes import RUNTIMES, gpu_missing
from posexport.runtimes.tensorrt import api, engine

pytestmark = pytest.mark.few_inputs

no_gpu = pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU here")


def made(folder: Path) -> Path:
    """A plan that no engine made, with a manifest that fits it and the ONNX file that it names."""
    plan, onnx, data = folder / "block.plan", folder / "block.onnx", folder / "block.onnx.data"
    plan.write_bytes(b"code" * 300)
    onnx.write_bytes(b"graph")
    data.write_bytes(b"weights")
    external_data = {data.name: sha256_of(data)}
    source = {"file": onnx.name, "sha256": sha256_of(onnx), "version": "0.1.0", "external_data": external_data}
    tools = {"onnx": "1.19.0", "tensorrt-rtx": "1.2.3"}
    write(plan, plan_manifest(plan, onnx, onnx=source, tools=tools))
    return plan


def test_a_sound_plan_gives_its_manifest(tmp_path: Path) -> None:
    plan = made(tmp_path)
    manifest = check_plan(plan)
    assert manifest.sha256 == sha256_of(plan)
    assert unstructure(manifest) == read(plan)
    assert onnx_of(plan, manifest) == tmp_path / "block.onnx"
    check_builder(plan, manifest, "tensorrt-rtx", "1.2.3")
    check_builder(plan, manifest, "tensorrt-rtx")


PLAN_EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tools.tensorrt-rtx": lambda manifest: manifest["tools"].update({"tensorrt-rtx": "9"}),
    "tools.tensorrt": lambda manifest: manifest["runtime"].update(name="tensorrt"),  # with the tools of tensorrt-rtx
    "external_data": lambda manifest: manifest.update(external_data={"zz": "0"}),
    "sizes.plan": lambda manifest: manifest["sizes"].update(plan=1),
    "sizes": lambda manifest: manifest["sizes"].update(scratch=-5),
    "memory_limit": lambda manifest: manifest.update(memory_limit=-1),
    "kernels": lambda manifest: manifest["kernels"].update(count=-1),
    "profiles": lambda manifest: manifest["profiles"]["hidden_states"].update(opt=[5, 7, 256]),
}


@pytest.mark.parametrize("key", PLAN_EDITS)
def test_a_manifest_that_contradicts_its_plan_or_itself_is_refused(key: str, tmp_path: Path) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    PLAN_EDITS[key](manifest)
    write(plan, manifest)
    with pytest.raises(RequestError, match=f"block.plan.json contradicts the plan or itself in its {key}:"):
        check_plan(plan)


def test_the_counts_of_a_plan_are_those_of_its_listed_kernels(tmp_path: Path) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    rows = [{"name": "_gemm_mha_v2", "type": "kgen", "nodes": []}, {"name": "copy", "type": "copy", "nodes": []}]
    manifest["kernels"].update(rows=rows, count=2, attention_kernels=1)
    write(plan, manifest)
    check_plan(plan)
    for key, wrong in {"count": 1, "attention_kernels": 2, "host_steps": -1, "attention_layers": -1}.items():
        write(plan, {**manifest, "kernels": {**manifest["kernels"], key: wrong}})
        with pytest.raises(RequestError, match="contradicts the plan or itself in its kernels:"):
            check_plan(plan)


def over_caches(manifest: dict[str, Any]) -> None:
    """Inputs that share dimensions. One dimension is the sum of two others."""
    shapes = {"hidden_states": ["batch", "seq", 256], "past_key": ["batch", 4, "past_seq", 64]}
    shapes["attention_mask"] = ["batch", "total_seq"]
    manifest["inputs"] = [{"name": name, "shape": shape, "dtype": "fp32"} for name, shape in shapes.items()]
    moments = {"min": (1, 1, 0, 1), "opt": (1, 7, 5, 12), "max": (2, 9, 8, 17)}
    sizes = {
        key: dict(zip(("batch", "seq", "past_seq", "total_seq"), row, strict=True)) for key, row in moments.items()
    }
    manifest["profiles"] = {
        name: {moment: [sizes[moment].get(str(dim), dim) for dim in shape] for moment in moments}
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("name", "shape"), [("hidden_states", [3, 9, 256]), ("past_key", [2, 4, 7, 64]), ("attention_mask", [2, 16])]
)
def test_profiles_that_disagree_on_a_shared_dimension_are_refused(name: str, shape: list[int], tmp_path: Path) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    over_caches(manifest)
    write(plan, manifest)
    check_plan(plan)
    manifest["profiles"][name]["max"] = shape
    write(plan, manifest)
    with pytest.raises(RequestError, match="contradicts the plan or itself in its profiles:"):
        check_plan(plan)


@pytest.mark.parametrize("command", ["verify", "package --triton"])
def test_a_plan_under_the_name_of_another_builder_is_neither_verified_nor_packaged(
    command: str, tmp_path: Path
) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    manifest["runtime"]["name"] = "tensorrt"
    write(plan, manifest)
    verifies = command == "verify"
    result = cli(*command.split(), plan, *(["--json"] if verifies else ["-o", tmp_path / "models"]))
    assert result.exit_code == (1 if verifies else 2), result.output
    assert "contradicts the plan or itself in its tools.tensorrt" in " ".join(result.output.split())
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["ort-cpu", "TensorRT", "\x1b[31m", ""])
@pytest.mark.parametrize("command", ["verify", "package --triton"])
def test_a_plan_of_no_builder_is_refused(command: str, name: str, tmp_path: Path) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    manifest["runtime"]["name"] = name
    write(plan, manifest)
    result = cli(*command.split(), plan)
    assert result.exit_code == 2, result.output
    told = " ".join(result.output.split())
    assert f"runtime has the builder {name!r}, not one of tensorrt, tensorrt-rtx" in told, told
    assert "\x1b" not in told and "build the plan again with 'posexport compile'" in told


def test_manifests_know_the_builders_that_exist() -> None:
    assert set(BUILDERS) == set(api.BUILDERS)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda plan: plan.unlink(), "is not there"),
        (lambda plan: plan.with_name("block.plan.json").unlink(), "has no manifest block.plan.json"),
        (lambda plan: plan.with_name("block.plan.json").write_text("{"), "it is not JSON"),
        (lambda plan: plan.with_name("block.plan.json").write_bytes(b"\xff\xfe\x00"), "it is not JSON"),
        (lambda plan: plan.with_name("block.plan.json").write_text("[" * 100_000), "it is not JSON"),
        (lambda plan: write(plan, []), "is \\[\\], not an object"),
        (lambda plan: write(plan, {}), "lacks 'file'"),
        (lambda plan: plan.write_bytes(plan.read_bytes() + b"x"), "their sha256 differ"),
        (lambda plan: plan.write_bytes(plan.read_bytes()[:-1]), "their sha256 differ"),
        (lambda plan: plan.write_bytes(b""), "their sha256 differ"),
        (lambda plan: plan.write_bytes(b"Code" + plan.read_bytes()[4:]), "their sha256 differ"),
        (lambda plan: shutil.rmtree(plan.parent), "is not there"),
    ],
)
def test_anything_amiss_is_refused(tmp_path: Path, spoil: Callable[[Path], object], says: str) -> None:
    plan = made(tmp_path)
    spoil(plan)
    with pytest.raises(RequestError, match=says):
        check_plan(plan)


KEYS = ("sha256", "form", "spec", "inputs", "outputs", "onnx", "runtime", "profiles")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in KEYS
        for value in (None, 3, "", [3], {"x": 3})
        if (key, value) != ("spec", None)  # allowed: the plan of another tool's graph
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    write(plan, {**manifest, key: value})
    another_file = key == "sha256" and isinstance(value, str)
    with pytest.raises(RequestError, match="their sha256 differ" if another_file else f"can't be used, .*{key}"):
        check_plan(plan)
    if key != "spec":
        del manifest[key]
        write(plan, manifest)
        with pytest.raises(RequestError, match=f"lacks '{key}'"):
            check_plan(plan)


@pytest.mark.parametrize("name", ["../block.onnx", "/etc/passwd", "a/b", "..", "", "c:x", "a\\b", 3])
def test_no_file_outside_the_folder_can_be_meant(tmp_path: Path, name: Any) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    write(plan, {**manifest, "onnx": {**manifest["onnx"], "file": name}})
    with pytest.raises(RequestError, match="can't be used, onnx"):
        check_plan(plan)
    if isinstance(name, str):
        write(plan, {**manifest, "onnx": {**manifest["onnx"], "external_data": {name: "0"}}})
        with pytest.raises(RequestError, match="can't be used, onnx"):
            check_plan(plan)


@pytest.mark.parametrize(
    "profile",
    [
        {},
        {"min": [1]},
        {"min": [1], "opt": [1], "max": ["1"]},
        {"min": [-1], "opt": [1], "max": [1]},
        {"min": [1, 0, 256], "opt": [1, 7, 256], "max": [2, 9, 256]},  # only a cache may be empty
    ],
)
def test_profiles_must_be_shapes_of_the_inputs(tmp_path: Path, profile: Any) -> None:
    plan = made(tmp_path)
    manifest = read(plan)
    write(plan, {**manifest, "profiles": {"hidden_states": profile}})
    with pytest.raises(RequestError, match=r"can't be used, .*(profile|too small)"):
        check_plan(plan)
    write(plan, {**manifest, "profiles": {**manifest["profiles"], "more": manifest["profiles"]["hidden_states"]}})
    with pytest.raises(RequestError, match="profiles that are not those of its inputs"):
        check_plan(plan)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 2, 2), (3, 3, 4), (0, 0, 0)])
def test_profiles_must_have_the_rank_of_their_inputs(tmp_path: Path, ranks: tuple[int, int, int]) -> None:
    plan = made(tmp_path)
    profile = {moment: [1] * rank for moment, rank in zip(("min", "opt", "max"), ranks, strict=True)}
    write(plan, {**read(plan), "profiles": {"hidden_states": profile}})
    with pytest.raises(RequestError, match="profiles that are not those of its inputs"):
        check_plan(plan)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=JSON)
def test_no_manifest_ends_in_a_traceback(tmp_path: Path, key: str, value: Any) -> None:
    assume((key, value) != ("spec", None))
    plan = made(tmp_path)
    write(plan, {**read(plan), key: value})
    with pytest.raises(RequestError):
        check_plan(plan)


def test_the_source_must_be_there_and_unchanged(tmp_path: Path) -> None:
    plan = made(tmp_path)
    manifest = check_plan(plan)
    for name in ("block.onnx", "block.onnx.data"):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before + b"x")
        with pytest.raises(RequestError, match=f"{name} beside it is not what it was built from"):
            onnx_of(plan, manifest)
        (tmp_path / name).unlink()
        with pytest.raises(RequestError, match=f"built from {name}, which is not beside it"):
            onnx_of(plan, manifest)
        (tmp_path / name).write_bytes(before)


def test_inspect_says_first_that_a_plan_is_not_that_of_its_manifest(tmp_path: Path) -> None:
    plan = made(tmp_path)
    assert cli("inspect", plan).stderr == ""
    manifest = read(plan)
    write(plan, {**manifest, "sizes": {**manifest["sizes"], "plan": 1}})
    told = cli("inspect", plan)
    assert (told.exit_code, "does not match the file" in told.stdout) == (0, True)
    assert "contradicts the plan or itself in its sizes.plan" in told.stderr
    write(plan, manifest)
    plan.write_bytes(b"Code" + plan.read_bytes()[4:])
    told = cli("inspect", plan)
    assert told.exit_code == 0
    assert told.stdout.splitlines()[1].split(maxsplit=1) == ["manifest", "does not match the file"]
    assert told.stderr.startswith(f"Warning: {plan}: the file is not the one that its manifest block.plan.json")
    write(plan, {"file": plan.name, "sha256": "0"})
    refused(cli("inspect", plan), "lacks 'version'")


@pytest.mark.parametrize(("name", "version"), [("tensorrt", "1.2.3"), ("tensorrt-rtx", "1.2.4"), ("tensorrt", None)])
def test_only_its_builder_opens_a_plan(tmp_path: Path, name: str, version: str | None) -> None:
    plan = made(tmp_path)
    with pytest.raises(RequestError, match=r"built by tensorrt-rtx 1\.2\.3 and runs only there"):
        check_builder(plan, check_plan(plan), name, version)


@pytest.mark.parametrize("runtime", ["tensorrt", "tensorrt-rtx"])
def test_the_runtime_refuses_before_it_opens(tmp_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> Any:
        raise AssertionError("the plan was opened")

    monkeypatch.setattr("posexport.runtimes.tensorrt.engine.PlanRunner", opened)
    plan = made(tmp_path)
    plan.write_bytes(b"other code")
    with pytest.raises(RequestError, match="their sha256 differ"):
        RUNTIMES[runtime].load(plan)
    plan.with_name("block.plan.json").unlink()
    with pytest.raises(RequestError, match="has no manifest"):
        RUNTIMES[runtime].load(plan)
    plan = made(tmp_path)
    if runtime == "tensorrt":
        with pytest.raises(RequestError, match="built by tensorrt-rtx"):
            RUNTIMES[runtime].load(plan)


@no_gpu
@pytest.mark.skipif(api.can_build("tensorrt-rtx") is not None, reason="tensorrt-rtx is not installed")
def test_without_a_gpu_the_runtime_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMissingError, match="no GPU"):
        RUNTIMES["tensorrt-rtx"].load(made(tmp_path))
    with pytest.raises(RuntimeMissingError, match="no GPU"):
        RUNTIMES["tensorrt-rtx"].load(tmp_path / "block.onnx")


def test_a_plan_of_another_version_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        __version__ = "1.2.4"

    monkeypatch.setattr("posexport.runtimes.tensorrt.engine._engine", lambda name: Engine)
    with pytest.raises(RequestError, match=r"not on tensorrt-rtx 1\.2\.4"):
        RUNTIMES["tensorrt-rtx"].load(made(tmp_path))


def test_a_plan_that_was_exchanged_after_the_check_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan and manifest fit each other, but the signature was checked earlier on another plan."""

    class Engine:
        __version__ = "1.2.3"

    opened = []
    monkeypatch.setattr("posexport.runtimes.tensorrt.engine._engine", lambda name: Engine)
    monkeypatch.setattr("posexport.runtimes.tensorrt.engine.PlanRunner", lambda *_: opened.append(1))
    plan, options = made(tmp_path), {**RUNTIMES["tensorrt-rtx"].options}
    engine.load(plan, {**options, "sha256": sha256_of(plan)})
    assert opened == [1]
    with pytest.raises(RequestError, match="changed while it was being opened"):
        engine.load(plan, {**options, "sha256": sha256_of(tmp_path / "block.onnx")})
    assert opened == [1]


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    options = {**RUNTIMES["tensorrt-rtx"].options, "cuda_grap": True}
    with pytest.raises(RequestError, match="unknown option of tensorrt 'cuda_grap': did you mean 'cuda_graph'"):
        engine.load(made(tmp_path), options)


def test_checking_a_plan_loads_no_engine() -> None:
    heavy = ["torch", "onnx", "numpy", "tensorrt", "tensorrt_rtx", "polygraphy"]
    code = "import sys, posexport.artifact.plan, posexport.artifact.profiles\n"
    code += f"print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
