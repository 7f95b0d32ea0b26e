"""Magnitudes of hidden states and of cached keys and values, by kind: each set of inputs has one kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attrs
import numpy as np

from posexport.spec.arrays import Array
from posexport.spec.spec import Spec
from posexport.verify.aligned import Directions
from posexport.verify.positions import FAR, NEAR

LOUD = {"fp32": 6.0, "fp16": 2.0, "bf16": 1.5}
"""The factor of the kind "loud" on hidden_states and cached keys; logits grow by its square, so softmax is sharp.

Half precision has too few digits for logits of a hundred: torch eager itself would be far off.
"""

CACHED_LOUD = {"fp32": 32.0, "fp16": 24.0, "bf16": 8.0}
"""The factor of the kind "loud" on cached keys only, if a norm comes before attention or logits are capped.

In these cases hidden states can't make logits large; exp overflows at 88, and a cap that is not reached changes
nothing. In a deep stack one layer has this factor, another layer in each case.
"""

LOUD_LAYERS, LOUD_BELOW = 3, 2.0
"""The most layers of a stack with the full factor, and the largest factor in deeper stacks.

The latter also applies if runtimes round terms of the encoding in different ways. Without norms, a layer of sharp
attention makes rounding errors some ten times larger: at 6, eight layers of bare attention in fp32 leave nothing to
compare. At 2 they don't grow.
"""

ROUNDED_APART = 8e-5
"""The part of values from which on rounding of terms of the encoding counts as different, at near positions."""

HIDDEN_PEAK, CACHED_PEAK = {"fp32": 40.0, "fp16": 6.0, "bf16": 3.0}, 100.0
"""The factors on tokens and on cached keys that are masked: a mask of -100 lets them through.

In half precision, only one such token in a row is large, and by less, since the outputs of a loud token itself have few
correct digits.
"""

DEEP_PEAK = 30.0
"""One number in the cached keys of one layer of a deep stack, another layer in each case; in its values, twice that."""

OUTLIER, HALF_OUTLIER, HALF_NORMED, DEEP_OUTLIER = 400.0, 200.0, 50.0, 8.0
"""The factors on one feature, as in hidden states of trained models.

OUTLIER: if a norm comes first, on all tokens; else on one token in a row, and in fp32 on all tokens of every second
row. HALF_OUTLIER: without a norm first, in half precision, in bare attention with short rows. HALF_NORMED: the same
with longer rows, or if a norm comes later, whose squares would overflow. DEEP_OUTLIER: in stacks without norms, since
the next layer would get the feature; and if runtimes round terms of the encoding in different ways, since the feature
would make the difference larger: then only in one token of a row.
"""

NARROW, FEW_FEATURES = 0.1, 150
"""The ratio sqrt(head_dim) / hidden_size above which, and the hidden size below which, the feature is smaller.

This is for half precision: if so few features share a projection, logits would overflow. They are about the feature's
square over the hidden size times products of normal numbers. One in a million of these reaches 10, and the factor 200
makes a feature of at most 1,000: 10 * 1,000^2 / 150 is about 65,504.
"""

LONG_ROW = 128
"""Tokens from which on some keys of a row have logits that half precision can't tell apart.

This is the case if a feature makes all logits large.
"""

MASSIVE = 8_000.0
"""The one feature of the kind "massive".

Those of trained models reach 2,600 (Llama 2 7B) to 7,000 (Mixtral 8x7B), as Sun et al. 2024 measured
(arXiv:2402.17762).
"""

SHIFT, HALF_SHIFT, SMALL_SHIFT = 100.0, 8.0, 0.5
"""What the kind "shifted" adds to hidden states: if a norm comes first, the same in half precision, and otherwise."""

NEARLY_ALIKE, LAST = 0.1, 16
"""How much tokens of the kind "alike" differ, and how many at the end of a causal row differ like any others."""

EVEN = 0.85
"""Of the tokens that the kind "zeros" leaves, those with a larger number drawn have the same number in all features."""

FEW_TOKENS = 8
"""The most tokens of a single row that is all zero with the kind "zeros"."""

OLDEST = 4
"""The tokens of a cache that the kind "oldest" makes large."""

HALF_ROOM = 24.0
"""How many times larger than usual logits may be in half precision before hidden states and cached keys get smaller.

Beyond it, half precision has too few digits for the weights of softmax.
"""

SMALL = 0.05
"""The factor on hidden states before a norm, in half precision: compared with them, the output of attention is
large."""

QUIET = 1e-3
"""The factor on hidden_states of the kind "quiet"."""

SIZES = {"a fifth": (0.1, 0.32), "a twentieth": (0.03, 0.1), "a hundredth": (3 * QUIET, 0.03)}
"""Sizes between usual and quiet ones, as in embeddings: each row has its own, from one number to another."""

DOMINANT = 20.0
"""The factor on half of the rows of the kind "aligned" in stacks with norms first.

Layers then change them little, so that tokens lie along the weights in later layers too.
"""


def loudness(spec: Spec, rounded: bool) -> float:
    """The factor of the kind "loud", by dtype, depth and scale; smaller if such large values would leave nothing to
    compare. `rounded` is `is_rounded_apart` for the tokens."""
    most, plain = LOUD[spec.dtype], spec.layers <= LOUD_LAYERS and not rounded
    return _as_scaled(spec, most if plain else min(most, LOUD_BELOW))


def usual_size(spec: Spec) -> float:
    """The standard deviation of hidden states and cached keys: 1, or less in half precision if logits are large."""
    return 1.0 if spec.dtype == "fp32" else float(min(1.0, (HALF_ROOM / _logits(spec)) ** 0.5))


def is_normed_first(spec: Spec) -> bool:
    """Whether a norm comes before attention."""
    return spec.block == "transformer" and spec.norm == "pre"


def is_rounded_apart(spec: Spec, keys: int = NEAR) -> bool:
    """Whether runtimes round terms of an encoding so differently that large values would make the difference large, at
    near positions and with this many keys."""
    return any(layer.encoding.rounding(layer, NEAR, keys) > ROUNDED_APART for layer in spec.distinct_layers())


def _logits(spec: Spec) -> float:
    """How many times larger logits are than with the usual scale of 1 / sqrt(head_dim).

    In half precision this is at a far position: some encodings multiply queries by a factor that grows with the
    position.
    """
    farthest = 0 if spec.dtype == "fp32" else FAR
    return max(
        float(layer.scale * layer.head_dim**0.5 * layer.encoding.query_factor(farthest))
        for layer in spec.distinct_layers()
    )


def _as_scaled(spec: Spec, factor: float, keys_alone: bool = False) -> float:
    """A factor on hidden states, which queries and keys are made from, or only on keys; smaller if logits are large
    anyway."""
    larger = max(1.0, _logits(spec))
    return max(1.0, float(factor / (larger if keys_alone else larger**0.5)))


@attrs.frozen(kw_only=True)
class Tokens:
    """The values of one input before they are scaled, and what is known about its tokens.

    `values` are unit normal, [batch, tokens, features] for hidden states or [batch, heads, slots, head_dim] for a
    cache. `masked` bool [batch, tokens] says which of them padding hides; `normed` whether a norm comes first; `alone`
    whether these are cached keys that may be louder than those of other layers; `encoder` whether these belong to an
    encoder; `rounded` whether runtimes round terms of the encoding differently (is_rounded_apart). `directions` are
    those of the block's weights, if they are known; their `heads` take turns.
    """

    values: Array
    masked: Array
    cached: bool
    normed: bool
    keys: bool
    alone: bool
    spec: Spec
    rng: np.random.Generator
    encoder: bool = False
    rounded: bool = False
    directions: Directions | None = None
    heads: Iterator[int] = attrs.field(factory=itertools.count)

    def each(self, tokens: Array) -> Array:
        """bool [batch, tokens] in a shape that broadcasts over the values."""
        return tokens[:, None, :, None] if self.cached else tokens[:, :, None]


def _loud(tokens: Tokens) -> Array:
    spec, factor = tokens.spec, loudness(tokens.spec, tokens.rounded) if tokens.keys else 1.0
    if tokens.alone and (spec.softcap or is_normed_first(spec)):
        factor = max(factor, _as_scaled(spec, CACHED_LOUD[spec.dtype], keys_alone=True))
    return tokens.values * factor


def _quiet(tokens: Tokens) -> Array:
    return tokens.values * QUIET


def _sized(low: float, high: float, tokens: Tokens) -> Array:
    sizes = np.exp(tokens.rng.uniform(np.log(low), np.log(high), len(tokens.values)))
    return tokens.values * sizes.reshape(-1, *[1] * (tokens.values.ndim - 1))


def _aligned(tokens: Tokens) -> Array:
    if tokens.cached or tokens.directions is None:
        return tokens.values
    made = tokens.directions.drawn(tokens.rng, tokens.values, tokens.heads, tokens.encoder)
    if tokens.normed and tokens.spec.layers > 1:
        made[tokens.rng.random(len(made)) < 0.5] *= DOMINANT
    return made


def _zeros(tokens: Tokens) -> Array:
    """Some tokens are zero, and some have the same number in all features.

    Zero are the first token of the first row, the whole last row if there are several or if it is short, and all that
    padding hides in a cache: caches begin as zeros, and batches are filled up with zeros.
    """
    drawn = tokens.rng.random(tokens.masked.shape)
    zero: Array = np.less(drawn, 0.3)
    zero[0, :1] = True
    if not tokens.cached:
        zero[-1] |= len(zero) > 1 or zero.shape[1] <= FEW_TOKENS
    zero |= tokens.masked & tokens.cached
    made = np.where(tokens.each(zero), 0.0, tokens.values)
    return made if tokens.cached else np.where(tokens.each(~zero & (drawn > EVEN)), _even(tokens), made)


def _same(tokens: Tokens) -> Array:
    """All tokens of a row are the same, as in a test of whether an engine starts: in about half of the rows, all
    features are one number too."""
    if tokens.cached:
        return tokens.values
    first = tokens.rng.integers(2)
    even = (np.arange(len(tokens.values)) + first) % 2 == 0
    made = np.where(even[:, None, None], _even(tokens), tokens.values)
    return np.repeat(made[:, :1], made.shape[1], 1)


def _even(tokens: Tokens) -> Array:
    """One number for all features of a token, [batch, tokens, 1]: a power of two, whose mean and whose variance, which
    is zero, are exact in any order of sums.

    All tokens of a row have the same sign: the sum of two that cancel out would be zero or a rounding error, which a
    norm makes as large as other values.
    """
    size = 2.0 ** np.floor(np.log2(usual_size(tokens.spec)))
    rng, (batch, count) = tokens.rng, tokens.masked.shape
    powers, signs = rng.integers(-2, 2, (batch, count, 1)), rng.choice((-1.0, 1.0), (batch, 1, 1))
    return np.asarray(size * 2.0**powers * signs, np.float32)


def _alike(tokens: Tokens) -> Array:
    """All tokens of a row are nearly alike, except those that few or no queries may see.

    So one key among thousands that is seen by mistake is noticed, even if a norm makes all tokens equally large.
    """
    spec, values = tokens.spec, tokens.values
    few = tokens.masked.copy()
    if not tokens.cached:
        few[:, :1] |= bool(spec.window or spec.attention_chunk_size)
        few[:, -LAST:] |= spec.causal
    first = values[:, :, :1] if tokens.cached else values[:, :1]
    return np.where(tokens.each(few), values, first + NEARLY_ALIKE * values)


def _shifted(tokens: Tokens) -> Array:
    """Features whose mean is not 0; before a norm, it is far larger than their deviation."""
    spec = tokens.spec
    if tokens.cached:
        return tokens.values
    normed = SHIFT if spec.dtype == "fp32" else HALF_SHIFT
    return tokens.values + (normed if tokens.normed else SMALL_SHIFT)


def _outlier(tokens: Tokens, few: bool = False) -> Array:
    """One feature is far larger than the others.

    With `few`, this is so for any encoding, in the first token: if it sees only itself, its logit may be far below that
    of a mask.
    """
    spec, values, rng = tokens.spec, tokens.values.copy(), tokens.rng
    if tokens.cached:
        return values
    batch, seq = tokens.masked.shape
    rounded, deep = tokens.rounded, spec.block == "attention" and spec.layers > 1
    if tokens.normed:
        factor = OUTLIER
    elif deep or (rounded and not few) or (spec.ordered and spec.dtype != "fp32"):
        factor = _as_scaled(spec, DEEP_OUTLIER)
    else:
        factor = _as_scaled(spec, OUTLIER if spec.dtype == "fp32" else _half_outlier(spec, seq))
    has, whole = np.zeros((batch, seq), bool), np.zeros(batch, bool)
    has[np.arange(batch), rng.integers(0, seq, batch) * (not few)] = True
    if tokens.normed:
        whole[:] = True
    elif spec.dtype == "fp32" and not (deep or rounded):
        whole[int(rng.integers(2)) * (batch > 1) :: 2] = True
    feature = rng.integers(values.shape[-1], size=(batch, 1, 1))
    usual = np.take_along_axis(values, feature, 2)
    signs = np.where(whole[:, None, None], np.sign(usual), _signs(rng, batch)[:, None, None])
    large = factor * signs * (2 + abs(usual))
    np.put_along_axis(values, feature, np.where((has | whole[:, None])[..., None], large, usual), 2)
    return values


def _half_outlier(spec: Spec, seq: int) -> float:
    """The factor on one feature in half precision, in rows of `seq` tokens."""
    usual = HALF_OUTLIER if spec.block == "attention" and seq < LONG_ROW else HALF_NORMED
    wide, few = (max(1.0, size / spec.hidden_size) ** 0.5 for size in (spec.head_dim**0.5 / NARROW, FEW_FEATURES))
    return float(min(usual / wide, HALF_OUTLIER / few))


def _massive(tokens: Tokens) -> Array:
    """One feature of the first token is as large as in trained models, if a norm comes first.

    Otherwise it is as large as an outlier, even if runtimes round terms of the encoding in different ways: with few
    tokens they differ little.
    """
    if not tokens.normed:
        return _outlier(tokens, few=True)
    values = tokens.values.copy()
    values[:, 0, int(tokens.rng.integers(values.shape[-1]))] = MASSIVE * _signs(tokens.rng, len(values))
    return values


def _signs(rng: np.random.Generator, count: int) -> Array:
    """1 and -1 in turn."""
    return np.where((np.arange(count) + rng.integers(2)) % 2, 1.0, -1.0)


def _peaks(tokens: Tokens) -> Array:
    """Large where few or no queries may look, and single large numbers in a cache."""
    spec = tokens.spec
    deep = spec.layers > (LOUD_LAYERS if spec.dtype == "fp32" else 1) or tokens.rounded
    if not tokens.cached:
        peak, hidden = HIDDEN_PEAK[spec.dtype], tokens.masked.copy()
        if spec.dtype == "fp32":
            hidden[:, :1] |= bool(spec.window or spec.attention_chunk_size)
            hidden[:, -1:] |= spec.causal
        else:
            hidden &= hidden.cumsum(1) == 1
        peak = min(peak, LOUD_BELOW) if deep else peak
        return np.where(tokens.each(hidden), peak, 1.0) * tokens.values
    heavy = tokens.values * np.where(tokens.rng.random(tokens.values.shape) < 0.02, LOUD_BELOW if deep else 8.0, 1.0)
    if deep and tokens.alone and heavy.size:
        heavy[tuple(tokens.rng.integers(heavy.shape))] = (
            DEEP_PEAK * _signs(tokens.rng, 1)[0] * (1 if tokens.keys else 2)
        )
    if heavy.size and not (deep or tokens.keys):  # no logit depends on it
        heavy[tuple(tokens.rng.integers(heavy.shape))] = CACHED_PEAK
    return np.where(tokens.each(tokens.masked), CACHED_PEAK * tokens.values, heavy)


def _oldest(tokens: Tokens) -> Array:
    """The first cached tokens have values so large that one key among thousands is noticed.

    In half precision, if a norm comes first, hidden states are small, so that the output of attention is noticed beside
    them. Otherwise the first of many hidden states are large.
    """
    spec = tokens.spec
    if not tokens.cached and spec.dtype != "fp32":
        if tokens.normed:
            return tokens.values * SMALL
        first = np.arange(tokens.values.shape[1]) < OLDEST * (tokens.values.shape[1] > 2 * OLDEST)
        factor = HIDDEN_PEAK[spec.dtype] if spec.layers == 1 else LOUD_BELOW
        return np.where(first[:, None], _as_scaled(spec, factor), 1.0) * tokens.values
    if not tokens.cached or tokens.keys:
        return tokens.values
    first = np.arange(tokens.values.shape[2]) < OLDEST
    return np.where(first[:, None], CACHED_PEAK, 1.0) * tokens.values


VALUES: Mapping[str, Callable[[Tokens], Array]] = {
    "normal": lambda tokens: tokens.values,
    "loud": _loud,
    "quiet": _quiet,
    **{name: partial(_sized, *sizes) for name, sizes in SIZES.items()},
    "aligned": _aligned,
    "zeros": _zeros,
    "same": _same,
    "alike": _alike,
    "outlier": _outlier,
    "massive": _massive,
    "shifted": _shifted,
    "peaks": _peaks,
    "oldest": _oldest,
}
"""The kinds of magnitudes of hidden states and of cached keys and values."""
