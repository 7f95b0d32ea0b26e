"""Sets of inputs of a few tokens, which cost little: they combine all kinds of values with far positions.

Servers compute mostly steps, and a fault may be only in steps. So every magnitude is tried in steps, and batches of
every size have far positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np

from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.draft import CROWD, Draft, band_between, each_size, few_cached, shorter, size_between
from posexport.verify.positions import At, position_end
from posexport.verify.reach import Reach
from posexport.verify.values import SIZES, is_rounded_apart

FIRST_OCTAVE = 11
"""Rows far out begin in each octave from this power of two on; other inputs have enough smaller positions."""

BATCHES = ((2, 5, 29), (6, 9, 29), (10, 16, 12), (17, 40, 6))
"""Rows of a batch, from one number to another, and the most tokens that each row has."""

MAGNITUDES = ("quiet", *SIZES, "aligned", "shifted", "outlier", "massive", "zeros", "peaks", "loud", "same")
"""The kinds of values that steps, chunks and prompts of a few tokens have."""

FEW_TOKENS = (("step", (1, 1), (8, 250)), ("short chunk", (2, 7), (2, 60)), ("short prompt", (8, 29), (0, 0)))
"""The tokens and the cached tokens that each magnitude has, from one number to another."""

FEW, ROWS_TOKENS = (2, 3, 5, 7), 70
"""The rows of small batches of each magnitude, and about the most tokens of any batch, of all rows together."""


def far_rows(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Batches at far and at middle positions, without a cache and with a small one."""
    for low, high, most in BATCHES:
        for positions in ("middle", "far", "far row"):
            batch, seq = size_between(rng, low, high), size_between(rng, 1, most)
            past = min(size_between(rng, 1, 60), few_cached(spec, batch)) if positions != "far" else 0
            yield Draft(f"rows of {positions}", batch, seq, past, 2, size_between(rng, 2, 30), positions, "mixed")
    for name, positions in (("steps between", "middle"), ("steps far out", "far")):
        batch = size_between(rng, 2, 9)
        past = min(size_between(rng, 8, 60), few_cached(spec, batch))
        yield Draft(name, batch, 1, past, 3, size_between(rng, 2, 30), positions, "mixed")


def far_starts(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """One row at consecutive positions in each octave: a step over a cache, and in turn a chunk or a short prompt.

    All tokens of a row lie in the octave, so that a fault between two far positions shows. Rows of other kinds begin
    anywhere, or have tokens of several octaves.
    """
    if "position_ids" not in graph_inputs(spec) or spec.position_limits() is not None or spec.ordered:
        return
    kinds = itertools.cycle((("short chunk", 2, 7), ("short prompt", 8, 20)))
    for octave in range(FIRST_OCTAVE, position_end(spec).bit_length() - 1):
        steps = [("step", 1, 1)] if spec.kv_cache else []
        for name, few, many in (*steps, next(kinds)):
            seq = min(size_between(rng, few, many), reach.seq)
            start = size_between(rng, 2**octave, 2 ** (octave + 1) - seq)
            places = (start + np.arange(seq))[None, :, None].repeat(spec.position_axes, 2)
            past = 0 if name == "short prompt" else min(size_between(rng, 2, 60), few_cached(spec, 1), reach.seq)
            yield Draft(f"{name} from 2^{octave}", 1, seq, past, 2, size_between(rng, 2, 30), At(places))


def no_keys(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """One row without a key: a step, a chunk and a prompt."""
    if spec.padding_mask:
        for tokens, cached in (((1, 1), (5, 250)), ((2, 7), (8, 60)), ((8, 400), (0, 0))):
            past = min(band_between(rng, *cached), few_cached(spec, 1)) if any(cached) else 0
            seq = shorter(spec, 1, band_between(rng, *tokens))
            yield Draft("no key", 1, seq, past, 2, size_between(rng, 8, 300), "near", "all")


def magnitudes(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Every magnitude in a step, in a few tokens with a small cache, and in a short prompt.

    One of the three has one row, one a few rows, and the step or the few tokens are a large batch. Positions are near
    and far, unless runtimes round terms of the encoding so differently that large values would make the difference
    large.
    """
    few, crowd = itertools.cycle(rng.permutation(FEW).tolist()), each_size(rng, *CROWD)
    near = ("near", "consecutive", "offset")
    positions = itertools.cycle(near if is_rounded_apart(spec) else ("near", "far", "consecutive", "middle", "offset"))
    padding = itertools.cycle(("none", "left", "none", "holes"))
    for values in MAGNITUDES:
        first, second = rng.permutation([1, next(few)]).tolist()
        sizes = (*rng.permutation([first, next(crowd)]).tolist(), second)
        for batch, (name, tokens, cached) in zip(sizes, FEW_TOKENS, strict=True):
            seq = size_between(rng, tokens[0], min(tokens[1], max(tokens[0], ROWS_TOKENS // batch)))
            past = min(size_between(rng, *cached), few_cached(spec, batch)) if any(cached) else 0
            kinds = next(positions), next(padding), values
            yield Draft(
                f"{name}, {values}", batch, seq, past, size_between(rng, 0, 9), size_between(rng, 2, 30), *kinds
            )


def along_weights(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """Tokens along the weights whose positions are alike, so that no rotation changes the angle between them."""
    size = partial(size_between, rng)
    yield Draft("token along weights", 4, 1, 0, 2, size(2, 9), "still", "none", "aligned")
    yield Draft("tokens along weights", 3, size(8, 29), 0, 2, size(8, 29), "still", "none", "aligned")
    yield Draft("prompt along weights", 3, size(64, 90), 0, 2, size(64, 90), "still", "holes", "aligned")


def squares(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
    """As many tokens as cached ones or as rows, and as many rows as cached tokens: no shape shows there that axes are
    mixed up."""
    size = partial(size_between, rng)
    for low, high, rows in ((8, 15, 1), (16, 40, 2), (41, 300, 1)):
        if spec.kv_cache:
            tokens = min(band_between(rng, low, high), few_cached(spec, rows))
            yield Draft("as many as cached", rows, tokens, tokens, 3, 1, "near", "left", "a fifth")
    for low, high in ((5, 9), (10, 16)):
        rows = size(low, high)
        yield Draft("as many as rows", rows, rows, 0, 2, rows, "mixed", "none")
        if spec.kv_cache:
            yield Draft("as many rows as cached", rows, 1, min(rows, few_cached(spec, rows)), 2, 1, "near", "mixed")
