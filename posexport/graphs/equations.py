"""The equation of an Einsum, with a letter for each axis, also for the axes of an ellipsis."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

import onnx_ir as ir

ELLIPSIS = "..."


def equation_of(node: ir.Node) -> str:
    """The equation without spaces; empty if there is none."""
    return node.attributes.get_string("equation", "").replace(" ", "")


def letters_of(node: ir.Node, ranks: Sequence[int]) -> tuple[list[str], str] | None:
    """The letters of the axes of the operands, which have these ranks, and of the result.

    None if the equation leaves its result out, or doesn't fit operands of these ranks.
    """
    operands, arrow, result = equation_of(node).partition("->")
    parts = operands.split(",")
    if not arrow or len(parts) != len(ranks):
        return None
    counts = [rank - len(part.replace(ELLIPSIS, "")) for part, rank in zip(parts, ranks, strict=True)]
    if any(count < 0 or (count and ELLIPSIS not in part) for part, count in zip(parts, counts, strict=True)):
        return None
    free = [letter for letter in ascii_uppercase if letter not in operands]
    most = max(counts, default=0)
    if most > len(free):
        return None
    dots = "".join(free[:most])
    named = [part.replace(ELLIPSIS, dots[most - count :]) for part, count in zip(parts, counts, strict=True)]
    result = result.replace(ELLIPSIS, dots)
    return (named, result) if "".join((*named, result)).isalpha() else None
