"""Decoders that expect more in their caches than the tokens that they were given. They are refused.

Captioners such as GIT keep the features of an image in their caches, before the tokens. In transformers, such a model
widens the mask of the tokens by the size of an image if its caches aren't empty. A file of the text decoder reads no
image, so the widened mask would hide tokens that are no padding.

The model makes one step over a cache of plain text, up to its first mask. The size of the mask shows whether the model
widens it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from posexport.errors import RequestError

_MASK = "attention_mask"
"""The argument of transformers' functions that make masks: the mask of the tokens."""


class _Stopped(Exception):
    """The model wants a mask made of `given`, the mask of the tokens."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given


def check_mask(model: nn.Module, cached: int, **cache: Any) -> None:
    """Raise RequestError for a decoder that widens the mask of the tokens if its caches aren't empty.

    `cache` is an argument of the model, by name, with `cached` tokens.
    """
    shown = torch.ones(1, cached + 1, dtype=torch.int64)
    call: Any = model
    try:
        with torch.no_grad(), _stopped_at_masks(model):
            call(input_ids=torch.zeros(1, 1, dtype=torch.int64), attention_mask=shown, use_cache=True, **cache)
    except _Stopped as stopped:
        given = stopped.given
    except Exception:  # the model takes other arguments; what it computes is verified later
        return
    else:
        return  # it makes its masks elsewhere
    if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] > shown.shape[1]:
        raise RequestError(
            f"{type(model).__name__} expects an image before the tokens in its caches, and its text decoder alone has "
            "none there: give --kv-cache none for the model without caches."
        )


@contextmanager
def _stopped_at_masks(model: nn.Module) -> Iterator[None]:
    """Raise _Stopped where the model calls a function of transformers that makes masks."""
    with ExitStack() as stack:
        for place in {type(each).__module__ for each in model.modules()}:
            module = sys.modules[place]
            for name, value in list(vars(module).items()):
                if getattr(value, "__module__", None) == "transformers.masking_utils" and inspect.isfunction(value):
                    stack.enter_context(mock.patch.object(module, name, _stopping(value)))
        yield


def _stopping(function: Callable[..., Any]) -> Callable[..., Any]:
    names = [*inspect.signature(function).parameters]

    def stopped(*values: Any, **named: Any) -> Any:
        given = dict(zip(names, values, strict=False)) | named
        if _MASK not in names:
            return function(*values, **named)
        raise _Stopped(given.get(_MASK))

    return stopped
