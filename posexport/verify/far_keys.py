"""Padding with biases by distance in half precision.

Outputs of hidden tokens are compared too. If such a token sees only far keys, half precision has too few digits for its
output. Then the token is not padding.
"""

from __future__ import annotations

import numpy as np

from posexport.spec.arrays import Array
from posexport.spec.spec import Spec
from posexport.verify.positions import steepness

FAINT = 32.0
"""The largest bias of the nearest key that a hidden token sees.

There fp16 has steps of 1/64 and bf16 steps of 1/8, to which operators round a bias that they take in the graph's dtype.
"""


def shown_where_keys_are_far(spec: Spec, mask: Array, before: Array, positions: Array) -> Array:
    """The mask [batch, width], with 1 for hidden new tokens that would see only far keys.

    `before` [batch] is the number of cached tokens of each row; `positions` [batch, seq] or [batch, seq, axes] are
    those of the new tokens.
    """
    steep, (batch, seq) = steepness(spec), positions.shape[:2]
    if not steep:
        return mask
    mask = mask.copy()
    for shown, first, places in zip(mask, before.tolist(), positions.reshape(batch, seq, -1), strict=True):
        new = shown[first : first + seq]
        while (far := _sees_far_keys(spec, shown[: first + seq] != 0, first, places, FAINT / steep)).any():
            new[far] = 1
    return mask


def _sees_far_keys(spec: Spec, seen: Array, first: int, places: Array, most: float) -> Array:
    """Which new tokens of a row are hidden and see keys, but only far ones, bool [seq].

    The new tokens follow `first` cached ones. A key is far if its position differs by more than `most`. `seen` [keys]
    is False for padding, `places` are [seq, axes].
    """
    far = np.zeros(len(places), bool)
    queries, keys = first + np.flatnonzero(~seen[first:]), np.flatnonzero(seen)
    if not (len(queries) and len(keys)):
        return far
    ahead, at = queries[:, None] - keys, _key_places(spec, seen, first, places)
    apart = np.abs(at[queries][:, None] - at[keys]).sum(-1)
    for layer in spec.distinct_layers():
        looks = ahead >= 0 if layer.causal else np.ones(ahead.shape, bool)
        if layer.window:
            looks &= np.abs(ahead) < layer.window
        if chunk := layer.attention_chunk_size:
            looks &= ((queries - keys[0]) // chunk)[:, None] == (keys - keys[0]) // chunk
        far[queries - first] |= looks.any(1) & ~(looks & (apart <= most)).any(1)
    return far


def _key_places(spec: Spec, seen: Array, first: int, places: Array) -> Array:
    """The positions of all keys of a row, [keys, axes].

    Cached keys come right before the first new token that is not padding. Padding takes up no position
    (custom_ops.key_positions), unless positions are consecutive by promise.
    """
    if spec.consecutive:
        return np.arange(len(seen))[:, None]
    count = np.cumsum(seen) - seen
    new = np.flatnonzero(seen[first:])
    anchor = new[0] if len(new) else len(places) - 1
    cached = places[anchor] + (count[:first] - count[first])[:, None]
    return np.concatenate((cached, places))
