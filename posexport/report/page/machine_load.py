"""A machine that did other work while it was timed: said once above the winners and above the times that it spoils."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from posexport.report.page.blocks import Point, Prose, listed
from posexport.report.page.results import Result

LIMIT = 0.2
"""From this share of the CPU taken by others, times mean little."""


def is_busy(data: Mapping[str, Any]) -> bool:
    """Whether what a result says of times is spoilt."""
    return (data.get("machine_load") or 0.0) > LIMIT


def sign(data: Mapping[str, Any]) -> str:
    """What stands before a time that is spoilt, or nothing."""
    return "⚠ " if is_busy(data) else ""


def title(results: Iterable[Mapping[str, Any]], text: str) -> str:
    """A title of the times of results, marked where some of them are spoilt."""
    return f"⚠ busy machine: {text}" if any(map(is_busy, results)) else text


def shares(results: Sequence[Result]) -> tuple[tuple[str, float], ...]:
    """The files that were timed on a busy machine, with the share of the CPU that other work took."""
    return tuple((result.name, result.data["machine_load"]) for result in results if is_busy(result.data))


def point(found: Sequence[tuple[str, float]]) -> Point:
    """The line above the winners."""
    return Point(head=f"⚠ {_said(found)}", text=_files(found), tone="care")


def warning(results: Sequence[Result]) -> Iterator[Prose]:
    """The paragraph above the times."""
    found = shares(results)
    if found:
        yield Prose(text=f"⚠ {_said(found)}.", tone="care", note=f"({_files(found)})")


def _said(found: Sequence[tuple[str, float]]) -> str:
    ends = list(dict.fromkeys(f"{end(share for _, share in found):.0%}" for end in (min, max)))
    return (
        f"Other work took {' to '.join(ends)} of the CPU: ratios hold roughly, absolute times don't; time again at rest"
    )


def _files(found: Sequence[tuple[str, float]]) -> str:
    names = [f"{name} ({share:.0%})" for name, share in found] if len(found) > 1 else [found[0][0]]
    return f"in {listed(names)}"
