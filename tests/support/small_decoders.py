"""Small checkpoints of whole models of transformers, and their exports. Every term affects the output with their
weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import cli
from shared_exports import made_once

VOCABULARY, TRAINED = 60, 96
"""The size of the vocabulary and the number of trained positions of all these models."""

PROMPTS: tuple[tuple[int, ...], ...] = ((5, 17, 3, 44, 21, 8, 30), (11, 2), (50, 9, 33, 27))
"""Three prompts of different lengths."""

_SHARED = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": TRAINED},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": _SIZES,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TRAINED},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Bamba": {
        **{**_SIZES, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
        "mamba_n_groups": 1,
    },
}


NATIVE = ("--form", "native", "--opset", "24")
"""Options of an export that several test files share."""


def small_checkpoint(folder: Path, kind: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """Write the checkpoint of a model into a folder. Returns the model of transformers."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**_SHARED, **_CONFIGS[kind], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    save_randomised(model, folder, seed)
    return model


def save_randomised(model: Any, folder: Path, seed: int = 0) -> None:
    """Give a model of transformers weights with which every term affects the output, and write its checkpoint."""
    import transformers

    model.eval().requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "emb" in name or "wte" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=random) * scale)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.mul_(0.3).add_(1)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)


def exported_model(folder: Path, path: Path, *options: str) -> Path:
    """The file of a whole model, exported from a checkpoint."""

    def make(new: Path) -> None:
        result = cli("export", "--from", folder, "--model", "-o", new, *options)
        assert result.exit_code == 0, result.output

    made_once(folder, path, options, make)
    return path


def greedy(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = 24) -> list[list[int]]:
    """The tokens that transformers' own `generate` returns for a batch with padding on the left."""
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
    made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return np.asarray(made[:, longest:]).tolist()
