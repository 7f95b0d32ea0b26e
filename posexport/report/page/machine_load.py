"""Warnings about a machine that did other work while it was timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posexport.bench.result import HIGH_MACHINE_LOAD, Benchmark
from posexport.bench.tune.result import Result as Tuning
from posexport.report.page.blocks import Point, Prose, listed
from posexport.report.page.results import Result

Timed = Benchmark | Tuning


def is_high(data: Timed) -> bool:
    """Whether other work spoilt the times of a result."""
    return data.machine_load > HIGH_MACHINE_LOAD


def sign(data: Timed) -> str:
    """The mark before a spoilt time, or nothing."""
    return "⚠ " if is_high(data) else ""


def title(results: Iterable[Timed], text: str) -> str:
    """A title over the times of results, marked where some of them are spoilt."""
    return f"⚠ busy machine: {text}" if any(map(is_high, results)) else text


def shares(results: Sequence[Result[Benchmark]] | Sequence[Result[Tuning]]) -> tuple[tuple[str, float], ...]:
    """The files that were timed on a busy machine, with the share of the CPU that other work took."""
    return tuple((result.name, result.data.machine_load) for result in results if is_high(result.data))


def points(files: Sequence[tuple[str, float]]) -> list[Point]:
    """The line above the winners, where some files were timed on a busy machine."""
    if not files:
        return []
    ends = dict.fromkeys(f"{end(share for _, share in files):.0%}" for end in (min, max))
    advice = "ratios hold roughly, absolute times don't; time again at rest"
    head = f"⚠ Other work took {' to '.join(ends)} of the CPU: {advice}"
    names = [f"{name} ({share:.0%})" for name, share in files] if len(files) > 1 else [files[0][0]]
    return [Point(head=head, text=f"in {listed(names)}", tone="care")]


def warning(files: Sequence[tuple[str, float]]) -> list[Prose]:
    """The same as a paragraph above the times."""
    return [Prose(text=f"{point.head}.", tone="care", note=f"({point.text})") for point in points(files)]
