"""Modules that ask for the number of rows of a tensor by `len`, as DETR's successors do:

    batch_size = len(source_flatten)

Python makes a plain number of what `len` gives, so that a trace would fix the size. `x.shape[0]` stays what it is.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn


@contextmanager
def traced_lengths(model: nn.Module) -> Iterator[None]:
    """Inside, `len` of a tensor is its first size, in the files that define the classes of the model's modules."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    with ExitStack() as stack:
        for name in names - {"builtins"}:
            file = sys.modules.get(name)
            if file is not None and not name.startswith("torch.") and not hasattr(file, "len"):
                stack.enter_context(mock.patch.object(file, "len", _length, create=True))
        yield


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else builtins.len(value)
