"""`--from` with tensors: names that are refused, and `export --from` from the command line to a verified file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import LLAMA, llama_tensors, refusal, written
from helpers import cli, refused
from safetensors.torch import save_file
from torch import Tensor

from posexport.artifact.onnx_artifact import read_onnx
from posexport.bench.tune.request import read_tune_request
from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.models.checkpoints import read_checkpoint
from posexport.models.weights import seeded_weights
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import DTYPES

pytestmark = pytest.mark.few_inputs

Q = "model.layers.1.self_attn.q_proj.weight"
SPOILT: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (lambda held: held.pop(Q), f"lacks the tensor {Q!r} [32, 32]"),
    (
        lambda held: held.update({Q: held[Q][:-1].clone()}),
        f"{Q!r} has shape [31, 32], by config.json it must have [32, 32]",
    ),
    (lambda held: held.update({Q: held[Q].to(torch.float8_e4m3fn)}), f"{Q!r} is torch.float8_e4m3fn"),
    (lambda held: held.update({Q: held[Q] * float("nan")}), f"{Q!r} holds NaN or Inf"),
    (lambda held: held.update({Q: held[Q] * 1e6}), "q_proj.weight overflows in fp16"),
    (
        lambda held: [held.pop(name) for name in list(held) if "layers.1.self_attn" in name],
        "no tensor below layers.1.self_attn or model.layers.1.self_attn",
    ),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILT, ids=[said[:30] for _, said in SPOILT])
def test_a_spoilt_tensor_is_named(spoil: Callable[[dict[str, Tensor]], Any], said: str, tmp_path: Path) -> None:
    held = llama_tensors()
    written(tmp_path, **LLAMA)
    save_file(held, tmp_path / "model.safetensors")
    read_checkpoint(tmp_path, 1, 1, {"dtype": "fp16"})
    spoil(held)
    save_file(held, tmp_path / "model.safetensors")
    assert said in refusal(tmp_path, 1, dtype="fp16")


def test_a_bias_that_config_denies_is_refused(tmp_path: Path) -> None:
    written(tmp_path, **{**LLAMA, "attention_bias": False})
    save_file(llama_tensors(), tmp_path / "model.safetensors")
    said = "holds 'model.layers.1.self_attn.k_proj.bias', which the attention of llama does not have by config.json"
    assert said in refusal(tmp_path, 1)


LAYER = "model.layers.1.self_attn"
UNKNOWN = [
    *(f"{LAYER}.{name}" for name in ("q_norm.weight", "q_proj.weight_scale", "q_proj.input_scale", "k_scale", "sinks")),
    *(f"{LAYER}.{name}" for name in ("q_proj.lora_A.weight", "qkv_proj.weight", "bias", "rotary_emb.scale", "o_proj")),
    *(f"{root}layers.1.self_attn.q_proj.weight" for root in ("", "model.model.", "language_model.model.", "module.")),
    "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.1.self_attn.v_proj.base_layer.weight",
]


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("where", ["file", "shard", "unlisted"])
def test_a_tensor_of_the_attention_that_is_not_read_is_refused(name: str, where: str, tmp_path: Path) -> None:
    """An unknown tensor of a layer may change its results, so the layer is refused. Other layers are not affected."""
    written(tmp_path, **LLAMA)
    held = llama_tensors()
    save_file({**held, name: torch.ones(32, 32)}, tmp_path / "model.safetensors")
    if where != "file":
        (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
        listed = dict.fromkeys([*held, *([name] if where == "shard" else [])], "one.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert read_checkpoint(tmp_path, 0, 1, {}).weights is not None
    if where == "unlisted" and not name.startswith(LAYER):
        return
    for sentence in (refusal(tmp_path, 1), refusal_of_weights(tmp_path, 0, 2)):
        assert f"holds {name!r}" in sentence or "below layers.1.self_attn: keep one of them" in sentence


def refusal_of_weights(folder: Path, first: int, layers: int) -> str:
    """The message that refuses a stack when its weights are looked up."""
    with pytest.raises(RequestError) as caught:
        dict(read_checkpoint(folder, first, layers, {}).weights or {})
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.rotary_emb.inv_freq",
        "model.layers.1.self_attn_norm.weight",
        "model.layers.11.self_attn.q_norm.weight",
        "vision_tower.vision_model.encoder.layers.1.self_attn.q_proj.weight",
    ],
)
def test_a_tensor_that_does_not_affect_the_attention_is_passed_over(name: str, tmp_path: Path) -> None:
    written(tmp_path, **LLAMA)
    save_file({**llama_tensors(), name: torch.ones(2)}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path, 1, 1, {}).weights is not None


@pytest.mark.parametrize("listed", ["a.safetensors", "b.safetensors"])
def test_a_tensor_in_two_shards_is_refused(listed: str, tmp_path: Path) -> None:
    """transformers reads every shard completely and keeps the last tensor, whatever the index says."""
    written(tmp_path, **LLAMA)
    held, name = llama_tensors(), f"{LAYER}.q_proj.weight"
    save_file(held, tmp_path / "a.safetensors")
    save_file({name: 2 * held[name], "lm_head.weight": torch.ones(2)}, tmp_path / "b.safetensors")
    files = {**dict.fromkeys(held, "a.safetensors"), "lm_head.weight": "b.safetensors", name: listed}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_checkpoint(tmp_path, 0, 1, {}).weights is not None  # Only its own layer is refused.
    assert f"holds {name!r} both in {listed} and in " in refusal(tmp_path, 1)


def test_an_adapter_in_the_folder_is_refused(tmp_path: Path) -> None:
    written(tmp_path, **LLAMA)
    save_file(llama_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "an adapter to the weights: merge it into them first" in refusal(tmp_path, 1)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "SCB", None])
def test_quantized_tensors_are_refused_whatever_config_says_and_plain_ones_are_not(
    scale: str | None, tmp_path: Path
) -> None:
    """The quantization in a config.json may be only that of experts, so the tensors decide."""
    written(tmp_path, **LLAMA, quantization_config={"quant_method": "fp8"})
    held = llama_tensors()
    save_file(held, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path, 1, 1, {}).weights is not None
    name = f"{LAYER}.q_proj.weight"
    if scale is None:
        held[name] = held[name].to(torch.float8_e4m3fn)
    else:
        held[f"{LAYER}.q_proj.{scale}"] = torch.ones(1)
    save_file(held, tmp_path / "model.safetensors")
    assert "quantized" in refusal(tmp_path, 1)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 3}}'])
def test_a_folder_without_tensors_is_refused(index: str, tmp_path: Path) -> None:
    written(tmp_path, **LLAMA)
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path, 1)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "is no index of shards" in refusal(tmp_path, 1)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q: "gone.safetensors"}}))
    assert "gone.safetensors' can't be read as .safetensors" in refusal(tmp_path, 1)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    assert "model.safetensors' can't be read as .safetensors" in refusal(tmp_path, 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a checkpoint in `llama` and one whose layers differ in `gemma`."""
    monkeypatch.chdir(tmp_path)
    norms = {
        f"model.layers.{layer}.self_attn.{name}_norm.weight": torch.randn(8) for layer in range(3) for name in "qk"
    }
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 3, "sliding_window_pattern": 2}
    for name, data, more in (("llama", LLAMA, {}), ("gemma", gemma, norms)):
        (tmp_path / name).mkdir()
        written(
            tmp_path / name, **{key: value for key, value in data.items() if name == "llama" or key != "rope_theta"}
        )
        save_file({**llama_tensors(), **more}, tmp_path / name / "model.safetensors")
    return tmp_path


def test_a_layer_with_its_weights(folder: Path) -> None:
    result = cli("export", "--from", "llama", "--layer", 1, "--kv-cache", "--padding-mask", "-o", "llama.onnx")
    assert (result.exit_code, result.stderr) == (0, "")
    found, tensors = read_onnx(folder / "llama.onnx"), llama_tensors()
    assert found.spec == read_checkpoint(Path("llama"), 1, 1, {"kv_cache": True, "padding_mask": True}).spec
    assert (found.spec.encoding.name, found.spec.num_kv_heads, found.spec.causal) == ("rope", 2, True)
    for name, tensor in found.weights().items():
        assert torch.equal(tensor, tensors[f"model.layers.1.self_attn.{name}"])
    verified = cli("verify", "llama.onnx", "--runtime", "ort-cpu")
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_a_layer_may_promise_consecutive_positions(folder: Path) -> None:
    """No config.json says this. Rotated keys are cached, so the file has an input for the first position of a row."""
    options = ("--from", "llama", "--kv-cache", "--positions", "consecutive")
    assert cli("export", *options, "-o", "llama.onnx").exit_code == 0
    found = read_onnx(folder / "llama.onnx")
    assert found.spec.positions == "consecutive"
    assert graph_inputs(found.spec)["position_ids"] == (("batch", 1), "int64")
    verified = cli("verify", "llama.onnx", "--from", "llama", "--runtime", "ort-cpu", "--reach", "seq=64")
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_a_stack_with_its_weights(folder: Path) -> None:
    (folder / "more.toml").write_text("layers = 2\ndtype = 'fp16'\nform = 'function'\nfrom = 'gemma'")
    result = cli("export", "--config", "more.toml", "--layer", "1", "-o", "gemma.onnx", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = read_onnx(folder / "gemma.onnx")
    assert [found.spec.layer(index).window for index in (0, 1)] == [None, 3]
    theirs = llama_tensors()["model.layers.2.self_attn.o_proj.weight"]
    assert torch.equal(found.weights()["layers.1.o_proj.weight"], theirs.half())
    verified = cli("verify", "gemma.onnx", "--runtime", "ort-cpu")
    assert verified.exit_code == 0, verified.output


def test_a_config_alone(folder: Path) -> None:
    """The block has the shape of the first layer and weights from a seed."""
    (folder / "c.json").write_text((folder / "llama" / "config.json").read_text())
    assert cli("export", "--from", "c.json", "--seed", "3", "-o", "c.onnx").exit_code == 0
    found = read_onnx(folder / "c.onnx")
    assert found.spec == read_checkpoint(Path("llama"), None, 1, {}).spec
    seeded = seeded_weights(found.spec, 3)
    assert all(torch.equal(tensor, seeded[name]) for name, tensor in found.weights().items())


def weights_row(stdout: str) -> str:
    """The text about weights in the summary of an export."""
    return next(line.split(maxsplit=1)[1] for line in stdout.splitlines() if line.startswith("  weights "))


def test_a_folder_with_weights_gives_them_without_a_layer(folder: Path) -> None:
    """The default is layer 0, as the summary and the manifest say. Random weights for such a folder need a seed."""
    result = cli("export", "--from", "llama", "-o", "first.onnx")
    assert result.exit_code == 0
    assert result.stderr == "This is one layer of the checkpoint: give --model for the whole model.\n"
    assert weights_row(result.stdout) == "checkpoint llama, layer 0; give --layer for another"
    tensors = llama_tensors()
    for name, tensor in read_onnx(folder / "first.onnx").weights().items():
        assert torch.equal(tensor, tensors[f"model.layers.0.self_attn.{name}"])
    config = sha256_of(folder / "llama" / "config.json")
    source = {"source": "checkpoint", "folder": "llama", "config_sha256": config, "layer": 0}
    assert json.loads((folder / "first.onnx.json").read_bytes())["weights"] == source
    result = cli("export", "--from", "./llama", "--layer", "2", "-o", "third.onnx")
    assert weights_row(result.stdout) == "checkpoint llama, layer 2"
    assert json.loads((folder / "third.onnx.json").read_bytes())["weights"] == {**source, "layer": 2}
    result = cli("export", "--from", "llama", "--seed", "3", "-o", "random.onnx")
    assert weights_row(result.stdout) == "random, seed 3"
    random = read_onnx(folder / "random.onnx")
    seeded = seeded_weights(random.spec, 3)
    assert all(torch.equal(tensor, seeded[name]) for name, tensor in random.weights().items())


def test_several_layers_are_not_called_one(folder: Path) -> None:
    result = cli("export", "--from", "llama", "--layers", "2", "-o", "first_two.onnx")
    assert result.stderr == "These are 2 layers of the checkpoint: give --model for the whole model.\n"


def test_a_shape_alone_says_that_its_weights_are_random(folder: Path) -> None:
    hint = "random, seed 0; give the checkpoint's folder to --from for trained ones"
    assert weights_row(cli("export", "--from", "llama/config.json").stdout) == hint
    assert weights_row(cli("export", "--from", "llama/config.json", "--seed", "0").stdout) == "random, seed 0"


@pytest.mark.parametrize("command", ["export", "tune"])
@pytest.mark.parametrize("beside", [None, "tokenizer.json", "model.safetensors.incomplete", "pytorch_model.bin"])
def test_weights_that_are_not_there_are_not_replaced_silently(command: str, beside: str | None, folder: Path) -> None:
    (folder / "llama" / "model.safetensors").unlink()
    if beside is not None:
        (folder / "llama" / beside).write_bytes(b"{}")
    said = ("'llama' holds neither model.safetensors nor", "its config.json for the shape alone")
    for options in ([], ["--layers", "2"], ["--layer", "1"]):
        refused(cli(command, "--from", "llama", *options), *said)
    (folder / "from.toml").write_text("from = 'llama'")
    refused(cli(command, "--config", "from.toml"), *said)
    assert not list(folder.glob("*.onnx*"))
    if command == "export":
        assert weights_row(cli("export", "--from", "llama", "--seed", "0").stdout) == "random, seed 0"
    else:
        request = read_tune_request(None, None, {}, {"from": "llama", "seed": "0"}, None)
        assert list(request.specs) == list(DTYPES)


DECIDED = "was given with from: config.json decides it, so drop it."
BESIDE: list[tuple[tuple[str, ...], str]] = [
    (("--encoding", "rope"), f"encoding {DECIDED}"),
    (("--set", "theta=3"), f"set {DECIDED}"),
    (("--hidden-size", "32"), f"hidden_size {DECIDED}"),
    (("--no-causal",), f"causal {DECIDED}"),
    (("--bias",), f"bias {DECIDED}"),
    (("--qk-norm",), f"qk_norm {DECIDED}"),
    (("--window", "3"), f"window {DECIDED}"),
    (("--block", "transformer"), f"block {DECIDED}"),
    (("--layer-pattern", "rope"), f"layer_pattern {DECIDED}"),
    (("--layer", "1", "--seed", "0"), "both layer and seed were given"),
    (("--layer", "1", "--weights", "w.safetensors"), "both from and weights were given"),
    (("--preset", "llama-2-7b"), "both preset and from were given"),
    (("--layer", "-1"), "layer is '-1': it must be a whole number from 0"),
    (("--layer", "3"), "describes 3 layers, 0 to 2: 3 is none of them"),
    (("--layer", "2", "--layers", "2"), "describes 3 layers, 0 to 2: 3 is none of them"),
    (("--layers", "0"), "layers is '0'"),
    (("--prefix-tokens", "3", "--kv-cache"), "prefix_tokens and kv_cache were both given"),
]


@pytest.mark.parametrize(("options", "said"), BESIDE, ids=lambda value: str(value)[:40])
def test_what_may_not_stand_beside_from(options: tuple[str, ...], said: str, folder: Path) -> None:
    refused(cli("export", "--from", "llama", *options), said)
    assert not list(folder.glob("*.onnx*"))


def test_layer_needs_from(folder: Path) -> None:
    refused(cli("export", "--encoding", "rope", "--layer", "1"), "layer was given without from")
    refused(cli("export", "--from", "lama"), "'lama' can't be read (No such file or directory)")
    (folder / "set.toml").write_text("from = 'llama'\n[set]\ntheta = 3")
    refused(cli("export", "--config", "set.toml"), f"set {DECIDED}")
