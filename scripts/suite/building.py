"""Builds a model with random weights that all affect its output. Scores have a spread, and norms and biases differ from
the ones and zeros of an untrained model."""

from __future__ import annotations

import re
import zlib

import torch
import transformers
from architecture import Architecture

QUERIES_AND_KEYS = re.compile(
    r"(^|[._])(q|k|query|key|qkv|q_proj|k_proj|q_lin|k_lin|qkv_proj|c_attn|query_key_value|Wqkv|in_proj|query_proj|key_proj|q_norm|k_norm)([._]|$)"
)
TABLES = re.compile(r"(bias_table|relative_attention_bias|rel_embeddings|sinks)")


def build(architecture: Architecture) -> torch.nn.Module:
    """The model in its dtype and in evaluation mode. The same name gives the same weights in every process."""
    torch.manual_seed(zlib.crc32(architecture.name.encode()))
    config = getattr(transformers, architecture.config)(**architecture.options)
    config._attn_implementation = architecture.attention
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"  # the other implementations cannot be exported to ONNX
    model: torch.nn.Module = getattr(transformers, architecture.model)(config)
    randomize(model, architecture.gain)
    model.to(getattr(torch, architecture.dtype))
    return (model.get_submodule(architecture.part) if architecture.part else model).eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, gain: float) -> None:
    """Draw all weights again: matrices scaled by their fan-in, vectors around their previous values."""
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = gain if QUERIES_AND_KEYS.search(name) else 1.0
        if id(parameter) in embeddings or TABLES.search(name):
            parameter.copy_(noise)
        elif parameter.ndim < 2:
            parameter.copy_((parameter + 0.3 * noise) * scale)
        elif min(parameter.shape) == 1 or (parameter.ndim == 3 and parameter.shape[0] == 1):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * scale / parameter[0].numel() ** 0.5)
