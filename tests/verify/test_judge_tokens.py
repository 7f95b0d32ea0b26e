"""Tokens are right if the errors of logits that pass can explain them."""

from __future__ import annotations

import numpy as np
import pytest

from posexport.verify.blocks import root_mean_square
from posexport.verify.graph.judge_tokens import judge_tokens
from posexport.verify.parity import TOLERANCES


@pytest.mark.parametrize(("limits", "state"), [(0.9, "passed"), (1.9, "passed"), (2.1, "failed")])
def test_a_margin_of_as_many_limits(limits: float, state: str) -> None:
    """A runtime whose logits are each off by almost the limit chooses the other token of a pair up to two limits
    apart."""
    tolerance = TOLERANCES["fp16"]
    exact = np.zeros((1, 4, 100))
    exact[..., :98] = -1.0
    limit = tolerance.ceiling * root_mean_square(exact)
    exact[..., 98], exact[..., 99] = 0.0, -limits * limit
    own = exact + 1.0  # the rounding of torch alone reaches the ceiling
    off = np.zeros(100)
    off[98], off[99] = -0.99 * limit, 0.99 * limit
    assert ((exact + off).argmax(-1) == 99).all() == (state == "passed")
    verdict = judge_tokens("model.onnx", "ort-cpu", np.array([[98, 98, 99, 98]]), exact, own, tolerance)
    assert verdict.state == state
