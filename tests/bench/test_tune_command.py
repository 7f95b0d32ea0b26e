"""`posexport tune` with real files and engines: refusals, and (slow) written files, resumed runs and found faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import onnx
import onnx_ir as ir
import pytest
from checkpoint_files import LLAMA, llama_tensors, written
from helpers import cli, refused, small_spec
from safetensors.torch import save_file

from posexport import runtimes
from posexport.bench import rounds
from posexport.bench.scenarios import Scenario
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.programs import Block
from posexport.bench.tune.request import read_tune_request
from posexport.bench.tune.search import tune
from posexport.bench.tune.space import Limits, Request
from posexport.models.checkpoints import read_checkpoint
from posexport.models.weights import seeded_weights
from posexport.runtimes import RUNTIMES
from posexport.runtimes.ort import load
from posexport.spec.spec import DTYPES

SMALL = ("--hidden-size", "32", "--num-heads", "4", "--dtype", "fp32")

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "encoding": (("--encoding", "rop"), "unknown encoding 'rop': did you mean 'rope'?"),
    "runtime": (("--encoding", "rope", "--for", "torch"), "unknown runtime in --for 'torch'"),
    "objective": (("--encoding", "rope", "--objective", "speed"), "unknown objective 'speed'"),
    "decode": (("--encoding", "rope", "--scenario", "decode:9"), "this block has none: give --kv-cache too"),
    "sweep": (("--encoding", "rope", "--scenario", "prefill"), "is 7 sizes: tune for one, such as prefill:512"),
    "several": (("--encoding", "rope", "--scenario", "batch:2,4"), "is 2 sizes: tune for one"),
    "scenario": (("--encoding", "rope", "--scenario", "prompt:9"), "unknown scenario 'prompt'"),
    "opset": (("--encoding", "rope", "--opset", "99"), "opset is '99': it must be a whole number from 18 to 25"),
    "form": (("--encoding", "rope", "--form", "nat"), "unknown form 'nat'"),
    "target": (("--encoding", "rope", "--target", "gpu"), "unknown target 'gpu'"),
    "dtype": (("--encoding", "rope", "--dtype", "fp8"), "unknown dtype 'fp8'"),
    "ending": (("--encoding", "rope", "-o", "x.plan"), "must end in .onnx for ort-cpu"),
    "plan": (("--encoding", "rope", "--for", "tensorrt-rtx", "-o", "x.onnx"), "must end in .plan for tensorrt-rtx"),
    "folder": (("--encoding", "rope", "-o", "no/x.onnx"), "is not there: make it first"),
    "save": (("--encoding", "rope", "--save", "x.onnx"), "must end in .json"),
    "manifest": (("--encoding", "rope", "-o", "x.onnx", "--save", "x.onnx.json"), "is the manifest of the output"),
    "layer": (("--encoding", "rope", "--layer", "1"), "layer was given without from"),
    "weights": (("--encoding", "rope", "--weights", "a", "--seed", "1"), "both weights and seed were given"),
    "preset": (("--preset", "llama-2-7b", "--encoding", "rope"), "both preset and encoding were given"),
    "promise": (
        ("--encoding", "rope2d", "--allow", "consecutive"),
        "with rope2d, which has no positions that can be consecutive: drop it",
    ),
    "promise with denormals": (
        ("--encoding", "none", "--allow", "denormal-as-zero", "--allow", "consecutive"),
        "--allow consecutive with none, which has no positions that can be consecutive: drop it",
    ),
    "unknown promise": (("--encoding", "rope", "--allow", "zeros"), "unknown allow 'zeros'"),
    "denormals": (
        ("--encoding", "rope", "--for", "tensorrt-rtx", "--allow", "denormal-as-zero"),
        "--allow denormal-as-zero for tensorrt-rtx: it is an option of ONNX Runtime on a CPU, so drop it",
    ),
    "bf16": (("--encoding", "rope", "--dtype", "bf16"), "ONNX Runtime's CPU provider has no bf16 kernels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_one_sentence_and_writes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posexport.bench.tune.search.check_there", lambda runtime: False)
    given, sentence = REFUSED[name]
    result = cli("tune", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr and result.stderr.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.name != ".posexport-tune"]


def test_the_graph_beside_a_plan_is_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posexport.bench.tune.search.check_there", lambda runtime: pytest.fail("the work began"))
    Path("x.onnx").mkdir()
    options = ("--encoding", "rope", *SMALL, "--for", "tensorrt", "-o", "x.plan")
    refused(cli("tune", *options), "output 'x.onnx' is a folder: give the name of a file")


def test_a_config_may_hold_its_options_and_no_others(tmp_path: Path) -> None:
    config = tmp_path / "block.toml"
    config.write_text('encoding = "rope"\nform = ["native", "nat"]\nfor = "ort-cpu"\n')
    assert "unknown form 'nat'" in cli("tune", "--config", str(config)).stderr
    config.write_text('encoding = "rope"\nspeed = 1\n')
    assert "unknown key in config" in cli("tune", "--config", str(config)).stderr


def test_a_runtime_that_is_not_there_is_exit_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "gpu_missing", lambda: "no GPU: there is no NVIDIA driver")
    result = cli("tune", "--encoding", "rope", "--for", "ort-cuda")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "ort-cuda can't be tuned for here" in result.stderr


def test_graph_level_and_plain_calls_are_options_of_onnxruntime(tmp_path: Path) -> None:
    from helpers import inputs_for, weights_for

    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.errors import RequestError
    from posexport.export import export

    spec = small_spec("none")
    path = tmp_path / "none.onnx"
    write_onnx(export(spec, weights_for(spec)), path)
    runner = load(path, {"graph_level": "basic", "io_binding": False})
    assert runner.prepare(inputs_for(spec, 1, 3))() > 0
    with pytest.raises(RequestError, match="unknown graph_level of onnxruntime 'full'"):
        load(path, {"graph_level": "full"})


@pytest.mark.parametrize("denormal_as_zero", [True, False])
def test_denormal_numbers_are_zeros_where_a_session_is_asked_for_it(denormal_as_zero: bool, tmp_path: Path) -> None:
    """Runs in a separate process, like candidates: ONNX Runtime reads the option only for the first session."""
    nodes = [onnx.helper.make_node("Mul", ["x", "x"], ["y"])]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4096]) for name in "xy")
    graph = onnx.helper.make_graph(nodes, "square", [x], [y])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 18)])
    onnx.save(model, tmp_path / "m.onnx")
    program = f"""
import numpy as np
from pathlib import Path
from posexport.runtimes.ort import load
runner = load(Path("m.onnx"), {{"denormal_as_zero": {denormal_as_zero}}})
(square,) = runner.run({{"x": np.full(4096, 1e-20, np.float32)}}).values()  # 1e-40
print((square.view(np.int32) == 0).sum())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "4096\n" if denormal_as_zero else "0\n"), done.stderr


@pytest.mark.slow
def test_the_winner_is_the_file_that_export_writes_and_its_manifest_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds.MachineLoad, "share", lambda self: 0.0)  # Rounds on a busy machine are not stored.
    given = ("--encoding", "rope", *SMALL, "--form", "native", "--form", "contrib", "--scenario", "prefill:16")
    result = cli("tune", *given, "--save", "tune.json", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data == json.loads(Path("tune.json").read_bytes())
    winner = data["winner"]
    made = ("--form", winner["form"], "--opset", str(winner["opset"]), "--target", winner["target"])
    assert cli("export", "--encoding", "rope", *SMALL, *made, "-o", "same.onnx").exit_code == 0
    assert Path("same.onnx").read_bytes() == Path("rope.onnx").read_bytes()
    manifest = json.loads(Path("rope.onnx.json").read_bytes())
    assert manifest["weights"] == {"source": "random", "seed": 0}
    assert manifest["tune"]["options"] == winner["settings"]
    assert manifest["tune"]["candidates"] == data["candidates"]
    assert "timed once" in str(data["candidates"])
    assert winner["verified"] == "ort-cpu"
    assert not list(Path(".posexport-tune").glob("programs-*"))
    again = json.loads(cli("tune", *given, "--json").stdout)
    assert again["candidates"] == data["candidates"]
    assert again["cost"]["known_before"] > 5 and data["cost"]["known_before"] == 0
    assert re.search(r"wrote rope\.onnx\n +winner", cli("tune", *given).stdout)
    assert cli("verify", "rope.onnx", "--runtime", "ort-cpu").exit_code == 0


def planted(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Plants a fault: the form is exported with a faster, wrong graph whose output is its input."""
    from posexport.export import exporter as stage

    true = stage.export

    def wrong(*args: Any, **options: Any) -> ir.Model:
        model = true(*args, **options)
        if options["form"] == form:
            last = model.graph.outputs[0].producer()
            assert last is not None
            node = ir.node("Identity", [model.graph.inputs[0]])
            last.graph.append(node) if last.graph is not None else None
            node.outputs[0].name, model.graph.outputs[0].name = model.graph.outputs[0].name, "unused"
            node.outputs[0].shape, node.outputs[0].type = model.graph.outputs[0].shape, model.graph.outputs[0].type
            model.graph.outputs[0] = node.outputs[0]
        return model

    monkeypatch.setattr(stage, "export", wrong)


@pytest.mark.slow
def test_a_fast_graph_that_is_wrong_never_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "native")
    spec = small_spec("rope")
    block = Block(specs={"fp32": spec}, load=lambda dtype: (spec, seeded_weights(spec, 0)), source="seed 0")
    limits = Limits(forms=("native", "contrib"), targets=("portable",), opsets=(23,))
    request = Request(scenario=Scenario("prefill", 256), limits=limits)
    result = tune(block, request, tmp_path / "x.onnx", Store(tmp_path / "cache"))
    assert result.winner is not None and result.winner.form == "contrib"
    assert any("did not verify" in row.reason for row in result.candidates)
    alone = attrs.evolve(request, limits=attrs.evolve(limits, forms=("native",)))
    assert tune(block, alone, tmp_path / "y.onnx", Store(tmp_path / "cache")).winner is None
    assert not (tmp_path / "y.onnx").exists()


@pytest.mark.slow
@pytest.mark.skipif(RUNTIMES["tensorrt-import"].missing() is not None, reason="no TensorRT")
def test_a_plan_is_chosen_by_kernels_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if RUNTIMES["tensorrt-rtx"].missing() is None:
        pytest.skip("there is a GPU: plans are raced")
    monkeypatch.chdir(tmp_path)
    given = (
        "--encoding",
        "rope",
        "--hidden-size",
        "64",
        "--num-heads",
        "2",
        "--form",
        "decomposed",
        "--form",
        "native",
    )
    result = cli("tune", *given, "--for", "tensorrt-rtx", "--dtype", "fp16", "--dtype", "fp32")
    assert result.exit_code == 0, result.stderr
    assert "by kernel table: no GPU" in result.stdout
    manifest = json.loads(Path("rope.plan.json").read_bytes())
    assert manifest["tune"]["winner"]["dtype"] == "fp16"
    assert manifest["tune"]["winner"]["verified"] == "tensorrt-import"
    assert manifest["kernels"]["fused_attention"] is True
    onnx.checker.check_model(onnx.load("rope.onnx"))
    assert cli("inspect", "rope.plan").exit_code == 0


def test_two_scenarios_are_refused() -> None:
    refused(cli("tune", "--encoding", "rope", "--scenario", "prefill:16", "--scenario", "batch:2"), "given 2 times")


@pytest.mark.parametrize("given", [{"layer": "1"}, {}], ids=["a layer", "none"])
def test_what_is_tuned_is_the_layer_whose_weights_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    """Layers 0 and 1 have different encodings."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, **{**LLAMA, "attention_bias": False, "model_type": "smollm3", "no_rope_layers": [1, 0, 1]})
    save_file({name: t for name, t in llama_tensors().items() if name.endswith("weight")}, "model.safetensors")
    request = read_tune_request(None, None, {}, {"from": str(tmp_path), **given}, None)
    assert list(request.specs) == list(DTYPES)
    for dtype, spec in request.specs.items():
        checkpoint = read_checkpoint(tmp_path, int(given.get("layer", 0)), 1, {"dtype": dtype})
        assert spec == checkpoint.spec and spec.encoding.name == ("none" if given else "rope")
