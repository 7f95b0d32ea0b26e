"""Models whose tokens see only some keys of a long text, those with the largest numbers, as in Doge. They are refused.

In Doge's first layer, the number of a key follows from its token alone, so equal tokens have equal numbers, and torch
takes any of them. A runtime may take others. A text that is not longer than the number of kept keys needs no choice.
"""

from __future__ import annotations

from torch import nn

from posexport.errors import RequestError

_METHOD, _KEPT = "prepare_dynamic_mask", "keep_window_size"
"""The method that chooses keys, and the number of keys that it keeps."""


def check_keys(model: nn.Module, trained_length: int | None) -> None:
    """RequestError if a text of the length that a model was trained for has more keys than a token sees."""
    kept = min((int(getattr(one, _KEPT)) for one in model.modules() if hasattr(one, _METHOD)), default=None)
    if kept is not None and (trained_length is None or kept < trained_length):
        raise RequestError(
            f"{type(model).__name__} keeps the {kept} keys with the largest numbers ({_KEPT}), fewer than the "
            f"{trained_length or 'unknown number of'} tokens that it was trained for, and equal tokens have equal "
            "numbers, of which torch takes any: no file can be compared with it, so it is not exported as a whole."
        )
