"""The language model inside a model that can't read tokens alone.

Models such as BLIP-2 and Kosmos-2 take an image first, and hand what it becomes to a language model of their own class,
which has a head and caches. A file of their text decoder is one of this language model.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_CROSS = ("crossattention", "cross_attn", "encoder_attn")
"""Modules of a decoder that reads an image in each layer. Alone, it computes something else."""


def language_model(model: Any) -> Any | None:
    """Return the language model inside a model that reads images or sound first. None if it has none, or several."""
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.models.auto import modeling_auto as lists

    known = lists.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    if model.main_input_name == "input_ids" or model.config.is_encoder_decoder or type(model).__name__ not in known:
        return None
    found = [
        part
        for part in model.children()
        if isinstance(part, PreTrainedModel) and isinstance(part, GenerationMixin) and _reads_tokens(part)
    ]
    return found[0] if len(found) == 1 else None


def _reads_tokens(part: Any) -> bool:
    """Whether a model makes tokens of tokens alone."""
    alone = part.config.is_encoder_decoder or not _has(part, _CROSS)
    return bool(part.main_input_name == "input_ids" and part.get_output_embeddings() is not None and alone)


def _has(part: nn.Module, names: tuple[str, ...]) -> bool:
    return any(name.endswith(names) for name, _ in part.named_modules())
