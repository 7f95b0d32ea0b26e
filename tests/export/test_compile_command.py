"""`posexport compile`: its files, output and exit codes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import onnx
import pytest
from manifest_data import onnx_manifest, write_manifest_data
from trt_helpers import RTX, copied, exported, needs_rtx, posexport, refused

from posexport.artifact.onnx_artifact import write_onnx
from posexport.artifact.plan import check_plan, onnx_of
from posexport.errors import RequestError, RuntimeMissingError
from posexport.export import compile as compile_stage
from posexport.export import export
from posexport.export.compile import compile_plan
from posexport.files import sha256_of
from posexport.jsondata import unstructure
from posexport.models import read_spec
from posexport.models.weights import seeded_weights
from posexport.runtimes import gpu_missing
from posexport.runtimes.installation import install_command
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.options import BuildOptions

no_gpu = pytest.mark.skipif(gpu_missing() is None, reason="there is a GPU here")


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """A fp16 RoPE block that the test may change."""
    return copied(exported("rope"), tmp_path)


def left(folder: Path) -> set[str]:
    """The files in a folder, hidden ones too."""
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.slow
@needs_rtx
def test_the_plan_lies_beside_the_onnx_file_with_its_manifest(block: Path) -> None:
    result = posexport("compile", block, "--runtime", RTX, "--profile", "seq=1:196:256", "--json")
    assert result.exit_code == 0, result.output
    assert left(block.parent) == {"block.onnx", "block.plan", "block.plan.json"}
    plan = block.with_suffix(".plan")
    manifest = unstructure(check_plan(plan))
    printed = json.loads(result.stdout)
    seconds = printed.pop("build_seconds")
    assert seconds > 0
    assert printed.pop("warnings") == []
    assert printed == manifest
    assert onnx_of(plan, check_plan(plan)) == block
    assert manifest["onnx"]["sha256"] == sha256_of(block)
    assert manifest["sha256"] == sha256_of(plan)
    assert manifest["sizes"]["plan"] == plan.stat().st_size
    assert manifest["runtime"] == {"name": RTX, "version": api.load(RTX).__version__}
    assert manifest["profiles"]["position_ids"] == {"min": [1, 1], "opt": [1, 196], "max": [8, 256]}
    assert (manifest["target_gpus"], manifest["tf32"], manifest["form"]) == (["portable"], False, "decomposed")
    assert manifest["kernels"]["count"] == len(manifest["kernels"]["rows"]) <= 6
    assert manifest["kernels"]["fused_attention"] is True


@needs_rtx
def test_manifest_keeps_the_keys_of_the_onnx_manifest(tmp_path: Path) -> None:
    source = exported("rope")
    before = json.loads(source.with_name(source.name + ".json").read_bytes())
    posexport("compile", source, "-o", tmp_path / "x.plan")
    after = unstructure(check_plan(tmp_path / "x.plan"))
    assert set(before) <= set(after)
    for key in ("form", "spec", "inputs", "outputs", "opset", "domains"):
        assert after[key] == before[key], key


@needs_rtx
def test_nothing_of_place_or_time_is_written(block: Path) -> None:
    posexport("compile", block)
    manifest = block.with_name("block.plan.json").read_text()
    assert str(block.parent) not in manifest
    assert "seconds" not in manifest
    assert str(block.parent).encode() not in block.with_suffix(".plan").read_bytes()


@pytest.mark.slow
@needs_rtx
def test_weights_outside_the_onnx_file_are_found_and_hashed(tmp_path: Path) -> None:
    spec = read_spec({"encoding": {"name": "none"}, "hidden_size": 64, "num_heads": 2, "dtype": "fp16"})
    write_onnx(export(spec, seeded_weights(spec, 0)), tmp_path / "block.onnx", external_from=0)
    assert posexport("compile", tmp_path / "block.onnx").exit_code == 0
    manifest = check_plan(tmp_path / "block.plan")
    assert manifest.onnx.external_data == {"block.onnx.data": sha256_of(tmp_path / "block.onnx.data")}
    assert onnx_of(tmp_path / "block.plan", manifest) == tmp_path / "block.onnx"
    (tmp_path / "block.onnx.data").unlink()
    refused(posexport("compile", tmp_path / "block.onnx"), "block.onnx.data", "missing or cut short")


@needs_rtx
def test_the_table_names_kernels_nodes_and_fusion(block: Path) -> None:
    result = posexport("compile", block, "--compute-capability", "12.0,8.9", "--require-fused-attention")
    assert result.exit_code == 0, result.output
    for part in ("_gemm_mha_v2", "node_linear_3", "Softmax", "yes, one kernel in 1 layer", "8.9, 12.0", "tf32", "off"):
        assert part in result.stdout, part
    assert result.stderr == ""
    assert result.stdout.startswith("wrote ")  # the summary, then the kernels
    assert result.stdout.index("build time") < result.stdout.index("Kernels of")
    assert "[" not in result.stdout.split("wrote")[1].splitlines()[0]


@needs_rtx
def test_unfused_attention_exits_1_where_it_is_required_and_the_plan_stays(tmp_path: Path) -> None:
    source = copied(exported("rope", dtype="fp32"), tmp_path)
    result = posexport("compile", source, "--profile", "batch=1", "--require-fused-attention")
    assert result.exit_code == 1
    text = "fp32 has no fused attention kernel: export with --dtype fp16 or bf16"
    assert f"no, 0 fused kernels in 1 layer; {text}" in result.stdout
    assert text in result.stderr
    assert "is written" in result.stderr
    kernels = unstructure(check_plan(tmp_path / "block.plan").kernels)
    assert (kernels["fused_attention"], kernels["unfused"]) == (False, {"code": "fp32", "text": text})


@pytest.mark.slow
@needs_rtx
def test_much_scratch_memory_is_a_warning_that_names_the_profile(tmp_path: Path) -> None:
    source = copied(exported("rope", dtype="fp32"), tmp_path)
    result = posexport("compile", source, "--json")
    assert result.exit_code == 0
    (warning,) = json.loads(result.stdout)["warnings"]
    scratch = check_plan(tmp_path / "block.plan").sizes["scratch"]
    assert scratch is not None
    assert scratch > 1e9
    assert warning["code"] == "scratch-memory"
    assert warning["text"] == (
        f"scratch memory is {scratch / 1e9:.1f} GB, which a run takes on the GPU beside the weights, for "
        "the largest sizes of the default profile batch=1:1:8 seq=1:1024:4096: give lower ones, such as --profile "
        "batch=1:1:2 --profile seq=1:1024:1024"
    )
    assert result.stderr == f"Warning: {source}: {warning['text']}.\n"
    small = posexport("compile", source, "--profile", "seq=1:64:128", "--json")
    assert (json.loads(small.stdout)["warnings"], small.stderr) == ([], "")
    lower = [part for part in warning["text"].split() if "=" in part][-2:]
    small = posexport("compile", source, "--profile", lower[0], "--profile", lower[1])
    assert (small.exit_code, small.stderr) == (0, "")  # The advice of the warning removes it.
    assert "see the warning" not in small.stdout and "the default, give" not in small.stdout


@needs_rtx
def test_the_summary_points_at_much_scratch_memory_and_at_a_profile_that_nobody_chose(tmp_path: Path) -> None:
    result = posexport("compile", copied(exported("rope", dtype="fp32"), tmp_path))
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")}
    assert "see the warning: lower largest sizes of --profile" in lines["scratch"]
    assert "the default, give --profile NAME=MIN:OPT:MAX for another" in result.stdout


@pytest.mark.slow
@needs_rtx
def test_fusion_that_is_not_known_never_counts_as_fused(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compile_stage.build_in_child
    monkeypatch.setattr(compile_stage, "build_in_child", lambda *given: attrs.evolve(real(*given), kernels=_unknown(1)))
    result = posexport("compile", block, "--require-fused-attention")
    assert result.exit_code == 1
    assert "not known: the builder logged no table of layers" in result.stdout
    assert "not known" in result.stderr
    assert check_plan(block.with_suffix(".plan")).kernels.fused_attention is None


def _unknown(layers: int) -> Any:
    from posexport.runtimes.tensorrt.kernels import read_kernels

    return read_kernels([], layers)


@pytest.mark.slow
@needs_rtx
def test_a_second_compile_replaces_the_first_whole(block: Path) -> None:
    plan, beside = block.with_suffix(".plan"), block.with_name("block.onnx.json")
    write_manifest_data(block, onnx_manifest(block, sha256="0" * 64))
    refused(posexport("compile", block, "--profile", "seq=1:2:3"), "not the one that its manifest block.onnx.json")
    assert not plan.exists()
    beside.unlink()
    assert posexport("compile", block, "--profile", "seq=1:2:3").exit_code == 0
    first = check_plan(plan)
    posexport("compile", block, "--profile", "seq=1:2:4")
    assert check_plan(plan).profiles != first.profiles
    before = plan.read_bytes()
    model = onnx.load(block)
    next(node for node in model.graph.node if node.op_type == "Softmax").op_type = "Sofmax"
    onnx.save(model, block)
    refused(posexport("compile", block), "'tensorrt-rtx'".strip("'"), "operator Sofmax", "--form decomposed")
    assert plan.read_bytes() == before
    assert check_plan(plan).onnx.sha256 != sha256_of(block)


@pytest.mark.sampled(2)
@needs_rtx
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--profile", "seq=9:2:3"], ["'seq=9:2:3'", "not ordered"]),
        (["--profile", "sequence=1:2:3"], ["'sequence'", "batch, seq"]),
        (["--compute-capability", "9.0"], ["'9.0'", "allowed: 7.5, 8.0"]),
        (["--compute-capability", "ampere"], ["'ampere'", "8.9,12.0"]),
        (["--memory-limit", "lots"], ["'lots'", "512M"]),
        (["--memory-limit", "0"], ["'0'", "512M"]),
        (["--memory-limit", "1K"], ["workspace limit", "raise --memory-limit"]),
        (["--timing-cache", "cache"], ["no timing cache", "--runtime tensorrt"]),
        (["--runtime", "tensorrt-rxt"], ["'tensorrt-rxt'", "did you mean 'tensorrt-rtx'"]),
        (["--runtime", "ort-cpu"], ["'ort-cpu'", "tensorrt, tensorrt-rtx"]),
        (["-o", "block.engine"], ["'block.engine'", ".plan"]),
        (["-o", "nowhere/block.plan"], ["'nowhere'", "not there"]),
        (["--unknown"], ["--unknown"]),
    ],
)
def test_bad_options_get_one_sentence_and_leave_nothing(
    block: Path, options: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(block.parent)
    result = posexport("compile", block.name, *options)
    if options == ["--unknown"]:
        assert result.exit_code == 2
    else:
        refused(result, *parts)
    assert left(block.parent) == {"block.onnx"}


def _junk(path: Path) -> None:
    path.write_bytes(b"\x0a\x03" + b"no graph" * 500)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _leading_out(path: Path) -> None:
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name == "q_proj.weight")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (_junk, "not an ONNX file"),
        (_truncated, ""),
        (_empty, "is empty: export it again"),
        (_leading_out, "outside its own folder"),
        (Path.unlink, "is not there"),
    ],
)
@needs_rtx
def test_files_that_are_no_artifact_of_ours_are_refused(block: Path, spoil: Any, part: str) -> None:
    spoil(block)
    there = left(block.parent)
    refused(posexport("compile", block), part, "block.onnx")
    assert left(block.parent) == there


def test_only_onnx_files_are_compiled(tmp_path: Path) -> None:
    refused(posexport("compile", tmp_path / "block.plan"), "does not end in .onnx")


def test_without_a_builder_it_says_how_to_install_one(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posexport.runtimes.importlib.util.find_spec", lambda name: None)
    refused(
        posexport("compile", block), install_command("posexport[rtx]"), install_command("posexport[tensorrt]"), code=3
    )
    refused(posexport("compile", block, "--runtime", RTX), install_command("posexport[rtx]"), code=3)
    assert left(block.parent) == {"block.onnx"}


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the packages of both builders are installed."""
    for name, row in api.BUILDERS.items():
        monkeypatch.setitem(api.BUILDERS, name, attrs.evolve(row, package="os"))


@pytest.mark.usefixtures("real_processes")
def test_a_builder_that_is_broken_is_missing(block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    text = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    (tmp_path / "tensorrt_rtx.py").write_text(text)  # It comes before the real one on the child's path.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused(posexport("compile", block, "--runtime", RTX), "libcudart.so.13", "pip install", code=3)


@no_gpu
def test_tensorrt_needs_the_gpu_and_is_passed_over_without(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    refused(posexport("compile", block, "--runtime", "tensorrt"), "no GPU", code=3)
    assert api.choose(None) == RTX


def test_tensorrt_is_preferred_where_it_can_build(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    monkeypatch.setattr("posexport.runtimes.gpu_missing", lambda: None)
    assert api.choose(None) == "tensorrt"


@pytest.mark.slow
def test_a_runtime_cache_takes_a_gpu_and_the_runtime_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Path(shutil.copy(exported("none", "fp16"), tmp_path / "block.onnx"))
    monkeypatch.setattr("posexport.runtimes.gpu_missing", lambda: "no GPU: there is no NVIDIA driver")
    for runtime, kind, said in (
        ("tensorrt-rtx", RuntimeMissingError, "made by running the plan, which can't be done here"),
        ("tensorrt", RequestError, "has no runtime cache"),
    ):
        options = BuildOptions(runtime=runtime, runtime_cache=tmp_path / "cache")
        with pytest.raises(kind, match=said):
            compile_plan(artifact, tmp_path / "block.plan", options)
    assert [file.name for file in tmp_path.iterdir()] == ["block.onnx"]
