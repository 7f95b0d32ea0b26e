"""Decoders of transformers as whole files against transformers' models, with padding and caches, in several forms."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tiny_models import checkpoint, decoder_error

from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.export import whole_model
from posexport.export.whole_model import ExportedModel, HowToExport, export_whole
from posexport.models.pretrained import open_pretrained

BOUND = {"fp32": 2e-5, "fp16": 2e-2}


@cache
def exported(name: str, stored: str = "float32", **how: Any) -> ExportedModel:
    """The export of a tiny checkpoint, shared by tests."""
    dtype = how.pop("dtype", None)
    (model,) = export_whole(open_pretrained(checkpoint(name, stored)), HowToExport(dtype=dtype, **how))
    return model


def two_kinds() -> ExportedModel:
    """A model with two kinds of layers, which takes longest to trace."""
    return exported("gemma3", form="native", hidden_states=True)


def written(model: ExportedModel, folder: Path) -> Path:
    write_onnx(model.model, folder / "model.onnx", attentions=model.attentions)
    return folder / "model.onnx"


ORT = {"form": "contrib", "target": "ort"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama, grown caches": ("llama", {"form": "native"}, {"Attention": 2}),
    "llama, buffers": ("llama", {"form": "native", "opset": 24, "kv_cache": "shared"}, {"Attention": 2}),
    "buffers for ort": ("llama", {"form": "native", "target": "ort", "kv_cache": "shared"}, {"TensorScatter": 4}),
    "llama, without caches": ("llama", {"kv_cache": "none"}, {"Softmax": 2}),
    "tied embeddings, learned positions": ("gpt2", ORT, {"MultiHeadAttention": 2}),
    "two kinds of layers": ("gemma3", {"form": "native"}, {"Attention": 4}),
    "experts": ("qwen3_moe", {"form": "native"}, {"Attention": 4}),
    "no positions": ("bloom", {}, {"Softmax": 4}),
    "delta rule": ("qwen3_next", {}, {"Scan": 2}),
    "delta rule, buffers": (
        "qwen3_next",
        {"form": "native", "opset": 24, "kv_cache": "shared"},
        {"Attention": 2, "Scan": 2},
    ),
    "a decay of each feature": ("kimi_linear", {}, {"Softmax": 2, "Scan": 2}),
    "convolutions": ("lfm2", {"form": "native", "opset": 24, "kv_cache": "shared"}, {"Attention": 2}),
    "state space": ("bamba", ORT, {"LinearAttention": 2}),
    "state space without caches": ("bamba", {"kv_cache": "none"}, {"Softmax": 2, "Scan": 2}),
    "states and keys in each layer": ("falcon_h1", {"form": "native"}, {"Attention": 4, "Scan": 4}),
    "channels of their own, without caches": ("jamba", {"kv_cache": "none"}, {"Scan": 2}),
    "layers without caches": ("nemotron_h", {"form": "native"}, {"Attention": 2, "Scan": 2}),
    "limits of steps": ("zamba2", {}, {"Softmax": 2, "Scan": 4}),
    "keys that choose tokens": ("deepseek_v32", {}, {"Softmax": 4}),
    "one head of keys": ("falcon_mqa", {"form": "native"}, {"Attention": 4}),
}


QUICK = {"llama, grown caches"}
"""Cases of the default run; the others take as long and run by `scripts/test slow`."""


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CASES])
def test_a_decoder_is_the_model_of_transformers(case: str, tmp_path: Path) -> None:
    name, how, operators = CASES[case]
    model = exported(name, **how)
    assert not model.left()
    kinds = [node.op_type for node in model.model.graph]
    assert {kind: kinds.count(kind) for kind in operators} == operators
    path = written(model, tmp_path)
    assert decoder_error(path, checkpoint(name)) < BOUND["fp32"]


@pytest.mark.slow
def test_bfloat16_where_an_operator_does_not_take_it_is_a_sentence() -> None:
    with pytest.raises(
        RequestError, match=r"Lfm2ForCausalLM can't be written in bf16 at opset 18, .*: give --opset 22"
    ):
        exported("lfm2", "bfloat16")
    assert exported("lfm2", "bfloat16", opset=22).model.graph.opset_imports[""] == 22


def test_names_are_those_that_loaders_expect() -> None:
    def shapes(values: Any) -> dict[str, list[int | str]]:
        return {value.name: [dim if isinstance(dim, int) else dim.value for dim in value.shape] for value in values}

    graph = exported("llama", form="native").model.graph
    caches = {f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")}
    assert shapes(graph.inputs) == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total"],
        "position_ids": ["batch", "sequence"],
        **{f"past_key_values.{name}": ["batch", 2, "past", 16] for name in sorted(caches)},
    }
    assert shapes(graph.outputs) == {
        "logits": ["batch", "sequence", 128],
        **{f"present.{name}": ["batch", 2, "total", 16] for name in sorted(caches)},
    }


@pytest.mark.slow
def test_a_model_without_positions_has_no_such_input() -> None:
    assert "position_ids" not in {value.name for value in exported("bloom").model.graph.inputs}


@pytest.mark.slow
def test_layers_of_a_kind_are_traced_once() -> None:
    assert [one.get("like") is None for one in exported("llama", form="native").attentions] == [True, False]
    assert [one.get("like") is None for one in two_kinds().attentions] == [True, True, False, False]


@pytest.mark.slow
def test_weights_keep_the_names_and_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    path = written(exported("llama", "bfloat16", form="native"), tmp_path)
    from safetensors.torch import load_file

    stored = load_file(checkpoint("llama", "bfloat16") / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    for name, value in stored.items():
        assert tensors[name].data_type == onnx.TensorProto.BFLOAT16
        assert tensors[name].raw_data == value.contiguous().view(torch.int16).numpy().tobytes(), name


@pytest.mark.slow
def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    path = written(exported("gpt2", **ORT), tmp_path)
    tables = [tensor.name for tensor in onnx.load(path).graph.initializer if sorted(tensor.dims) == [64, 128]]
    assert len(tables) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stored", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision(stored: str, tmp_path: Path) -> None:
    path = written(exported("llama", stored, form="native", dtype=torch.float16), tmp_path)
    kinds = {tensor.type.tensor_type.elem_type for tensor in onnx.load(path).graph.output}
    assert kinds == {onnx.TensorProto.FLOAT16}
    assert decoder_error(path, checkpoint("llama", stored)) < BOUND["fp16"]


@pytest.mark.slow
def test_hidden_states_are_those_that_enter_the_head(tmp_path: Path) -> None:
    path = written(two_kinds(), tmp_path)
    assert decoder_error(path, checkpoint("gemma3"), "last_hidden_state") < BOUND["fp32"]
    assert decoder_error(path, checkpoint("gemma3")) < BOUND["fp32"]


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    pretrained = open_pretrained(checkpoint("llama"))
    (again,) = export_whole(pretrained, HowToExport(form="native"))
    folders = tmp_path / "one", tmp_path / "other"
    for folder, model in zip(folders, (exported("llama", form="native"), again), strict=True):
        folder.mkdir()
        written(model, folder)
    assert (folders[0] / "model.onnx").read_bytes() == (folders[1] / "model.onnx").read_bytes()


@pytest.mark.slow
def test_the_oracle_sees_a_wrong_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a copied layer reads a weight of the original layer."""
    tensor = whole_model._Export._tensor

    def wrong(self: Any, name: str, like: Any) -> Any:
        return tensor(self, name.replace("layers.1.self_attn.q_proj", "layers.0.self_attn.q_proj"), like)

    monkeypatch.setattr(whole_model._Export, "_tensor", wrong)
    (model,) = export_whole(open_pretrained(checkpoint("llama")), HowToExport(kv_cache="none"))
    assert decoder_error(written(model, tmp_path), checkpoint("llama")) > 100 * BOUND["fp32"]
