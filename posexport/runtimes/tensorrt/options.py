"""Options of a build, and how they are read from text. Imports no engine."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from posexport.errors import RequestError
from posexport.runtimes.tensorrt import api

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@attrs.frozen(kw_only=True)
class BuildOptions:
    """How to build: `capabilities` like "8.9" (empty: every GPU that the runtime supports), `memory_limit` in bytes."""

    runtime: str
    profile: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    memory_limit: int | None = None
    tf32: bool = False
    timing_cache: Path | None = None
    runtime_cache: Path | None = None


def read_options(
    runtime: str | None,
    *,
    profile: tuple[str, ...] = (),
    compute_capability: tuple[str, ...] = (),
    memory_limit: str | None = None,
    timing_cache: str | None = None,
    runtime_cache: str | None = None,
    tf32: bool = False,
) -> BuildOptions:
    """Options as they are written on a command line; None takes the first runtime that can build on this machine.

    Raises RequestError for an option that can't be read, RuntimeMissingError where no runtime can build.
    """
    return BuildOptions(
        profile=profile,
        capabilities=capabilities(compute_capability),
        memory_limit=None if memory_limit is None else memory_size(memory_limit),
        timing_cache=None if timing_cache is None else Path(timing_cache),
        runtime_cache=None if runtime_cache is None else Path(runtime_cache),
        tf32=tf32,
        runtime=api.choose(runtime),
    )


def capabilities(given: tuple[str, ...]) -> tuple[str, ...]:
    """`--compute-capability` options as distinct X.Y, sorted. The runtime checks whether it knows them."""
    names = [part.strip() for option in given for part in option.split(",")]
    for name in names:
        if not re.fullmatch(r"\d+\.\d", name):
            raise RequestError(f"compute capability {name!r} is not X.Y: write it like 8.9 or 8.9,12.0.")
    return tuple(sorted(set(names), key=lambda name: tuple(map(int, name.split(".")))))


def memory_size(text: str) -> int:
    """`--memory-limit` in bytes."""
    match = re.fullmatch(r"(\d{1,12})\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size < 2**48:
        raise RequestError(f"memory limit {text!r} is no size: write it like 512M or 2G.")
    return size
