"""Small random checkpoints that transformers itself writes, and its own models as the oracle of files made of them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch

transformers: Any = pytest.importorskip("transformers")

Array = npt.NDArray[Any]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {"num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
VISION = {"image_size": 16, "patch_size": 4}
SOUND = {
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
TRANSLATOR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | DECODER | TOKENS),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | TOKENS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | DECODER | TOKENS | WINDOWS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES | DECODER | TOKENS | EXPERTS),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 3, "n_head": 4} | TOKENS),
    "falcon": ("FalconForCausalLM", "FalconConfig", SIZES | TOKENS),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 16, "num_hidden_layers": 2} | TOKENS),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | TOKENS),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4} | TOKENS,
    ),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        SIZES | TOKENS | {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta": (
        "DebertaV2Model",
        "DebertaV2Config",
        SIZES | TOKENS | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", SIZES | VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", SIZES | VISION),
    "swin": (
        "SwinModel",
        "SwinConfig",
        VISION | {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    ),
    "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", SIZES | VISION),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SIZES | SOUND | TOKENS),
    "hubert": ("HubertModel", "HubertConfig", SIZES | SOUND | TOKENS),
    "bart": ("BartForConditionalGeneration", "BartConfig", TRANSLATOR | TOKENS | {"max_position_embeddings": 64}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        TRANSLATOR | TOKENS | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
    ),
    "marian": ("MarianMTModel", "MarianConfig", TRANSLATOR | TOKENS | {"max_position_embeddings": 64}),
}
"""The class, its configuration and what is set in it."""


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def checkpoint(name: str, dtype: str = "float32") -> Path:
    """The folder of a random checkpoint, whose weights are large enough that every term shows."""
    kind, config, settings = MODELS[name]
    folder = Path(_root().name) / f"{name}-{dtype}"
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            width = parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=random) / width)
            if "norm" in path.lower() and path.endswith("weight"):
                parameter.add_(1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@cache
def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model, with its plainest implementation of attention."""
    import json

    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    options = {"dtype": dtype, "attn_implementation": "eager"}
    return getattr(transformers, kind).from_pretrained(folder, **options).eval().requires_grad_(False)


def session(path: Path) -> onnxruntime.InferenceSession:
    """The file on ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def error(made: Array, wanted: Array, real: Array | None = None) -> float:
    """The largest difference as a part of the largest value, over the tokens that are `real`."""
    assert made.shape == wanted.shape
    difference = np.abs(made.astype(np.float64) - wanted)
    return float(difference.max() if real is None else difference[real.astype(bool)].max()) / float(
        np.abs(wanted).max()
    )


PADDING, LENGTH = (0, 2, 4), 14
CHUNKS = (9, 1, 3, 1)
"""A prompt behind an empty cache, a token, a chunk and a token."""


def padded_batch(seed: int = 0) -> dict[str, Array]:
    """Rows of tokens with padding on their left, and what transformers itself counts as their positions."""
    ids = np.random.default_rng(seed).integers(3, 100, (len(PADDING), LENGTH))
    mask = np.ones_like(ids)
    for row, padding in enumerate(PADDING):
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}


def decoder_error(path: Path, folder: Path, output: str = "logits", room: int = 20) -> float:
    """The error of a decoder's file against transformers, chunk by chunk behind its own caches; of buffers of `room`
    slots where it has such."""
    run = session(path)
    inputs = {value.name: value for value in run.get_inputs()}
    batch, model = padded_batch(), oracle(folder)
    tensors = {name: torch.from_numpy(value) for name, value in batch.items() if name in inputs}
    made = model(**tensors, use_cache=False, output_hidden_states=True)
    wanted = (made.logits if output == "logits" else made.hidden_states[-1]).numpy()
    shared = any("max_sequence_length" in value.shape for value in inputs.values())
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    caches = {
        name: np.zeros((len(PADDING), value.shape[1], room if shared else 0, value.shape[3]), kinds[value.type])
        for name, value in inputs.items()
        if name.startswith("past_key_values.")
    }
    start, worst = 0, 0.0
    for chunk in CHUNKS:
        end = start + chunk
        first = start if caches else 0
        given = {name: value[:, first:end] for name, value in batch.items() if name in inputs}
        given["attention_mask"] = batch["attention_mask"][:, :end]
        given |= {name: np.array([start], np.int64) for name in inputs if name not in given and name not in caches}
        results = dict(
            zip((value.name for value in run.get_outputs()), run.run(None, {**given, **caches}), strict=True)
        )
        caches = {name: results[name.replace("past_key_values", "present")] for name in caches}
        real = batch["attention_mask"][:, start:end]
        worst = max(worst, error(results[output][:, -chunk:], wanted[:, start:end], real))
        start = end
    return worst
