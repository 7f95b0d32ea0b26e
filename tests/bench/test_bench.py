"""`posexport bench` on a tiny block: states, numbers and exit codes. No test depends on speed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers import small_spec

from posexport import runtimes
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import benchmark as benching
from posexport.bench import candidates, rounds
from posexport.bench.candidates import CANDIDATES
from posexport.bench.options import BenchOptions
from posexport.bench.result import Benchmark
from posexport.cli import main
from posexport.export import export
from posexport.models.weights import seeded_weights

NO_GPU = "no GPU: the test took it away"
TIMED = [name for name in runtimes.RUNTIMES if name in CANDIDATES]


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small_spec("rope")
    path = tmp_path_factory.mktemp("bench") / "block.onnx"
    write_onnx(export(spec, seeded_weights(spec, 0)), path)
    return path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "gpu_missing", lambda: NO_GPU)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)])


@pytest.mark.slow
def test_every_candidate_has_a_state_and_a_required_one_that_is_missing_exits_3(
    block: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(block.parent / "inductor"))
    options = ("--shape", "seq=5", "--shape", "batch=2,seq=3", "--rounds", 3, "--warmup", 1, "--threads", 1)
    result = invoke(block, "--runtime", "ort-cpu", "--require", "ort-cuda", *options, "--json")
    assert result.exit_code == 3
    assert result.stderr == f"Error: required runtime ort-cuda was not run: {NO_GPU}.\n"
    found = json.loads(result.stdout)
    assert {key: found[key] for key in ("file", "encoding", "form", "opset", "dtype", "rounds", "burst")} == {
        "file": "block.onnx",
        "encoding": "rope",
        "form": "decomposed",
        "opset": 18,
        "dtype": "fp32",
        "rounds": 3,
        "burst": 3,
    }
    assert [(each["batch"], each["seq"]) for each in found["shapes"]] == [(1, 5), (2, 3)]
    for shape in found["shapes"]:
        results = {each["runtime"]: each for each in shape["results"]}
        assert {name: each["state"] for name, each in results.items()} == {
            "lower_bound": "timed",
            "torch": "timed",
            "torch-compile": "not run",
            "lower_bound-cuda": "not run",
            "torch-cuda": "not run",
            "torch-compile-cuda": "not run",
            "ort-cpu": "timed",
            "ort-cuda": "not run",
        }
        assert "no-such-compiler" in results["torch-compile"]["reason"]
        assert results["ort-cuda"]["reason"] == NO_GPU
        assert results["torch"]["ratios"]["torch"] == {"median": 1, "low": 1, "high": 1, "confidence": 0.75}
        assert results["lower_bound"]["engine"]["method"].startswith(("products by ", "bytes by "))
        timed = results["ort-cpu"]
        assert set(timed["ratios"]) == {"lower_bound", "torch"}
        assert timed["tokens_per_second"] == shape["batch"] * shape["seq"] / timed["seconds"]["median"]
        assert timed["load_seconds"] > 0 and timed["build_seconds"] is None
        assert timed["engine"]["engine"] == "onnxruntime"
        assert (
            timed["seconds"]["count"] >= 9 and timed["seconds"]["count"] % 3 == 0
        )  # Each round has the same number of runs.
        assert 0 < timed["seconds"]["p10"] <= timed["seconds"]["median"] <= timed["seconds"]["p99"]
        for ratio in timed["ratios"].values():
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
        assert timed["memory"] > 0


class Crashing:
    """Workers that crash or fail like an engine, except those of torch and of the lower bound."""

    def __init__(self, how: Callable[[], dict[str, Any]]) -> None:
        self._how, self.runtime = how, ""

    def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        self.runtime = request.get("runtime", {"name": self.runtime})["name"]
        if self.runtime != "torch" and request["do"] == "time":
            return self._how()
        done: dict[str, dict[str, Any]] = {
            "open": {"describe": {}, "load_seconds": 1.0, "build_seconds": None},
            "shape": {"seconds": 1.0, "memory": 1, "gpu_memory": None, "resident": 1, "run_seconds": 1e-3}
            | {"build_seconds": None, "describe": {}},
            "time": {"seconds": [1.0, 2.0, 3.0]},
        }
        return {"ok": True, **done[request["do"]]}

    pid = None

    def close(self) -> None:
        pass


def states(found: Benchmark, name: str) -> set[str]:
    return {timing.state for timing in found.timings if timing.runtime == name}


def crash() -> dict[str, Any]:
    return {"ok": False, "error": "crashed: the process was killed by SIGSEGV", "code": "crashed"}


def refuse() -> dict[str, Any]:
    return {"ok": False, "error": "NotImplemented: no bf16", "code": "refused"}


@pytest.mark.parametrize(("how", "state", "code"), [(crash, "failed", 1), (refuse, "not run", 0)])
def test_a_runtime_that_ends_while_it_is_timed_ends_itself_only(
    block: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[], dict[str, Any]], state: str, code: int
) -> None:
    monkeypatch.setattr(rounds, "Worker", lambda module: Crashing(how))
    result = invoke(block, "--runtime", "ort-cpu", "--shape", "seq=5", "--shape", "seq=6", "--rounds", 2)
    assert result.exit_code == code, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith((" ort-cpu", " torch "))]
    assert [line[-1] if state == "failed" or line[0] == "torch" else " ".join(line[-2:]) for line in lines] == [
        "timed",
        state,
    ] * 2
    reason = "crashed: the process was killed by SIGSEGV" if how is crash else "NotImplemented: no bf16"
    assert f"ort-cpu: {reason}" in result.stdout


@pytest.mark.parametrize(("named", "code"), [("ort-cpu", 0), ("torch", 1)])
def test_a_peer_that_fails_is_not_the_artifacts_fault_unless_it_was_named(
    block: Path, monkeypatch: pytest.MonkeyPatch, named: str, code: int
) -> None:
    class Short(Crashing):
        def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
            self.role = request.get("role", getattr(self, "role", ""))
            if self.role == "torch" and request["do"] == "shape":
                return {"ok": False, "error": "out of memory", "code": "memory"}
            self.runtime = "torch"  # torch never crashes
            return super().ask(request | {"runtime": {"name": "torch"}}, time_limit)

    monkeypatch.setattr(rounds, "Worker", lambda module: Short(crash))
    result = invoke(block, "--runtime", named, "--shape", "seq=5", "--rounds", 2)
    assert result.exit_code == code, result.output
    assert "torch: out of memory" in result.stdout


def test_a_failed_compilation_is_not_the_artifacts_fault(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCompiler(Crashing):
        def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
            if request.get("options", {}).get("compiled"):
                return {"ok": False, "error": "InductorError: no C++ compiler", "code": "failed"}
            return super().ask(request, time_limit)

    monkeypatch.setattr(rounds, "Worker", lambda module: NoCompiler(crash))
    found = benching.bench(block, BenchOptions(runtimes=("torch",), shapes=("seq=5",), rounds=1))
    assert states(found, "torch-compile") == {"not run"}
    assert states(found, "torch") == {"timed"}


def test_a_plan_runs_on_its_builder_alone_beside_torch_of_its_source(
    block: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx")
    from posexport.export.compile import compile_plan
    from posexport.runtimes.tensorrt.options import BuildOptions

    plan = block.with_suffix(".plan")
    compile_plan(block, plan, BuildOptions(runtime="tensorrt-rtx", profile=("seq=4:16:64", "batch=2:2:2")))
    opened = {}

    class Noting(Crashing):
        def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
            if request["do"] == "open":
                opened[request["runtime"]["name"]] = Path(request["path"]).name
            return super().ask(request, time_limit)

    monkeypatch.setattr(rounds, "Worker", lambda module: Noting(crash))
    result = invoke(plan, "--rounds", 1, "--json")
    assert result.exit_code == 0, result.output
    (shape,) = json.loads(result.stdout)["shapes"]
    assert (shape["batch"], shape["seq"]) == (2, 16)
    reasons = {each["runtime"]: each["reason"] for each in shape["results"]}
    assert reasons["ort-cpu"] == "a plan of tensorrt-rtx runs on nothing else"
    assert reasons["tensorrt-rtx"] == NO_GPU
    assert opened == {"torch": "block.onnx"}
    outside = invoke(plan, "--shape", "seq=65")
    assert (outside.exit_code, outside.stderr) == (
        2,
        "Error: seq is 65: 'block.plan' takes 4 to 64, so give such a --shape.\n",
    )
    plan.write_bytes(plan.read_bytes() + b"more")
    assert invoke(plan).exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runtime", "ort-cup"), "unknown runtime 'ort-cup': did you mean 'ort-cpu'"),
        (("--require", "tensort"), "unknown runtime 'tensort': did you mean 'tensorrt'"),
        (("--rounds", "0"), "--rounds is '0': it must be a whole number"),
        (("--warmup", "x"), "--warmup is 'x': it must be a whole number"),
        (("--threads", "-1"), "--threads is '-1': it must be a whole number"),
        (("--shape", "heads=3"), "unknown dimension in --shape 'heads'"),
    ],
)
def test_bad_requests_exit_2_before_anything_runs(
    block: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(rounds, "Worker", lambda module: pytest.fail("a process was started"))
    result = invoke(block, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"junk", b"\x08\x07"])
def test_files_that_are_no_artifact_exit_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "block.onnx"
    path.write_bytes(content)
    result = invoke(path)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert str(path) in result.stderr


def test_options_go_to_the_engines_that_have_them_and_the_others_say_so(
    block: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes.Runtime, "missing", lambda self: None)
    given: dict[str, tuple[bool, Any]] = {}

    class Strict(Crashing):
        def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
            if request["do"] == "open" and request["role"] in ("", "torch"):
                given[request["runtime"]["name"]] = (request["options"].get("cuda_graph", False), request["threads"])
            return super().ask({**request, "runtime": {"name": "torch"}}, time_limit)

    monkeypatch.setattr(rounds, "Worker", lambda module: Strict(crash))
    found = benching.bench(
        block, BenchOptions(runtimes=tuple(TIMED), shapes=("seq=5",), rounds=1, threads=2, cuda_graph=True)
    )
    assert given == {
        "torch": (False, 2),
        "torch-cuda": (False, 2),
        "onnx-reference": (False, None),
        "ort-cpu": (False, 2),
        "ort-cuda": (True, 2),
        "tensorrt": (True, None),
        "tensorrt-rtx": (True, None),
    }
    (timings,) = (shape.results for shape in found.shapes)
    threads, graph = "--threads has no effect on it", "--cuda-graph has no effect on it"
    assert {timing.runtime: timing.note for timing in timings if timing.note} == {
        "lower_bound-cuda": graph,
        "torch-cuda": graph,
        "torch-compile-cuda": graph,
        "onnx-reference": threads,
        "tensorrt": threads,
        "tensorrt-rtx": threads,
    }
    assert all(timing.state == "timed" and timing.ratios for timing in timings)


def test_onnx_reference_is_timed_whatever_the_threads(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "ALWAYS", ())  # peers take seconds to start
    options = ("--shape", "seq=3", "--rounds", 1, "--warmup", 1, "--threads", 1, "--require", "onnx-reference")
    result = invoke(block, "--runtime", "onnx-reference", *options)
    assert result.exit_code == 0, result.output
    assert "onnx-reference: --threads has no effect on it\n" in result.stdout


@pytest.mark.slow
def test_torch_compile_is_timed_where_there_is_a_compiler(block: Path) -> None:
    import shutil

    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    found = benching.bench(block, BenchOptions(runtimes=("ort-cpu",), shapes=("seq=5", "seq=6"), rounds=2))
    assert states(found, "torch-compile") == {"timed"}
