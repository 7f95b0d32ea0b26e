"""Angles of the RoPE scaling `dynamic`, which depend only on the largest position of a call.

transformers branches on that position, which torch cannot export. It also keeps the frequencies of the longest text so
far until it reads a text that is shorter than the trained length. Its output therefore depends on earlier calls.

Here each call uses the frequencies of its largest position, as if the model had read nothing before.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn

_DYNAMIC = "dynamic"


def stateless_angles(model: nn.Module) -> None:
    """Make the modules of a model that use this scaling compute their angles anew in each call."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}  # by type of layer, or for all layers
        found = {layer: kind for layer, kind in by_layer.items() if isinstance(kind, str) and _DYNAMIC in kind}
        if found:
            own: Any = module
            own.rope_type = {**kinds, **dict.fromkeys(found, "default")} if isinstance(kinds, dict) else "default"
            module.register_forward_pre_hook(_frequencies(found), with_kwargs=True)


def _frequencies(kinds: dict[str | None, str]) -> Any:
    """Return the hook that computes a module's frequencies. `kinds` has a rope type by type of layer, None for all."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def hook(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = signature(module.forward).bind(*arguments, **named).arguments
        layer = given.get("layer_type")
        if layer not in kinds:
            return
        positions = given["position_ids"]
        options = {} if layer is None else {"layer_type": layer}
        made, _ = ROPE_INIT_FUNCTIONS[kinds[layer]](
            module.config, positions.device, seq_len=torch.max(positions) + 1, **options
        )
        getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq").copy_(made)

    return hook
