"""Models of several parts, such as text and images: the config of each part is a table in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.models.checkpoints.config import COMMON, Config, words


@attrs.frozen(kw_only=True)
class Part:
    """The `table` of a model's config.json that is read, and its `model_type`. `whole`: without such a table, as in
    older versions, the whole file is read."""

    table: str
    model_type: str
    whole: bool = False


PARTS: Mapping[str, Part] = {
    "llama4": Part(table="text_config", model_type="llama4_text"),
    "gemma3": Part(table="text_config", model_type="gemma3_text"),
    "qwen2_vl": Part(table="text_config", model_type="qwen2_vl_text", whole=True),
    "qwen2_5_vl": Part(table="text_config", model_type="qwen2_5_vl_text", whole=True),
    "qwen3_vl": Part(table="text_config", model_type="qwen3_vl_text"),
    "llava": Part(table="vision_config", model_type="pixtral"),
    "mistral3": Part(table="vision_config", model_type="pixtral"),
}
"""Models of several parts, by their `model_type`."""

_OUTSIDE = COMMON | words(
    """
    text_config vision_config image_token_id image_token_index video_token_id vision_token_id vision_start_token_id
    vision_end_token_id boi_token_index boi_token_id eoi_token_index eoi_token_id mm_tokens_per_image image_seq_length
    projector_hidden_act vision_feature_layer vision_feature_select_strategy multimodal_projector_bias
    spatial_merge_size ignore_index
    """
)
"""Keys outside the tables of such models."""


def part_of(data: Mapping[str, Any], where: str) -> tuple[str, Config]:
    """The model_type of the part that is read, and its table, in which COMMON keys need not be read.

    Raises RequestError for an unknown key outside the table, or for a part with an unexpected model_type.
    """
    model_type = str(data.get("model_type"))
    if model_type not in PARTS:
        return model_type, Config(data, where, known=COMMON)
    part = PARTS[model_type]
    if part.whole and data.get(part.table) is None:
        return part.model_type, Config(data, where, known=_OUTSIDE)
    inner = Config(data, where).table(part.table, COMMON)
    inner_type = inner.value("model_type", default=part.model_type)
    if inner_type not in (part.model_type, model_type):
        raise inner.wrong("model_type", f"{part.model_type}, which posexport reads of {model_type}")
    repeated = {key for key in data if key in inner.data and data[key] == inner.data[key]}
    Config(data, where, known=_OUTSIDE | repeated).refuse_unread(model_type)
    return part.model_type, inner
