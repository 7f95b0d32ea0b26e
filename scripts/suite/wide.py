"""Float64 in models that convert to float32: norms, rotations and softmaxes of transformers do this."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def wide_floats() -> Iterator[None]:
    """Inside this context, conversions to float32 and new tensors are float64. Stored numbers keep their float32
    values."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(default)


class _Widen(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)
