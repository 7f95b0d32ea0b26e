"""The outputs of a model without caches: what it returns under names of its own.

A model also returns states of its parts, losses and masks, which only training and other parts read. A file has none of
these, unless the model returns nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

HIDDEN = "last_hidden_state"

FIRST = (
    *("logits", "start_logits", "end_logits", "prediction_logits", "seq_relationship_logits"),
    *(HIDDEN, "pooler_output", "logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
    *("reconstruction", "embeddings", "relevance_logits", "heatmaps", "alphas"),
    *("class_queries_logits", "masks_queries_logits", "pred_boxes", "predicted_depth"),
    *("decoder_coord_logits", "decoder_class_logits"),
)
"""The usual outputs, in the order in which a file has them. Others follow."""

ALPHABETS = ("char_logits", "bpe_logits", "wp_logits")
"""The outputs of a model that reads a text in three alphabets, which loaders expect in place of a tuple of logits."""

_INNER = re.compile(
    r"(.*_)?loss|(?!fpn_).*hidden_states?(_.*)?|(.*_)?attentions?|(.*_)?mask|(.*_)?router_logits|.*_perplexity"
    r"|(encoder|enc|decoder|pixel_decoder|transformer_decoder|intermediate|init|initial|auxiliary|aux|denoising)_.*"
    r"|backbone_.*|extract_features|ids_restore|patch_input|patch_offsets|spatial_shapes|input_ids|past_.*|mems"
)
"""Names of what the parts of a model hand on, or what only training reads."""


def outputs_by_name(made: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a model returned, in the order in which a file has them.

    The items of a tuple have the name of the tuple and a number. Three logits in a tuple are those of ALPHABETS.
    """
    found: dict[str, Tensor] = {}
    for name, value in made.items():
        several = isinstance(value, tuple | list) and all(isinstance(one, Tensor) for one in value)
        if isinstance(value, Tensor):
            found[name] = value
        elif several and name == "logits" and len(value) == len(ALPHABETS):
            found |= zip(ALPHABETS, value, strict=True)
        elif several and not _INNER.fullmatch(name):
            found |= {f"{name}_{number}": one for number, one in enumerate(value)}
    own = [name for name in found if name not in FIRST and not _INNER.fullmatch(name)]
    return {name: found[name] for name in (*filter(found.__contains__, FIRST), *own)} or found
