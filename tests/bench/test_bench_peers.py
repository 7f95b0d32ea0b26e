"""What the benchmark against peers makes of its series, and the page of its results."""

import sys
from pathlib import Path
from typing import Any

import pytest

from posexport.models import ENCODINGS

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
try:
    import peers
    import peers_cells
    import peers_page
finally:
    sys.path.pop(0)


def ratio(median: float, width: float = 0.1) -> dict[str, float]:
    return {"median": median, "low": median - width, "high": median + width, "confidence": 0.99}


def ratios(bound: float, torch: float, **others: float) -> dict[str, dict[str, float]]:
    found = {"lower_bound": ratio(bound), "torch": ratio(torch)}
    return {**found, **{name.replace("_", "-"): ratio(value) for name, value in others.items()}}


@pytest.mark.parametrize(
    ("scenario", "found", "place", "slower", "missed"),
    [
        ("prefill:1024", ratios(1.0, 0.5), "fastest", [], 0),
        ("prefill:1024", ratios(1.15, 0.95), "equal", [], 0),
        ("prefill:1024", {**ratios(1.15, 0.5), "torch-onnx 24": ratio(1.0, 0.3)}, "inconclusive", [], 0),
        ("prefill:1024", ratios(1.3, 0.5), "fastest", [], 1),
        ("prefill:128", ratios(1.3, 0.5), "fastest", [], 0),
        ("prefill:128", ratios(1.0, 0.5, ort_fusions=1.2), "slower", ["ort-fusions"], 0),
        ("decode:2048", ratios(3.0, 0.4), "fastest", [], 0),
        ("decode:2048", ratios(3.0, 0.5), "fastest", [], 1),
    ],
)
def test_a_place_is_lost_and_a_goal_missed_only_where_that_is_sure(
    scenario: str, found: dict[str, Any], place: str, slower: list[str], missed: int
) -> None:
    judged = peers.judged(scenario, found)
    assert (judged["place"], judged["slower_than"], len(judged["missed"])) == (place, slower, missed)


def cell(encoding: str, scenario: str, **over: Any) -> dict[str, Any]:
    found = ratios(1.0, 0.5)
    return {
        "encoding": encoding,
        "scenario": scenario,
        "best": "native",
        "seconds": {"native": 0.0123},
        "ratios": found,
        "missing": {"torch-compile": "no compiler."},
        **peers.judged(scenario, found),
        **over,
    }


def test_goals_count_the_encodings_that_miss_them() -> None:
    slow = {"place": "slower", "slower_than": ["torch"], "missed": ["above 1.1 of the lower bound"]}
    rows = peers._goals([cell("rope", "prefill:1024"), cell("t5", "prefill:1024", **slow), cell("t5", "prefill:128")])
    assert [(row.what.partition(":")[2][:12], row.value, row.state) for row in rows] == [
        ("128: encodin", 0, "passed"),
        ("1024: encodi", 1, "failed"),
        ("1024: encodi", 1, "failed"),
    ]


def test_the_page_tells_places_ratios_and_what_was_not_run() -> None:
    slow = {"place": "slower", "slower_than": ["torch"], "missed": ["above 1.1 of the lower bound"]}
    data = {
        "machine": "a machine",
        "versions": {"torch": "2"},
        "cells": [cell("rope", "prefill:1024"), cell("t5", "prefill:1024", **slow)],
        "onnxruntime-genai": {"state": "not run", "reason": "it is not installed"},
    }
    page = peers_page.page(data)
    assert "| prefill:1024 | 2 | 1 | 0 | 0 | `t5` | `t5` |" in page
    assert "| rope | native | 12.30 | 0.50 (0.40-0.60) | 1.00 (0.90-1.10) | fastest |" in page
    assert "| slower than torch; above 1.1 of the lower bound |" in page
    assert "- torch-compile, not run: no compiler (all)." in page
    assert "Not run: it is not installed." in page


def test_every_encoding_has_its_scenarios() -> None:
    names = peers_cells.encodings(quick=False)
    assert names == list(ENCODINGS)
    for name in names:
        found = peers_cells.scenarios(name)
        assert ("decode:2048" in found) == peers_cells.decodes(name)
        if peers_cells.decodes(name):
            for cache in (None, peers_cells.GROWN, peers_cells.SHARED):
                limit = peers_cells.spec_of(name, cache).position_limit()
                assert limit is None or limit > peers_cells.PAST
        else:
            assert peers_cells.spec_of(name, None).position_axes > 1
