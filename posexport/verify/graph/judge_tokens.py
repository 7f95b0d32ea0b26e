"""The verdict on tokens by the logits of float64: each must be the likeliest, or be so within the errors that pass.

Two logits may each be off by the limit of an error, so their difference by twice that. As in parity, tokens beyond that
limit show nothing if only the ceiling makes it so low: then torch's own logits have errors of this size. Places where
torch has no logits at all in the file's dtypes show nothing either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from posexport.errors import Reason
from posexport.spec.arrays import Array
from posexport.verify.blocks import root_mean_square
from posexport.verify.graph.parity import HUGE
from posexport.verify.parity import UNCLEAR, largest_error
from posexport.verify.result import (
    FAILED,
    GENERATION,
    INCONCLUSIVE,
    NOT_RUN,
    OTHER_TOKENS,
    PASSED,
    State,
    Tolerance,
    Verdict,
)

LISTED = 3
"""The places that a note names; it counts the others."""


def judge_tokens(
    path: str, runtime: str, made: Array, exact: Array, own: Array, tolerance: Tolerance, known: Array | None = None
) -> Verdict:
    """The verdict on tokens [rows, count] by the logits [rows, count, vocabulary] at the places before them.

    `exact` are the logits of float64, `own` those of an honest evaluation in the file's dtypes. bool `known` [rows,
    count] says for which tokens these logits are right, None for all of them.
    """
    known = np.ones(made.shape, bool) if known is None else known
    ordinary = np.isfinite(exact) & (np.abs(exact) < HUGE)  # a token that can't be chosen has a huge negative logit
    computed = has_likeliest(exact) & np.isfinite(np.where(ordinary, own, 0.0)).all(-1)
    counted, values = known & computed, ordinary & computed[..., None]
    if not counted.any():
        text = f"{INCONCLUSIVE}: transformers itself gives NaN or infinity at all places, so no token can be judged"
        return Verdict.of(path, runtime, NOT_RUN, Reason(INCONCLUSIVE, text), check=GENERATION)
    error, rms = largest_error(own[values], exact[values]), root_mean_square(exact[values])
    limit, wide = 2 * tolerance.limit(error, rms), 2 * tolerance.uncapped(error, rms)
    margins, short = _margins(np.where(ordinary, exact, -np.inf), made, counted)
    same, open_places = counted & (short == 0), np.argwhere(margins <= limit)
    notes = [f"row {at + 1}, token {step + 1}: {margins[at, step]:.2e}" for at, step in open_places[:LISTED]]
    if notes:
        more = f" and {len(open_places) - LISTED} more" if len(open_places) > LISTED else ""
        notes = [f"margins within the limit of {limit:.2e}, so that either token is right: {', '.join(notes)}{more}"]
    if not known.all():
        notes.append(f"{int((~known).sum())} tokens after a place where either is right were not compared")
    total = int(counted.sum())
    fields: dict[str, Any] = {
        "check": GENERATION,
        "cases": 1,
        "notes": tuple(notes),
        "measured": f"{int(same.sum())} of {total} tokens are those of float64",
        "limit_text": f"{total - len(open_places)}, as many as have a margin above {limit:.2e}",
    }
    not_shown = []
    if blank := int((known & ~computed).sum()):
        not_shown.append(f"transformers itself gives NaN or infinity before {blank} of {int(known.sum())} tokens")
    hidden = (short > limit) & (short <= wide)
    wrong, code = short > wide, OTHER_TOKENS
    if not wrong.any() and UNCLEAR * int(hidden.sum()) > total:
        wrong, code = hidden, INCONCLUSIVE
        fields["where"] = f"{INCONCLUSIVE}: {_rounding(error, rms)}"
    elif hidden.any():
        not_shown.append(f"{_rounding(error, rms)}, and hide whether {int(hidden.sum())} of {total} tokens are right")
    reason = None
    if wrong.any():
        at, step = min(map(tuple, np.argwhere(wrong)), key=lambda place: place[1])
        reason = Reason(
            code,
            f"token {step + 1} of row {at + 1} is {made[at, step]}, and float64 has {exact[at, step].argmax()}, "
            f"whose logit is {short[at, step]:.2e} more (limit {limit:.2e})",
        )
    state: State = PASSED if reason is None else FAILED
    return Verdict.of(path, runtime, state, reason, not_shown=tuple(not_shown), **fields)


def _rounding(error: float, rms: float) -> str:
    return f"torch itself is off by {error:.2g} of {rms:.2g} in the logits: rounding errors are as large as that"


def has_likeliest(logits: Array) -> Array:
    """Where one of the logits [..., vocabulary] is the largest: at least one is finite, and none is NaN or infinity."""
    ordinary = np.isfinite(logits) & (np.abs(logits) < HUGE)
    return np.asarray((ordinary | (logits < 0)).all(-1) & ordinary.any(-1))


def _margins(logits: Array, made: Array, counted: Array) -> tuple[Array, Array]:
    """How far the two largest logits are apart, infinite where nothing is counted; and how far the logits of the tokens
    are below the largest, 0 there."""
    ranked = np.sort(np.where(counted[..., None], logits, 0.0), -1)[..., -2:]
    chosen = np.where(counted, np.take_along_axis(logits, made[..., None], -1)[..., 0], 0.0)
    return np.where(counted, ranked[..., -1] - ranked[..., 0], np.inf), np.where(counted, ranked[..., -1] - chosen, 0.0)
