"""Encoders whose checkpoints `--from` reads: one case for each architecture, and for what varies within it."""

from __future__ import annotations

from typing import Any

import torch
from checkpoint_cases import (
    SEQ,
    Case,
    batch_of_one,
    counted,
    grid,
    image,
    memory,
    registers,
    speech,
    tokens,
    video,
    windows,
)
from hf_helpers import BATCH, states
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 17, "max_position_embeddings": 16}
DEBERTA: dict[str, Any] = {
    **TEXT,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "c2p|p2c",
}
SPEECH: dict[str, Any] = {
    **SIZES,
    "conv_dim": [8],
    "conv_stride": [2],
    "conv_kernel": [3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_depthwise_kernel_size": 3,
    "vocab_size": 8,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}


def with_table(path: str, table: str, module: str) -> Any:
    """Runs a layer on its input plus the table of positions, as the model would without the norm between them."""

    def run(model: Any) -> Tensor:
        positions = torch.arange(SEQ).expand(BATCH, -1)
        rows = model.get_parameter(table).reshape(-1, 32)
        model.get_submodule(path)(states(SEQ) + rows[positions])
        return positions

    return run
