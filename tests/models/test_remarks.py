"""Warnings of `export --model` about a file: dtypes, pipelines, sizes of images, inputs and experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cli, refused
from small_decoders import save_randomised, small_checkpoint
from tiny_models import ROWS, build

from posexport.export import remarks
from posexport.export.remarks import expert_bytes
from posexport.models.image_size import image_size
from posexport.models.whole_inputs import left_out_inputs

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 40}


def saved(model: Any, folder: Path) -> Path:
    save_randomised(model, folder)
    return folder


def warnings(folder: Path, *options: str) -> str:
    """The warnings of the export of a checkpoint."""
    output = folder.with_name("out")
    output.mkdir(exist_ok=True)
    result = cli("export", "--from", folder, "--model", "-o", output / "model.onnx", *options)
    assert result.exit_code == 0, result.output
    return "\n".join(line for line in result.stderr.splitlines() if line.startswith("Warning: "))


@pytest.mark.slow
def test_bf16_without_a_dtype(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "llama").to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    said = "the checkpoint is in bf16, and so is the file, which ONNX Runtime doesn't run on CPUs: give --dtype fp32 or"
    assert said in warnings(tmp_path / "llama")
    refused(
        cli("generate", tmp_path / "out" / "model.onnx", "--prompt-ids", "1,2"),
        "is bf16: give a decoder in fp32 or fp16, as `export --model --dtype fp32` writes it",
    )
    for dtype in ("bf16", "fp32"):
        assert warnings(tmp_path / "llama", "--dtype", dtype) == ""


@pytest.mark.slow
def test_fp64_is_written_in_fp32(tmp_path: Path) -> None:
    """An fp64 file failed its own verification, since angles are in fp32, and onnxruntime-genai refused its caches."""
    folder, model = tmp_path / "llama", tmp_path / "out" / "model.onnx"
    small_checkpoint(folder).double().save_pretrained(folder)
    assert "the checkpoint is in fp64, and the file is in fp32" in warnings(folder)
    inspected = json.loads(cli("inspect", model, "--json").stdout)
    assert "fp64" not in json.dumps(inspected["inputs"]) and "fp32" in json.dumps(inspected["inputs"])
    verified = cli("verify", model, "--from", folder, "--runtime", "ort-cpu")
    assert verified.exit_code == 0, verified.output
    assert warnings(folder, "--dtype", "fp16") == ""


@pytest.mark.slow
def test_a_pipeline_of_sentence_transformers(tmp_path: Path) -> None:
    folder = saved(transformers.BertModel(transformers.BertConfig(**TEXT)), tmp_path / "bert")
    kinds = ("Transformer", "Pooling", "Normalize")
    for kinds_of, module in ((kinds, "sentence_transformers.models."), (kinds[:1], "sentence_transformers.models.")):
        modules = [{"idx": at, "path": "", "type": f"{module}{kind}"} for at, kind in enumerate(kinds_of)]
        (folder / "modules.json").write_text(json.dumps(modules))
        said = warnings(folder)
        assert ("'Pooling' and 'Normalize' of modules.json" in said) == (len(kinds_of) > 1)
        assert ("are left out: the file gives what BertModel gives alone." in said) == (len(kinds_of) > 1)


@pytest.mark.slow
def test_the_model_of_a_pipeline_itself_is_not_left_out(tmp_path: Path) -> None:
    """A pipeline may have its own class for the model. The model has the number 0."""
    folder = saved(transformers.BertModel(transformers.BertConfig(**TEXT)), tmp_path / "bert")
    kinds = ("custom_st.OwnTransformer", "sentence_transformers.models.Pooling")
    modules = [{"idx": at, "path": "", "type": kind} for at, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    said = warnings(folder)
    assert "Warning: 'Pooling' of modules.json" in said and "OwnTransformer" not in said


PREPROCESSORS: dict[str, tuple[dict[str, Any], tuple[int, int] | None]] = {
    "height and width": ({"size": {"height": 32, "width": 48}}, (32, 48)),
    "a number": ({"size": 64}, (64, 64)),
    "a shorter side": ({"size": {"shortest_edge": 64}}, (64, 64)),
    "cut": ({"size": {"shortest_edge": 80}, "crop_size": {"height": 64, "width": 64}}, (64, 64)),
    "not cut": ({"size": 80, "crop_size": 64, "do_center_crop": False}, (80, 80)),
    "of a processor": ({"image_processor": {"size": {"height": 32, "width": 48}}}, (32, 48)),
    "a shorter side and the most of the longer": ({"size": 80, "max_size": 133}, None),
    "two sides": ({"size": {"shortest_edge": 64, "longest_edge": 100}}, None),
    "nothing": ({}, None),
    "no number": ({"size": {"height": "32", "width": None}}, None),
    "a truth value": ({"size": True}, None),
    "too many numbers": ({"size": [1, 2, 3]}, None),
    "too large": ({"size": 10**9}, None),
}


@pytest.mark.parametrize("case", PREPROCESSORS)
def test_the_size_of_images_is_that_of_the_preprocessor(case: str, tmp_path: Path) -> None:
    data, wanted = PREPROCESSORS[case]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(data))
    config = transformers.ResNetConfig()
    assert image_size(config, tmp_path) == wanted
    config.image_size = 16
    assert image_size(config, tmp_path) == (16, 16)


def test_the_size_of_images_of_a_backbone_is_the_last_choice(tmp_path: Path) -> None:
    config = transformers.VitPoseConfig(backbone_config={"model_type": "vitpose_backbone", "image_size": [32, 24]})
    assert image_size(config, None) == image_size(config, tmp_path) == (32, 24)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 80, "max_size": 133}))
    assert image_size(config, tmp_path) is None


@pytest.mark.slow
def test_a_guessed_size_of_images_is_a_warning(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    folder = saved(transformers.ResNetForImageClassification(config), tmp_path / "resnet")
    said = "says how large images are, so the file takes 224x224, which is a guess: put image_size into config.json"
    assert said in warnings(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 64}}))
    assert said not in warnings(folder)
    result = cli("verify", tmp_path / "out" / "model.onnx", "--from", folder, "--runtime", "ort-cpu", "--json")
    assert result.exit_code == 0, result.output
    inspected = cli("inspect", tmp_path / "out" / "model.onnx").stdout
    assert "32, 64" in inspected


@pytest.mark.slow
def test_inputs_that_a_file_does_not_have(tmp_path: Path) -> None:
    sizes = {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [8], "num_conv_pos_embeddings": 4}
    config = transformers.Wav2Vec2Config(**SIZES, **sizes, num_conv_pos_embedding_groups=2, vocab_size=12)
    said = warnings(saved(transformers.Wav2Vec2Model(config), tmp_path / "wav2vec2"))
    assert "Wav2Vec2Model can be given attention_mask too, which the file has no input for: it computes what" in said


@pytest.mark.slow
def test_places_of_tokens_on_a_page_are_an_input(tmp_path: Path) -> None:
    config = transformers.LayoutLMConfig(**TEXT, max_2d_position_embeddings=1024, type_vocab_size=1)
    model = transformers.LayoutLMModel(config)
    folder = saved(model, tmp_path / "layoutlm")
    assert warnings(folder) == ""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert {one.name: one.shape for one in session.get_inputs()}["bbox"] == ["batch", "sequence", 4]
    ids = np.random.default_rng(0).integers(3, 60, (2, 5))
    boxes = np.sort(np.random.default_rng(1).integers(0, 1000, (2, 5, 2, 2)), 2).reshape(2, 5, 4)
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "bbox": boxes}
    made = session.run(["last_hidden_state"], given)[0]
    wanted = model(**{name: torch.from_numpy(value) for name, value in given.items()}).last_hidden_state.numpy()
    assert np.abs(made - wanted).max() < 1e-4
    result = cli("verify", tmp_path / "out" / "model.onnx", "--from", folder, "--runtime", "ort-cpu")
    assert result.exit_code == 0, result.output


def test_places_that_are_no_whole_numbers(tmp_path: Path) -> None:
    folder = saved(transformers.BrosModel(transformers.BrosConfig(**TEXT)), tmp_path / "bros")
    command = ("export", "--from", folder, "--model", "-o", tmp_path / "model.onnx")
    refused(cli(*command), "BrosModel reads places of tokens on a page, bbox, that are no whole numbers")


@pytest.mark.parametrize(("name", "chosen"), [("olmoe", 2), ("mixtral", 2), ("hunyuan_v1_moe", 2), ("llama", 0)])
def test_bytes_of_experts_for_each_token(name: str, chosen: int) -> None:
    model = build(ROWS[name])
    of_one = [
        module.gate_up_proj[0].numel() + module.down_proj[0].numel()
        for module in model.modules()
        if getattr(module, "gate_up_proj", None) is not None and getattr(module, "down_proj", None) is not None
        if isinstance(module.down_proj, torch.nn.Parameter)
    ]
    assert expert_bytes(model, 4) == max(of_one, default=0) * chosen * 4
    assert (expert_bytes(model, 2) > 0) == (chosen > 0)


def test_experts_one_after_the_other_are_not_copied() -> None:
    assert expert_bytes(build(ROWS["longcat_flash"]), 4) == 0


@pytest.mark.slow
def test_experts_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(build(ROWS["olmoe"]), tmp_path / "olmoe")
    assert "experts" not in warnings(folder)
    monkeypatch.setattr(remarks, "FEW", 2**10)
    said = warnings(folder)
    assert "OlmoeForCausalLM chooses experts for each token, and its file copies their weights for each: some" in said
    assert "MB for each token of a prompt, so give long prompts in parts." in said


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("ErnieModel", ["task_type_ids"]),
        ("RoCBertModel", ["input_shape_ids", "input_pronunciation_ids"]),
        ("PatchTSTModel", ["past_observed_mask"]),
        ("PromptDepthAnythingForDepthEstimation", ["prompt_depth"]),
        ("BertModel", []),
    ],
)
def test_optional_inputs_are_named(name: str, left: list[str]) -> None:
    model = getattr(transformers, name)
    given = ("input_ids", "attention_mask", "token_type_ids", "pixel_values", "past_values")
    assert left_out_inputs(model, given) == tuple(left)
