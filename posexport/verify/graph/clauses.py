"""What a verdict on a graph leaves open, in clauses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posexport.verify.graph.truth import Truth
from posexport.verify.result import FAILED, Comparison

LISTED = 3
"""The clauses of a kind that a verdict has; it counts the others."""


def some(clauses: Sequence[str]) -> list[str]:
    """The first clauses, and how many more there are."""
    more = [f"{len(clauses) - LISTED} more of the kind"] if len(clauses) > LISTED else []
    return [*clauses[:LISTED], *more]


def unexplained(truth: Truth) -> Iterator[str]:
    """A clause if two files differ in float64 by more than rounding, though by less than a runtime may."""
    if truth.difference is not None and truth.difference.of_rounding > 1:
        times = f"{truth.difference.of_rounding:.2g} times as much as the rounding of constants explains"
        yield f"the files differ in float64 {times}, so they may be different functions"


def zeros(comparisons: Sequence[Comparison]) -> list[str]:
    """The outputs that are zero for all inputs: they show nothing."""
    shown = {each.output for each in comparisons if each.reference_rms or each.max_error or each.reference_rms is None}
    names = dict.fromkeys(each.output for each in comparisons)
    return [f"output {name!r} is zero for all inputs" for name in names if name not in shown]


def not_compared(comparisons: Sequence[Comparison]) -> list[str]:
    """The outputs without any comparable value on any inputs, for example because all values are NaN."""
    compared = {each.output for each in comparisons if each.max_error is not None or each.state == FAILED}
    names = dict.fromkeys(each.output for each in comparisons)
    return [f"no value of output {name!r} is finite in float64" for name in names if name not in compared]
