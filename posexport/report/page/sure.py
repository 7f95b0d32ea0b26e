"""How sure it is that a winner is the fastest: clearly, a tie with whom, or likely; in words, for its line on top."""

from __future__ import annotations

from collections.abc import Sequence

from posexport.bench.statistics import CONFIDENCE
from posexport.report.page.blocks import listed
from posexport.report.page.latency_rows import Row

ALIKE = 2
"""Names of those as fast as the winner that its line tells."""


def told(ties: Sequence[str], unsure: bool, separate: bool = False) -> str:
    """`ties` are the names, with their figures, of those that the winner can't be told from; `unsure` says that other
    things stand against it, such as a busy machine; `separate` that a tie is one of runs of their own."""
    if ties:
        return f"{'too close to call against' if separate else 'tie with'} {listed(ties, ALIKE)}"
    return "likely the fastest" if unsure else "clearly the fastest"


def apart(one: Row, other: Row) -> bool:
    """Whether one is faster than the other by its whole interval.

    That of their ratio where they ran in the same rounds, else those of their ratios to torch on the same device, else
    the middle 80 % of their times. An interval of less confidence than `CONFIDENCE`
    (few rounds) tells nothing apart.
    """
    if one.gpu == other.gpu:
        direct = one.ratio(other.role) if one.head is other.head and other.role else None
        if direct is not None:
            return bool(direct["high"] < 1 and direct["confidence"] >= CONFIDENCE)
        first, second = one.ratio("torch"), other.ratio("torch")
        if first is not None and second is not None:
            return bool(
                first["high"] < second["low"] and min(each["confidence"] for each in (first, second)) >= CONFIDENCE
            )
    return bool(one.result["seconds"]["p90"] < other.result["seconds"]["p10"])
