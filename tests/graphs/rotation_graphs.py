"""Rotations of heads [batch, heads, seq, SIZE] as exporters write them. This file does not import posexport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attention_graphs import Rotate, Writer
from onnx import TensorProto

Array = np.ndarray[Any, Any]


def angles(g: Writer, frequencies: Array) -> tuple[str, str]:
    """Cosines and sines [batch, 1, seq, P] of frequencies times positions, which are an input."""
    positions = g.op("Cast", g.input("position_ids", TensorProto.INT64, "batch", "seq"), to=g.type)
    turns = g.op("Mul", g.op("Unsqueeze", positions, g.const([1, 3])), g.floats(frequencies))
    return g.op("Cos", turns), g.op("Sin", turns)


def by_partners(partners: Sequence[int], frequencies: Array, signs: Array | None = None) -> Rotate:
    """x cos + signs * x[partners] sin, with a frequency for each feature.

    By default, the sign is -1 for the lower feature of a pair and 1 for the other.
    """
    places = np.arange(len(partners))
    own = np.where(np.asarray(partners) > places, -1.0, 1.0) if signs is None else signs

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        cos, sin = angles(g, frequencies)
        other = g.op("Mul", g.op("Gather", heads, g.const(list(partners)), axis=-1), g.floats(own))
        return g.op("Add", g.op("Mul", heads, cos), g.op("Mul", other, sin))

    return rotate


def halves(a: str, b: str, cos: str, sin: str, g: Writer) -> tuple[str, str]:
    """The rotated features of pairs (a, b)."""
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    return first, g.op("Add", g.op("Mul", a, sin), g.op("Mul", b, cos))


def sliced(g: Writer, heads: str, first: int, last: int, step: int = 1) -> str:
    """The features from `first` to `last` - 1 of heads."""
    return g.op("Slice", heads, g.const([first]), g.const([last]), g.const([-1]), g.const([step]))


def becoming_halves(frequencies: Array, start: int = 0) -> Callable[[Writer, str], str]:
    """Rotates pairs (2i, 2i + 1) from `start` on and puts them in the layout half, as in DeepSeek."""
    end = start + 2 * len(frequencies)

    def turned(g: Writer, heads: str) -> str:
        even, odd = sliced(g, heads, start, end, 2), sliced(g, heads, start + 1, end, 2)
        return g.op("Concat", *halves(even, odd, *angles(g, frequencies), g), axis=-1)

    return turned


def assigned(frequencies: Array, *, zeros: bool = True, reduction: str = "none") -> Rotate:
    """Rotates pairs (2i, 2i + 1) and assigns them to even and odd features, as torch exports `out[..., 0::2] = ...`.

    The assignment starts from zeros, or from the heads themselves if `zeros` is False.
    """

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        size = 2 * len(frequencies)
        even, odd = sliced(g, heads, 0, size, 2), sliced(g, heads, 1, size, 2)
        out = g.op("Expand", g.floats(0.0), g.op("Shape", heads)) if zeros else heads
        for start, turned in enumerate(halves(even, odd, *angles(g, frequencies), g)):
            places = g.op("Range", g.const(start), g.const(size), g.const(2))
            first, features = (g.op("Transpose", one, perm=[3, 1, 2, 0]) for one in (out, turned))
            index = g.op("Unsqueeze", places, g.const([1]))
            put = g.op("ScatterND", first, index, features, reduction=reduction)
            out = g.op("Transpose", put, perm=[3, 1, 2, 0])
        return out

    return rotate


def cut_table(frequencies: Array, rows: int = 64) -> Rotate:
    """Rotates pairs (2i, 2i + 1) by tables that are sliced to the number of tokens and whose columns are repeated."""

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        size, tokens = 2 * len(frequencies), g.op("Shape", heads, start=2, end=3)
        shape, last = g.op("Concat", g.const([1, 1]), tokens, g.const([size]), axis=0), g.const([-1])
        both = []
        for values in (np.cos, np.sin):
            table = g.floats(values(np.arange(rows)[:, None] * frequencies))
            column = g.op("Unsqueeze", g.op("Slice", table, g.const([0]), tokens, g.const([0])), last)
            both.append(g.op("Reshape", g.op("Concat", column, column, axis=-1), shape))
        pairs = [g.op("Unsqueeze", sliced(g, heads, start, size, 2), last) for start in (1, 0)]
        other = g.op("Concat", g.op("Neg", pairs[0]), pairs[1], axis=-1)
        turned = g.op("Reshape", other, g.op("Shape", heads))
        return g.op("Add", g.op("Mul", heads, both[0]), g.op("Mul", turned, both[1]))

    return rotate


def still_at_first(frequencies: Array) -> Rotate:
    """Rotates pairs (2i, 2i + 1), the first only after position 1,000,000; Einsum computes the angles."""

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        positions = g.op("Cast", g.input("position_ids", TensorProto.INT64, "batch", "seq"), to=g.type)
        late = g.op("Max", g.op("Sub", positions, g.floats(1e6)), g.floats(0.0))
        parts = [(late, frequencies[:1]), (positions, frequencies[1:])]
        turns = [g.op("Einsum", one, g.floats(own), equation="..., f -> ... f") for one, own in parts]
        whole = g.op("Unsqueeze", g.op("Concat", *turns, axis=-1), g.const([1]))
        even, odd = (sliced(g, heads, start, 2 * len(frequencies), 2) for start in (0, 1))
        turned = halves(even, odd, g.op("Cos", whole), g.op("Sin", whole), g)
        both = g.op("Concat", *(g.op("Unsqueeze", one, g.const([-1])) for one in turned), axis=-1)
        return g.op("Reshape", both, g.op("Shape", heads))

    return rotate


def part(first: int, last: int, frequencies: Array) -> Callable[[Writer, str], str]:
    """Rotates the features `first` to `last` - 1 of heads in the layout half."""
    middle = (first + last) // 2

    def turned(g: Writer, heads: str) -> str:
        a, b = sliced(g, heads, first, middle), sliced(g, heads, middle, last)
        return g.op("Concat", *halves(a, b, *angles(g, frequencies), g), axis=-1)

    return turned


def by_parts(*parts: Callable[[Writer, str], str]) -> Rotate:
    """Applies each part to the heads and concatenates the results."""
    return lambda g, heads, queries: g.op("Concat", *(one(g, heads) for one in parts), axis=-1)


def normed(rotate: Rotate) -> Rotate:
    """A rotation whose result is divided by its L2 norm."""

    def both(g: Writer, heads: str, queries: bool) -> str:
        turned = rotate(g, heads, queries)
        length = g.op("ReduceL2", turned, g.const([-1]), keepdims=1)
        return g.op("Div", turned, length)

    return both
