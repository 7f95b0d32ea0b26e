"""Reads the options of a build from their text. Imports no engine."""

from __future__ import annotations

import re

from posexport.errors import RequestError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


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
