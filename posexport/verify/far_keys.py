"""Padding beside steep biases in half precision: what a token computes that padding hides is compared too, and where it
sees nothing but far keys, half precision has too few digits for it. Such a token is then no padding."""

from __future__ import annotations

import numpy as np

from posexport.spec.spec import Spec
from posexport.verify.draws import Array, steepness

FAINT = 100.0
"""The largest bias of the nearest key that a hidden token sees: fp16 has steps of 1/16 there, bf16 of a half."""


def shown_where_keys_are_far(spec: Spec, mask: Array, before: Array, positions: Array) -> Array:
    """The mask [batch, width], with 1 for new tokens that padding hides and that would see none but far keys.

    `before` [batch] says how many tokens of each row are cached, `positions` [batch, seq] or [batch, seq, axes] are
    those of the new ones.
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
    """bool [seq]: which new tokens of a row, behind `first` cached ones, are hidden and see keys, but none whose
    position is at most so far away. `seen` [keys] is False for padding, `places` are [seq, axes]."""
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
    """The positions of all keys of a row, [keys, axes]: cached ones stand right before the first new token that is no
    padding, which takes up no position (custom_ops.key_positions) but where positions are consecutive by promise."""
    if spec.consecutive:
        return np.arange(len(seen))[:, None]
    count = np.cumsum(seen) - seen
    new = np.flatnonzero(seen[first:])
    anchor = new[0] if len(new) else len(places) - 1
    cached = places[anchor] + (count[:first] - count[first])[:, None]
    return np.concatenate((cached, places))
