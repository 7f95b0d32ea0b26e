"""Checkpoints written by hand, and the messages that refuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posexport.errors import RequestError
from posexport.models.checkpoints import read_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "rope_theta": 500.0,
    "attention_bias": True,
}


def llama_tensors() -> dict[str, Tensor]:
    """The attention weights of a tiny Llama, with the names of LlamaForCausalLM."""
    random, found = torch.Generator().manual_seed(0), {}
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, width in rows.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            found[f"{path}.weight"] = torch.randn(width, 32, generator=random) * 32**-0.5
            found[f"{path}.bias"] = torch.randn(width, generator=random) * 0.1
    return found


def written(folder: Path, **data: Any) -> Path:
    """Writes a config.json into a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(data))
    return file


def refusal(path: Path, layer: int | None = None, layers: int = 1, **options: Any) -> str:
    """The message of the RequestError that refuses a checkpoint: one line that ends in . or ?."""
    with pytest.raises(RequestError) as caught:
        read_checkpoint(path, layer, layers, options)
    sentence = str(caught.value)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    return sentence
