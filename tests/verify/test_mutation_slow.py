"""Verify catches new faults: a part of the mutation test with its own seed."""

from __future__ import annotations

import math

import pytest
from mutation import page
from mutation.scoring import Plan, score

SEED = 1


@pytest.mark.slow
def test_random_and_corner_mutants_are_caught() -> None:
    made = score(plan=Plan(random_count=4, corner_share=0.25, seed=SEED))
    assert made.alarms == []
    data = page.score_data(made, SEED)
    passed = [f"{mutant.group} / {mutant.kind} / {mutant.artifact} / {mutant.numbers}" for mutant in page.missed(made)]
    assert data["random"]["faults"] > 100 and data["corner"]["faults"] > 150
    for name, target in page.TARGETS.items():
        row = data[name]
        assert row["faults"] - row["caught"] <= math.ceil((1 - target) * row["faults"]), passed
