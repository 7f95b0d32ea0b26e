"""Stacks of realistic size: memory, the whole `verify`, TensorRT's compiler and importer, commands of the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from helpers import cli, exported
from stack_helpers import stack
from trt_helpers import needs_rtx

from posexport.artifact.onnx_artifact import write_onnx
from posexport.models import read_spec
from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.result import FAILED, NOT_RUN, PASSED

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from posexport import machine  # a process begins with the ru_maxrss of the one that started it
from posexport.artifact import write_onnx
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import seeded, seeded_weights
from posexport.runtimes import torch_eager

how, layers, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
spec = read_spec({"encoding": {"name": "rope"}, "hidden_size": 1024, "num_heads": 8, "layers": layers})
inputs = {"hidden_states": np.ones((1, 3, 1024), np.float32), "position_ids": np.arange(3)[None]}
if how == "verify":
    torch_eager.load(path, {"dtype": "fp64", "streamed": True}).run(inputs)
else:
    write_onnx(export(spec, (seeded if how == "export" else seeded_weights)(spec, 0)), path, external_from=0)
print(machine.peak())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    def peak(how: str, layers: int) -> int:
        command = [sys.executable, "-c", _CHILD, how, str(layers), str(tmp_path / f"{layers}.onnx")]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    for how in ("export", "verify"):  # 24 layers have 400 MB in fp32 and 800 MB in float64.
        assert peak(how, 24) < 1.3 * peak(how, 2), how
    assert peak("at once", 24) > 1.6 * peak("export", 2)  # The measurement shows if all layers are in memory.


@pytest.mark.slow
@pytest.mark.parametrize("form", ["decomposed", "function"])
def test_verify_passes_stacks_and_finds_the_layer_that_is_wrong(tmp_path: Path, form: str) -> None:
    spec = stack("pattern")
    for name in ("sound", "another", "order"):
        write_onnx(exported(spec, form), tmp_path / f"{name}.onnx", external_from=0)
    for name, swap in (("another", {"layers.3.v_proj.weight": "layers.1.v_proj.weight"}), ("order", _order())):
        model = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False)
        for node in model.graph.node:
            for at, value in enumerate(node.input):
                node.input[at] = swap.get(value, value)
        onnx.save(model, tmp_path / f"{name}.onnx")
        (tmp_path / f"{name}.onnx.json").unlink(missing_ok=True)  # The manifest would reveal that the file was changed.
    report = verify(
        [tmp_path], runtimes={name: RUNTIMES[name] for name in ("ort-cpu", "tensorrt-import")}, reach={"seq": 300}
    )
    states = {(Path(each.artifact).stem, each.runtime): each for each in report.verdicts}
    for (name, _), verdict in states.items():
        if verdict.state != NOT_RUN:
            assert verdict.state == (PASSED if name == "sound" else FAILED), verdict
    assert states["sound", "ort-cpu"].state == PASSED
    assert "layers.3.v_proj.weight" in str(states["another", "ort-cpu"].where)


@pytest.mark.slow
def test_a_wrong_rotation_deep_in_a_stack_is_found(tmp_path: Path) -> None:
    data = {"hidden_size": 64, "num_heads": 2, "layers": 32, "causal": True, "kv_cache": "concat"}
    write_onnx(exported(read_spec({**data, "encoding": {"name": "rope"}})), tmp_path / "sound.onnx")
    model = onnx.load(tmp_path / "sound.onnx")
    rotations = [node for node in model.graph.node if node.op_type == "Sub"]
    wrong = rotations[len(rotations) // 32 * 17]  # the first of layer 17
    wrong.op_type = "Add"
    onnx.save(model, tmp_path / "wrong.onnx")
    report = verify([tmp_path], runtimes={name: RUNTIMES[name] for name in ("torch", "ort-cpu")})
    found = {(Path(each.artifact).stem, each.runtime): each for each in report.verdicts}
    assert {name: each.state for name, each in found.items()} == {
        ("sound", "torch"): PASSED, ("sound", "ort-cpu"): PASSED, ("wrong", "torch"): PASSED,
        ("wrong", "ort-cpu"): FAILED,
    }  # fmt: skip
    assert wrong.name in str(found["wrong", "ort-cpu"].where)


def _order() -> dict[str, str]:
    names = [f"{part}_proj.weight" for part in "qkvo"]
    return {f"layers.{a}.{name}": f"layers.{b}.{name}" for name in names for a, b in ((1, 3), (3, 1))}


@needs_rtx
@pytest.mark.slow
def test_a_stack_with_outside_weights_compiles(tmp_path: Path) -> None:
    write_onnx(exported(stack("plain")), tmp_path / "block.onnx", external_from=0)
    result = cli("compile", tmp_path / "block.onnx")
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "block.plan.json").read_text())
    assert list(manifest["onnx"]["external_data"]) == ["block.onnx.data"]
