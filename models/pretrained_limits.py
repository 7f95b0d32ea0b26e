"""Limits on what a config.json may describe: not more than the weights beside it can fill.

transformers builds a model of any size that it reads, and allocates tensors that no file contains. Counts are therefore
checked before its configuration loops over them. While transformers builds the model, its parts are compared with the
files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration

from posexport import machine
from posexport.errors import RequestError, shown
from posexport.machine import size_text
from posexport.models.checkpoints.config import FILE

MOST = 2**20
"""The maximum number of layers, heads, experts or labels. No known model has a hundredth of it, and a list of this
length takes no noticeable time."""

_COUNTS = re.compile(r"(^|_)(layers?|depths?|blocks?|stages?|levels?|heads|experts|labels)$")
"""The keys of config.json that configurations and models loop over."""

_SIZES = ("max_position_embeddings", "vocab_size", "hidden_size")
"""Keys of config.json that have no special value, such as -1, in any model."""

_PARTS, _FEWEST_PARTS = 32, 10_000
"""The maximum number of modules, weights and buffers for each tensor in the files, and the minimum of this limit."""

_WEIGHTS, _FEWEST_WEIGHTS = 4, 2**24
"""The same for weights per byte. int4 has two per byte, and tied weights exist up to four times at first."""


def check_counts(data: Mapping[str, Any], where: str) -> None:
    """Raise RequestError for a count in a config.json, at any depth, that is more than MOST, or for a size below 1."""
    for key, value in data.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                check_counts(one, f"{where}: {key}")
            if isinstance(one, int) and one > MOST and _COUNTS.search(key):
                raise RequestError(f"{where}: {shown(key)} is {one}: it must be a whole number up to {MOST}.")
            if isinstance(one, int) and one < 1 and key in _SIZES:
                raise RequestError(f"{where}: {shown(key)} is {one}: it must be a whole number above 0.")


class _Built:
    """What a model has registered so far. The methods are hooks of torch and raise RequestError."""

    def __init__(self, folder: Path, tensors: int, stored: int) -> None:
        self._folder, self._tensors, self._stored = folder, tensors, stored
        self._free = machine.available()
        self._sizes: dict[tuple[int, str], int] = {}
        self._weights = self._buffers = 0

    def module(self, module: nn.Module, name: str, _: nn.Module | None) -> None:
        """Count a module."""
        self._added(module, name, 0)

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Count weights."""
        self._weights += self._added(module, name, 0 if parameter is None else parameter.numel())
        if self._weights > _WEIGHTS * self._stored + _FEWEST_WEIGHTS:
            raise self._refusal(f"{self._weights:,} weights or more, and its files have {size_text(self._stored)}")

    def buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        """Count the bytes of computed tensors, such as tables of positions."""
        self._buffers += self._added(module, name, 0 if buffer is None else buffer.nbytes)
        if self._buffers > self._free:
            raise self._refusal(f"tables of {size_text(self._buffers)} or more, which is more than is free")

    def _added(self, module: nn.Module, name: str, size: int) -> int:
        """Return how much the total grows. Weights are registered again after loading; they count once."""
        key = (id(module), name)
        before = self._sizes.get(key, 0)
        self._sizes[key] = size
        if len(self._sizes) > _PARTS * self._tensors + _FEWEST_PARTS:
            raise self._refusal(f"{len(self._sizes):,} parts or more, and its files have {self._tensors} tensors")
        return size - before

    def _refusal(self, text: str) -> RequestError:
        return RequestError(f"{str(self._folder / FILE)!r} describes a model of {text}: give the one of these weights.")


@contextlib.contextmanager
def limited_to(folder: Path, tensors: int, stored: int) -> Iterator[None]:
    """Refuse a model that is built inside the block if it is too large for its files.

    The files in `folder` contain `tensors` tensors with `stored` bytes.
    """
    built = _Built(folder, tensors, stored)
    handles = (
        registration.register_module_module_registration_hook(built.module),
        registration.register_module_parameter_registration_hook(built.parameter),
        registration.register_module_buffer_registration_hook(built.buffer),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
