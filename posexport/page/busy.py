"""A machine that did other work while it was timed: said before the times that this spoils, wherever they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posexport.page.blocks import Prose, listed
from posexport.page.boxes import BUSY, Finding
from posexport.page.links import Result

LIMIT = 0.2
"""From this share of the CPU taken by others, times mean little."""

SAID = f"other work took over {LIMIT:.0%} of the CPU, so these times mean little"


def is_busy(data: Mapping[str, Any]) -> bool:
    """Whether what a result says of times is spoilt."""
    return (data.get("busy") or 0.0) > LIMIT


def sign(data: Mapping[str, Any]) -> str:
    """What stands before a time that is spoilt, or nothing."""
    return "⚠ " if is_busy(data) else ""


def title(results: Iterable[Mapping[str, Any]], text: str) -> str:
    """A title of the times of results, marked where some of them are spoilt."""
    return f"⚠ busy machine: {text}" if any(map(is_busy, results)) else text


def _name(result: Result) -> str:
    return f"{result.name} ({result.data['busy']:.0%})"


def findings(results: Sequence[Result], where: str) -> Iterator[Finding]:
    """What the boxes say of it."""
    for result in results:
        if is_busy(result.data):
            yield Finding(state=BUSY, who=_name(result), reason=SAID, where=where)


def warning(results: Sequence[Result]) -> Iterator[Prose]:
    """The paragraph above the times."""
    names = [_name(result) for result in results if is_busy(result.data)]
    if names:
        yield Prose(text=f"⚠ {listed(names)}: {SAID}.", tone="care")
