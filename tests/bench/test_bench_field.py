"""Bench sessions with several processes: failures, the number of rounds, and peers with their own files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import small_spec
from test_scenarios import artifact

from posexport import runtimes
from posexport.bench import rounds as rounds_module
from posexport.bench.candidates import CANDIDATES, choose, previous
from posexport.bench.options import BenchOptions
from posexport.bench.session import BenchSession
from posexport.bench.shapes import Sizes
from posexport.bench.timed_artifact import TimedArtifact

SHORT, LONG_RUN_SECONDS = Sizes(seq=5), Sizes(seq=6)
SETTINGS = BenchOptions(rounds=4, warmup=1)

Faults = dict[tuple[str, str, int | None], dict[str, Any]]
"""The answer that a worker gives instead, by role or runtime, request and tokens (None: any)."""


class World:
    """Workers that answer from a script and record their requests."""

    def __init__(self, faults: Faults | None = None, turn: float = 1e-3) -> None:
        self.faults, self.turn = faults or {}, turn
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def worker(self, module: str) -> Any:
        world = self

        class Scripted:
            pid = None
            name, seq = "", None

            def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
                if request["do"] in ("open", "make"):
                    self.name = request.get("role") or request["runtime"]["name"]
                self.seq = request.get("seq", self.seq)
                world.asked.append((self.name, request["do"], request))
                for seq in (self.seq, None):
                    if (fault := world.faults.get((self.name, request["do"], seq))) is not None:
                        return {"ok": False, **fault}
                if request["do"] == "make":
                    Path(request["path"]).write_text("a peer")
                done: dict[str, dict[str, Any]] = {
                    "open": {"describe": {"engine": self.name}, "load_seconds": 1.0, "build_seconds": None},
                    "shape": {"seconds": 1.0, "memory": 100, "gpu_memory": None, "resident": 40, "build_seconds": None}
                    | {"run_seconds": world.turn, "describe": {}},
                    "time": {"seconds": [1.0, 2.0, 3.0]},
                    "make": {},
                }
                return {"ok": True, **done[request["do"]]}

            def close(self) -> None:
                pass

        return Scripted()

    def count(self, name: str, do: str) -> int:
        return [asked[:2] for asked in self.asked].count((name, do))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "gpu_missing", lambda: "no GPU")
    monkeypatch.setattr(rounds_module, "interleave", partial(rounds_module.interleave, pause=0.0))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BenchSession]:
    def made(world: World, *names: str, sessions: int = 1, alternatives: bool = False, **settings: Any) -> BenchSession:
        monkeypatch.setattr(rounds_module, "Worker", world.worker)
        one = TimedArtifact(artifact("contrib"))
        candidates = choose(names, alternatives)
        field = BenchSession(
            one, candidates, [SHORT, LONG_RUN_SECONDS], attrs.evolve(SETTINGS, **settings), None, lambda step: None
        )
        with field:
            field.open_processes(sessions)
        return field

    return made


def states(field: BenchSession, name: str) -> list[str]:
    return [next(each.state for each in field.timings(index) if each.runtime == name) for index in (0, 1)]


def reason(field: BenchSession, name: str, index: int) -> str:
    return next(each.reason for each in field.timings(index) if each.runtime == name)


def test_every_session_has_processes_of_its_own(run: Callable[..., BenchSession]) -> None:
    world = World()
    field = run(world, "ort-cpu", sessions=3)
    assert {world.count(name, "open") for name in ("lower_bound", "torch", "torch-compile", "ort-cpu")} == {3}
    (timed,) = (each for each in field.timings(0) if each.runtime == "ort-cpu")
    assert timed.processes["lower_bound"] == (1.0,) * 3
    assert timed.seconds is not None and timed.seconds.count == 3 * 4 * 3
    assert field.rounds == [12, 12]
    seeds = {request["seed"] for _, do, request in world.asked if do == "shape"}
    assert seeds == {0}  # Every process gets the same inputs.


def test_what_fails_at_a_shape_stays_timed_before_and_failed_after(run: Callable[..., BenchSession]) -> None:
    world = World({("ort-cpu", "time", 6): {"error": "crashed: the process was killed by SIGSEGV", "code": "crashed"}})
    assert states(run(world, "ort-cpu"), "ort-cpu") == ["timed", "failed"]
    world = World({("ort-cpu", "time", 5): {"error": "crashed: the process was killed by SIGSEGV", "code": "crashed"}})
    field = run(world, "ort-cpu")
    assert states(field, "ort-cpu") == ["failed", "failed"]
    assert states(field, "torch") == ["timed", "timed"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"error": "InvalidArgument: a table has 256 rows", "code": "failed"}, "a table has 256 rows"),
        ({"error": "out of memory: bad_alloc", "code": "memory"}, "out of memory: bad_alloc"),
        ({"error": "crashed: the process was killed by SIGKILL", "code": "killed"}, "most likely for want of memory"),
    ],
)
@pytest.mark.parametrize("do", ["shape", "time"])
def test_without_memory_or_with_inputs_that_it_refuses_it_fails_at_that_shape_alone(
    run: Callable[..., BenchSession], do: str, fault: dict[str, Any], said: str
) -> None:
    world = World({("ort-cpu", do, 5): fault})
    field = run(world, "ort-cpu")
    assert states(field, "ort-cpu") == ["failed", "timed"]
    assert said in reason(field, "ort-cpu", 0)
    assert world.count("ort-cpu", "open") == 2  # The process is gone, so another one runs the next shape.


def test_a_failure_in_a_later_process_is_not_hidden_by_the_first(run: Callable[..., BenchSession]) -> None:
    class Later(World):
        def worker(self, module: str) -> Any:
            if self.count("ort-cpu", "open") == 1:
                self.faults = {("ort-cpu", "shape", None): {"error": "ValueError: no", "code": "failed"}}
            return super().worker(module)

    field = run(Later(), "ort-cpu", sessions=2)
    assert states(field, "ort-cpu") == ["failed", "failed"]
    assert states(field, "torch") == ["timed", "timed"]


@pytest.mark.parametrize(("turn", "rounds"), [(1e-3, 4), (0.5, 4), (7.0, 3), (1e6, 3)])
def test_slow_runs_get_fewer_rounds_but_some(run: Callable[..., BenchSession], turn: float, rounds: int) -> None:
    field = run(World(turn=turn), "ort-cpu", seconds=60.0)
    assert field.rounds == [rounds, rounds]


def test_memory_that_others_take_anew_in_each_run_is_kept_free(run: Callable[..., BenchSession]) -> None:
    world = World()
    run(world, "ort-cpu")
    kept = [request["keep_free"] for _, do, request in world.asked if do == "shape"][:4]
    assert kept == [0, 60, 60, 60]  # The peak is 100 bytes, of which 40 stay.


def test_peers_that_are_files_are_made_once_and_run_by_onnxruntime(run: Callable[..., BenchSession]) -> None:
    world = World()
    field = run(world, "ort-cpu", sessions=2, alternatives=True)
    assert (world.count("torch-onnx", "make"), world.count("ort-optimizer", "make")) == (1, 1)
    opened = {name: Path(asked["path"]).name for name, do, asked in world.asked if do == "open"}
    assert opened["torch-onnx"] == "torch-onnx.onnx" and opened["ort-optimizer"] == "ort-optimizer.onnx"
    assert opened["torch"] == opened["ort-cpu"] == "block.onnx"
    (timed,) = (each for each in field.timings(0) if each.runtime == "ort-cpu")
    assert set(timed.ratios) == {"lower_bound", "torch", "torch-compile", "torch-onnx", "ort-optimizer"}
    assert not next(each for each in field.timings(0) if each.runtime == "ort-cpu").reason


def test_a_peer_that_cannot_be_made_is_not_run_with_the_reason(run: Callable[..., BenchSession]) -> None:
    fault = {"error": "torch's exporter can't write this block.", "code": "refused"}
    world = World({("torch-onnx", "make", None): fault})
    field = run(world, "ort-cpu", alternatives=True)
    assert states(field, "torch-onnx") == states(field, "ort-optimizer") == ["not run", "not run"]
    assert reason(field, "ort-optimizer", 0) == fault["error"]
    assert world.count("torch-onnx", "make") == 1
    assert states(field, "ort-cpu") == ["timed", "timed"]


def test_peers_are_timed_only_where_they_are_asked_for() -> None:
    assert [each.name for each in choose(["ort-cpu"])] == ["lower_bound", "torch", "torch-compile", "ort-cpu"]
    assert [each.name for each in choose(["torch-onnx"])] == ["lower_bound", "torch", "torch-compile", "torch-onnx"]
    assert "ort-optimizer" not in {each.name for each in choose(())}
    assert {"torch-onnx-cuda", "ort-optimizer-cuda"} <= {each.name for each in choose((), alternatives=True)}


def test_candidates_on_the_gpu_are_held_against_peers_on_the_gpu() -> None:
    assert dict(CANDIDATES["ort-cuda"].references) == {
        role: f"{role}-cuda" for role in ("lower_bound", "torch", "torch-compile", "torch-onnx", "ort-optimizer")
    } | {"against": "against:ort-cuda"}
    assert all(
        CANDIDATES[name].runtime.needs_gpu
        for role, name in CANDIDATES["tensorrt"].references.items()
        if role != "against"
    )


def test_an_earlier_artifact_is_timed_on_the_same_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(rounds_module, "Worker", world.worker)
    new = artifact()
    old = attrs.evolve(new, path=Path("old.onnx"))
    candidates = [*choose(["ort-cpu"]), previous(CANDIDATES["ort-cpu"])]
    with BenchSession(
        TimedArtifact(new), candidates, [SHORT], SETTINGS, TimedArtifact(old), lambda step: None
    ) as field:
        field.open_processes()
    opened = {name: Path(asked["path"]).name for name, do, asked in world.asked if do == "open"}
    assert (opened["ort-cpu"], opened["against"]) == ("block.onnx", "old.onnx")
    timed = {each.runtime: each for each in field.timings(0)}
    assert timed["ort-cpu"].processes["against"] == (1.0,)
    assert timed["against:ort-cpu"].state == "timed"


@pytest.mark.parametrize(("run_seconds", "burst"), [(1e-12, 1000), (1e-3, 10), (3e-3, 4), (0.02, 3)])
def test_turns_wake_threads_and_time_as_many_runs_each(
    run: Callable[..., BenchSession], run_seconds: float, burst: int
) -> None:
    world = World(turn=run_seconds)
    run(world, "ort-cpu")
    asked = [(request["burst"], request["wake"]) for _, do, request in world.asked if do == "time"]
    assert set(asked) == {(burst, 0.01)}


def test_the_spec_goes_to_every_process(run: Callable[..., BenchSession]) -> None:
    world = World()
    run(world, "ort-cpu")
    specs = [request["spec"] for _, do, request in world.asked if do == "shape"]
    assert all(spec == small_spec("rope").to_dict() for spec in specs)
