"""Attention in windows with global tokens, as in Longformer and LED, traced as attention under a mask.

transformers divides the text into overlapping pieces, which torch can't export for every number of tokens, and asks
whether a mask has a global token. With W tokens on either side, a query sees

    keys:         |i - j| <= W, and all global tokens
    global query: all keys, with projections of its own

Scores take memory for all pairs of tokens [batch, heads, tokens, tokens], as in other encoders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_WINDOW, _FILL = "one_sided_attn_window_size", "_pad_to_window_size"
"""The attribute with W, and the method that fills a text up to whole pieces."""


@contextmanager
def windows_as_masks(model: nn.Module) -> Iterator[None]:
    """Trace the attention of a model in windows as one attention under a mask. The text is then not filled up."""
    changed: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            if hasattr(module, _WINDOW):
                module.forward = _attention.__get__(module)
                changed.append((module, "forward"))
            if hasattr(module, _FILL):
                setattr(module, _FILL, _unfilled)
                changed.append((module, _FILL))
        yield
    finally:
        for module, name in changed:
            vars(module).pop(name, None)


def _unfilled(*given: Any, **named: Any) -> tuple[Any, ...]:
    """Return no added tokens and the arguments without the last, the id of padding, as the replaced method does."""
    values = [*given, *named.values()]
    return (0, *values[:-1])


def _attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: object = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Return the states [batch, tokens, size]; both masks are bool [batch, tokens]. Masked queries read nothing."""
    assert is_index_masked is not None
    assert is_index_global_attn is not None
    at = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    near = (at[:, None] - at[None]).abs() <= getattr(self, _WINDOW)
    shown = ~is_index_masked[:, None, None, :]
    seen = (near | is_index_global_attn[:, None, None, :]) & shown
    local = _read(self, hidden_states, ("query", "key", "value"), seen)
    whole = _read(self, hidden_states, ("query_global", "key_global", "value_global"), shown.expand_as(seen))
    read = torch.where(is_index_global_attn[:, None, :, None], whole, local)
    read = torch.where(is_index_masked[:, None, :, None], torch.zeros_like(read), read)
    return (read.transpose(1, 2).flatten(2),)


def _read(module: Any, states: Tensor, names: tuple[str, str, str], seen: Tensor) -> Tensor:
    query, key, value = (
        getattr(module, name)(states).unflatten(2, (module.num_heads, module.head_dim)).transpose(1, 2)
        for name in names
    )
    mask = torch.zeros(seen.shape, dtype=states.dtype, device=states.device)
    mask = mask.masked_fill(~seen, torch.finfo(states.dtype).min)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
