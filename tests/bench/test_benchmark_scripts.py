"""The results that benchmark scripts compute, and that the pages in docs/results agree with the committed data."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import small_spec, weights_for
from result_pages import figures_of

from posexport.custom_ops.operator import plain_torch
from posexport.models import ENCODINGS
from posexport.models.block import build_block
from posexport.spec.forms import FORMS

SCRIPTS = Path(__file__).parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))
try:
    import alternatives
    import before
    import forms
    import kernels
    import memory
    import positions
    import results
    import timing
    import tuning
finally:
    sys.path.pop(0)


@pytest.fixture
def command() -> ModuleType:
    """The module of `scripts/benchmark`."""
    spec = importlib.util.spec_from_file_location("benchmark_command", SCRIPTS / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def read(name: str) -> Any:
    return json.loads((results.RESULTS / name).read_bytes())


def test_the_pages_are_of_the_committed_data(command: ModuleType) -> None:
    benchmarks = [line for part in read("cpu.json").values() for line in command._section(part)]
    pages: dict[str, Any] = {
        **{"alternatives": alternatives, "tuning": tuning, "positions": positions},
        "positions-before": before,
    }
    lines = {"benchmarks": benchmarks, **{name: page.figures(read(f"{name}.json")) for name, page in pages.items()}}
    for name, expected in lines.items():
        assert figures_of(results.RESULTS / f"{name}.md") == "\n".join(expected).strip("\n") + "\n", name


def test_goals_are_counted_in_the_committed_ratios() -> None:
    counts = [row.data() for row in positions._goal_rows(read("positions.json")["cells"])]
    assert read("cpu.json")["positions"]["rows"] == counts


def test_every_result_names_its_machine(command: ModuleType) -> None:
    recorded = results.record()["machine"]
    assert set(recorded) == set(results.MACHINE)
    assert recorded["logical_cpus"] and recorded["memory"]
    committed = [
        read(f"{name}.json")["machine"] for name in ("alternatives", "tuning", "positions", "positions-before", "gate")
    ]
    for facts in (*committed, *(part["machine"] for part in read("cpu.json").values())):
        assert set(facts) == set(results.MACHINE)
    unknown = dict.fromkeys(results.MACHINE) | {
        "logical_cpus": 2,
        "memory": 24 * 2**30,
        "os": "Linux",
        "architecture": "x",
    }
    assert results.machine_line(unknown) == "CPU model not recorded, 2 cores, 24 GiB, Linux x"
    known = {**unknown, "cpu": "A", "instruction_sets": ["AVX2"]}
    assert results.machine_line(known) == "A, 2 cores, AVX2, 24 GiB, Linux x"


def test_every_part_is_a_function_and_the_long_ones_are_asked_for(command: ModuleType) -> None:
    assert set(command.LONG) < set(command.PARTS)
    for place, _ in command.PARTS.values():
        module, _, function = place.partition(".")
        sys.path.insert(0, str(SCRIPTS))
        try:
            assert callable(getattr(importlib.import_module(module), function))
        finally:
            sys.path.pop(0)


def test_an_encoding_is_timed_beside_a_block_of_its_kind() -> None:
    """A causal block hides half of its products, so other blocks are not a reference for it."""
    for encoding in ("alibi", "swin", "mrope", "rope2d"):
        causal = positions.decodes(encoding)
        assert positions.spec_of(encoding, "data", None).causal == causal == (encoding in ("alibi", "mrope"))
        assert positions.spec_of(positions.NONE, "data", None, causal).causal == causal
    modes = {name: "consecutive" in positions.modes_of(name) for name in ENCODINGS}
    assert modes["swin"] and modes["relative"] and not modes["rope2d"] and not modes["mrope"]


def test_a_row_passes_or_fails_by_its_target() -> None:
    slow, fast = [2.0] * 9, [1.0] * 9
    assert results.compared("x", slow, fast, 1.3).state == "failed"
    assert results.compared("x", fast, slow, 1.3).state == "passed"
    assert results.counted("x", 7, 6, "kernels").state == "failed"
    assert results.counted("x", 6, 6, "kernels").state == "passed"
    assert results.not_run("x", 6, "no GPU").state == "not run"
    free = results.compared("x", [9.0] * 9, fast, None)
    assert free.state == "measured" and free.value == 9.0 and "target" not in free.data()


@pytest.mark.slow
def test_every_form_is_timed_and_each_has_limits_of_its_kernels(tmp_path: Path) -> None:
    assert set(forms.FORMS) == {form for pair in kernels.PAIRS for form in pair} == set(FORMS)
    assert all(len(limits) in (1, len(kernels.HOOKS)) for _, limits in kernels.CASES.values())
    files, missing = timing.write_forms(small_spec("rope", causal=True), tmp_path, forms.FORMS)
    assert set(memory.FORM_LIMITS) <= set(files) <= {*FORMS, *(f"{form} --target ort" for form in FORMS)}
    assert len({path.read_bytes() for path in files.values()}) == len(files) and not missing
    cached = timing.write_forms(small_spec("rope", causal=True, kv_cache="shared"), tmp_path, ["contrib"])
    assert list(cached[0]) == ["contrib --target ort"] and "TensorRT lacks" in cached[1]["contrib"]


def test_the_best_form_is_judged_by_other_sessions_than_the_one_that_chooses_it() -> None:
    lucky, usual = {"torch": 1.0, "a": 0.1, "b": 0.5}, {"torch": 1.0, "a": 0.9, "b": 0.5}
    for first, second, best, ratio, state in ((lucky, usual, "a", 0.9, "failed"), (usual, lucky, "b", 0.5, "passed")):
        series = {name: [[first[name]] * 9, [second[name]] * 9] for name in usual}
        row = forms.best_form("x", series, ["a", "b"], 0.85)
        assert (row.details["form"], row.value, row.state) == (best, pytest.approx(ratio), state)


def test_a_cache_that_grows_gets_what_is_written() -> None:
    step = forms.SITUATIONS["a step over 2048 in shared buffers of 2560"]
    spec = small_spec("rope", causal=True, kv_cache="shared")
    inputs = forms.seeded_inputs(spec, step.sizes, 0)
    given = timing.grown(inputs, 2048)
    assert inputs["past_key"].shape[2] == 2560 and given["past_key"].shape[2] == 2048
    assert "write_indices" not in given and (given["position_ids"] == 2048).all()


def test_a_session_times_all_and_another_function_is_found_out() -> None:
    spec = small_spec("rope")
    inputs = forms.seeded_inputs(spec, forms.Sizes(seq=5), 0)
    block = build_block(spec, weights_for(spec))
    one = timing.of_torch(block, inputs)
    series = timing.time_sessions({"a": one, "b": one}, 2, lambda seconds: 3 if seconds > 0 else 0, 1)
    assert {name: [len(session) for session in sessions] for name, sessions in series.items()} == {
        "a": [3, 3],
        "b": [3, 3],
    }
    assert timing.error_of(one, one) == 0
    other = timing.of_torch(build_block(small_spec("rope", layout="half"), weights_for(spec)), inputs)
    assert timing.error_of(other, one) > 1e-3
    with plain_torch(), torch.no_grad():
        assert timing.error_of(one, one) == 0


def ratio(median: float, width: float = 0.1) -> dict[str, float]:
    return {"median": median, "low": median - width, "high": median + width, "confidence": 0.99}


def ratios(lower_bound: float, torch: float, **others: float) -> dict[str, dict[str, float]]:
    found = {"lower_bound": ratio(lower_bound), "torch": ratio(torch)}
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
    judged = alternatives.judged(scenario, found)
    assert (judged["place"], judged["slower_than"], len(judged["missed"])) == (place, slower, missed)


def cell(encoding: str, scenario: str, **over: Any) -> dict[str, Any]:
    found = ratios(1.0, 0.5)
    return {
        "encoding": encoding,
        "scenario": scenario,
        "best": "native",
        "seconds": {"native": 0.0123},
        "ratios": found,
        "missing": {"torch-compile": "no compiler.", "contrib": "not an alternative"},
        **alternatives.judged(scenario, found),
        **over,
    }


SLOW = {"place": "slower", "slower_than": ["torch"], "missed": ["above 1.1 of the lower bound"]}


def test_goals_count_the_encodings_that_miss_them() -> None:
    cells = [cell("rope", "prefill:1024"), cell("t5", "prefill:1024", **SLOW), cell("t5", "prefill:128")]
    rows = alternatives.goal_rows(cells)
    assert [(row.what.partition(":")[2][:12], row.value, row.state) for row in rows] == [
        ("128: encodin", 0, "passed"),
        ("1024: encodi", 1, "failed"),
        ("1024: encodi", 1, "failed"),
    ]


def test_the_page_states_places_ratios_and_what_was_not_run() -> None:
    machine = dict.fromkeys(results.MACHINE) | {"memory": 2**30}
    cells = [cell("rope", "prefill:1024"), cell("t5", "prefill:1024", **SLOW)]
    lines = alternatives.figures({"machine": machine, "versions": {"torch": "2"}, "cells": cells})
    assert "| prefill:1024 | 2 | 1 | 0 | 0 | `t5` | `t5` |" in lines
    assert "| rope | native | 12.30 | 0.50 (0.40-0.60) | 1.00 (0.90-1.10) | fastest |" in lines
    assert any("| slower than torch; above 1.1 of the lower bound |" in line for line in lines)
    assert [line for line in lines if "not run" in line] == ["- torch-compile, not run: no compiler (all)."]


def test_every_encoding_has_its_scenarios() -> None:
    for name in ENCODINGS:
        assert ("decode:2048" in alternatives.scenarios(name)) == alternatives.decodes(name)
        if alternatives.decodes(name):
            for cache in (None, alternatives.GROWN, alternatives.SHARED):
                limit = alternatives.spec_of(name, cache).position_limit()
                assert limit is None or limit > 2048
        else:
            assert alternatives.spec_of(name, None).position_axes > 1
