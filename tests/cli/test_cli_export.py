"""`posexport export`, `list` and `inspect` as people and scripts call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import cli, small_spec, tree, weights_for
from safetensors.torch import save_file

from posexport.artifact.onnx_artifact import read_onnx
from posexport.files import sha256_of
from posexport.models import ENCODINGS, read_encoding
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt.api import BUILDERS, can_build
from posexport.spec.forms import FORMS, TARGETS

SMALL = ("--hidden-size", "32", "--num-heads", "4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_writes_the_file_and_its_manifest(folder: Path) -> None:
    result = cli("export", "--encoding", "rope", *SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    assert sorted(tree(folder)) == ["rope.onnx", "rope.onnx.json"]
    assert result.stdout.splitlines() == [
        "wrote rope.onnx",
        "  encoding             rope",
        "  form                 decomposed, opset 18, fp32",
        "  weights              random, seed 0; give --weights or --from for trained ones",
        "  input hidden_states  fp32 ['batch', 'seq', 32]",
        "  input position_ids   int64 ['batch', 'seq']",
        "  output output        fp32 ['batch', 'seq', 32]",
        f"  size                 {(folder / 'rope.onnx').stat().st_size / 1e6:.2f} MB",
        "  manifest             rope.onnx.json",
    ]
    found = read_onnx(folder / "rope.onnx")
    assert (found.spec, found.form, found.opset) == (small_spec("rope"), "decomposed", 18)
    assert all(torch.equal(tensor, weights_for(found.spec)[name]) for name, tensor in found.weights().items())


def test_json_is_the_manifest(folder: Path) -> None:
    result = cli("export", "--encoding", "none", *SMALL, "--json", "-o", "block.onnx")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == json.loads((folder / "block.onnx.json").read_bytes())


@pytest.mark.slow
def test_a_config_says_the_same_as_options(folder: Path) -> None:
    (folder / "block.toml").write_text(
        """
        encoding = "rope"
        hidden-size = 32
        num_heads = "4"
        num-kv-heads = 2
        causal = true
        window = 5
        block = "transformer"
        norm-type = "rmsnorm"
        mlp = "swiglu"
        dtype = "fp16"
        form = "function"
        opset = 20
        seq = 6
        seed = 3
        bias = true
        output = "a.onnx"

        [set]
        theta = 5e5
        layout = "half"
        rotary_dim = 4
        """
    )
    assert cli("export", "--config", "block.toml").exit_code == 0
    options = (
        "--encoding rope --hidden-size 32 --num-heads 4 --num-kv-heads 2 --causal --window 5 --block transformer "
        "--norm-type rmsnorm --mlp swiglu --dtype fp16 --form function --opset 20 --seq 6 --seed 3 --bias "
        "--set theta=500000 --set layout=half --set rotary_dim=4 --output b.onnx"
    )
    assert cli("export", *options.split()).exit_code == 0
    files = tree(folder)
    assert files["a.onnx"] == files["b.onnx"]
    assert files["a.onnx.json"] == files["b.onnx.json"].replace(b'"b.onnx"', b'"a.onnx"')
    found = read_onnx(folder / "a.onnx")
    assert found.spec.encoding == read_encoding({"name": "rope", "theta": 500000.0, "layout": "half", "rotary_dim": 4})
    assert found.opset == 20
    assert [shape[1] for shape, _ in found.inputs().values()] == [6, 6]


def test_options_win_over_a_config(folder: Path) -> None:
    (folder / "block.toml").write_text(
        "encoding = 'rope'\nhidden_size = 64\nnum_heads = 4\ncausal = true\n[set]\ntheta = 7\nlayout = 'half'"
    )
    arguments = ("--hidden-size", "32", "--no-causal", "--set", "theta=9", "-o", "c.onnx")
    assert cli("export", "--config", "block.toml", *arguments).exit_code == 0
    assert read_onnx(folder / "c.onnx").spec == small_spec("rope", theta=9.0, layout="half")


def test_weights_from_a_file(folder: Path) -> None:
    spec = small_spec("relative", bias=["k_proj", "o_proj"])
    weights = {name: tensor * 2 for name, tensor in weights_for(spec).items()}
    save_file(weights, "w.safetensors")
    arguments = ("--encoding", "relative", *SMALL, "--weights", "w.safetensors")
    assert cli("export", *arguments).exit_code == 0
    found = read_onnx(folder / "relative.onnx")
    assert found.spec == spec  # the spec has the biases of the file
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.weights().items())
    assert cli("export", *arguments, "--dtype", "bf16").exit_code == 0
    rounded = read_onnx(folder / "relative.onnx").weights()
    manifest = json.loads((folder / "relative.onnx.json").read_bytes())
    assert manifest["weights"] == {
        "source": "file",
        "file": "w.safetensors",
        "sha256": sha256_of(Path("w.safetensors")),
    }
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in rounded.items())


def test_seeds_make_different_weights(folder: Path) -> None:
    for seed in ("0", "1"):
        assert cli("export", "--encoding", "none", *SMALL, "--seed", seed, "-o", f"{seed}.onnx").exit_code == 0
        assert json.loads((folder / f"{seed}.onnx.json").read_bytes())["weights"] == {
            "source": "random",
            "seed": int(seed),
        }
    files = tree(folder)
    assert len(files["0.onnx"]) == len(files["1.onnx"])
    assert files["0.onnx"] != files["1.onnx"]


def test_list() -> None:
    result = cli("list")
    assert (result.exit_code, result.stderr) == (0, "")
    for name in (*ENCODINGS, *FORMS, *TARGETS, *RUNTIMES):
        assert name in result.stdout
    assert "theta=10000.0" in result.stdout
    assert "arXiv:2104.09864" in result.stdout
    only_builds = [name for name in BUILDERS if can_build(name) is None and RUNTIMES[name].missing() is not None]
    assert result.stdout.count("builds plans, runs none") == len(only_builds)


def test_list_for_machines() -> None:
    found = json.loads(cli("list", "--json").stdout)
    assert list(found) == ["encodings", "scalings", "forms", "targets", "refusals", "runtimes"]
    assert list(found["encodings"]) == list(ENCODINGS)
    assert found["encodings"]["rope"]["parameters"]["theta"] == {
        "default": 10000.0,
        "allowed": "a number from 1e-30 to 1e+30",
        "help": "base of the wavelengths",
    }
    assert found["forms"] == FORMS
    assert found["targets"] == TARGETS
    for row in found["refusals"]:
        assert row["form"] in FORMS
        assert set(row["targets"]) <= set(TARGETS)
        assert row["why"].endswith(".")
    assert list(found["runtimes"]) == list(RUNTIMES)
    assert found["runtimes"]["ort-cpu"]["missing"] is None
    assert all(row["missing"] is None or row["missing"] for row in found["runtimes"].values())


def test_inspect(folder: Path) -> None:
    assert cli("export", "--encoding", "alibi", *SMALL, "--form", "function").exit_code == 0
    result = cli("inspect", "alibi.onnx")
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("alibi.onnx", "function", "hidden_states", "AlibiBias", "PositionalAttention", "matches the file"):
        assert part in result.stdout
    found = json.loads(cli("inspect", "alibi.onnx", "--json").stdout)
    assert found["spec"] == small_spec("alibi").to_dict()
    assert found["form"] == "function"
    assert found["opset"] == 18
    assert found["domains"] == {"ai.onnx": 18, "posexport": 1}
    assert {"name": "position_ids", "shape": ["batch", "seq"], "dtype": "int64"} in found["inputs"]
    assert found["manifest"] == "matches the file"
    assert (folder / "alibi.onnx").stat().st_size == found["bytes"]
