"""A thousand mutants of each kind of file. Each reader runs in its own process. Planted faults are found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_files import PLANTED, READERS
from helpers import exported, small_spec
from manifest_data import plan_manifest, write_manifest_data
from page_helpers import bench, tune
from safetensors.numpy import save_file
from test_matrix_files import small
from test_report import REPORT

from posexport.artifact.loaded import load_artifact
from posexport.artifact.onnx_artifact import write_onnx
from posexport.jsondata import unstructure

SCRIPT = Path(__file__).parents[1] / "support" / "fuzz_files.py"
CONFIG = {
    **{"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 9},
    **{"intermediate_size": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 1e4},
}
BATCH = 250
"""The number of mutants in one process."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound file of every kind."""
    folder = tmp_path_factory.mktemp("sound")
    spec = small_spec("rope", hidden_size=16, num_heads=2, head_dim=8)
    write_onnx(exported(spec, "function"), folder / "sound.onnx")
    (folder / "sound.plan").write_bytes(b"a plan")
    source = json.loads((folder / "sound.onnx.json").read_bytes())
    sizes = {"batch": 1, "seq": 7}
    inputs = {tensor["name"]: [sizes.get(dim, dim) for dim in tensor["shape"]] for tensor in source["inputs"]}
    plan = plan_manifest(folder / "sound.plan", folder / "sound.onnx")
    plan |= {key: source[key] for key in ("spec", "form", "inputs", "outputs", "opset", "domains", "tools")}
    plan["tools"] = {**plan["tools"], plan["runtime"]["name"]: plan["runtime"]["version"]}
    plan["profiles"] = {name: dict.fromkeys(("min", "opt", "max"), shape) for name, shape in inputs.items()}
    write_manifest_data(folder / "sound.plan", plan)
    load_artifact(folder / "sound.plan")  # the unchanged plan is sound
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = {f"{name}_proj.weight": np.ones((16, 16), np.float32) for name in "qkvo"}
    layer = {f"model.layers.0.self_attn.{name}": array for name, array in names.items()}
    save_file({**names, **layer}, folder / "sound.safetensors")
    shutil.copy(Path(__file__).parents[2] / "docs" / "examples" / "posexport.toml", folder / "project.sound.toml")
    (folder / "export.sound.toml").write_text(
        'encoding = "rope"\nhidden_size = 16\nnum_heads = 2\nform = "native"\nopset = 23\ndtype = "fp16"\n'
        'causal = true\nwindow = 4\n[set]\ntheta = 500.0\nscaling = "yarn"\nfactor = 2\n'
        "original_max_position_embeddings = 64\n"
    )
    (folder / "sweep.sound.toml").write_text(
        '[[job]]\nkind = "bench"\nfile = "sound.onnx"\nruntime = ["ort-cpu"]\ncpus = 1\n'
        '[[job]]\nkind = "verify"\nfile = "*.onnx"\n'
        '[[job]]\nkind = "tune"\nencoding = ["rope", "alibi"]\nhidden-size = 16\nfor = "ort-cpu"\n'
    )
    (folder / "results").mkdir()
    results = {
        "bench": bench(),
        "tune": tune(),
        "verify": unstructure(REPORT),
        "matrix": json.loads(small().to_bytes()),
    }
    for name, data in results.items():
        (folder / "results" / f"{name}.json").write_text(json.dumps(data))
    return folder


def run(reader: str, folder: Path, seed: int, count: int, seconds: float = 10) -> dict[str, Any]:
    """The script's result for a batch. A crash of its process counts as a fault."""
    command = [sys.executable, str(SCRIPT), reader, str(folder), str(seed), str(count), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env={**os.environ, "COLUMNS": "100"})
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return {"files": count, "refused": 0, "read": 0, "faults": [[seed, f"exit code {done.returncode} {last}"]]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_thousand_mutants_are_read_or_refused(reader: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "files")
    files, refused, read, faults = 0, 0, 0, []
    for seed in range(0, 1000, BATCH):
        result = run(reader, tmp_path / "files", seed, BATCH)
        files, refused, read = files + result["files"], refused + result["refused"], read + result["read"]
        faults += result["faults"]
    assert files == 1000
    assert not faults, faults[:5]
    assert min(refused, read) >= 10, "the mutants are too mild, or too harsh"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("reader", READERS)
def test_some_mutants_are_read_or_refused(reader: str, sound: Path, tmp_path: Path) -> None:
    """A small part of the slow sweep, in the usual run."""
    shutil.copytree(sound, tmp_path / "files")
    result = run(reader, tmp_path / "files", 10_000, 15)
    assert (result["files"], result["faults"]) == (15, [])


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        ("planted-raise", "KeyError"),
        ("planted-escape", "reaches the terminal"),
        ("planted-hang", "no end within"),
        pytest.param("planted-memory", "it took", marks=pytest.mark.slow),
        ("planted-crash", "exit code -11"),
    ],
)
def test_planted_faults_are_found(reader: str, said: str, tmp_path: Path) -> None:
    assert reader in PLANTED
    result = run(reader, tmp_path, 0, 1, seconds=0.2 if reader == "planted-hang" else 10)
    assert said in result["faults"][0][1]
