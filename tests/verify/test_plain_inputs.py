"""Inputs as most services make them. A graph may have a fast path for them, and only they show a fault in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import small_spec

from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import Case, make_cases

SEEDS = range(3)

ENCODER = small_spec("rope", padding_mask=True)
DECODER = small_spec("rope", kv_cache="concat", causal=True, padding_mask=True)
UNMASKED = small_spec("rope", kv_cache="concat", causal=True)
SHARED = small_spec("rope", kv_cache="shared", causal=True, padding_mask=True)
CROSS = small_spec("learned", cross=True, padding_mask=True)


def is_unpadded(case: Case) -> bool:
    mask = case.arrays.get("attention_mask")
    if mask is None:
        return True
    starts = case.arrays.get("write_indices")
    if starts is None:
        return bool(mask.all())
    width = (starts + case.sizes["seq"])[:, None]
    return bool((mask != 0)[np.arange(mask.shape[1]) < width].all())


def is_plain(case: Case) -> bool:
    """Whether a case has no padding, and all rows have as many cached tokens and positions that continue from there."""
    starts = case.arrays.get("write_indices", np.full(case.sizes["batch"], case.sizes.get("past_seq", 0)))
    usual = starts[:, None] + np.arange(case.sizes["seq"])
    alike = len({*starts.tolist()}) == 1
    return alike and is_unpadded(case) and np.array_equal(case.arrays["position_ids"], usual)


def cached(case: Case) -> int:
    starts = case.arrays.get("write_indices")
    return case.sizes.get("past_seq", 0) if starts is None else int(starts.max())


Corner = Callable[[Case], bool]

CORNERS: dict[str, tuple[Spec, Corner]] = {
    "encoder, one row": (ENCODER, lambda c: is_plain(c) and c.sizes["batch"] == 1 and c.sizes["seq"] >= 64),
    "encoder, rows": (ENCODER, lambda c: is_plain(c) and c.sizes["batch"] > 1 and c.sizes["seq"] >= 64),
    "encoder, many rows": (ENCODER, lambda c: is_plain(c) and c.sizes["batch"] >= 6 and c.sizes["seq"] >= 8),
    "prompt": (DECODER, lambda c: is_plain(c) and not cached(c) and c.sizes["seq"] >= 180),
    "prompts of rows": (DECODER, lambda c: is_plain(c) and c.sizes["batch"] > 1 and c.sizes["seq"] >= 64),
    "prompts of ten rows": (DECODER, lambda c: is_plain(c) and c.sizes["batch"] >= 10 and c.sizes["seq"] >= 8),
    "step": (DECODER, lambda c: is_plain(c) and c.sizes == {**c.sizes, "batch": 1, "seq": 1} and cached(c) >= 256),
    "steps of rows": (DECODER, lambda c: is_plain(c) and c.sizes["batch"] > 1 and cached(c) >= 150),
    "chunk": (DECODER, lambda c: is_plain(c) and 1 < c.sizes["seq"] <= 60 and cached(c) >= 30),
    "piece of a prompt": (DECODER, lambda c: c.sizes["batch"] == 1 and c.sizes["seq"] >= 192 and cached(c) > 0),
    "late piece": (DECODER, lambda c: c.sizes["seq"] >= 340 and cached(c) >= 600),
    "early piece": (DECODER, lambda c: c.sizes["seq"] >= 192 and 1 <= cached(c) <= 90),
    "chunks of a dozen": (DECODER, lambda c: c.sizes["batch"] >= 10 and c.sizes["seq"] >= 56 and cached(c) > 0),
    "step without a mask": (UNMASKED, lambda c: is_plain(c) and c.sizes["seq"] == 1 and cached(c) >= 130),
    "rows at one slot": (SHARED, lambda c: is_plain(c) and c.sizes["batch"] > 1 and cached(c) >= 16),
    "chunks at one slot": (
        SHARED,
        lambda c: is_plain(c) and c.sizes["batch"] > 1 and c.sizes["seq"] >= 8 and cached(c) >= 16,
    ),
    "free slots": (
        SHARED,
        lambda c: c.sizes["seq"] == 1 and 350 <= c.sizes["max_seq"] - cached(c) - 1 <= 1000 and c.sizes["batch"] == 1,
    ),
    "prompt in a wide buffer": (
        SHARED,
        lambda c: c.sizes["seq"] >= 130 and c.sizes["max_seq"] - cached(c) - c.sizes["seq"] >= 400,
    ),
    "prompts in a wide buffer": (
        SHARED,
        lambda c: c.sizes["batch"] > 1 and c.sizes["seq"] >= 64 and c.sizes["max_seq"] - c.sizes["seq"] >= 100,
    ),
    "text over sound": (CROSS, lambda c: c.sizes["seq"] >= 130 and c.sizes["encoder_seq"] >= 1000),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["ENCODER", "DECODER", "UNMASKED", "SHARED", "CROSS"])
def test_every_seed_meets_the_corners(name: str, seed: int) -> None:
    chosen: Spec = globals()[name]
    cases = make_cases(chosen, seed, bounds_of(graph_inputs(chosen), {}))
    corners = [corner for corner, (spec, meets) in CORNERS.items() if spec is chosen and not any(map(meets, cases))]
    assert corners == []
