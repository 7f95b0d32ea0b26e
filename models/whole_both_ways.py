"""Decoders that read their prompt in both directions. They are refused.

In transformers, a token of the prompt can see later tokens of the prompt. A generated token sees only earlier tokens,
and no earlier token sees it. A file without caches gets all tokens in each step, and nothing tells it where the prompt
ends.

Keys and values in a cache belong to tokens that saw no later token. The keys of a token that sees later ones would
change with each new token.

Whether a query sees a later key follows from the masks that transformers makes for the first step of `generate`. They
depend on the configuration and on the token types, which are 0 for plain text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.pretrained import quiet

_TOKENS = 4


def check_causal(model: nn.Module, cached: bool = True) -> None:
    """Raise RequestError for a decoder whose tokens see later tokens of plain text. `cached`: its file has caches."""
    name, config = type(model).__name__, _text_config(model)
    whole: Any = model
    why = (
        "which a decoder of steps can't do" if cached else "and a file without caches isn't told where the prompt ends"
    )
    both = not getattr(config, "is_causal", True)
    both |= getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both and config is whole.config:  # its body reads only tokens, so it can be exported
        raise RequestError(
            f"{name} reads its prompt in both directions, {why}: for its states without a head, put "
            f"{type(whole.base_model).__name__} into 'architectures' of its config.json."
        )
    if both or getattr(config, "prefix_lm", False) or _sees_later(model):
        raise RequestError(
            f"{name} reads its prompt in both directions, {why}: give a checkpoint of a decoder whose "
            "tokens see only those before them."
        )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _sees_later(model: Any) -> bool:
    """Whether a query sees a later key, by the masks of the first step for a prompt of plain text.

    False if transformers makes the model's masks elsewhere.
    """
    import transformers
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    padded = torch.ones(2, _TOKENS, dtype=torch.int64)
    padded[0, 0] = 0  # without padding, transformers omits some masks
    types = torch.zeros_like(padded)
    try:
        with quiet(transformers):  # some models warn that they ignore token types
            made = make(
                config=model.config,
                inputs_embeds=torch.empty(*padded.shape, 0),
                attention_mask=padded,
                past_key_values=None,
                position_ids=torch.arange(_TOKENS).expand(2, _TOKENS),
                token_type_ids=types,
                mm_token_type_ids=types,
                is_first_iteration=True,
            )
    except Exception:  # the model needs its caches here, or takes other arguments
        return False
    return any(_is_open(mask) for mask in (made.values() if isinstance(made, dict) else [made]))


def _is_open(mask: object) -> bool:
    """Whether a mask [batch, heads, queries, keys] shows a later key to a query in the row without padding.

    The mask contains booleans or numbers that are added to the logits.
    """
    if not isinstance(mask, Tensor) or tuple(mask.shape[2:]) != (_TOKENS, _TOKENS):
        return False
    row = mask[-1]
    shown = row if row.dtype == torch.bool else row == 0
    return bool(shown.triu(1).any())
