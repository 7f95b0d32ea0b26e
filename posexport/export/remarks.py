"""What a user should know about the file of a whole model, one sentence each.

The sentences say what the file leaves out, which of its sizes is a guess, and where it can't run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posexport.errors import RequestError, shown
from posexport.files import is_there
from posexport.jsondata import read_json
from posexport.machine import size_text
from posexport.models.image_size import GUESSED, image_size
from posexport.models.pretrained import DECODER, ENCODER, Pretrained, main_dtype, text_config
from posexport.models.whole_inputs import GLOBAL, left_out_inputs

FEW = 2**20
"""Experts with at most this many bytes for each token of a prompt need no remark."""

_CHOSEN = (*("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),)
"""Keys in configurations for the number of experts that read a token."""

_PIPELINE = "modules.json"
"""The file in which sentence-transformers lists the modules that it adds after a model."""


def remarks(pretrained: Pretrained, dtype: torch.dtype | None, inputs: Collection[str]) -> tuple[str, ...]:
    """The sentences about the file of a model with these inputs, whose weights get this `dtype`; None: the
    checkpoint's."""
    return tuple(_remarks(pretrained, dtype, inputs))


def _remarks(pretrained: Pretrained, dtype: torch.dtype | None, inputs: Collection[str]) -> Iterator[str]:
    name, own = pretrained.architecture, main_dtype(pretrained)
    if dtype is None and own == torch.bfloat16:
        yield (
            "the checkpoint is in bf16, and so is the file, which ONNX Runtime doesn't run on CPUs: give --dtype fp32 "
            "or fp16 for those."
        )
    if dtype == torch.float32 and own == torch.float64:
        yield "the checkpoint is in fp64, and the file is in fp32: no loader of attention takes fp64."
    others = _behind(pretrained.folder)
    if others:
        yield (
            f"{' and '.join(map(shown, others))} of {_PIPELINE}, which sentence-transformers puts behind the model, "
            f"{'are' if len(others) > 1 else 'is'} left out: the file gives what {name} gives alone."
        )
    if pretrained.kind != DECODER:
        left = left_out_inputs(pretrained.model, inputs)
        if pretrained.kind != ENCODER:
            left = tuple(one for one in left if one == GLOBAL)
        if left:
            yield (
                f"{name} can be given {' and '.join(left)} too, which the file has no input for: it computes what "
                "transformers computes without."
            )
        reads_images = any(name.startswith("pixel_values") for name in inputs)
        if reads_images and image_size(pretrained.config, pretrained.folder) is None:
            yield (
                "neither config.json nor preprocessor_config.json says how large images are, so the file takes "
                f"{GUESSED}x{GUESSED}, which is a guess: put image_size into config.json for another size."
            )
    size = expert_bytes(pretrained.model, (dtype or own).itemsize)
    if size > FEW:
        yield (
            f"{name} chooses experts for each token, and its file copies their weights for each: some "
            f"{size_text(size)} for each token of a prompt, so give long prompts in parts."
        )


def _behind(folder: Path) -> tuple[str, ...]:
    """The kinds of modules that sentence-transformers adds after the model of a folder."""
    try:
        listed = read_json(folder / _PIPELINE) if is_there(folder / _PIPELINE) else []
    except (OSError, ValueError, RequestError):
        listed = []
    modules = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    kinds = [one.get("type") for one in modules if one.get("idx") != 0]  # 0 is the model, of whatever class
    names = [kind.rpartition(".")[2] for kind in kinds if isinstance(kind, str)]
    return tuple(name for name in names if name != "Transformer")


def expert_bytes(model: nn.Module, itemsize: int) -> int:
    """The bytes of the experts of one layer that read one token.

    0 for a model without experts, and for a model that computes them one after the other.
    """
    whole: Any = model
    if not whole._can_set_experts_implementation():
        return 0
    text = text_config(whole.config)
    counts = (getattr(text, name, None) for name in _CHOSEN)
    chosen = next((count for count in counts if isinstance(count, int) and count > 0), 1)
    sizes = (
        sum(each.numel() // each.shape[0] for each in module.parameters(recurse=False) if each.ndim == 3)
        for module in model.modules()
        if getattr(module, "down_proj", None) is not None and isinstance(module.down_proj, nn.Parameter)
    )
    return max(sizes, default=0) * chosen * itemsize
