"""Options of a build, from text or from values. Imports no engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs

from posexport.errors import FieldError
from posexport.runtimes.tensorrt.api import BUILDERS
from posexport.spec.fields import choice, flag, parsed

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _texts(given: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) and item for item in given):
        raise TypeError
    return tuple(given)


def _capabilities(given: Sequence[str]) -> tuple[str, ...]:
    """Texts such as "8.9" or "8.9,12.0" as distinct X.Y, sorted. The runtime checks whether it knows them."""
    capabilities = {part.strip() for option in _texts(given) for part in option.split(",")}
    for name in capabilities:
        if not re.fullmatch(r"\d+\.\d", name):
            raise FieldError("compute_capability", f"{name!r} is not X.Y: write it like 8.9 or 8.9,12.0.")
    return tuple(sorted(capabilities, key=lambda name: tuple(map(int, name.split(".")))))


def _memory_size(given: str | int) -> int:
    """Bytes, or text such as 512M."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(i?B)?", str(given).strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size < 2**48:
        raise FieldError("memory_limit", f"{given!r} is no size: write it like 512M or 2G.")
    return size


@attrs.frozen(kw_only=True)
class PlanOptions:
    """How a plan is built: what determines its bytes, apart from its ONNX file and the runtime's version.

    Without a `compute_capability` (such as "8.9"), it is for every GPU that the runtime supports. `memory_limit` is in
    bytes. RequestError for a value that can't be read.
    """

    runtime: str = choice("tensorrt-rtx", tuple(BUILDERS), "what builds it")
    profile: tuple[str, ...] = parsed("shapes to build for", "a list of texts", _texts, ())
    compute_capability: tuple[str, ...] = parsed("GPUs to build for", "a list of X.Y", _capabilities, ())
    memory_limit: int | None = parsed("scratch that a kernel may take", "a size such as 512M", _memory_size)
    tf32: bool = flag(False, "let fp32 products round their inputs")


@attrs.frozen(kw_only=True)
class BuildOptions(PlanOptions):
    """A plan's options, and the files that its build reads and writes in addition."""

    timing_cache: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    runtime_cache: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
