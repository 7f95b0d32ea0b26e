"""Caveats of a verdict: what its inputs could not show, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posexport.verify.cases import Case
from posexport.verify.parity import TOLERANCES

if TYPE_CHECKING:
    from posexport.runtimes.base import Arrays
    from posexport.spec.spec import Spec

ALIKE = 16
"""Tokens of a row are alike where they differ by fewer floors of the tolerance than this."""


def notes_on(spec: Spec, cases: Sequence[Case], reference: Sequence[Arrays]) -> tuple[str, ...]:
    """What these cases could not show of a block; `reference` are its float64 outputs on them."""
    return (*_windows(spec, cases), *_alike(spec, reference))


def _windows(spec: Spec, cases: Sequence[Case]) -> tuple[str, ...]:
    longest = max(case.keys for case in cases)
    limits = {"window": "the window of", "attention_chunk_size": "a chunk of"}
    sizes = {(what, getattr(kind, name)) for kind in spec.distinct_layers() for name, what in limits.items()}
    return tuple(
        f"no sequence was longer than {what} {size}, so it did not show"
        for what, size in sorted(sizes, key=str)
        if size is not None and size >= longest
    )


def _alike(spec: Spec, reference: Sequence[Arrays]) -> tuple[str, ...]:
    """Several layers of bare attention make tokens alike: how attention weighs them then no longer matters, and what a
    layer did with positions is lost in rounding."""
    outputs = [arrays["output"] for arrays in reference if arrays["output"].shape[1] > 1]
    several = [values for values in outputs if np.isfinite(values).all()]  # others fail the comparison
    if spec.layers == 1 or not several:
        return ()
    apart = max(float(abs(x - x.mean(1, keepdims=True)).max() / np.sqrt((x**2).mean() or 1.0)) for x in several)
    if apart > ALIKE * TOLERANCES[spec.dtype].floor:
        return ()
    return (
        f"after {spec.layers} layers of bare attention all tokens of a row are alike (to {apart:.0e}), so a fault in "
        "how a layer uses positions may not show: it does with a cache, a residual or fewer layers",
    )
