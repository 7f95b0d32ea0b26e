"""Scenarios: the named sizes at which an artifact is timed.

`prefill:1024` is a prompt of 1024 tokens. `decode:2048` is one new token after 2048 in the cache. `batch:8` is eight
prompts of the usual length. A name without a size is the whole sweep.
"""

from __future__ import annotations

import attrs

from posexport.errors import RequestError, check_known

SWEEPS: dict[str, tuple[int, ...]] = {
    "prefill": (1, 16, 128, 512, 1024, 4096, 16384),
    "decode": (1, 128, 512, 2048, 8192, 32768),
    "batch": (1, 2, 4, 8, 16, 32),
}
"""The sizes of each sweep: new tokens, tokens in the cache, and prompts in a batch."""

_LARGEST = 2**31 - 1


@attrs.frozen
class Scenario:
    """One point of a sweep. If it is `swept`, nobody named its size, and artifacts that can't take it leave it out."""

    kind: str
    size: int
    swept: bool = attrs.field(default=False, eq=False)

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}"


def read_scenario(text: str) -> list[Scenario]:
    """The scenarios of `prefill`, `decode:2048` or `batch:4,8`. RequestError for anything else."""
    kind, colon, sizes = text.strip().partition(":")
    check_known("scenario", kind, SWEEPS)
    if not colon:
        return [Scenario(kind, size, swept=True) for size in SWEEPS[kind]]
    return [Scenario(kind, _size(text, size)) for size in sizes.split(",")]


def _size(text: str, size: str) -> int:
    size = size.strip()
    if not (size.isascii() and size.isdigit() and len(size) <= len(str(_LARGEST)) and 1 <= int(size) <= _LARGEST):
        raise RequestError(
            f"scenario {text!r} has the size {size!r}: give whole numbers from 1 to {_LARGEST}, such as prefill:1024."
        )
    return int(size)
