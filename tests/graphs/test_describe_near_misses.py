"""The description of attention changes if the attention has one fault in rotations, masks or scores.

Some faults do not show because descriptions do not contain them: other weights, weights that multiply the queries, and
the size of an epsilon.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import pytest
from near_miss_masks import MASKS
from near_miss_models import MODELS
from near_miss_rotations import ROTATIONS
from near_miss_scores import SCORES
from near_misses import difference, near_miss

from posexport.errors import RequestError
from posexport.graphs.attention.describe import Describer
from posexport.graphs.view import view_of

NOT_DESCRIBED = {"queries_of_another_layer", "scale_of_one_head", "norm_epsilon", "keys_and_values_tiled"}

QUICK = [*ROTATIONS][::6] + [*MASKS][::6]


@functools.cache
def right() -> tuple[ir.Model, list[Any], list[dict[str, Any]]]:
    """A decoder with a window, a cap, norms and RoPE; its inputs; and the descriptions of its attention."""
    model, feeds = MODELS["decoder"]()
    return model, feeds, said_of(model)


def said_of(model: ir.Model) -> list[dict[str, Any]]:
    """The descriptions of all attention without names."""
    view = view_of(model.clone())
    records = map(Describer(view).describe, view.attentions)
    return [{key: value for key, value in one.items() if key not in ("name", "nodes", "runtimes")} for one in records]


def test_the_right_one_has_a_name() -> None:
    assert [one["encoding"] for one in right()[2]] == [{"name": "rope", "layout": "half", "theta": 16.0}] * 2
    assert {one["mask"]["kind"] for one in right()[2]} == {"window"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow)
        for fault in (*ROTATIONS, *MASKS, *SCORES)
        if fault not in NOT_DESCRIBED
    ],
)
def test_a_fault_shows(fault: str) -> None:
    model, feeds, before = right()
    for seed in range(3):
        changed = near_miss(model, fault, seed)
        if changed is None or not difference(model, changed, feeds) > 1e-3:
            continue
        try:
            assert said_of(changed) != before, seed
        except RequestError:  # The graph no longer runs.
            continue
