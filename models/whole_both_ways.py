"""Decoders that read their prompt in both directions: a file that makes one token after the other can't.

transformers reads so only the prompt: each token that is made sees those before it, and is seen by none of them. A file
without caches gets all tokens in each step, and nothing tells it where the prompt ends.

Keys and values in a cache are those of tokens that saw none behind them, so a token that sees later ones would have
other keys with each new one. transformers says what a query sees by the masks that it makes for the first step of
`generate`, from the configuration and from the types of tokens, which are 0 for plain text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.pretrained import quiet

_TOKENS = 4


def check_causal(model: nn.Module, cached: bool = True) -> None:
    """RequestError for a decoder whose tokens see later ones where it reads plain text; the file of it has caches or
    not."""
    name, config = type(model).__name__, _text_config(model)
    whole: Any = model
    why = (
        "which a decoder of steps can't do" if cached else "and a file without caches isn't told where the prompt ends"
    )
    both = not getattr(config, "is_causal", True)
    both |= getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both and config is whole.config:  # its body reads tokens alone, and so can be exported
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
    """Whether a query sees a later key, by the masks of the first step of a prompt of plain text. False where
    transformers makes the model's masks elsewhere."""
    import transformers
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    padded = torch.ones(2, _TOKENS, dtype=torch.int64)
    padded[0, 0] = 0  # without padding, some masks are left out
    types = torch.zeros_like(padded)
    try:
        with quiet(transformers):  # some say that they ignore types of tokens
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
    except Exception:  # of a model that needs its caches for them, or takes other arguments
        return False
    return any(_is_open(mask) for mask in (made.values() if isinstance(made, dict) else [made]))


def _is_open(mask: object) -> bool:
    """Whether a mask [batch, heads, queries, keys], of booleans or of numbers that are added, shows a later key to a
    query of the row that has no padding."""
    if not isinstance(mask, Tensor) or tuple(mask.shape[2:]) != (_TOKENS, _TOKENS):
        return False
    row = mask[-1]
    shown = row if row.dtype == torch.bool else row == 0
    return bool(shown.triu(1).any())
