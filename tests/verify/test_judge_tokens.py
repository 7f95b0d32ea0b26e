"""Tokens are right if the errors of logits that pass can explain them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Array

from posexport.verify.blocks import root_mean_square
from posexport.verify.graph.judge_tokens import judge_tokens
from posexport.verify.parity import TOLERANCES
from posexport.verify.result import Verdict

TOLERANCE = TOLERANCES["fp16"]
CEILING = 2 * TOLERANCE.ceiling
"""How far two logits may be apart if the ceiling is their limit, as a part of the root mean square."""


def logits(short: float, places: int = 4) -> Array:
    """Logits of 100 tokens: the last one but one is the likeliest, and the last one is `short` times their root mean
    square below."""
    exact = np.full((1, places, 100), -1.0)
    exact[..., 98] = 0.0
    exact[..., 99] = -short * root_mean_square(exact)
    return exact


def verdict(made: list[int], exact: Array, own: Array) -> Verdict:
    return judge_tokens("model.onnx", "ort-cpu", np.array([made]), exact, own, TOLERANCE)


@pytest.mark.parametrize(("limits", "state"), [(0.9, "passed"), (1.9, "passed"), (2.1, "failed")])
def test_a_margin_of_as_many_limits(limits: float, state: str) -> None:
    """A runtime whose logits are each off by almost the limit chooses the other token of a pair up to two limits
    apart."""
    error = 2.0**-9
    limit = TOLERANCE.limit(error, 1.0)
    assert limit < TOLERANCE.ceiling
    exact = logits(limits * limit)
    off = np.zeros(100)
    off[98], off[99] = -0.99 * limit, 0.99 * limit
    assert ((exact + off).argmax(-1) == 99).all() == (state == "passed")
    assert verdict([98, 98, 99, 98], exact, exact + error).state == state


@pytest.mark.parametrize(
    ("made", "short", "error", "state", "code"),
    [
        ([98, 98, 99, 98], 0.9 * CEILING, 1.0, "passed", None),
        ([98, 98, 99, 98], 2.0 * CEILING, 1.0, "inconclusive", None),
        ([98, 99, 99, 98], 2.0 * CEILING, 1.0, "failed", "inconclusive"),
        ([98, 98, 99, 98], 2.0 * CEILING, 2.0**-9, "failed", "other-tokens"),
        ([98, 98, 5, 98], 2.0 * CEILING, 0.05, "failed", "other-tokens"),
    ],
    ids=["within the ceiling", "one of four", "two of four", "torch is near", "beyond any rounding"],
)
def test_errors_above_the_ceiling_are_judged_as_in_parity(
    made: list[int], short: float, error: float, state: str, code: str | None
) -> None:
    """If torch's own logits are off by more than the ceiling, tokens within their errors show nothing, as long as they
    are at most a quarter."""
    exact = logits(short)
    found = verdict(made, exact, exact + error)
    assert ("inconclusive" if found.inconclusive else found.state, found.reason_code) == (state, code)
    if state == "inconclusive":
        assert "torch itself is off by 1" in found.not_shown[0]


@pytest.mark.parametrize("where", ["own", "exact"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_place_without_logits_of_torch_shows_nothing(value: float, where: str) -> None:
    """A wrong token at another place is found, and none is excused because an error is NaN."""
    exact = logits(1.0)
    arrays = {"exact": exact, "own": exact.copy()}
    arrays[where][0, 1, 3] = value
    assert verdict([98, 98, 99, 98], **arrays).reason_code == "other-tokens"
    right = verdict([98, 99, 98, 98], **arrays)
    assert right.inconclusive
    assert right.not_shown == ("transformers itself gives NaN or infinity before 1 of 4 tokens",)
    arrays[where][0, :, 3] = value
    nothing = verdict([98] * 4, **arrays)
    assert (nothing.state, nothing.reason_code, nothing.shows_nothing) == ("not run", "inconclusive", True)


@pytest.mark.parametrize("value", [-np.inf, float(np.finfo(np.float64).min)])
def test_tokens_that_cannot_be_chosen_dont_raise_the_limit(value: float) -> None:
    """Chameleon gives tokens of images the least logit that there is."""
    exact = logits(1.0)
    exact[..., :50] = value
    own = np.maximum(exact, -65504.0) if np.isfinite(value) else exact
    assert verdict([98] * 4, exact, own).measured == "4 of 4 tokens are those of float64"
    assert verdict([98, 99, 98, 98], exact, own).reason_code == "other-tokens"
    assert verdict([98, 3, 98, 98], exact, own).reason_code == "other-tokens"
