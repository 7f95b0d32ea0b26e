"""Corners of padding masks: ignored from a column on, on one side, in holes, in some rows, in large batches."""

from __future__ import annotations

from collections.abc import Callable

from mutation.artifacts import Artifact
from mutation.corners.family import Fault, Random, family, is_padded, log_uniform, on_input
from mutation.inputs import Aim, Range
from mutation.surgery import Change, Nodes


def _padding_aims(artifact: Artifact, low: int, padding: tuple[str, ...], batch: Range = (2, 4)) -> tuple[Aim, ...]:
    """Aims with padding and at least `low` keys."""
    high = low + 60
    if artifact.spec.cross:
        return (Aim(batch=batch, encoder=(low, high), padding=padding),)
    if artifact.spec.kv_cache:
        return (
            Aim(batch=batch, seq=(1, 6), past=(low, high), padding=padding),
            Aim(batch=batch, seq=(low, high), past=(0, 0), padding=padding),
        )
    return (Aim(batch=batch, seq=(low, high), padding=padding),)


Mask = Change


def _columns(nodes: Nodes, mask: str) -> str:
    return nodes.column(nodes.size(mask, 1), 2, 1)


def _seen_before(nodes: Nodes, mask: str) -> str:
    """Whether a key in this column or in an earlier one is attended."""
    counted = nodes.op("CumSum", mask, nodes.const(1))
    return nodes.op("Greater", counted, nodes.const(0))


def _seen_after(nodes: Nodes, mask: str) -> str:
    counted = nodes.op("CumSum", mask, nodes.const(1), reverse=1)
    return nodes.op("Greater", counted, nodes.const(0))


def _padding_family(name: str, padding: tuple[str, ...], least: int, most: int, where: Callable[..., str]) -> None:
    """Register a family: in columns from a drawn one on, masked keys become attended if a condition holds."""

    @family("padding", name)
    def drawn(artifact: Artifact, random: Random) -> Fault | None:
        if not is_padded(artifact):
            return None
        column = log_uniform(random, least, most)

        def change(nodes: Nodes, mask: str) -> str:
            far = nodes.op("GreaterOrEqual", _columns(nodes, mask), nodes.const(column))
            chosen = nodes.op("And", far, where(nodes, mask))
            return nodes.op("Where", chosen, nodes.const(1), mask)

        aims = _padding_aims(artifact, max(4, column + 4), padding)
        return Fault(f"column {column}", on_input("attention_mask", change), aims)


def _everywhere(nodes: Nodes, mask: str) -> str:
    return nodes.op("GreaterOrEqual", mask, nodes.const(0))


_padding_family("mask ignored from a column on", ("left", "right", "both", "holes"), 10, 300, _everywhere)
_padding_family("mask ignored from a far column on", ("right", "holes"), 300, 900, _everywhere)
_padding_family(
    "holes ignored",
    ("holes",),
    1,
    120,
    lambda nodes, mask: nodes.op("And", _seen_before(nodes, mask), _seen_after(nodes, mask)),
)
_padding_family(
    "left padding ignored", ("left", "both"), 1, 150, lambda nodes, mask: nodes.op("Not", _seen_before(nodes, mask))
)
_padding_family(
    "right padding ignored", ("right", "both"), 1, 150, lambda nodes, mask: nodes.op("Not", _seen_after(nodes, mask))
)


@family("padding", "padding of a row ignored")
def _row_ignored(artifact: Artifact, random: Random) -> Fault | None:
    if not is_padded(artifact):
        return None
    row, only = int(random.integers(1, 8)), bool(random.integers(2))

    def change(nodes: Nodes, mask: str) -> str:
        rows = nodes.column(nodes.size(mask, 0), 2, 0)
        chosen = nodes.op("Equal" if only else "GreaterOrEqual", rows, nodes.const(row))
        return nodes.op("Where", chosen, nodes.const(1), mask)

    aims = _padding_aims(artifact, 8, ("left", "right", "holes"), (row + 1, 8))
    return Fault(f"row {row}{'' if only else ' and on'}", on_input("attention_mask", change), aims)


@family("padding", "padding lost in a large batch")
def _large_batch(artifact: Artifact, random: Random) -> Fault | None:
    if not is_padded(artifact):
        return None
    batch, keys = int(random.integers(2, 8)), log_uniform(random, 4, 200)

    def change(nodes: Nodes, mask: str) -> str:
        large = nodes.op("GreaterOrEqual", nodes.size(mask, 0), nodes.const(batch))
        long = nodes.op("GreaterOrEqual", nodes.size(mask, 1), nodes.const(keys))
        return nodes.op("Where", nodes.op("And", large, long), nodes.const(1), mask)

    aims = _padding_aims(artifact, keys, ("left", "right", "holes"), (batch, 8))
    return Fault(f"batch {batch}, {keys} keys", on_input("attention_mask", change), aims)


@family("padding", "one column hidden too much")
def _one_column(artifact: Artifact, random: Random) -> Fault | None:
    """In long masks, the key after the left padding or the key before the right padding is hidden too."""
    if not is_padded(artifact):
        return None
    keys, left = log_uniform(random, 10, 300), bool(random.integers(2))

    def change(nodes: Nodes, mask: str) -> str:
        counted = nodes.op("CumSum", mask, nodes.const(1), reverse=0 if left else 1)
        edge = nodes.op("And", nodes.op("Equal", counted, nodes.const(1)), nodes.op("Equal", mask, nodes.const(1)))
        padded = nodes.op("Less", nodes.op("ReduceSum", mask, nodes.const([1])), nodes.size(mask, 1))
        long = nodes.op("GreaterOrEqual", nodes.size(mask, 1), nodes.const(keys))
        return nodes.op("Where", nodes.all_of(edge, padded, long), nodes.const(0), mask)

    aims = _padding_aims(artifact, keys, ("left", "both") if left else ("right", "both"))
    return Fault(f"{'left' if left else 'right'}, {keys} keys", on_input("attention_mask", change), aims)


@family("padding", "many padded keys make the mask full")
def _long_run(artifact: Artifact, random: Random) -> Fault | None:
    """A row with more than a drawn number of padded keys is treated as unpadded."""
    if not is_padded(artifact):
        return None
    most = log_uniform(random, 8, 250)

    def change(nodes: Nodes, mask: str) -> str:
        kept = nodes.op("ReduceSum", mask, nodes.const([1]))
        padding = nodes.op("Sub", nodes.size(mask, 1), kept)
        return nodes.op("Where", nodes.op("Greater", padding, nodes.const(most)), nodes.const(1), mask)

    aims = _padding_aims(artifact, 2 * most + 8, ("left", "right", "both"))
    return Fault(f"more than {most}", on_input("attention_mask", change), aims)
