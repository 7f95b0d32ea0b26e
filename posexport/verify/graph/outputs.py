"""Which values of an output mean something: those of tokens that are not padding.

Padding may see nothing at all; then its output is zero in one runtime and a mean in another, and no user reads it. An
axis of tokens is recognised by its size, which is the number of tokens in every case.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posexport.graphs.axes import BATCH, ENCODER, KEPT, SEQ, SLOTS, TOTAL
from posexport.spec.arrays import Array
from posexport.spec.input_roles import is_state
from posexport.verify.graph.cases import GraphCase

TokenAxes = tuple[int, int, str]
"""The axis of rows, the axis of tokens, and the meaning of the latter."""

_MEANINGS = (SEQ, TOTAL, SLOTS, ENCODER, KEPT)


def token_axes(name: str, cases: Sequence[GraphCase], shapes: Sequence[tuple[int, ...]]) -> TokenAxes | None:
    """The axes of rows and tokens of an output with these shapes on these cases; None if it has none."""
    if is_state(name):
        return None
    known = [(case, shape) for case, shape in zip(cases, shapes, strict=True) if case.visible]
    if not known or len({len(shape) for _, shape in known}) > 1:
        return None
    ranks = range(len(known[0][1]))

    def places(meaning: str) -> list[int]:
        return [at for at in ranks if all(case.sizes.get(meaning, -1) == shape[at] for case, shape in known)]

    rows = places(BATCH)
    if not rows:
        return None
    cached = any(word in name.lower() for word in ("present", "past", "cache", "key", "value"))
    for meaning in (*_MEANINGS[1:], SEQ) if cached else _MEANINGS:
        tokens = [at for at in places(meaning) if at != rows[0]]
        if tokens and all(meaning in case.visible for case, _ in known):
            # in caches [batch, heads, tokens, size] the axis of heads may be as long
            return rows[0], tokens[-1] if cached and len(tokens) > 1 and tokens[0] == 1 else tokens[0], meaning
    return None


def selected(case: GraphCase, axes: TokenAxes | None, shape: tuple[int, ...]) -> Array | None:
    """A bool array with an output's shape, True for tokens that are not padding; None if no token is padding."""
    if axes is None or not case.visible:
        return None
    rows, tokens, meaning = axes
    visible = case.visible[meaning]
    if visible.all() or visible.shape != (shape[rows], shape[tokens]):
        return None
    visible = visible if rows < tokens else visible.T
    return np.broadcast_to(
        visible.reshape([size if at in (rows, tokens) else 1 for at, size in enumerate(shape)]), shape
    )
