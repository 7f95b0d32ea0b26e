"""Exports one small model on import. torch, transformers and posexport are then ready in every fork."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from click.testing import CliRunner

from posexport.cli import main

_SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 8}

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
with tempfile.TemporaryDirectory() as _folder, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).save_pretrained(_folder)
    _options = ["--from", _folder, "--model", "--form", "native", "-o", str(Path(_folder) / "model.onnx")]
    CliRunner().invoke(main, ["export", *_options])
