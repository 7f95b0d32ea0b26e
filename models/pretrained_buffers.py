"""Buffers that transformers computes for a dtype, such as Gemma's factor of its embeddings or tables of sinusoids.

A checkpoint in bf16 has them rounded to bf16. In another dtype they are computed again, as transformers does if it
opens the checkpoint in that dtype: the rounded ones are off by up to 0.4%.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def computed_again(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return these buffers of the model in another dtype.

    A buffer that transformers does not compute, or computes from more than the configuration, is converted.
    """
    own = {name: model.get_buffer(name) for name in names}
    stored = model.state_dict().keys()
    computed = {name: buffer for name, buffer in own.items() if name not in stored and buffer.is_floating_point()}
    again = _computed(model, computed) if computed else {}
    return {name: _chosen(buffer, again.get(name)).to(dtype) for name, buffer in own.items()}


def _chosen(buffer: Tensor, again: Tensor | None) -> Tensor:
    """Return the more exact one: the other, if it rounds to the buffer."""
    same = again is not None and torch.equal(again.to(buffer.dtype), buffer)
    return again if same and again is not None else buffer


def _computed(model: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the buffers that transformers fills in float32 when it opens a checkpoint."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("meta"):
            made: Any = type(model)(model.config)
    finally:
        torch.set_default_dtype(before)
    found: dict[str, Tensor] = {}
    for name in own:
        owner, _, last = name.rpartition(".")
        module = made.get_submodule(owner)
        if not isinstance(getattr(module, last, None), Tensor):
            continue
        # only this buffer gets values: the weights beside it stay without
        filled = torch.full(own[name].shape, torch.nan)
        module._buffers[last] = filled
        try:
            _of(made, owner)._init_weights(module)
        except Exception:  # it reads what has no values here
            continue
        if not torch.isnan(filled).any():
            found[name] = filled
    return found


def _of(model: nn.Module, name: str) -> Any:
    """Return the innermost model of transformers around a module."""
    found: Any = model
    parts = name.split(".") if name else []
    for count in range(1, len(parts) + 1):
        module = model.get_submodule(".".join(parts[:count]))
        found = module if hasattr(module, "_init_weights") else found
    return found
