"""Magnitudes of the numbers that a graph takes, by kind: each set of inputs has one kind. And numbers in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from posexport.graphs.axes import PAST, SLOTS
from posexport.graphs.roles import Role
from posexport.spec.arrays import Array
from posexport.spec.input_roles import chooses_tokens

VALUES: dict[str, float] = {"normal": 1.0, "quiet": 1e-3, "loud": 6.0, "zeros": 1.0, "outlier": 1.0, "between": 1.0}
"""Kinds of numbers, with their standard deviation."""

BETWEEN = (0.01, 0.3)
"""The deviations of the kind "between": each row has its own, from one number to another."""

FEATURES = ("features", "encoder_features")
"""The roles of inputs with features of tokens."""

HALF_LOUD, OUTLIER, HALF_OUTLIER = 2.0, 100.0, 20.0
"""The deviation of "loud" in half precision; the factor of one feature of "outlier", and that in half precision."""

EVEN = 0.1
"""The part of the tokens of the kind "zeros" that have one number in all features."""

LISTED = 2**24
"""The most numbers that are put in random order: a list of them has some hundred MB."""


def drawn_numbers(
    kind: str, role: Role, shape: tuple[int, ...], sizes: Mapping[str, int], rng: np.random.Generator, half: bool
) -> Array:
    """Normally distributed numbers for an input of this role and shape, scaled by the kind of VALUES.

    `sizes` are those by meaning, `half` says whether the input has half precision. Free places of a cache that is
    written into have numbers too, as after earlier use, unless the kind is "zeros".
    """
    factor = HALF_LOUD if kind == "loud" and half else VALUES[kind]
    values = rng.standard_normal(shape, np.float32).astype(np.float64) * factor
    # tokens with equal scores are chosen in an order that TopK doesn't define
    if kind == "zeros" and values.ndim > 1 and not chooses_tokens(role.name):
        values[rng.random(values.shape[:-1]) < 0.3] = 0.0
        if role.kind in FEATURES and values.ndim > 2:
            values = _with_even_tokens(rng, values)
    if kind == "between" and values.ndim:
        low, high = np.log(BETWEEN)
        deviations = np.exp(rng.uniform(low, high, len(values)))
        values *= deviations.reshape(-1, *[1] * (values.ndim - 1))
    if kind == "outlier" and values.ndim > 1 and role.kind not in ("past", "encoder_past", "state"):
        values[..., int(rng.integers(values.shape[-1]))] *= HALF_OUTLIER if half else OUTLIER
    if SLOTS in role.axes and kind == "zeros":
        at = role.axes.index(SLOTS)
        full = np.arange(shape[at]) < sizes[PAST]
        values *= full.reshape([-1 if axis == at else 1 for axis in range(values.ndim)])
    return values


def _with_even_tokens(rng: np.random.Generator, values: Array) -> Array:
    """The last of several rows is zero, and some tokens have one number in all features: a power of two, so that their
    mean and their variance, which is zero, are exact. Those of a row have the same sign, so that sums don't cancel out.
    """
    tokens = values.shape[:-1]
    signs = rng.choice((-1.0, 1.0), (tokens[0], *[1] * (len(tokens) - 1)))
    even = 2.0 ** rng.integers(-2, 2, tokens) * signs
    made = np.where((rng.random(tokens) < EVEN)[..., None], even[..., None], values)
    if len(made) > 1:
        made[-1] = 0.0
    return made


def every_number(count: int, *seed: int) -> Iterator[int]:
    """Numbers below `count` without end; each number comes once before any comes again.

    If there are more than LISTED, more than any vocabulary has, inputs can only have a few of them: they are drawn one
    by one, since a file may state any count.
    """
    rng = np.random.default_rng(seed)
    while True:
        yield from (rng.permutation(count) if count <= LISTED else rng.integers(0, count, 2**12)).tolist()
