"""The flow of a tuning with fake programs and times: what it tries, what it times once, what verifies, its output.

Files, engines and verification are replaced; test_tune_command.py has the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import small_spec

from posexport.bench.scenarios import Scenario
from posexport.bench.tune import search as stage
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.halving import Round
from posexport.bench.tune.measure import CandidateTimer
from posexport.bench.tune.programs import Block, PreparedProgram, Programs
from posexport.bench.tune.result import Result, Row
from posexport.bench.tune.search import Tuning
from posexport.bench.tune.space import Limits, Program, Request
from posexport.cli.tune_command import show_tuning
from posexport.errors import Reason, RequestError, RuntimeMissingError
from posexport.jsondata import structure

TIMES = {"decomposed": 3.0, "native": 2.0, "contrib": 1.0}
"""Seconds by form; the form function takes as long as decomposed."""


class World:
    """The answers of the replaced parts; a test changes them before it tunes."""

    def __init__(self) -> None:
        self.times: Callable[[str], float] = lambda name: TIMES[name.split("/")[0].replace("function", "decomposed")]
        self.failing: dict[str, str] = {}
        self.wrong: set[str] = set()
        self.sizes: Callable[[Program], int] = lambda program: 1000
        self.memory: Callable[[str], int] = lambda name: 1000
        self.verified: list[str] = []
        self.timed: list[str] = []
        self.calls = 0

    def prepare(self, programs: Any, program: Program) -> PreparedProgram:
        name = str(program).removesuffix("/ort")
        size, sizes = self.sizes(program), {"seq": 8}
        prepared = PreparedProgram(sha256=name, size=size, sizes=sizes, profile=("seq=1:8:8",), spec={})
        programs.prepared[program] = prepared
        return prepared

    def identity(self, programs: Any, program: Program, level: str | None = None) -> tuple[str, Reason | None]:
        form = program.form.replace("function", "decomposed")
        return f"{form} {program.dtype} {'basic' if level == 'basic' else 'all'}", None

    def time_rounds(
        self, timer: CandidateTimer, names: Sequence[str], rounds: int, seed: int
    ) -> tuple[list[Round], Mapping[str, str]]:
        self.timed += names
        self.calls += 1
        timer.memory |= {name: self.memory(name) for name in names}
        timer.runs += 4 * rounds * len(names)
        timer.turn = 4
        failed = {name: self.failing[name] for name in names if name in self.failing}
        return [{name: self.times(name) for name in names if name not in failed}] * rounds, failed

    def verify(self, programs: Programs, candidate: Row, by_kernels: bool) -> tuple[str | None, str]:
        self.verified.append(candidate.name)
        return ("outputs differ" if candidate.program.form in self.wrong else None), programs.request.runtime


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(Programs, "prepare", lambda programs, program: made.prepare(programs, program))
    monkeypatch.setattr(Programs, "identity", lambda programs, *args: made.identity(programs, *args))
    monkeypatch.setattr(CandidateTimer, "time_rounds", lambda timer, *args: made.time_rounds(timer, *args))
    monkeypatch.setattr(stage, "verified", made.verify)
    monkeypatch.setattr(stage, "options_of", lambda *args, **more: OPTIONS)
    return made


OPTIONS: list[dict[str, Any]] = [{}, {"graph_level": "basic"}, {"threads": 1}, {"io_binding": True}]


def run(tmp_path: Path, dtypes: Sequence[str] = ("fp32",), **fields: Any) -> Result:
    specs = {dtype: small_spec("rope", dtype=dtype) for dtype in dtypes}
    block = Block(specs=specs, load=lambda dtype: (specs[dtype], {}), source="seed 0")
    request = Request(**{"scenario": Scenario("prefill", 8), **fields})
    with Tuning(block, request, Store(tmp_path), lambda step: None) as tuning:
        return tuning.result(tuning.settle(tuning.search()), 1.0)


def states(result: Result) -> dict[str, str]:
    return {row.name: row.state for row in result.candidates}


def test_the_planted_best_wins_with_the_options_that_are_fastest_on_it(tmp_path: Path, world: World) -> None:
    times = world.times
    world.times = lambda name: times(name) * (0.5 if name.endswith("threads=1") else 1)
    result = run(tmp_path)
    assert result.winner is not None
    assert (result.winner.name, result.winner.state) == ("contrib/fp32/18 threads=1", "won")
    assert world.verified == ["contrib/fp32/18 threads=1"]
    assert result.winner.verified == "ort-cpu"
    native = next(row for row in result.candidates if row.name == "native/fp32/23 io_binding=true")
    assert (native.state, native.rounds) == ("dropped", 4)
    assert "2.00x of contrib/fp32/18" in native.reason


def test_equal_candidates_give_the_simplest(tmp_path: Path, world: World) -> None:
    world.times = lambda name: 1.0
    result = run(tmp_path)
    assert result.winner is not None and result.winner.name == "decomposed/fp32/18"
    assert "the simplest of them" in result.winner.reason


def test_what_is_the_same_graph_is_timed_once_and_says_so(tmp_path: Path, world: World) -> None:
    result = run(tmp_path)
    rows = {row.name: row for row in result.candidates}
    assert not [name for name in world.timed if name.startswith("function") or "/ort" in name]
    assert rows["function/fp32/18 io_binding=true"].reason == "the same graph as decomposed/fp32/18: timed once"
    assert rows["contrib/fp32/18/ort io_binding=true"].reason == "the same file as contrib/fp32/18: timed once"
    assert rows["contrib/fp32/25 io_binding=true"].reason == "the same graph as contrib/fp32/18: timed once"
    assert result.cost.everything_runs == 3 * len(OPTIONS) * (2 + 20 * 4)


def test_everything_counts_each_distinct_candidate_once(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
    import tuning

    levels = (
        {"graph_level": "extended"},
        {"graph_level": "extended", "threads": 1},
    )  # These programs are equal to those of "all".
    monkeypatch.setattr(tuning, "options_of", lambda *args, **more: [*OPTIONS, *levels])
    spec = small_spec("rope")
    block = Block(specs={"fp32": spec}, load=lambda dtype: (spec, {}), source="seed 0")
    every = tuning.time_everything(block, Request(scenario=Scenario("prefill", 8)), "contrib/fp32/18", Store(tmp_path))
    assert len(every["ratios"]) == 3 * len(OPTIONS)
    assert every["everything_runs"] == len(every["ratios"]) * 20 * 4
    own = [Program(form="native", dtype="fp32", opset=23, target=target) for target in ("portable", "ort")]
    assert [tuning.winning_program(name, own) for name in ("native/fp32/24", "native/fp32/24/ort threads=1")] == own


def test_a_winner_that_does_not_verify_is_out_and_the_next_is_raced_for(tmp_path: Path, world: World) -> None:
    world.wrong = {"contrib"}
    result = run(tmp_path)
    assert result.winner is not None and result.winner.form == "native"
    assert states(result)["contrib/fp32/18 io_binding=true"] == "failed"
    assert any("did not verify on ort-cpu: outputs differ" in row.reason for row in result.candidates)
    world.wrong = set(TIMES)
    assert run(tmp_path).winner is None


def test_what_fails_or_is_refused_tells_why_and_the_rest_goes_on(tmp_path: Path, world: World) -> None:
    world.failing = {"contrib/fp32/18 io_binding=true": "crashed: the process was killed by SIGSEGV"}
    result = run(tmp_path, ("fp32", "bf16"))
    rows = {row.name: row for row in result.candidates}
    assert result.winner is not None and result.winner.form == "native"
    assert rows["contrib/fp32/18 io_binding=true"].state == "failed"
    assert "SIGSEGV" in rows["contrib/fp32/18 io_binding=true"].reason
    refused = rows["native/bf16/23 io_binding=true"]
    assert (refused.state, refused.reason) == ("refused", "ONNX Runtime's CPU provider has no bf16 kernels")


def test_nothing_that_can_be_tuned_is_a_request_error(tmp_path: Path, world: World) -> None:
    with pytest.raises(RequestError, match="nothing can be tuned for ort-cpu: ONNX Runtime's CPU provider has no bf16"):
        run(tmp_path, ("bf16",))


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_size_and_memory_come_before_speed(
    tmp_path: Path, world: World, objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.sizes = lambda program: 500 if program.form == "native" else 1000
    world.memory = lambda name: 500 if name.startswith("native") else 1000
    result = run(tmp_path, objective=objective)
    assert result.winner is not None and result.winner.form == "native"
    contrib = next(row for row in result.candidates if row.name == "contrib/fp32/18 io_binding=true")
    assert (contrib.state, contrib.reason) == ("dropped", "takes 1,000 bytes, the least is 500")
    assert result.winner.reason.startswith("takes 500 bytes; of those within 2% of the least, ")
    show_tuning(attrs.evolve(result, winner=None), Path("rope.onnx"))
    assert ("500 B" if objective == "size" else "0.00 MB") in capsys.readouterr().out


def test_the_search_is_held_to_what_was_asked_for(tmp_path: Path, world: World) -> None:
    result = run(tmp_path, limits=Limits(forms=("native",), opsets=(24,), targets=("portable",)))
    assert {name.split()[0] for name in states(result)} == {"native/fp32/24"}
    assert world.calls == 1, "one program alone is raced with its options only"


def test_the_result_is_plain_data_with_every_candidate_and_the_cost(tmp_path: Path, world: World) -> None:
    result = run(tmp_path)
    data = result.to_dict()
    assert structure(json.loads(json.dumps(data)), Result) == result
    codes = {row["name"]: row.get("reason_code") for row in data["candidates"]}
    assert codes["function/fp32/18 io_binding=true"] == "same-graph"
    assert codes["contrib/fp32/18"] == "simplest" and codes["native/fp32/23 io_binding=true"] == "slower"
    assert (data["kind"], data["version"], data["target"], data["scenario"]) == ("tune", 1, "ort-cpu", "prefill:8")
    assert sum(row["state"] == "won" for row in data["candidates"]) == 1
    assert {row["state"] for row in data["candidates"]} <= {"won", "raced", "dropped", "failed", "refused", "not run"}
    assert data["cost"]["timed_runs"] <= 0.4 * data["cost"]["everything_runs"]
    won = next(row for row in data["candidates"] if row["state"] == "won")
    assert won["ratio"]["median"] == 1.0
    assert data["machine"]["logical_cpus"]


def test_plans_are_ranked_by_kernel_tables_and_the_result_says_so(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels(programs: Programs, candidate: Row) -> dict[str, Any]:
        program, profile = candidate.program, programs.profile(candidate)
        if program.form == "contrib":
            return {"error": "Plugin not found"}
        count = {"decomposed": 5, "native": 6}[program.form]
        found = {"fused_attention": program.dtype != "fp32", "count": count, "host_steps": 0}
        found |= {"attention_kernels": 1, "attention_layers": 1}
        return {"kernels": found, "memory": {"scratch": 0 if profile else 10}, "size": 7}

    monkeypatch.setattr(Programs, "kernels", kernels)
    monkeypatch.setattr(stage, "check_there", lambda name: True)
    result = run(tmp_path, ("fp32", "fp16", "bf16"), runtime="tensorrt-rtx")
    assert result.method == "by kernel table: no GPU"
    assert result.winner is not None and result.winner.name == "decomposed/fp16/18"
    assert result.winner.kernels["count"] == 5
    assert (result.cost.timed_runs, result.cost.everything_runs, world.timed) == (0, 0, [])
    assert result.winner.reason.endswith("5 kernels and 0 host steps, 10 bytes planned, a plan of 7 bytes")
    rows = {row.name: row for row in result.candidates}
    assert (rows["contrib/fp16/18"].state, rows["contrib/fp16/18"].reason) == ("failed", "Plugin not found")
    assert rows["function/fp16/18"].reason.endswith("timed once") and rows["function/fp16/18"].size is None
    small = run(tmp_path, ("fp16",), runtime="tensorrt-rtx", objective="size")
    assert small.winner is not None
    assert small.winner.reason.startswith("by kernel table: no GPU: a plan of 7 bytes, fused attention")


def test_the_size_of_plans_that_are_raced_is_the_plans_own(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels(programs: Any, candidate: Row) -> dict[str, Any]:
        form = candidate.program.form
        return {"error": "no kernel"} if form == "contrib" else {"size": 7 if form == "native" else 9}

    monkeypatch.setattr(Programs, "kernels", kernels)
    monkeypatch.setattr(stage, "check_there", lambda name: False)
    world.sizes = lambda program: 500 if program.form == "decomposed" else 1000
    result = run(tmp_path, runtime="tensorrt-rtx", objective="size")
    assert result.winner is not None and (result.winner.form, result.winner.size) == ("native", 7)
    reasons = {row.form: row.reason for row in reversed(result.candidates)}
    assert reasons["decomposed"] == "takes 9 bytes, the least is 7" and reasons["contrib"] == "no kernel"


def test_a_runtime_that_is_not_there_is_missing_and_a_sweep_is_refused() -> None:
    missing = stage.RUNTIMES["ort-cuda"].missing()
    if missing is not None:
        with pytest.raises(RuntimeMissingError, match="ort-cuda can't be tuned for here"):
            stage.check_there("ort-cuda")
    with pytest.raises(RequestError, match="is a whole sweep: tune for one point of it, such as prefill:1"):
        Request(scenario=Scenario("prefill", 1, swept=True))
