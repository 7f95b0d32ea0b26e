"""The hidden states that a whole model passes to its head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def last_hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the hidden states that the model passes to its head, one for each run. The list is filled when the block
    ends."""
    states: list[Tensor] = []
    module: Any = model
    # some heads, such as those of OPT and of BART's decoder, call the decoder inside their base model themselves
    own = {id(body): body for body in (module.get_decoder(), module.base_model) if body is not model}
    # both are the model itself if the class names its body otherwise than it says (Llama 4)
    bodies = [*own.values()] or [body for body in model.children() if hasattr(body, "get_decoder")]
    found: list[list[Tensor]] = [[] for _ in bodies]
    hooks = [
        body.register_forward_hook(lambda _, __, made, into=into: into.append(made[0]))
        for body, into in zip(bodies, found, strict=True)
    ]
    try:
        yield states
    finally:
        states += next((each for each in reversed(found) if each), [])
        for hook in hooks:
            hook.remove()
