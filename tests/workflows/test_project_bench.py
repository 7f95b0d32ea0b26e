"""Time budgets: judged with their interval on plain data, and the scenarios and runtimes that a project asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import cli, refused

from posexport.bench.options import BenchOptions
from posexport.bench.result import Benchmark, FileResult, Shape, Timing
from posexport.bench.statistics import Ratio, summarize
from posexport.errors import RequestError
from posexport.files import write_json
from posexport.workflows.project import bench as bench_stage
from posexport.workflows.project.bench import exit_code
from posexport.workflows.project.file import find_project
from posexport.workflows.project.latency import (
    baseline_of,
    baseline_problems,
    is_exceeded,
    judge,
    options_for,
    timed_on,
)
from posexport.workflows.project.products import Product, products

HEAD = '[[artifact]]\nname = "one"\nencoding = "rope"\nhidden-size = 16\nnum-heads = 2\n'


SECONDS = summarize([1.0])


def product(folder: Path, more: str) -> Product:
    (folder / "posexport.toml").write_text(HEAD + more)
    return products(find_project(str(folder / "posexport.toml")))[-1]


def measured(*results: Timing) -> Benchmark:
    shape = Shape(scenario="prefill:8", batch=1, seq=8, rounds=5, results=results)
    told: dict[str, Any] = {"file": "one.onnx", "sha256": "0", "encoding": "rope", "form": "native", "opset": 23}
    told |= {"dtype": "fp32", "spec": {}, "rounds": 5, "burst": 3, "processes": 1, "seed": 0, "machine_load": 0.0}
    return Benchmark(**told, machine={}, threads=None, shapes=(shape,))


def timed(low: float, median: float, high: float, name: str = "ort-cpu") -> Timing:
    return Timing(
        runtime=name,
        state="timed",
        seconds=SECONDS,
        ratios={"torch": Ratio(median=median, low=low, high=high, confidence=0.95)},
    )


@pytest.mark.parametrize(
    ("low", "median", "high", "state"),
    [(0.3, 0.4, 0.5, "fine"), (0.55, 0.6, 0.7, "inconclusive"), (0.7, 0.8, 0.9, "slower")],
)
def test_a_limit_is_judged_with_the_interval(
    low: float, median: float, high: float, state: str, tmp_path: Path
) -> None:
    one = product(tmp_path, "budget = {latency = {scenario = 'prefill:8', of-torch = 0.6}}")
    torch = Timing(
        runtime="torch",
        state="timed",
        seconds=SECONDS,
        ratios={"torch": Ratio(median=1.0, low=1.0, high=1.0, confidence=0.95)},
    )
    (kept,) = judge(one, measured(torch, timed(low, median, high)))
    assert (kept.runtime, kept.reference, kept.state, kept.ratio) == ("ort-cpu", "torch", state, median)
    assert is_exceeded(kept, strict=False) is (state == "slower")
    assert is_exceeded(kept, strict=True) is (state != "fine")


def test_few_rounds_tell_nothing_of_a_limit(tmp_path: Path) -> None:
    one = product(tmp_path, "budget = {latency = {scenario = 'prefill:8', of-torch = 0.6}}")
    few = Timing(
        runtime="ort-cpu",
        state="timed",
        seconds=SECONDS,
        ratios={"torch": Ratio(median=9, low=9, high=9, confidence=0.5)},
    )
    (kept,) = judge(one, measured(few))
    assert (kept.state, kept.reason) == ("inconclusive", "few rounds: its interval holds with 50%, not 95%")


def test_what_was_not_timed_is_not_run_with_its_reason(tmp_path: Path) -> None:
    one = product(tmp_path, "budget = {latency = {scenario = 'prefill:8', of-torch = 1, runtime = 'ort-cuda'}}")
    gone = Timing(runtime="ort-cuda", state="not run", reason="no GPU")
    (kept,) = judge(one, measured(timed(0.1, 0.2, 0.3), gone))
    assert (kept.runtime, kept.state, kept.reason) == ("ort-cuda", "not run", "no GPU")
    assert not is_exceeded(kept, strict=False)
    assert is_exceeded(kept, strict=True)
    other = product(tmp_path, "budget = {latency = {scenario = 'prefill:9', of-torch = 1}}")
    (unmet,) = judge(other, measured(timed(0.1, 0.2, 0.3)))
    assert unmet.state == "not run"
    assert is_exceeded(unmet, strict=False)  # ort-cpu is available, so it could have been measured
    unheld = product(tmp_path, "budget = {latency = {scenario = 'prefill:8', of-lower-bound = 1}}")
    assert [each.reason for each in judge(unheld, measured(timed(0.1, 0.2, 0.3)))] == [
        "lower_bound was not timed beside it"
    ]


def test_what_is_timed_is_what_the_budget_needs(tmp_path: Path) -> None:
    latency = "[{scenario = 'decode:8', of-torch = 1}, {scenario = 'decode:8', of-lower-bound = 1}]"
    one = product(tmp_path, f"runtimes = ['torch', 'ort-cpu', 'tensorrt-import']\nbudget = {{latency = {latency}}}")
    assert timed_on(one, ()) == (("ort-cpu",), None)
    asked = options_for(one, ("ort-cpu",), BenchOptions(rounds=7, required=("torch",)))
    assert (asked.scenarios, asked.alternatives, asked.torch_compile) == (("decode:8",), False, False)
    assert (asked.runtimes, asked.required, asked.rounds) == (("ort-cpu",), (), 7)
    assert timed_on(one, ("ort-cuda",)) == ((), "none of its runtimes is one to be timed")
    alternatives = product(tmp_path, "budget = {latency = {scenario = 'prefill:8', of-torch-onnx = 1}}")
    assert options_for(alternatives, (), BenchOptions()).alternatives
    compiled = product(tmp_path, "budget = {latency = {scenario = 'prefill: 08', of-torch-compile = 1}}")
    asked = options_for(compiled, (), BenchOptions())
    assert (asked.scenarios, asked.alternatives, asked.torch_compile) == (("prefill:8",), False, True)
    plan = product(tmp_path, "compile = {}")
    assert timed_on(plan, ("ort-cpu",)) == (("tensorrt-rtx",), "tensorrt-rtx was not asked for")


def test_a_limit_that_stands_twice_is_one_request(tmp_path: Path) -> None:
    limit = "{scenario = 'prefill:8', of-torch = 1}"
    twice = product(tmp_path, f"budget = {{latency = [{limit}, {limit}]}}")
    assert options_for(twice, (), BenchOptions()).scenarios == ("prefill:8",)


def test_limits_of_a_plan_are_told_also_where_it_was_not_timed(tmp_path: Path) -> None:
    plan = product(tmp_path, "compile = {}\nbudget = {latency = {scenario = 'prefill:8', of-torch = 0.6}}")
    (kept,) = judge(plan, None, ("tensorrt-rtx",), "no GPU")
    assert (kept.runtime, kept.state, kept.reason, kept.there) == ("tensorrt-rtx", "not run", "no GPU", False)
    (slow,) = judge(plan, measured(timed(0.7, 0.8, 0.9, "tensorrt-rtx")), ("tensorrt-rtx",))
    assert slow.state == "slower"
    gone = Timing(runtime="tensorrt-rtx", state="not run", reason="no such shape")
    (kept,) = judge(plan, measured(gone), ("tensorrt-rtx",))
    assert (kept.runtime, kept.reason) == ("tensorrt-rtx", "no such shape")


def test_nothing_timed_is_exit_3() -> None:
    def code(result: Benchmark, *named: str) -> int:
        file = FileResult(file="one.onnx", artifact="one", state="timed", result=result)
        return exit_code([file], named, (), False)[0]

    gone = measured(Timing(runtime="ort-cuda", state="not run", reason="no GPU"), timed(1, 1, 1, "torch"))
    assert code(gone) == 3
    assert code(gone, "torch") == 0
    assert code(measured(timed(1, 1, 1))) == 0


@pytest.mark.parametrize(("named", "required", "expected"), [((), (), 0), (("torch",), (), 1), ((), ("torch",), 1)])
def test_a_reference_that_fails_counts_where_it_is_named_or_required(
    named: tuple[str, ...], required: tuple[str, ...], expected: int
) -> None:
    result = measured(Timing(runtime="torch", state="failed", reason="it crashed"), timed(1, 1, 1))
    file = FileResult(file="one.onnx", artifact="one", state="timed", result=result)
    said = "torch failed: it crashed" if expected else ""
    assert exit_code([file], named, required, False) == (expected, said)


@pytest.mark.parametrize(
    ("more", "states"),
    [
        ("runtimes = ['ort-cpu', 'onnx-reference']\n", {"ort-cpu": "fine", "onnx-reference": "not run"}),
        ("", {"ort-cpu": "fine"}),
    ],
)
def test_a_limit_holds_for_each_runtime_that_is_named(more: str, states: dict[str, str], tmp_path: Path) -> None:
    one = product(tmp_path, f"{more}budget = {{latency = {{scenario = 'prefill:8', of-torch = 0.6}}}}")
    left = Timing(runtime="onnx-reference", state="not run", reason="it takes no such operator")
    judged = judge(one, measured(timed(0.1, 0.2, 0.3), left), timed_on(one, ())[0])
    assert {limit.runtime: limit.state for limit in judged} == states
    assert [limit.runtime for limit in judged if is_exceeded(limit, strict=False)] == [*states][1:]
    assert all(limit.reason == "it takes no such operator" for limit in judged if limit.state == "not run")


def test_a_baseline_of_one_file_is_made_as_the_error_says(tmp_path: Path) -> None:
    latency = "latency = {scenario = 'prefill:8', of-torch = 1}"
    one = product(tmp_path, f"runtimes = ['ort-cpu']\nbaseline = 'b.json'\nbudget = {{{latency}}}")
    said = r"one\.onnx --runtime ort-cpu --scenario prefill:8 --save \S+b\.json'"
    with pytest.raises(RequestError, match=said):
        baseline_of(find_project(str(tmp_path / "posexport.toml")), one, None)


def test_a_scenario_that_shares_its_sizes_is_judged(tmp_path: Path) -> None:
    one = product(tmp_path, "budget = {latency = {scenario = 'batch:1', of-torch = 1}}")
    found = measured(timed(0.1, 0.2, 0.3))
    shared = attrs.evolve(found, shapes=(attrs.evolve(found.shapes[0], also=("batch:1",)),))
    assert [each.state for each in judge(one, shared)] == ["fine"]


def test_a_baseline_is_there_or_this_run_makes_it(tmp_path: Path) -> None:
    one = product(tmp_path, "baseline = 'bench'")
    project = find_project(str(tmp_path / "posexport.toml"))
    with pytest.raises(RequestError, match="posexport bench --save"):
        baseline_of(project, one, None)
    assert baseline_of(project, one, tmp_path / "bench" / "one.json") is None
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "one.json").write_text("{}")
    assert baseline_of(project, one, tmp_path / "one.json") == tmp_path / "bench" / "one.json"
    with pytest.raises(RequestError, match=r"--save and the baseline of artifact 'one' are both .*one\.json"):
        baseline_of(project, one, tmp_path / "bench" / "one.json")
    (tmp_path / "bench" / "one.json").rename(tmp_path / "bench" / "two.json")
    with pytest.raises(RequestError, match=r"posexport bench \S+one\.onnx --save \S+one\.json"):
        baseline_of(project, one, None)  # two has its baseline, which a run of all files would not replace


UNFIT: dict[str, tuple[dict[str, Any], float, str]] = {
    "too few processes": ({"processes": 1}, 0.5, "it has 1 of the 3 processes that it takes to tell changes"),
    "a busy machine": ({"processes": 3, "machine_load": 0.3}, 0.5, "other work took 30% of the CPU (time it at rest)"),
    "over its budget": ({"processes": 3}, 0.7, "it is over its budget of time"),
    "a fit one": ({"processes": 3}, 0.5, ""),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_fit_baseline_is_told(name: str, tmp_path: Path) -> None:
    over, ratio, problem = UNFIT[name]
    one = product(tmp_path, "budget = {latency = {scenario = 'prefill:8', of-torch = 0.6}}")
    result = attrs.evolve(measured(timed(ratio, ratio, ratio)), **over)
    result = attrs.evolve(result, limits=tuple(judge(one, result)))
    assert "; ".join(baseline_problems(result)) == problem


def test_a_result_that_is_no_fit_baseline_is_warned_of_where_there_is_a_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_stage, "out_of_date", lambda product: None)
    monkeypatch.setattr(bench_stage, "bench", lambda path, options, progress: measured(timed(0.5, 0.5, 0.5)))
    monkeypatch.setattr(bench_stage, "bench_to_keep", lambda path, options, progress: measured(timed(0.5, 0.5, 0.5)))
    for more, warned in (("baseline = 'bench'\n", True), ("", False)):
        product(tmp_path, more)
        result = cli("bench", "--save", "bench")
        assert result.exit_code == 0, result.output
        warning = "Warning: bench/one.json is saved, but is no fit baseline: it has 1 of the 3 processes"
        assert (warning in result.stderr) is warned
        (tmp_path / "bench" / "one.json").unlink()


def test_what_makes_a_comparison_uncertain_is_told_of_a_project_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gated(*_: object, warn: Callable[[str], object], **__: object) -> Benchmark:
        warn("one.onnx: the baseline is noisy")
        return measured(timed(0.5, 0.5, 0.5))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_stage, "out_of_date", lambda product: None)
    monkeypatch.setattr(bench_stage, "bench_gated", gated)
    product(tmp_path, "baseline = 'bench'\n")
    (tmp_path / "bench").mkdir()
    write_json(tmp_path / "bench/one.json", measured(timed(0.5, 0.5, 0.5)).to_dict())
    assert "Warning: one.onnx: the baseline is noisy" in cli("bench").stderr


def test_options_of_one_file_are_refused_and_missing_files_name_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    for option in (("--scenario", "prefill:8"), ("--baseline", "x.json"), ("--max-regression", "5%")):
        refused(cli("bench", *option), option[0], "without a file")
    refused(cli("bench", "x.onnx", "--project", "posexport.toml"), "both a file and --project")
    refused(cli("bench", "--save", "x.json"), "give a folder")
    refused(cli("bench", "--save", "posexport.toml/x"), "give a folder")
    refused(cli("bench", "--require", "ort-cup"), "did you mean 'ort-cpu'")
    stale = json.loads(cli("bench", "--json", "--save", "bench-1.2").stdout)
    assert (stale["exit_code"], stale["files"][0]["state"]) == (1, "out of date")
    assert not (tmp_path / "bench-1.2").exists()


def test_files_that_are_missing_stand_in_a_table_with_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product(tmp_path, "compile = {}")
    monkeypatch.chdir(tmp_path)
    result = cli("bench", "--runtime", "ort-cpu")
    assert result.exit_code == 1
    assert re.search(r"one\.onnx +out of date +it is not there *\n", result.stdout)
    assert re.search(r"one\.plan +not run +tensorrt-rtx was not asked for *\n", result.stdout)
    assert "Error: nothing is timed while files are out of date (1 of 2): run 'posexport build'." in result.stderr


@pytest.mark.slow
def test_a_project_is_timed_saved_and_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latency = "{scenario = 'prefill:8', of-lower-bound = 1e6}, {scenario = 'prefill:8', of-torch = 1e-6}"
    product(tmp_path, f"runtimes = ['ort-cpu']\nbaseline = 'bench'\nbudget = {{latency = [{latency}]}}")
    monkeypatch.chdir(tmp_path)
    assert cli("build").exit_code == 0
    few = ("--rounds", "6", "--processes", "1")
    refused(cli("bench", *few), "posexport bench --save bench")
    over = cli("bench", *few, "--save", "bench")
    assert over.exit_code == 1, over.output
    assert (tmp_path / "bench" / "one.json").is_file()
    assert "bench/one.json is saved, but is no fit baseline: it is over its budget of time; it has 1 of" in over.stderr
    refused(cli("bench", *few, "--save", "bench"), "are both 'bench/one.json'")
    assert "fine" in over.stdout
    assert "slower" in over.stdout
    assert over.stderr.splitlines()[-1].startswith("Error: over the budget of time: one.onnx at ")
    product(tmp_path, "runtimes = ['ort-cpu']\nbaseline = 'bench'\nmax-regression = '900%'")
    gated = cli("bench", *few, "--json")
    assert gated.exit_code == 0, gated.output
    assert '"gate"' in gated.stdout
