"""Options of a build as people write them, read into values. Imports no engine."""

from __future__ import annotations

import re

from posexport.errors import RequestError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def capabilities(given: tuple[str, ...]) -> tuple[str, ...]:
    """`--compute-capability` options as distinct X.Y; which of them a runtime knows is its own matter."""
    found = [part.strip() for each in given for part in each.split(",")]
    for each in found:
        if not re.fullmatch(r"\d+\.\d", each):
            raise RequestError(f"compute capability {each!r} is not X.Y: write it like 8.9 or 8.9,12.0.")
    return tuple(sorted(set(found), key=lambda each: tuple(map(int, each.split(".")))))


def memory_size(text: str) -> int:
    """`--memory-limit` in bytes."""
    match = re.fullmatch(r"(\d{1,12})\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size < 2**48:
        raise RequestError(f"memory limit {text!r} is no size: write it like 512M or 2G.")
    return size
