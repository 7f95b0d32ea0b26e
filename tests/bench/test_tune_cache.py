"""What a tuning stores, what it leaves unchanged, and what it checks before it publishes; without engines."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import onnx_ir as ir
import pytest
from helpers import CHILD_PATH, exported, small_spec
from manifest_data import onnx_manifest, plan_manifest, write_manifest_data

from posexport.artifact import onnx_artifact
from posexport.artifact.manifest import OnnxManifest, PlanManifest
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.scenarios import Scenario
from posexport.bench.tune import publish
from posexport.bench.tune.fact_cache import FOLDER, Store
from posexport.bench.tune.measure import CandidateTimer
from posexport.bench.tune.programs import Block, PreparedProgram, Programs, content
from posexport.bench.tune.result import Cost, Result, Row
from posexport.bench.tune.space import Program, Request
from posexport.errors import Reason, RequestError
from posexport.jsondata import structure

PROGRAM = Program(form="decomposed", dtype="fp32", opset=18)
CANDIDATE = Row.of(PROGRAM, {})
PREPARED = PreparedProgram(sha256="a", size=1, sizes={"seq": 8}, profile=(), spec={})


def programs(store: Store, runtime: str = "ort-cpu") -> Programs:
    spec = small_spec("none")
    block = Block(specs={"fp32": spec}, load=lambda dtype: (spec, {}), source="seed 0")
    request = Request(runtime=runtime, scenario=Scenario("prefill", 8))
    programs = Programs(block, request, store, lambda step: None)
    programs.prepared[PROGRAM] = PREPARED
    return programs


def test_no_file_of_the_cache_is_written_through_a_link(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / ".gitignore").symlink_to("../planted")
    Store(tmp_path).get({"what": "identify", "sha256": "a"}, lambda: {"identity": "1"})
    assert not (tmp_path / "planted").exists()


def test_what_else_is_in_the_folder_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/mine").write_text("x")
    store = Store(tmp_path)
    (store.files / "program.onnx").write_text("y")
    store.clear_files()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER, "files"]
    assert (tmp_path / "files/mine").read_text() == "x"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [".gitignore"]
    store.get({"what": "identify", "sha256": "a"}, lambda: {"identity": "1"})
    assert Store(tmp_path / FOLDER).get({"what": "identify", "sha256": "a"}, lambda: {"identity": "2"}) == {
        "identity": "1"
    }


def test_two_tunings_in_one_folder_keep_their_programs(tmp_path: Path) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    (one.files / "program.onnx").write_text("one")
    (other.files / "program.onnx").write_text("other")
    with pytest.raises(KeyboardInterrupt), programs(other):
        raise KeyboardInterrupt
    assert (one.files / "program.onnx").read_text() == "one"
    assert len(list((tmp_path / FOLDER).glob("programs-*"))) == 1


def test_trouble_of_today_is_asked_about_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = [
        {"error": "crashed: out of memory", "code": "memory"},
        {"identity": "graph"},
        {"identity": "never"},
    ]
    monkeypatch.setattr(Programs, "ask", lambda *args, **fields: answers[0])
    found = []
    for _ in range(3):
        with programs(Store(tmp_path)) as each:
            found.append(each.identity(PROGRAM))
            assert each.identity(PROGRAM) == found[-1]
        del answers[0]
    assert found == [("", Reason("memory", "crashed: out of memory")), ("graph", None), ("graph", None)]


def test_a_file_that_cannot_be_written_is_no_refusal_of_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: ir.Model, path: Path, weights: object) -> dict[str, Any]:
        raise RequestError("can't write the output (No space left on device): free some space.")

    monkeypatch.setattr(Programs, "_model", lambda *args: None)
    monkeypatch.setattr(onnx_artifact, "write_onnx", full)
    with programs(Store(tmp_path)) as each, pytest.raises(RequestError, match="No space left"):
        each.prepare(PROGRAM)
    assert not list((tmp_path / FOLDER).glob("*.json"))


@pytest.mark.parametrize("state", ["passed", "failed", "not run"])
def test_only_a_passed_verdict_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Programs, "path", lambda *args: tmp_path)
    monkeypatch.setattr(publish, "_verify", lambda *args: (asked.append(args), (state, "why"))[1])
    for _ in range(2):
        with programs(Store(tmp_path)) as each:
            reason, _runtime = publish.verified(each, CANDIDATE, False)
            assert reason == (None if state == "passed" else "why")
    assert len(asked) == (1 if state == "passed" else 2)


def test_a_winner_is_verified_under_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    monkeypatch.setattr(Programs, "path", lambda *args: tmp_path)
    monkeypatch.setattr(publish, "_verify", lambda programs, path, row: (rows.append(row), ("passed", ""))[1])
    options = {"graph_level": "basic", "threads": 1, "io_binding": True, "denormal_as_zero": True}
    won = Row.of(PROGRAM, {**options, "cuda_graph": True})
    with programs(Store(tmp_path)) as each:
        publish.verified(each, won, False)
        told = publish.settings(each, won)
        assert told["session.set_denormal_as_zero"] == "1"  # ONNX Runtime's name of the option
        assert told.keys() - publish.settings(each, Row.of(PROGRAM, {})).keys() == {
            "session.set_denormal_as_zero",
            "enable_cuda_graph",
        }
    assert rows[0].options == {"provider": "CPU", **options}


@pytest.mark.slow
def test_a_winner_whose_bound_runs_are_wrong_is_no_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_onnx(exported(small_spec("none")), tmp_path / "none.onnx")
    monkeypatch.setenv("PYTHONPATH", CHILD_PATH)
    monkeypatch.setattr(Programs, "path", lambda *args: tmp_path / "none.onnx")
    faulty = attrs.evolve(publish.RUNTIMES["ort-cpu"], module="engines.bound")
    monkeypatch.setattr(publish, "RUNTIMES", {**publish.RUNTIMES, "ort-cpu": faulty})
    with programs(Store(tmp_path)) as each:
        for options in ({}, {"io_binding": True}):
            won = Row.of(PROGRAM, options)
            reason, _runtime = publish.verified(each, won, False)
            assert (reason is None) == (not options)


@pytest.mark.parametrize(
    ("machine_load", "failed", "kept"), [(0.1, None, True), (0.3, None, False), (0.1, "crashed", False)]
)
def test_rounds_beside_other_work_and_failures_are_timed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_load: float, failed: str | None, kept: bool
) -> None:
    seeds: list[int] = []

    def time(field: CandidateTimer, names: list[str], rounds: int, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        name = names[0]
        fact = {"rounds": [{name: 1.0}] * rounds, "failed": {name: failed} if failed else {}, "memory": {name: 9}}
        return {**fact, "machine_load": machine_load, "runs": 1, "turn": 1, "seconds": 1.0}

    monkeypatch.setattr(CandidateTimer, "_time", time)
    for _ in range(2):
        with programs(Store(tmp_path)) as each:
            timer = CandidateTimer(each, {})
            timer.candidates[CANDIDATE.name] = CANDIDATE
            for _ in range(2):  # Two calls of one tuning never give the same rounds.
                timer.time_rounds([CANDIDATE.name], 4, 0)
    assert len(seeds) == (2 if kept else 4)
    assert len(set(seeds)) == 2


def test_other_external_data_is_another_program(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"x")
    plain = structure(onnx_manifest(tmp_path / "x.onnx", sha256="a"), OnnxManifest)
    assert content(plain) == "a"
    found = {content(attrs.evolve(plain, external_data={"x.onnx.data": sha256})) for sha256 in ("b", "c")}
    assert len(found | {"a"}) == 3


def winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: str, ending: str = ".onnx", state: str = "passed"
) -> Any:
    """The result of publishing a file with the bytes "made", if a file with the hash of `verified` was verified."""

    def made_anew(_: Programs, program: Program, path: Path) -> OnnxManifest:
        path.write_text("made")
        write_manifest_data(path, manifest := onnx_manifest(path))
        return structure(manifest, OnnxManifest)

    def compiled(onnx: Path, plan: Path, options: Any) -> tuple[PlanManifest, float]:
        plan.write_text("plan")
        return structure(plan_manifest(plan, onnx, sha256="of the plan"), PlanManifest), 0.0

    there = attrs.evolve(publish.RUNTIMES["torch"], name="tensorrt-rtx")
    monkeypatch.setattr(Programs, "write", made_anew)
    monkeypatch.setattr("posexport.export.compile.compile_plan", compiled)
    monkeypatch.setattr(publish, "RUNTIMES", {**publish.RUNTIMES, "tensorrt-rtx": there})
    monkeypatch.setattr(publish, "_verify", lambda programs, path, row: (state, f"{path.read_text()} is wrong"))
    row = attrs.evolve(CANDIDATE, state="won")
    tuned = programs(Store(tmp_path / "cache"), "ort-cpu" if ending == ".onnx" else "tensorrt-rtx")
    tuned.prepared[PROGRAM] = attrs.evolve(PREPARED, sha256=hashlib.sha256(verified.encode()).hexdigest())
    (tmp_path / f"x{ending}").write_text("before")
    result = Result(
        encoding="none", target="ort-cpu", scenario="prefill:8", objective="latency", method="", winner=None,
        candidates=(), machine_load=0, machine={},
        cost=Cost(seconds=1, timed_runs=1, everything_runs=1, known_before=0),
    )  # fmt: skip
    return publish.publish(tuned, row, tmp_path / f"x{ending}", result)


def test_only_the_bytes_that_were_verified_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "differs from the file that was verified" in winner(tmp_path, monkeypatch, "other")
    assert (tmp_path / "x.onnx").read_text() == "before"
    assert winner(tmp_path, monkeypatch, "made").file == "x.onnx"
    assert (tmp_path / "x.onnx").read_text() == "made"
    manifest = json.loads((tmp_path / "x.onnx.json").read_bytes())
    assert manifest["tune"]["winner"]["name"] == CANDIDATE.name


def test_a_plan_is_verified_itself_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = winner(tmp_path, monkeypatch, "made", ".plan", "failed")
    assert said == "its plan did not verify on tensorrt-rtx: plan is wrong"
    assert (tmp_path / "x.plan").read_text() == "before" and not (tmp_path / "x.onnx").exists()
    assert winner(tmp_path, monkeypatch, "made", ".plan").sha256 == "of the plan"
