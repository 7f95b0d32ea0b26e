"""Encoder-decoders made of two models: an encoder of images, audio or text, and any text decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cli, refused
from safetensors.torch import load_file, save_file
from small_decoders import save_randomised

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 40}
SOUND = {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [8], "num_feat_extract_layers": 1}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 8}
DECODER = {**TEXT, "is_decoder": True, "add_cross_attention": True}
START = 7

KINDS: dict[str, tuple[str, dict[str, Any], str, tuple[int, ...]]] = {
    "images": (
        "VisionEncoderDecoder",
        {"model_type": "vit", "image_size": 16, **SIZES},
        "pixel_values",
        (2, 3, 16, 16),
    ),
    "sound": ("SpeechEncoderDecoder", {"model_type": "wav2vec2", **SIZES, **SOUND}, "input_values", (2, 120)),
    "text": ("EncoderDecoder", {"model_type": "bert", **TEXT}, "input_ids", (2, 5)),
}


def saved(kind: str, folder: Path) -> Any:
    """A random model of a given kind, saved in a folder."""
    name, encoder, *_ = KINDS[kind]
    options = {"patch_size": 8} if kind == "images" else {}
    parts = {"encoder": {**encoder, **options}, "decoder": {"model_type": "bert", **DECODER}}
    config = getattr(transformers, f"{name}Config")(**parts, decoder_start_token_id=START, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config)
    save_randomised(model, folder)
    return model.eval()


@pytest.mark.parametrize("kind", ["images", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sound", "text"))])
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    _, _, name, shape = KINDS[kind]
    model = saved(kind, tmp_path / "checkpoint")
    if kind == "images":  # As in TrOCR's checkpoints, nothing reads the pooler.
        file = tmp_path / "checkpoint" / "model.safetensors"
        save_file({key: one for key, one in load_file(file).items() if "pooler" not in key}, file, {"format": "pt"})
    (tmp_path / "out").mkdir()
    export = ("export", "--from", tmp_path / "checkpoint", "--model", "-o", tmp_path / "out" / "model.onnx")
    assert cli(*export).exit_code == 0
    rng = np.random.default_rng(0)
    given = rng.integers(3, 60, shape) if kind == "text" else rng.standard_normal(shape).astype(np.float32)
    more = {"attention_mask": np.ones(shape, np.int64)} if kind == "text" else {}
    np.savez(tmp_path / "inputs.npz", **{name: given}, **more)
    options = ("--inputs", tmp_path / "inputs.npz", "--max-new-tokens", "6", "--ignore-eos", "--json")
    made = cli("generate", tmp_path / "out" / "decoder_model.onnx", *options)
    assert made.exit_code == 0, made.output
    tokens = np.full((2, 1), START)
    for _ in range(6):
        tensors = {key: torch.from_numpy(value) for key, value in {name: given, **more}.items()}
        with torch.no_grad():
            logits = model(**tensors, decoder_input_ids=torch.from_numpy(tokens)).logits[:, -1]
        tokens = np.concatenate([tokens, logits.argmax(-1, keepdim=True).numpy()], 1)
    assert [row["tokens"] for row in json.loads(made.stdout)["rows"]] == tokens[:, 1:].tolist()


def test_other_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    saved("images", tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    kept = {key: one for key, one in load_file(file).items() if not key.startswith("encoder.layernorm")}
    save_file(kept, file, {"format": "pt"})
    export = ("export", "--from", tmp_path / "checkpoint", "--model", "-o", tmp_path / "model.onnx")
    refused(cli(*export), "has no tensor for 'encoder.layernorm.bias' of VisionEncoderDecoderModel and 1 others")
