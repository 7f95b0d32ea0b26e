"""The verdict on tokens by the logits of float64: each must be the likeliest, or be so within the errors that pass.

Two logits may each be off by the limit of an error, so their difference by twice that.
"""

from __future__ import annotations

import numpy as np

from posexport.errors import Reason
from posexport.spec.arrays import Array
from posexport.verify.blocks import root_mean_square
from posexport.verify.result import FAILED, GENERATION, OTHER_TOKENS, PASSED, Tolerance, Verdict

LISTED = 3
"""The places that a note names; it counts the others."""


def judge_tokens(
    path: str, runtime: str, made: Array, exact: Array, own: Array, tolerance: Tolerance, known: Array | None = None
) -> Verdict:
    """The verdict on tokens [rows, count] by the logits [rows, count, vocabulary] at the places before them.

    `exact` are the logits of float64, `own` those of an honest evaluation in the file's dtypes. bool `known` [rows,
    count] says for which tokens these logits are right, None for all of them.
    """
    counted = np.ones(made.shape, bool) if known is None else known
    limit = 2 * tolerance.limit(float(np.abs(own - exact).max()), root_mean_square(exact))
    ranked = np.sort(exact, -1)
    margins = ranked[..., -1] - ranked[..., -2]
    short = np.where(counted, ranked[..., -1] - np.take_along_axis(exact, made[..., None], -1)[..., 0], 0.0)
    same, open_places = counted & (short == 0), np.argwhere(counted & (margins <= limit))
    notes = [f"row {at + 1}, token {step + 1}: {margins[at, step]:.2e}" for at, step in open_places[:LISTED]]
    if notes:
        more = f" and {len(open_places) - LISTED} more" if len(open_places) > LISTED else ""
        notes = [f"margins within the limit of {limit:.2e}, so that either token is right: {', '.join(notes)}{more}"]
    if not counted.all():
        notes.append(f"{int((~counted).sum())} tokens after a place where either is right were not compared")
    reason = None
    if (short > limit).any():
        at, step = min(map(tuple, np.argwhere(short > limit)), key=lambda place: place[1])
        reason = Reason(
            OTHER_TOKENS,
            f"token {step + 1} of row {at + 1} is {made[at, step]}, and float64 has {exact[at, step].argmax()}, "
            f"whose logit is {short[at, step]:.2e} more (limit {limit:.2e})",
        )
    total = int(counted.sum())
    fields = {
        "check": GENERATION,
        "cases": 1,
        "notes": tuple(notes),
        "measured": f"{int(same.sum())} of {total} tokens are those of float64",
        "limit_text": f"{total - len(open_places)}, as many as have a margin above {limit:.2e}",
    }
    return Verdict.of(path, runtime, PASSED if reason is None else FAILED, reason, **fields)
