"""Checkpoint folders that `export --model` refuses in one sentence because of the way their weights are stored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, refused
from safetensors.torch import load_file, save_file
from small_decoders import small_checkpoint
from torch import Tensor

from posexport.models.checkpoints.tensors import Tensors

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_checkpoint(tmp_path / "llama")
    return tmp_path / "llama"


def export(folder: Path) -> Any:
    return cli("export", "--from", folder, "--model", "-o", folder.with_name("model.onnx"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "by an unknown method"),
        ({"quantization_config": {"quant_method": None, "bits": 4}}, "by an unknown method"),
        ({"compression_config": {"quant_method": "own\n\x1b[31m"}}, "own \\x1b[31m"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "gptq"),
    ],
)
def test_quantized_weights(changes: dict[str, Any], method: str, folder: Path) -> None:
    edit(folder, **changes)
    refused(export(folder), f"'{folder}' is quantized ({method}): give the checkpoint that it was quantized from.")


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_quantized_weights_that_transformers_makes_plain_ones_of(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_accelerate_available", lambda: False)
    edit(folder, quantization_config={"quant_method": method})
    said = "which transformers undoes with the package accelerate: pip install accelerate, or give the checkpoint that"
    refused(export(folder), f"is quantized ({method}), {said}")


@pytest.mark.slow
def test_a_config_without_quantized_weights(folder: Path) -> None:
    edit(folder, quantization_config=None, compression_config=None)
    result = export(folder)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    said = f"but {name}, which is not opened since it may hold code: save it with transformers' save_pretrained"
    assert "config.json" not in refused(export(folder), said + ".")
    refused(cli("export", "--from", folder), said + ", or give its config.json for the shape alone.")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors.incomplete", "an unfinished download: fetch it again."),
        ("model-00001-of-00002.safetensors", "a shard without its index: fetch model.safetensors.index.json too."),
        ("consolidated.safetensors", "which is not a name that transformers reads: rename it to model.safetensors if"),
        ("model-q4.gguf", "which is packed for llama.cpp: give the checkpoint that it was made from."),
        ("tf_model.h5", "the weights of another framework: save it with transformers' save_pretrained."),
    ],
)
def test_weights_of_another_name(name: str, said: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    refused(export(folder), f"holds neither model.safetensors nor model.safetensors.index.json but {name}, {said}")


def test_weights_in_a_folder_below(folder: Path) -> None:
    folder.rename(folder.with_name("0_Transformer"))
    folder.mkdir()
    below = folder.with_name("0_Transformer").rename(folder / "0_Transformer")
    refused(export(folder), f"but the folder 0_Transformer, which does: give '{below}'.")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "config.json" not in refused(export(folder), "holds neither model.safetensors nor")


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def restored(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the tensor Q_PROJ by a changed one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, Q_PROJ: change(tensors[Q_PROJ])}, path, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_weights_without_the_scales_they_were_quantized_with(dtype: torch.dtype, folder: Path) -> None:
    restored(folder, lambda tensor: (tensor * 10).to(dtype))
    said = refused(export(folder), f"tensor '{Q_PROJ}' is ")
    assert said.rstrip().endswith("give the checkpoint that it was quantized from.")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(value: float, folder: Path) -> None:
    restored(folder, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    refused(export(folder), f"tensor '{Q_PROJ}' holds NaN or Inf, every value must be finite.")
    assert not folder.with_name("model.onnx").exists()


def test_a_tensor_in_two_shards(folder: Path) -> None:
    """transformers uses the last of them, whatever the index says."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({Q_PROJ: tensors[Q_PROJ] * 2}, folder / "b.safetensors", {"format": "pt"})
    save_file({"unread": tensors[Q_PROJ] * 2}, folder / "c.safetensors", {"format": "pt"})
    shards = {**dict.fromkeys(tensors, "a.safetensors"), "unread": "c.safetensors", "none": "b.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    refused(export(folder), f"holds '{Q_PROJ}' both in a.safetensors and in b.safetensors: keep one of them.")


@pytest.mark.parametrize("kind", ["a list", "deep", "a pipe"])
def test_settings_of_generation_that_are_no_json(kind: str, folder: Path) -> None:
    """transformers opens this file, so posexport checks it first."""
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes({"a list": b"[]", "deep": b"[" * 100_000}[kind])
    refused(export(folder), f"'{path}' can't be read as a JSON object: restore it, or remove it.")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_files_of_holes_are_refused_before_the_work(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posexport.models.pretrained.open_pretrained", None)
    (folder / name).touch()
    os.truncate(folder / name, 2**40)
    refused(export(folder), "bytes, nearly all of which are a hole")


def test_buffers_may_hold_integers(tmp_path: Path) -> None:
    """An example is position_ids, which checkpoints of BERT still have."""
    stored = {"bert.embeddings.position_ids": torch.arange(8), "bert.pooler.dense.weight": torch.ones(2, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    Tensors(tmp_path, whole=True).check_stored(["pooler.dense.weight"])


@pytest.mark.slow
def test_files_of_all_tokenizers_are_beside_the_model(folder: Path) -> None:
    names = ("spm.model", "tekken.json", "tokenizer.json")
    for name in names:
        (folder / name).write_bytes(b"{}")
    assert export(folder).exit_code == 0
    assert all(folder.with_name(name).is_file() for name in names)


def test_a_class_with_a_method_of_its_own_that_loads_weights(tmp_path: Path) -> None:
    """JEV's returns no list of what was loaded. The refusal was AttributeError: 'tuple' has no 'decision_config'."""
    transformers: Any = pytest.importorskip("transformers")
    kind = getattr(transformers, "JevForDecision", None)
    if kind is None:
        pytest.skip("this version of transformers has no JEV")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaConfig(**sizes, vocab_size=16)
    kind(transformers.JevConfig(text_config=text, hidden_size=8)).save_pretrained(tmp_path / "jev")
    refused(export(tmp_path / "jev"), "JevForDecision needs marks and num_options and question_type_ids too, which a ")
